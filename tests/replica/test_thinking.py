"""Prompts and grammars of base models that think before they answer."""

import asyncio
import itertools
import json
import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import AddedToken, Tokenizer

from lorikeet.apis.answer import Answer
from lorikeet.errors import InvalidInput
from lorikeet.protocol.messages import Call, Endpoint, Format, FormatKind, Thinking
from lorikeet.replica.grammar_matcher import ModelGrammars, TextMatcher
from lorikeet.replica.request_builder import RequestBuilder
from lorikeet.text.grammars.answer_grammar import answer_grammar
from lorikeet.text.prompts import PromptEncoder, encode_call
from lorikeet.text.reasoning import GEMMA_TAGS, MISTRAL_TAGS, THINK_TAGS
from lorikeet.text.tools.call_bodies import calls_of
from lorikeet.text.tools.syntax import GEMMA_4, GLM, HERMES, LLAMA, MINISTRAL, QWEN_XML, ToolSyntax
from lorikeet_engine.errors import InvalidRequest
from lorikeet_engine.request import FinishReason, Tokens
from tests.replica.published_templates import (
    FIRST_MINISTRAL_3,
    MINISTRAL_3,
    QWEN3,
    QWEN3_5,
    QWEN3_6,
    R1,
)
from tests.replica.test_grammar import possible
from tests.replica.test_strict_tools import MARKS, SCHEMAS, USE, written
from tests.text.test_prompts import CHAT, DEMO, encoder, text_of

USER = {"role": "user", "content": "Is it <think>?"}
NO_THINKING = {"enable_thinking": False}


def thinking(encoder: PromptEncoder, call: Call) -> Thinking:
    return encoder.thinking(call, encoder.encode(call, 4096))


def test_qwen_thinks_unless_it_is_told_not_to(tmp_path: Path) -> None:
    qwen = encoder(tmp_path, QWEN3)
    asked = replace(CHAT, messages=(USER,))
    assert thinking(qwen, asked) is Thinking.POSSIBLE
    assert thinking(qwen, replace(asked, template_args=NO_THINKING)) is Thinking.NEVER
    assert thinking(qwen, replace(asked, endpoint=Endpoint.RESPONSES)) is Thinking.POSSIBLE


def test_prompts_of_r1_distills_open_the_thinking(tmp_path: Path) -> None:
    distill = encoder(tmp_path, R1)
    assert thinking(distill, CHAT) is Thinking.BEGUN
    assert text_of(distill, CHAT).endswith("<think>\n")


def test_qwen_3_5_opens_the_thinking_or_closes_it_in_the_prompt(tmp_path: Path) -> None:
    qwen = encoder(tmp_path, QWEN3_5)
    asked = replace(CHAT, messages=(USER,))
    assert thinking(qwen, asked) is Thinking.BEGUN
    assert text_of(qwen, asked).endswith("<think>\n")
    assert thinking(qwen, replace(asked, template_args=NO_THINKING)) is Thinking.NEVER
    assert qwen.ignored(replace(asked, template_args={"reasoning_effort": "low"})) == (
        "reasoning_effort",
    )


def test_qwen_3_6_shows_thinking_of_earlier_turns_if_it_is_preserved(tmp_path: Path) -> None:
    qwen = encoder(tmp_path, QWEN3_6)
    said = {"role": "assistant", "content": "No.", "reasoning_content": "Hm."}
    asked = replace(CHAT, messages=(USER, said, USER))
    assert "Hm." not in text_of(qwen, asked)
    kept = replace(asked, template_args={"preserve_thinking": True})
    assert "<think>\nHm.\n</think>\n\nNo." in text_of(qwen, kept)


@pytest.mark.parametrize("template", [QWEN3_5, QWEN3_6], ids=["3.5", "3.6"])
def test_qwens_past_calls_are_written_as_its_syntax_has_them(tmp_path: Path, template: str) -> None:
    qwen = encoder(tmp_path, template)
    assert qwen.syntax is QWEN_XML
    given = {"place": "a < b\n", "days": [1, 2], "all": True}
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": given}}
    past = {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]}
    result = {"role": "tool", "content": "fine", "tool_call_id": "c1"}
    text = text_of(qwen, replace(CHAT, tools=USE, messages=(USER, past, result)))
    shown = text.rpartition("<tool_call>")[2].partition("</tool_call>")[0]
    syntax = qwen.syntax
    (read,) = calls_of(
        f"{shown.strip()}\n</tool_call>",
        syntax,
        {"weather": {"properties": {"place": {"type": "string"}, "all": {"type": "boolean"}}}},
    )
    assert read == ("weather", given)


