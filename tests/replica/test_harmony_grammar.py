"""Grammars of Harmony hold answers and calls, and leave thinking free."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import jsonschema
import numpy as np
import pytest

from lorikeet.protocol.messages import Call, Format, FormatKind, ToolUse
from lorikeet.replica.grammar_matcher import ModelGrammars
from lorikeet.replica.request_builder import PreparedCall, prepare_call
from lorikeet.text.choice import Ending, whole_calls
from lorikeet.text.detokenizer import NO_STOP_STRINGS
from lorikeet.text.harmony import HarmonyChoice
from lorikeet.text.prompts import PromptEncoder, encode_call
from lorikeet.text.tools.syntax import HARMONY
from lorikeet_engine.errors import InvalidRequest
from lorikeet_engine.request import FinishReason, Tokens
from tests.replica.harmony_model import harmony_model
from tests.text.test_prompts import CHAT, SHOWN, encoder

A = "<|start|>assistant"
THINKS = f"<|channel|>analysis<|message|>Hm, {{}}.<|end|>{A}"
SCHEMA = {
    "type": "object",
    "properties": {"zone": {"type": "string", "maxLength": 9}},
    "required": ["zone"],
    "additionalProperties": False,
}
TIME = {"name": "time", "parameters": SCHEMA, "strict": True}
TIMES = {"name": "times", "parameters": SCHEMA}
USE = ToolUse(tuple({"type": "function", "function": each} for each in (TIME, TIMES)))
TEXT = "<|channel|>final<|message|>It is noon."
PREAMBLE = f"<|channel|>commentary<|message|>I look.<|end|>{A}"
JSON = Format(json.dumps(SCHEMA))


def called(name: str, arguments: str = '{"zone":"utc"}') -> Iterator[str]:
    """Yield a call in each of its forms."""
    for kind in (" <|constrain|>json", "<|constrain|>json", " json", ""):
        yield f"<|channel|>commentary to=functions.{name}{kind}<|message|>{arguments}"
        yield f" to=functions.{name}<|channel|>commentary{kind}<|message|>{arguments}"


@dataclass(frozen=True, slots=True)
class Model:
    """A model folder in Harmony, with its grammars."""

    encoder: PromptEncoder
    grammars: ModelGrammars

    def allows(self, call: Call, text: str) -> bool:
        """Return True if the call's grammar allows an answer."""
        encoded = prepared(self, call)
        grammar = encoded.request.sampling.grammar
        assert grammar is not None
        assert encoded.tried_grammar is not None
        self.grammars.compile(encoded.tried_grammar)
        matcher = self.grammars.compile(grammar)
        try:
            for token in self.encoder.backend.encode(text, add_special_tokens=False).ids:
                matcher.accept(token)
        except InvalidRequest:
            return False
        return matcher.may_end


def prepared(model: Model, call: Call) -> PreparedCall:
    encoder = model.encoder
    return prepare_call(encode_call(call, encoder, 4096), encoder, 4096)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = harmony_model(tmp_path_factory.mktemp("harmony"))
    return Model(PromptEncoder(folder), ModelGrammars(folder))


