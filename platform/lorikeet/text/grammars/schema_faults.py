"""Faults of the JSON schemas that constrain an answer, and the place of a fault in its schema."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from lorikeet.protocol.messages import Call, FormatKind
from lorikeet.text.grammars.held_schema import (
    held_schema,
    json_path,
    path_of,
    pointer_of,
    subschemas,
)
from lorikeet.text.grammars.schema_logic import rebased

_MOST_STEPS = 64
_RENAMED = {"oneOf": "anyOf"}
"""New names of keywords that `held_schema` renames. The subschemas under such a keyword keep their
order.
"""
_WORDS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.DOTALL), words)
    for pattern, words in (
        (
            r'Unimplemented keys: \["uniqueItems"\].*',
            "uniqueItems cannot be held: remove it and check the answer, or set maxItems to 1",
        ),
        (
            r'Unimplemented keys: \["(?:else|if|then)".*',
            "this if cannot be held: write the cases as anyOf",
        ),
        (
            r'Unimplemented keys: \["not"\].*',
            "this not cannot be held: write what is allowed instead of what is not",
        ),
        (
            r'Unimplemented keys: \["(\$(?:dynamic|recursive)Ref)"\].*',
            r"\1 cannot be held: use $ref",
        ),
        (
            r'Unimplemented keys: \["([^\]]*)"\].*',
            r"\1 cannot be held: remove it and check the answer",
        ),
        (
            r"oneOf constraints are not supported.*",
            "two options of this oneOf may match the same value: use anyOf, or let the options "
            "differ by type, or by a const in a required property",
        ),
        (
            r"min/maxProperties only supported.*",
            "minProperties and maxProperties cannot be held beside optional properties: remove "
            "them, or make the properties required",
        ),
        (
            r".*error: look-around.*",
            "look-ahead and look-behind in a pattern cannot be held: write a pattern without them",
        ),
        (
            r".*error: backreferences.*",
            "references back in a pattern cannot be held: write a pattern without them",
        ),
        (
            r"patternProperty regexes (.*) are not disjoint.*",
            r"a property may match several patternProperties, \1: let them exclude each other",
        ),
        (
            r"circular references with sibling keys are not supported.*",
            "a $ref that leads back to its own schema cannot be held beside other keywords: leave "
            "it alone in its schema",
        ),
        (
            r"Resource '(?:json-schema:///)?(.*?)' is not present.*",
            r"the $ref to \1 leads out of the schema: copy what it names into $defs",
        ),
        (
            r"(?:Pointer|Anchor) .* does not exist.*",
            "its $ref names no part of the schema: want one such as #/$defs/place",
        ),
        (
            r"(?:Schema intersection stack level exceeded|schema too large).*",
            "it takes too much time or memory: make it smaller or less nested",
        ),
        (
            r"Unknown format: (.*)",
            r"the format \1 of a schema that it refers to cannot be held: copy that schema into "
            "$defs",
        ),
        (
            r"Failed to generate regex for (?:float|int).* range.*",
            "the bounds of this number cannot be held: use bounds closer to 0, or none",
        ),
        (
            r"Unable to determine if regex is empty.*",
            "its pattern cannot be held beside minLength and maxLength: remove these, or shorten "
            "the pattern's own repetitions",
        ),
        (r"(?:.*: )?Unsatisfiable schema: (.*)", r"no value matches it: \1"),
    )
)
"""Patterns of llguidance's error messages, each with the text that Lorikeet shows instead."""
_OF_GRAMMARS = re.compile("cannot be held|this oneOf may|several patternProperties|takes too much")
"""Pattern of the texts in `_WORDS` that report a limit of grammars, not a faulty schema."""
_JSON_TYPES = ["object", "array", "string", "number", "boolean", "null"]
_MOST_NAMED = 16
_LONGEST_PATH = 200