@pytest.mark.parametrize("template", [MINISTRAL_3, FIRST_MINISTRAL_3], ids=["newest", "first"])
def test_ministrals_past_thinking_and_calls_are_written_as_it_wrote_them(
    tmp_path: Path, template: str
) -> None:
    ministral = encoder(tmp_path, template)
    assert ministral.syntax is MINISTRAL or template is FIRST_MINISTRAL_3
    assert ministral.think_tags == MISTRAL_TAGS
    call = {"id": "c00000001", "type": "function", "function": {"name": "time", "arguments": {}}}
    past = (
        USER,
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_call_id": "c00000001"},
        {"role": "assistant", "content": "Noon.", "reasoning_content": "So."},
        USER,
    )
    asked = replace(CHAT, messages=past)
    assert (
        "[THINK]Hm.[/THINK][TOOL_CALLS]time[ARGS]{}<|eos|>[TOOL_RESULTS]noon[/TOOL_RESULTS]"
        "[THINK]So.[/THINK]Noon.<|eos|>[INST]Is it <think>?[/INST]"
    ) in text_of(ministral, asked)
    assert thinking(ministral, asked) is Thinking.POSSIBLE
    begun = replace(asked, messages=past[:4], generation_prompt=False, continue_final=True)
    assert text_of(ministral, begun).endswith("[THINK]So.[/THINK]Noon.")
    said = {"role": "assistant", "content": "[THINK]So"}
    begun = replace(begun, messages=(USER, said))
    assert thinking(ministral, begun) is Thinking.BEGUN


def test_system_messages_go_first_together_for_a_template_that_takes_them_there_alone(
    tmp_path: Path,
) -> None:
    brief, loud = ({"role": "system", "content": text} for text in ("Be brief.", "Be loud."))
    said = {"role": "assistant", "content": "No."}
    qwen = encoder(tmp_path, QWEN3_5)
    first = "<|im_start|>system\nBe brief.\n\nBe loud.<|im_end|>\n<|im_start|>user\nIs it"
    for messages in ((brief, loud, USER), (brief, USER, loud), (USER, brief, said, loud, USER)):
        text = text_of(qwen, replace(CHAT, messages=messages))
        assert text.startswith(first)
        assert text.count("<|im_start|>system") == 1
    kept = text_of(encoder(tmp_path, QWEN3), replace(CHAT, messages=(brief, USER, loud)))
    assert "<|im_end|>\n<|im_start|>system\nBe loud.<|im_end|>" in kept


def test_plain_completions_and_other_templates_have_no_thinking(tmp_path: Path) -> None:
    call = replace(CHAT, endpoint=Endpoint.COMPLETIONS, prompts=("<think>\n",))
    assert thinking(encoder(tmp_path, R1), call) is Thinking.NEVER
    assert thinking(PromptEncoder(DEMO), CHAT) is Thinking.NEVER


@pytest.mark.parametrize(
    ("begun", "expected"),
    [
        ("It is", Thinking.NEVER),
        ("<think>\nIs it", Thinking.BEGUN),
    ],
)
def test_a_continued_answer_continues_its_thinking_or_text(
    tmp_path: Path, begun: str, expected: Thinking
) -> None:
    messages = (USER, {"role": "assistant", "content": begun})
    call = replace(CHAT, messages=messages, generation_prompt=False, continue_final=True)
    qwen = encoder(tmp_path, QWEN3)
    assert thinking(qwen, call) is expected
    assert text_of(qwen, call).endswith(begun)


def test_a_template_gets_the_thinking_before_a_call(tmp_path: Path) -> None:
    called = {"id": "call00001", "type": "function", "function": {"name": "time", "arguments": {}}}
    turns = (
        USER,
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [called]},
        {"role": "tool", "content": "noon", "tool_call_id": "call00001"},
    )
    shown = text_of(encoder(tmp_path, QWEN3), replace(CHAT, messages=turns))
    assert "assistant\n<think>\nHm.\n</think>\n\n<tool_call>" in shown


def test_a_schema_that_costs_too_much_is_refused_behind_thinking_too(tmp_path: Path) -> None:
    """Its trial looks at the answer's first token, and not at that of the thinking."""
    costly = Format('{"type": "string", "pattern": "^(a{1000}){1000}$"}')
    shutil.copy(DEMO / "config.json", tmp_path)
    thinker = encoder(tmp_path, R1)
    builder = RequestBuilder(thinker, tmp_path, 4096)
    encoded = encode_call(replace(CHAT, format=costly), thinker, 4096)
    try:
        with pytest.raises(InvalidInput, match="too much time or memory"):
            asyncio.run(builder.build(encoded))
    finally:
        builder.close()


