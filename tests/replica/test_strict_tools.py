"""Answers with strict tools: any text, and calls whose arguments match the tools' schemas."""

import itertools
import json
import random
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import jsonschema
import pytest
from tokenizers import AddedToken, Tokenizer

from lorikeet.errors import InvalidInput
from lorikeet.protocol.messages import ToolUse
from lorikeet.replica.grammar_matcher import ModelGrammars, TextMatcher
from lorikeet.text.detokenizer import Detokenizer, Vocabulary
from lorikeet.text.grammars.tool_grammar import text_grammar
from lorikeet.text.tools.calls import ToolCallParser
from lorikeet.text.tools.syntax import (
    FUNCTION_GEMMA,
    GEMMA_4,
    GLM,
    GLM_4_5,
    HERMES,
    LLAMA,
    MINISTRAL,
    MISTRAL,
    OLMO,
    PYTHON_LIST,
    QWEN_XML,
    CallStyle,
    ToolSyntax,
    XmlTags,
)
from lorikeet_engine.errors import InvalidRequest
from tests.replica.test_grammar import possible
from tests.text.test_tool_calls import in_gemmas, in_xml

DEMO = Path(__file__).parents[2] / "demo" / "model"
PLACE = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "maxLength": 9},
        "days": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["place"],
    "additionalProperties": False,
}
STRICT = {"name": "weather", "parameters": PLACE, "strict": True}
BARE = {"name": "time", "strict": True}
FREE = {"name": "note", "parameters": PLACE}
USE = ToolUse(tuple({"type": "function", "function": f} for f in (STRICT, BARE, FREE)))
SCHEMAS = {
    "weather": PLACE,
    "time": {"type": "object", "maxProperties": 0},
    "note": {"type": "object"},
}
MOST_TOKENS = 200


@dataclass
class Model:
    """A tokenizer, and what its chat template calls in."""

    syntax: ToolSyntax
    tokenizer: Tokenizer
    grammars: ModelGrammars
    compiled: dict[str, TextMatcher] = field(default_factory=dict)

    def grammar(self, use: ToolUse = USE) -> str:
        return text_grammar(use, self.syntax, Vocabulary(self.tokenizer))

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def allows(self, text: str, use: ToolUse = USE) -> bool:
        """Whether an answer may be this text, and no less."""
        grammar = self.grammar(use)
        if grammar not in self.compiled:
            self.compiled[grammar] = self.grammars.compile(grammar)
        matcher = self.compiled[grammar].copy()
        try:
            for token in self.ids(text):
                matcher.accept(token)
        except InvalidRequest:
            return False
        return matcher.may_end

    def read(self, tokens: list[int], use: ToolUse = USE) -> tuple[str, list[tuple[str, object]]]:
        """Text and calls of an answer as a client gets them."""
        hidden = Vocabulary(self.tokenizer).special_except(self.syntax.tokens)
        stream = Detokenizer(self.tokenizer, (), hidden=hidden)
        reader = ToolCallParser(self.syntax, use)
        said, deltas = "", []
        for token in tokens:
            more, called = reader.push(stream.push([token]))
            said, deltas = said + more, [*deltas, *called]
        more, called = reader.push(stream.finish(), last=True)
        deltas += called
        names = [delta.name for delta in deltas if delta.name]
        arguments = [json.loads(delta.arguments) for delta in deltas if not delta.name]
        return said + more, list(zip(names, arguments, strict=True))


MARKS = {
    "letters": lambda tokenizer, mark: None,
    "a token": lambda tokenizer, mark: tokenizer.add_tokens([AddedToken(mark, normalized=False)]),
    "a special token": lambda tokenizer, mark: tokenizer.add_special_tokens([mark]),
}


@pytest.fixture(
    params=[
        *itertools.product(
            [HERMES, MINISTRAL, MISTRAL, OLMO, GEMMA_4, FUNCTION_GEMMA, QWEN_XML, GLM, GLM_4_5],
            MARKS,
        ),
        (LLAMA, "letters"),
        (PYTHON_LIST, "letters"),
    ],
    ids=lambda param: f"{(param[0].before + param[0].arguments).strip()} as {param[1]}",
)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Model:
    syntax, marks = request.param
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    for mark in syntax.tokens:
        MARKS[marks](tokenizer, mark)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    shutil.copy(DEMO / "config.json", tmp_path)
    return Model(syntax, tokenizer, ModelGrammars(tmp_path))