class AnswerSchema(NamedTuple):
    """JSON schema that constrains an answer.

    place: name, for error messages, of the part of the request that holds the schema.
    param: field of the request that holds the schema.
    lets_go: whether the grammar leaves out keywords that it cannot enforce; otherwise they are
        errors.
    tool: name of the tool whose arguments the schema constrains; None if it constrains the answer's
        format.
    """

    place: str
    param: str
    schema: Any
    lets_go: bool = False
    tool: str | None = None


class Fault(NamedTuple):
    """Fault of a JSON schema.

    path: JSON path of the innermost faulty subschema.
    reason: why a grammar cannot follow that subschema.
    """

    path: str
    reason: str


def answer_schemas(call: Call) -> list[AnswerSchema]:
    """Return the JSON schemas that constrain a call's answer, as the client wrote them."""
    found = list[AnswerSchema]()
    use, answer = call.tools, call.format
    if use is not None:
        functions = [tool["function"] for tool in use.tools]
        # the client counts tools that are left out, and namespaces as one
        as_sent = not call.left_out and not any("." in each["name"] for each in functions)
        for at, function in enumerate(functions):
            name, parameters = function["name"], function.get("parameters")
            if use.forced:
                is_held = name in use.forced
            else:
                is_held = answer is not None or bool(function.get("strict"))
            if is_held and parameters:
                field = "functions" if use.functions else "tools"
                place = f"{field}[{at}] ({name})" if as_sent else f"the tool {name}"
                lets_go = function.get("strict") is False
                found.append(AnswerSchema(place, "tools", parameters, lets_go, name))
    is_schema = answer is not None and answer.kind is FormatKind.JSON_SCHEMA
    if answer is not None and is_schema and (use is None or not use.forced):
        schema, lets_go = json.loads(answer.text), not answer.strict
        found.append(AnswerSchema(answer.param, answer.param, schema, lets_go))
    return found


def checked_schemas(call: Call) -> list[AnswerSchema]:
    """Return those of a call's schemas that the finished answer must be checked against.

    They have keywords that the grammar cannot enforce and leaves out.
    """
    return [
        each
        for each in answer_schemas(call)
        if each.lets_go and held_schema(each.schema, lets_go=True).let_go
    ]


def ignored_keywords(call: Call) -> tuple[str, ...]:
    """Return the names of schema keywords that the grammar of a call's answer does not enforce.

    A keyword that the finished answer is checked against is listed with its tool and the JSON path
    of its schema, as "KEYWORD:TOOL:PATH".
    """
    names, let_go = dict[str, None](), list[str]()
    for schema in answer_schemas(call):
        held = held_schema(schema.schema, lets_go=schema.lets_go)
        names |= dict.fromkeys(held.ignored)
        let_go += [_let_go(keyword, schema, path) for keyword, path in held.let_go]
    return (*names, *let_go[:_MOST_NAMED])


def without_schemas(call: Call, schemas: Collection[AnswerSchema]) -> Call:
    """Return a copy of a call in which each of `schemas`, some of the call's own, is replaced by
    a schema of its type alone, such as {"type": "object"}.
    """
    tools = {each.tool for each in schemas}
    use, answer = call.tools, call.format
    if use is not None:
        functions = [tool["function"] for tool in use.tools]
        loose = tuple(
            {"type": "function", "function": {**each, "parameters": {"type": "object"}}}
            if each["name"] in tools
            else {"type": "function", "function": each}
            for each in functions
        )
        use = replace(use, tools=loose)
    if answer is not None and None in tools:
        types = json.loads(answer.text).get("type", _JSON_TYPES)
        answer = replace(answer, text=json.dumps({"type": types}))
    return replace(call, tools=use, format=answer)


def whole_schema(schema: AnswerSchema) -> str:
    """Return the entry in the list of ignored keywords for a schema that the grammar leaves out
    whole: "schema:TOOL:$", or "schema:$" without a tool.
    """
    return _let_go("schema", schema, "$")


def _let_go(keyword: str, schema: AnswerSchema, path: str) -> str:
    tool = "" if schema.tool is None else f"{schema.tool}:"
    return f"{keyword}:{tool}{path[:_LONGEST_PATH]}"