@dataclass
class Thinker:
    """A model that thinks, as its tokenizer and chat template say."""

    thinking: Thinking
    syntax: ToolSyntax
    encoder: PromptEncoder
    grammars: ModelGrammars

    @property
    def opened(self) -> str:
        """The tag that an answer has before its thinking."""
        return self.encoder.think_tags.opens if self.thinking is Thinking.POSSIBLE else ""

    @property
    def closes(self) -> str:
        return self.encoder.think_tags.closes

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.encoder.backend.encode(text, add_special_tokens=False).ids
        return ids

    def matcher(self, call: Call) -> TextMatcher:
        encoder = self.encoder
        known = encoder.syntax, encoder.vocabulary, self.thinking, encoder.think_tags
        grammar = answer_grammar(call, *known)
        assert grammar is not None
        return self.grammars.compile(grammar)

    def allows(self, call: Call, *parts: str) -> bool:
        """Whether an answer may be these parts, of which tokens are made one by one."""
        matcher = self.matcher(call)
        try:
            for token in itertools.chain(*map(self.ids, parts)):
                matcher.accept(token)
        except InvalidRequest:
            return False
        return matcher.may_end

    def read(self, call: Call, tokens: list[int]) -> dict[str, Any]:
        """The message that a client gets of an answer."""
        vocabulary = self.encoder.vocabulary
        known, tags = (vocabulary, self.syntax, self.thinking), self.encoder.think_tags
        answer = Answer(call, [(1,)], *known, tags=tags)
        for token in tokens:
            assert not answer.take([Tokens("r1", 0, (token,))])
        body = answer.take([Tokens("r1", 0, (), FinishReason.STOP)])[-1]
        assert isinstance(body, bytes)
        message: dict[str, Any] = json.loads(body)["choices"][0]["message"]
        return message


@pytest.fixture(
    params=itertools.product(
        [Thinking.POSSIBLE, Thinking.BEGUN],
        MARKS,
        [
            (HERMES, THINK_TAGS),
            (LLAMA, THINK_TAGS),
            (MINISTRAL, MISTRAL_TAGS),
            (GEMMA_4, GEMMA_TAGS),
            (GLM, THINK_TAGS),
        ],
    ),
    ids=lambda param: (
        f"{param[0].value}, {param[1]}, {param[2][0].before.strip() or 'llama'}, "
        f"{param[2][1].opens}"
    ),
)
def thinker(request: pytest.FixtureRequest, tmp_path: Path) -> Thinker:
    thinking, marks, (syntax, tags) = request.param
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<other>", normalized=False)])
    for mark in (*tags.marks, *syntax.tokens):
        MARKS[marks](tokenizer, mark)
    encoder(tmp_path, f"{{{{ '{tags.closes}' }}}}")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    shutil.copy(DEMO / "config.json", tmp_path)
    own = PromptEncoder(tmp_path)
    own.syntax = syntax
    return Thinker(thinking, syntax, own, ModelGrammars(tmp_path))