def test_gpt_oss_is_found_by_its_template_and_tokens(
    model: Model, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert model.encoder.syntax is HARMONY
    assert model.encoder.takes_tools
    assert model.encoder._template is not None
    (template,) = model.encoder._template.texts
    without_tokens = encoder(tmp_path_factory.mktemp("demo"), template)
    assert without_tokens.syntax is None
    without_tools = harmony_model(
        tmp_path_factory.mktemp("bare"), "{# <|channel|> #}{{ '<|start|>user<|message|>hi' }}"
    )
    bare = PromptEncoder(without_tools)
    assert (bare.syntax, bare.takes_tools) == (HARMONY, False)
    assert encoder(tmp_path_factory.mktemp("other"), SHOWN).syntax is None


def test_a_format_holds_the_final_message_alone(model: Model) -> None:
    call = replace(CHAT, format=JSON)
    for kind in ("", " json", " <|constrain|>json", "<|constrain|>json"):
        final = f"<|channel|>final{kind}<|message|>"
        assert model.allows(call, final + '{"zone": "utc"}')
        assert model.allows(call, THINKS * 2 + final + '{\n  "zone":"utc"\n}')
        assert not model.allows(call, final + '{"zone": 1}')
        assert not model.allows(call, THINKS + final + "noon")
    assert not model.allows(call, THINKS + PREAMBLE + '<|channel|>final<|message|>{"zone":"utc"}')
    assert not model.allows(call, "<|channel|>analysis<|message|>Hm.")
    assert not model.allows(call, '{"zone": "utc"}')


@pytest.mark.parametrize(
    ("kind", "text"), [(FormatKind.REGEX, "yes|no"), (FormatKind.CHOICES, '["yes", "no"]')]
)
def test_other_formats_hold_the_final_message_alone(
    model: Model, kind: FormatKind, text: str
) -> None:
    call = replace(CHAT, format=Format(text, kind))
    assert model.allows(call, f"{THINKS}<|channel|>final<|message|>yes")
    assert model.allows(call, "<|channel|>final<|message|>no")
    assert not model.allows(call, f"{THINKS}<|channel|>final<|message|>maybe")


def test_a_forced_call_comes_behind_free_thinking(model: Model) -> None:
    call = replace(CHAT, tools=replace(USE, forced=("time", "times")))
    for name in ("time", "times"):
        for written in called(name):
            assert model.allows(call, written)
            assert model.allows(call, THINKS + written)
        for wrong in called(name, '{"zone":1}'):
            assert not model.allows(call, THINKS + wrong)
    for other in (TEXT, THINKS + TEXT, PREAMBLE + next(called("time")), *called("look")):
        assert not model.allows(call, other)


def test_a_named_function_is_the_only_one(model: Model) -> None:
    call = replace(CHAT, tools=replace(USE, forced=("times",)))
    assert all(model.allows(call, THINKS + written) for written in called("times"))
    assert not any(model.allows(call, THINKS + written) for written in called("time"))


def test_strict_tools_hold_calls_and_leave_text_free(model: Model) -> None:
    call = replace(CHAT, tools=USE)
    assert model.allows(call, THINKS + TEXT)
    assert model.allows(call, TEXT)
    for before in ("", THINKS, PREAMBLE, THINKS + PREAMBLE + THINKS):
        assert all(model.allows(call, before + written) for written in called("time"))
        assert not any(model.allows(call, before + each) for each in called("time", "{}"))
        assert all(model.allows(call, before + each) for each in called("times", '{"a": [1]}'))
        assert not any(model.allows(call, before + each) for each in called("times", "[1]"))
        assert not any(model.allows(call, before + written) for written in called("look"))
    assert not model.allows(call, THINKS + PREAMBLE)


def test_a_format_beside_tools_is_an_answer_or_a_call(model: Model) -> None:
    call = replace(CHAT, tools=USE, format=JSON)
    assert model.allows(call, THINKS + '<|channel|>final<|message|>{"zone":"utc"}')
    assert model.allows(call, THINKS + next(called("time")))
    assert not model.allows(call, THINKS + next(called("times", "{}")))
    assert not model.allows(call, THINKS + TEXT)


def test_tools_that_hold_nothing_have_no_grammar(model: Model) -> None:
    loose = {"type": "function", "function": TIMES}
    encoded = prepared(model, replace(CHAT, tools=ToolUse((loose,))))
    assert encoded.request.sampling.grammar is None


def test_an_answer_that_goes_on_is_held_from_there(model: Model) -> None:
    begun = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "It is"})
    call = replace(CHAT, messages=begun, continue_final=True, generation_prompt=False)
    strict = replace(call, tools=USE)
    assert model.allows(strict, " noon.")
    assert model.allows(strict, f" noon.<|end|>{A}{next(called('time'))}")
    assert not model.allows(strict, f" noon.<|end|>{A}{next(called('time', '{}'))}")
    forced = replace(call, tools=replace(USE, forced=("time",)))
    assert not model.allows(forced, " noon.")
    assert model.allows(forced, f" noon.<|end|>{A}{next(called('time'))}")


def test_an_answer_without_a_generation_prompt_opens_its_message(model: Model) -> None:
    call = replace(CHAT, format=JSON, generation_prompt=False)
    assert model.allows(call, f'{A}{THINKS}<|channel|>final<|message|>{{"zone":"utc"}}')
    assert not model.allows(call, '<|channel|>final<|message|>{"zone":"utc"}')


def random_answer(model: Model, grammar: str, dice: random.Random) -> list[int] | None:
    """Return tokens that a grammar allows; None if they come to no end."""
    matcher, tokens = model.grammars.compile(grammar), list[int]()
    vocabulary = model.encoder.vocabulary
    ends = {model.encoder.backend.token_to_id(letter) for letter in '"}uz'}
    while len(tokens) < 300:
        if matcher.must_end or (matcher.may_end and dice.random() < 0.5):
            return tokens
        mask = np.zeros((1, 512), np.uint8)
        assert model.grammars.fill_bitmasks([matcher], mask) == [None]
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        liked = [each for each in allowed if each in vocabulary.special or each in ends]
        tokens.append(dice.choice(liked if liked and dice.random() < 0.7 else allowed))
        matcher.accept(tokens[-1])
    return None


@pytest.mark.parametrize("kind", ["calls", "JSON"])
def test_random_answers_of_a_grammar_are_read_as_it_holds_them(model: Model, kind: str) -> None:
    dice, whole = random.Random(7), 0
    forced = replace(USE, forced=("time", "times"))
    call = replace(CHAT, tools=forced) if kind == "calls" else replace(CHAT, format=JSON)
    request = prepared(model, call).request
    assert request.sampling.grammar is not None
    for _ in range(30):
        tokens = random_answer(model, request.sampling.grammar, dice)
        if tokens is None:
            continue
        whole += 1
        choice = HarmonyChoice(call, request.prompts[0], model.encoder.vocabulary, NO_STOP_STRINGS)
        said = choice.take(Tokens("r1", 0, tuple(tokens), FinishReason.STOP))
        if kind == "calls":
            ((name, text),) = whole_calls(said.calls)
            assert name in forced.forced
            assert choice.finish is Ending.TOOL_CALLS
        else:
            text = said.text
            assert choice.finish is Ending.STOP
        jsonschema.validate(json.loads(text), SCHEMA)
    assert whole > 5
