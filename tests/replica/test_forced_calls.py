"""Answers that a grammar forces to be tool calls.

Random ones parse, as a client gets them, and validate against the tools' schemas; calls that chat
templates write are allowed.
"""

import itertools
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import AddedToken, Tokenizer

from lorikeet.apis.answer import Answer
from lorikeet.protocol.messages import Thinking, ToolUse
from lorikeet.replica.grammar_matcher import ModelGrammars, TextMatcher
from lorikeet.text.detokenizer import Vocabulary
from lorikeet.text.grammars.tool_grammar import call_grammar
from lorikeet.text.tools.calls import ToolCallParser
from lorikeet.text.tools.syntax import (
    EXAONE,
    FUNCTION_GEMMA,
    GEMMA_4,
    GLM,
    GLM_4_5,
    GRANITE,
    HERMES,
    MINISTRAL,
    NEMOTRON,
    OLMO,
    QWEN_XML,
    SEED,
    ToolSyntax,
)
from lorikeet_engine.request import FinishReason, Tokens
from tests.gateway.test_glm import GLM_4_7
from tests.replica.published_templates import (
    GEMMA_4_TEMPLATE,
    MINISTRAL_3,
    QWEN3,
    QWEN3_5,
    QWEN3_6,
)
from tests.replica.test_grammar import possible
from tests.replica.test_strict_tools import MARKS
from tests.text.test_prompts import CHAT, DEMO, encoder

SYNTAXES = {
    "EXAONE 4": EXAONE,
    "FunctionGemma": FUNCTION_GEMMA,
    "Gemma 4": GEMMA_4,
    "GLM 4.7": GLM,
    "GLM 4.5": GLM_4_5,
    "Granite 3": GRANITE,
    "Granite 4": HERMES,
    "Ministral 3": MINISTRAL,
    "Nemotron Nano 2": NEMOTRON,
    "Nemotron 3": QWEN_XML,
    "OLMo 3": OLMO,
    "Seed-OSS": SEED,
}
NODE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
    },
    "required": ["name"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "texts": {
        "type": "object",
        "properties": {
            "id": {"type": "string", "pattern": "^[a-z]{2}-[0-9]+$", "maxLength": 6},
            "mode": {"enum": ["fast", 'a "b"', "1"]},
            "day": {"type": "string", "format": "date"},
            "note": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
        },
        "required": ["id", "mode", "day"],
        "additionalProperties": False,
    },
    "numbers": {
        "type": "object",
        "properties": {
            "count": {"type": "integer", "minimum": 2, "maximum": 30},
            "on": {"type": "boolean"},
            "level": {"enum": [1, 2.5, None]},
            "first name": {"const": 7},
        },
        "required": ["count", "first name"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {
            "tree": {"$ref": "#/$defs/node"},
            "pair": {
                "type": "array",
                "prefixItems": [{"type": "integer", "maximum": 9}, {"enum": ["x", "y"]}],
                "items": False,
                "minItems": 1,
            },
            "tags": {"type": "array", "items": {"enum": ["p", "q"]}, "minItems": 2, "maxItems": 3},
        },
        "required": ["tree", "tags"],
        "additionalProperties": False,
        "$defs": {"node": NODE},
    },
}
USE = ToolUse(
    tuple(
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in SCHEMAS.items()
    ),
    forced=tuple(SCHEMAS),
)
MOST_TOKENS = 400
TEMPLATES = {
    "Qwen 3": QWEN3,
    "Qwen 3.5": QWEN3_5,
    "Qwen 3.6": QWEN3_6,
    "Gemma 4": GEMMA_4_TEMPLATE,
    "GLM 4.7": GLM_4_7,
    "Ministral 3": MINISTRAL_3,
}
LOOK = {
    "type": "object",
    "properties": {
        "at": {"type": "string"},
        "first days": {"type": "array", "items": {"type": "integer"}},
        "in": {"type": "object", "properties": {"ok": {"type": "boolean"}}},
    },
}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("look", {"at": 'a "{b}" <c>', "first days": [1, 2], "in": {"ok": True}}),
    ("now", {}),
]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_calls_are_allowed_as_chat_templates_write_those_of_earlier_turns(
    tmp_path: Path, template: str
) -> None:
    renders = encoder(tmp_path, template)
    syntax = renders.syntax
    assert syntax is not None
    tools = tuple(
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name, parameters in (("look", LOOK), ("now", {"type": "object", "properties": {}}))
    )
    made = [
        {"id": f"{at:09}", "type": "function", "function": {"name": name, "arguments": given}}
        for at, (name, given) in enumerate(CALLS)
    ]
    turns = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": ""}]
    prompt = renders._render([turns[0], {**turns[1], "tool_calls": made}], tools)
    begin = prompt.rindex(syntax.opens, 0, prompt.index("{b}"))
    last = syntax.closes or "{}"
    said = prompt[begin : prompt.rindex(last) + len(last)]
    use = ToolUse(tools, forced=("look", "now"))
    shutil.copy(DEMO / "config.json", tmp_path)
    matcher = ModelGrammars(tmp_path).compile(call_grammar(use, syntax, renders.vocabulary))
    for token in renders.backend.encode(said, add_special_tokens=False).ids:
        matcher.accept(token)
    assert matcher.may_end
    parts = ToolCallParser(syntax, use).push(said, last=True).calls
    assert [part.name for part in parts if part.name] == ["look", "now"]
    given = [json.loads(part.arguments) for part in parts if not part.name]
    assert given == [arguments for _, arguments in CALLS]