def babble(model: Model, use: ToolUse, dice: random.Random) -> list[int] | None:
    """Random tokens that often begin a call and close brackets; None if they do not end."""
    matcher = model.grammars.compile(model.grammar(use))
    closing = {model.ids(character)[0] for character in '"}]\n'}
    begin = model.syntax.before or '{"'
    said: list[int] = []
    plan: list[int] = []
    while len(said) < MOST_TOKENS:
        allowed = possible(model.grammars, matcher, model.tokenizer.get_vocab_size())
        if not allowed or (matcher.may_end and dice.random() < 0.05):
            return said
        if not plan and dice.random() < (0.1 if said else 0.7):
            plan = model.ids(begin)
        if not plan and model.syntax.tags is not None and dice.random() < 0.3:
            plan = model.ids(model.syntax.tags.pad + model.syntax.tags.value[1])
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


def test_random_output_of_text_and_calls_is_parsed_as_its_grammar_allows(model: Model) -> None:
    dice, called, spoke = random.Random(0), set(), 0
    for turn in range(200):
        if turn >= 12 and called == {"weather", "time", "note"} and spoke > 5:
            break
        tokens = babble(model, USE, dice)
        if tokens is None:
            continue
        said, calls = model.read(tokens)
        if re.search(r"[eE]\+?\d{3}", said):  # a number beyond all floats, which is no argument
            continue
        for name, arguments in calls:
            jsonschema.validate(arguments, SCHEMAS[name])
            called.add(name)
        marks = filter(None, (model.syntax.opens, model.syntax.closes))
        assert not any(mark in said for mark in marks)
        if not model.syntax.opens:
            assert not (said and calls)
            assert not said.lstrip().startswith(model.syntax.before or "{")
        spoke += bool(said)
    assert called == {"weather", "time", "note"}
    assert spoke > 5


def written(syntax: ToolSyntax, *calls: tuple[str, object]) -> str:
    if syntax.style is CallStyle.PYTHON:
        texts = [f"{name}({_pairs(arguments)})" for name, arguments in calls]
    elif syntax.tags is not None:
        texts = [_in_xml(name, given, syntax.tags) for name, given in calls]
    elif syntax.style is CallStyle.GEMMA:
        texts = [f"call:{name}{in_gemmas(given, syntax.quote)}" for name, given in calls]
    elif syntax.style is CallStyle.NAMED:
        texts = [name + syntax.arguments + json.dumps(given) for name, given in calls]
    else:
        texts = [json.dumps({"name": name, syntax.arguments: given}) for name, given in calls]
    return syntax.before + syntax.between.join(texts) + syntax.after


def _in_xml(name: str, arguments: object, tags: XmlTags) -> str:
    if isinstance(arguments, dict):
        return in_xml(name, arguments, tags)
    return f"{name.join(tags.name)}\n{json.dumps(arguments)}{tags.end}"


def _pairs(arguments: object) -> str:
    if not isinstance(arguments, dict):
        return json.dumps(arguments)
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items())


def test_any_text_is_allowed(model: Model) -> None:
    texts = ("", "a", "Ünïcode \n\n 🦜", "a <b> [c] {d} </tool>", "<tool", "<think>\n{hm}")
    assert all(map(model.allows, texts))


def test_calls_are_held_to_the_schemas_of_strict_tools_alone(model: Model) -> None:
    syntax = model.syntax
    assert model.allows(written(syntax, ("weather", {"place": "here", "days": [1]})))
    assert model.allows(written(syntax, ("weather", {"place": "x"}), ("time", {})))
    assert model.allows(written(syntax, ("note", {"any": [{"thing": None}]})))
    for call in (
        ("weather", {}),
        *([] if syntax.style is CallStyle.XML else [("weather", {"place": 7})]),
        ("weather", {"place": "x", "more": 1}),
        ("time", {"zone": "utc"}),
        ("note", ["no object"]),
        ("unknown", {}),
    ):
        assert not model.allows(written(syntax, call)), call