def answers(syntax: ToolSyntax) -> list[tuple[Call, str]]:
    """Calls that are held to a grammar, each with an answer that it allows."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    now = written(syntax, ("time", {}))
    return [
        (replace(CHAT, format=Format(json.dumps(schema))), '{"a": 1}'),
        (replace(CHAT, format=Format("{}")), '{"b": [1]}'),
        (replace(CHAT, format=Format("yes[!]{2}|no", FormatKind.REGEX)), "yes!!"),
        (replace(CHAT, format=Format('["red", "blue"]', FormatKind.CHOICES)), "blue"),
        (replace(CHAT, tools=replace(USE, forced=("time",), parallel=False)), now),
        (replace(CHAT, tools=USE), now),
        (replace(CHAT, tools=USE), "It is noon."),
    ]


def says_anything(call: Call) -> bool:
    """Whether an answer may be any text that is no call."""
    return call.tools is not None and not call.tools.forced


LINE_ENDS = ("", "\n", "\n\n")
THOUGHTS = ("", "\nHm, {[\n", "<other> <tool_call> no", '{"name": "time"}', "a\n\n<think>b")


def test_any_thinking_may_come_before_an_answer(thinker: Thinker) -> None:
    opened, closes = thinker.opened, thinker.closes
    for i, (call, answer) in enumerate(answers(thinker.syntax)):
        for j, thought in enumerate(THOUGHTS):
            if not thinker.encoder.vocabulary.special.isdisjoint(thinker.ids(thought)):
                continue  # special tokens are no thoughts
            text = f"{opened}{thought}{closes}{LINE_ENDS[(i + j) % 3]}{answer}"
            assert thinker.allows(call, text), text


def test_an_answer_may_begin_at_once_unless_thinking_has_begun(thinker: Thinker) -> None:
    for call, answer in answers(thinker.syntax):
        assert thinker.allows(call, answer) == (thinker.thinking is Thinking.POSSIBLE)


def test_thinking_must_end_and_an_answer_must_follow(thinker: Thinker) -> None:
    opened, closes = thinker.opened, thinker.closes
    for call, answer in answers(thinker.syntax):
        assert not thinker.allows(call, f"{opened}hm {answer}")
        if says_anything(call):
            continue
        assert not thinker.allows(call, f"{opened}hm{closes}")
        assert not thinker.allows(call, f"{opened}hm{closes}hm {answer} hm")
        assert not thinker.allows(call, f"{opened}hm{closes}hm{closes}{answer} hm")
        assert not thinker.allows(call, f"{opened}hm{closes}{answer[:-1]}")


def test_tags_spelled_in_letters_are_tags(thinker: Thinker) -> None:
    opened, closes = thinker.opened, thinker.closes
    for call, answer in answers(thinker.syntax):
        parts = opened[:4], opened[4:], f"hm {closes[:4]}", closes[4:]
        assert thinker.allows(call, *parts, answer)
        if not says_anything(call):
            assert not thinker.allows(call, *parts, "hm", answer, "hm")


def test_strict_calls_are_held_to_their_schemas_behind_thinking_alone(thinker: Thinker) -> None:
    call = replace(CHAT, tools=USE)
    bad = written(thinker.syntax, ("time", {"zone": "utc"}))
    opened, closes = thinker.opened, thinker.closes
    if thinker.encoder.vocabulary.special.isdisjoint(thinker.ids(bad)):
        good = written(thinker.syntax, ("time", {}))
        assert thinker.allows(call, f"{opened}{bad}{closes}{good}")
    assert not thinker.allows(call, f"{opened}hm{closes}{bad}")
    assert not thinker.allows(call, f"{opened}hm{closes}\n\n{bad}")


def test_tags_that_are_tokens_are_no_words_of_an_answer_beside_strict_tools(
    thinker: Thinker,
) -> None:
    """Else what such a tag begins could be thinking to a reader and an answer to the grammar."""
    opened, closes = thinker.opened, thinker.closes
    token, *more = thinker.ids(closes)
    # llguidance takes an added token that is not special for text, unless it is like <this>
    are_tokens = not more and (token in thinker.encoder.vocabulary.special or closes[0] == "<")
    text = f"{opened}hm{closes}It is{closes} noon."
    assert thinker.allows(replace(CHAT, tools=USE), text) != are_tokens


def test_random_output_of_thinking_and_calls_is_parsed_as_its_grammar_allows(
    thinker: Thinker,
) -> None:
    """Parsers and grammar agree on random answers."""
    call, dice = replace(CHAT, tools=USE), random.Random(0)
    thought = called = 0
    for turn in range(30):
        if turn >= 10 and called > 1 and thought > 2:
            break
        tokens = babble(thinker, thinker.matcher(call), dice)
        if tokens is None:
            continue
        message = thinker.read(call, tokens)
        for made in message.get("tool_calls", ()):
            function = made["function"]
            jsonschema.validate(json.loads(function["arguments"]), SCHEMAS[function["name"]])
            called += 1
        thought += "reasoning_content" in message
        if thinker.syntax is LLAMA and "tool_calls" not in message:
            assert not message["content"].lstrip().startswith("{")
    assert called > 1
    assert thought > 2


def babble(thinker: Thinker, matcher: TextMatcher, dice: random.Random) -> list[int] | None:
    """Random tokens with tags and begins of calls; None if they do not end."""
    closing = {thinker.ids(character)[0] for character in '"}]\n'}
    begin = thinker.syntax.before or '{"'
    said: list[int] = []
    opens, closes, _ = thinker.encoder.think_tags
    plan = thinker.ids(dice.choice([opens, begin]))
    while len(said) < 250:
        allowed = possible(thinker.grammars, matcher, thinker.encoder.backend.get_vocab_size())
        if not allowed or (matcher.may_end and dice.random() < 0.05):
            return said
        if not plan and dice.random() < 0.1:
            plan = thinker.ids(
                dice.choice([closes, begin, f"{closes}\n{begin}", f"{closes}{begin}"])
            )
        if plan and plan[0] in allowed:
            token = plan.pop(0)
        else:
            plan, liked = [], sorted(allowed & closing)
            token = dice.choice(liked if liked and dice.random() < 0.5 else sorted(allowed))
        matcher.accept(token)
        said.append(token)
        if matcher.must_end:
            return said
    return None