@pytest.mark.parametrize("marks", MARKS)
@pytest.mark.parametrize("syntax", SYNTAXES.values(), ids=SYNTAXES)
def test_random_forced_calls_validate_against_their_schemas(
    tmp_path: Path, syntax: ToolSyntax, marks: str
) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    for mark in syntax.tokens:
        MARKS[marks](tokenizer, mark)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    shutil.copy(DEMO / "config.json", tmp_path)
    grammars, vocabulary = ModelGrammars(tmp_path), Vocabulary(tokenizer)
    grammar = grammars.compile(call_grammar(USE, syntax, vocabulary))
    call, dice, called = replace(CHAT, tools=USE), random.Random(0), set[str]()
    for turn in itertools.count():
        if turn >= 12 and called == set(SCHEMAS):
            break
        assert turn < 60
        tokens = babble(grammars, tokenizer, syntax, grammar.copy(), dice)
        if tokens is None:
            continue
        answer = Answer(call, [(1,)], vocabulary, syntax, Thinking.NEVER)
        for token in tokens:
            assert not answer.take([Tokens("r1", 0, (token,))])
        body = answer.take([Tokens("r1", 0, (), FinishReason.STOP)])[-1]
        assert isinstance(body, bytes)
        choice = json.loads(body)["choices"][0]
        assert not choice["message"]["content"]
        assert choice["finish_reason"] == "tool_calls"
        for made in choice["message"]["tool_calls"]:
            name = made["function"]["name"]
            jsonschema.validate(json.loads(made["function"]["arguments"]), SCHEMAS[name])
            called.add(name)


def babble(
    grammars: ModelGrammars,
    tokenizer: Tokenizer,
    syntax: ToolSyntax,
    matcher: TextMatcher,
    dice: random.Random,
) -> list[int] | None:
    """Random tokens that often end strings; None if they do not end."""
    ends = [syntax.quote or (syntax.tags.value[1] if syntax.tags else '"'), "}", "]", ")"]
    closing = {tokenizer.encode(text, add_special_tokens=False).ids[0] for text in ends}
    said: list[int] = []
    while len(said) < MOST_TOKENS:
        allowed = possible(grammars, matcher, tokenizer.get_vocab_size())
        if not allowed or (matcher.may_end and dice.random() < 0.7):
            return said
        liked = sorted(allowed & closing)
        token = dice.choice(liked if liked and dice.random() < 0.5 else sorted(allowed))
        matcher.accept(token)
        said.append(token)
        if matcher.must_end:
            return said
    return None
