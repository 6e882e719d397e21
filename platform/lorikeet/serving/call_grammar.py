"""The grammar of an answer that calls tools, in llguidance's dialect of Lark."""

import json
from collections.abc import Mapping
from typing import Any

import regex

from lorikeet.api.messages import Format, ToolUse
from lorikeet.serving.grammar import LAYOUT
from lorikeet.serving.tools import Syntax
from lorikeet.serving.vocabulary import Vocabulary

_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As chat templates write arguments."""
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def call_grammar(
    use: ToolUse, syntax: Syntax, vocabulary: Vocabulary, otherwise: Format | None = None
) -> str:
    """Calls of the forced tools, as the syntax writes them, and nothing else.

    Where none is forced: calls of any, or an answer in the format of `otherwise`.
    """

    def literal(text: str) -> str:
        return _literal(text, syntax, vocabulary)

    more = f" ({literal(syntax.between)} call)*" if use.parallel else ""
    functions = [tool["function"] for tool in use.tools]
    if use.forced:
        functions = [function for function in functions if function["name"] in use.forced]
    names = [f"call_{index}" for index in range(len(functions))]
    rules = [
        f"calls: {literal(syntax.before)} call{more} {literal(syntax.after)}",
        f"call: {' | '.join(names)}",
        "start: calls",
    ]
    if otherwise is not None and not use.forced:
        schema = json.loads(otherwise.schema) or {"type": "object"}
        rules[-1] += f" | %json {json.dumps({**schema, 'x-guidance': LAYOUT})}"
    for name, function in zip(names, functions, strict=True):
        head = literal(f'{{"name": "{function["name"]}", "{syntax.arguments}": ')
        rules += [
            f'{name}: {head} {name}_arguments "}}"',
            f"{name}_arguments: %json {json.dumps(_parameters(function))}",
        ]
    return "\n".join(rules)


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters") or _NO_PARAMETERS
    return {"type": "object", **parameters, "x-guidance": {**LAYOUT, **_COMPACT}}


def _literal(text: str, syntax: Syntax, vocabulary: Vocabulary) -> str:
    """A text in a rule. Special tokens are named by their ids: their letters are not them."""
    ids = {token: vocabulary.tokenizer.token_to_id(token) for token in syntax.tokens}
    special = {token: i for token, i in ids.items() if i in vocabulary.special}
    marks = "|".join(map(regex.escape, special))
    parts = regex.split(f"({marks})", text) if special else [text]
    return " ".join(
        f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part
    )