def test_text_is_allowed_around_marked_calls(model: Model) -> None:
    call = written(model.syntax, ("time", {}))
    if not model.syntax.opens:
        assert not model.allows(f"{call} and more")
        assert model.allows(f"I would say {call}")  # which no reader takes for a call
    else:
        assert model.allows(f"I look.\n{call}\nAnd again. {call} Good.")
        assert not model.allows(f"I look.\n{call}\n{model.syntax.before} no call")


def test_without_parallel_calls_nothing_follows_a_call(model: Model) -> None:
    one = ToolUse(USE.tools, parallel=False)
    call, both = (written(model.syntax, *[("time", {})] * count) for count in (1, 2))
    assert model.allows("I say nothing.", one)
    assert model.allows(call, one)
    assert not model.allows(both, one)
    assert not model.allows(f"{call} {call}", one)
    assert not model.allows(f"{call} and more", one)


def test_a_begun_call_must_be_completed(model: Model) -> None:
    call = written(model.syntax, ("weather", {"place": "x"}))
    begun = len(model.syntax.before) or 1
    for length in range(begun, len(call)):
        assert not model.allows(call[:length]), call[:length]


def test_a_grammar_of_unmarked_calls_allows_text_that_the_parser_takes_for_text(
    tmp_path: Path,
) -> None:
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(DEMO / name, tmp_path)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    model = Model(LLAMA, tokenizer, ModelGrammars(tmp_path))
    for length in range(5):
        for text in map("".join, itertools.product(" \n;{a", repeat=length)):
            assert model.allows(text) == (re.match(r"\s*;?\s*\{", text) is None), repr(text)


ODD = {
    "name": "odd",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {
            "first name": {"type": "string"},
            "x:y=z": {"$ref": "#/properties/city"},
            "city": {"type": "string"},
            "tree": {"$ref": "#/$defs/node"},
        },
        "required": ["first name", "x:y=z", "city", "tree"],
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            }
        },
    },
}


def _python_model(tmp_path: Path) -> Model:
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    shutil.copy(DEMO / "config.json", tmp_path)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    return Model(PYTHON_LIST, tokenizer, ModelGrammars(tmp_path))


def test_calls_in_python_have_any_names_of_arguments_and_references(tmp_path: Path) -> None:
    model, use = _python_model(tmp_path), ToolUse(({"type": "function", "function": ODD},))
    given = {"first name": "a", "x:y=z": "b", "city": "c", "tree": {"kids": [{"kids": []}]}}
    pairs = ", ".join(
        f"{key if key.isalpha() else json.dumps(key)}={json.dumps(value)}"
        for key, value in given.items()
    )
    call = f"[odd({pairs})]"
    assert model.allows(call, use)
    assert not model.allows(call.replace('"b"', "1"), use)
    assert not model.allows(call.replace('{"kids": [{"kids": []}]}', "[[]]"), use)
    said, calls = model.read(model.ids(call), use)
    assert (said, calls) == ("", [("odd", given)])


@pytest.mark.parametrize("types", ["string", ["string", "null"], "array"])
def test_arguments_that_are_no_object_are_refused(model: Model, types: object) -> None:
    function = {"name": "f", "strict": True, "parameters": {"type": types}}
    with pytest.raises(InvalidInput, match="object") as refused:
        model.grammar(ToolUse(({"type": "function", "function": function},)))
    assert refused.value.param == "tools"


def test_arguments_of_several_types_are_held_to_an_object(model: Model) -> None:
    function = {"name": "f", "strict": True, "parameters": {"type": ["object", "string"]}}
    use = ToolUse(({"type": "function", "function": function},))
    assert model.allows(written(model.syntax, ("f", {"a": 1})), use)
    assert not model.allows(written(model.syntax, ("f", "text")), use)


def test_a_schema_that_grows_with_its_references_is_refused(tmp_path: Path) -> None:
    many = {f"p{i}": {"$ref": "#/$defs/d"} for i in range(2000)}
    schema = {"type": "object", "properties": many, "$defs": {"d": {"enum": ["x" * 50_000]}}}
    large = {"name": "large", "strict": True, "parameters": schema}
    with pytest.raises(InvalidInput, match="write out what"):
        _python_model(tmp_path).grammar(ToolUse(({"type": "function", "function": large},)))