def may_be_checked(reason: str) -> bool:
    """Return True if an answer can be checked against a schema that a grammar cannot follow.

    reason: why a grammar cannot follow the schema, as in_own_words returned it.
    """
    return _OF_GRAMMARS.search(reason) is not None


def in_own_words(reason: str) -> str:
    """Return Lorikeet's text for an error message of llguidance, which names the remedy. Messages
    without such a text are returned unchanged.
    """
    reason = reason.split("\n  while processing", 1)[0]
    for pattern, words in _WORDS:
        if pattern.fullmatch(reason):
            return pattern.sub(words, reason).replace('"', "")
    return reason


def find_fault(
    schema: Mapping[str, Any],
    problem: Callable[[Mapping[str, Any]], str | None],
    *,
    lets_go: bool = False,
) -> Fault | None:
    """Return the innermost fault of a schema; None if the schema has none.

    problem: function that takes a schema, translated into keywords that grammars enforce, and
        returns why a grammar cannot follow it; None if it can.
    lets_go: whether the translation removes keywords that nothing can replace.
    """
    held = held_schema(schema, lets_go=lets_go).schema
    whole = {"$defs": {"whole": rebased(held, "whole")}}

    def problem_at(pointer: str) -> str | None:
        return problem({"$ref": f"#/$defs/whole{pointer}", **whole})

    reason = problem(held)
    if reason is None:
        return None
    pointer, path, seen = "", "$", {""}
    here: Mapping[str, Any] = schema
    there: Mapping[str, Any] = held
    for _ in range(_MOST_STEPS):
        for pointer_on, path_on, part, held_part in _parts(here, there, schema, held):
            inner = pointer_on if pointer_on.startswith("#") else pointer + pointer_on
            inner = inner.removeprefix("#")
            if inner not in seen and (found := problem_at(inner)) and _explains(found, reason):
                seen.add(inner)
                path = path_on if path_on.startswith("$") else path + path_on
                pointer, here, there, reason = inner, part, held_part, found
                break
        else:
            break
    return Fault(path, reason)


def _parts(
    here: Mapping[str, Any], there: Mapping[str, Any], schema: Any, held: Any
) -> Iterator[tuple[str, str, Mapping[str, Any], Mapping[str, Any]]]:
    """Yield the direct subschemas of a schema, and the target of its `$ref`, each with its
    translation.

    Subschemas that held_schema's translation does not keep are left out. Each result is (JSON
    pointer in the translation, JSON path in the original, subschema, translated subschema). For the
    target of a `$ref`, pointer and path begin at the root; for other subschemas, at the given
    schema.

    here, there: the given schema and its translation.
    schema, held: the root and its translation.
    """
    for path, part in subschemas(here):
        if path[0] in ("$defs", "definitions") or not isinstance(part, Mapping):
            continue
        moved = path if path[0] in there else (_RENAMED.get(str(path[0]), path[0]), *path[1:])
        held_part = _at(there, moved)
        if isinstance(held_part, Mapping):
            yield pointer_of(moved), json_path(path).removeprefix("$"), part, held_part
    ref = there.get("$ref")
    if isinstance(ref, str) and ref.startswith("#"):
        path = path_of(ref)
        part, held_part = _at(schema, path), _at(held, path)
        if isinstance(part, Mapping) and isinstance(held_part, Mapping):
            yield ref, json_path(path), part, held_part


def _explains(found: str, reason: str) -> bool:
    """Return True if the problem of a subschema may explain the problem of the whole schema.

    False if the subschema matches no value although the whole schema matches some.

    found: problem of the subschema.
    reason: problem of the whole schema.
    """
    return _is_empty(found) == _is_empty(reason)


def _is_empty(reason: str) -> bool:
    return reason.startswith("no value matches it")


def _at(schema: Any, path: tuple[str | int, ...]) -> Any:
    for step in path:
        if isinstance(schema, list):
            try:
                schema = schema[int(step)]
            except (ValueError, IndexError):
                return None
        elif isinstance(schema, Mapping):
            schema = schema.get(str(step))
    return schema
