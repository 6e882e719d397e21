"""Grammar rules for the arguments of tool calls in Python syntax: key=value, …"""

import json
from collections.abc import Mapping
from typing import Any

import regex

from lorikeet.text.grammars.argument_rules import (
    MOST_SCHEMAS_LENGTH,
    ArgumentRules,
    alternatives,
    check_length,
    invalid,
    placed,
    self_contained,
)
from lorikeet.text.grammars.held_schema import json_path

_WORD = regex.compile(r"\w+")
"""Argument names that are written bare before the =; other names are written as JSON strings."""


def python_arguments(rule: str, schema: Mapping[str, Any]) -> list[str]:
    """Return the grammar rules for a Python call's arguments, key=value, with values in JSON.

    Arguments come in the order of the schema's properties. Without properties, any arguments are
    allowed, or none if the schema forbids additional properties. At the top level of the schema the
    rules enforce properties, $ref, allOf, anyOf, required and boolean additionalProperties; other
    keywords that constrain values raise InvalidInput there.

    rule: name of the first rule, and prefix of the names of the other rules.
    schema: schema of the arguments object.
    """
    ways = alternatives(schema)
    rules = [f"{rule}: {' | '.join(f'{rule}_of_{at}' for at in range(len(ways)))}"]
    try:
        for at, one in enumerate(ways):
            rules += _pairs(f"{rule}_of_{at}", one, schema, MOST_SCHEMAS_LENGTH // len(ways))
    except RecursionError as error:
        raise invalid("nested too deeply") from error
    return rules


def _pairs(
    rule: str, asked: ArgumentRules, schema: Mapping[str, Any], most_length: int
) -> list[str]:
    """Return the grammar rules of arguments that meet one of the schema's alternatives
    (anyOf).

    rule: name of the first rule, and prefix of the names of the other rules.
    asked: the alternative's constraints.
    schema: schema of the arguments object, for `$ref`.
    most_length: limit on the characters of the properties' schemas together.

    Raises InvalidInput if a property has no schema or the schemas exceed `most_length`.
    """
    if not asked.properties and asked.closed:
        return [f'{rule}: ""']
    guidance = {"x-guidance": schema["x-guidance"]}
    if not asked.properties:
        pair = f"{rule}_pair"
        return [
            f'{rule}: ({pair} (", " {pair})*)?',
            f'{pair}: (/[a-zA-Z_][a-zA-Z0-9_]*/ | {pair}_name) "=" {rule}_value',
            f'{pair}_name: %json {{"type": "string"}}',
            f"{rule}_value: %json {json.dumps(guidance)}",
        ]
    rules, length = [f"{rule}: {rule}_first_0"], 0
    # rules of the arguments from this property on: as the first ones, and after others
    for at, (key, value) in enumerate(asked.properties.items()):
        name = key if _WORD.fullmatch(key) else json.dumps(key)
        pair = f"{json.dumps(f'{name}=')} {rule}_value_{at} {rule}_more_{at + 1}"
        first, more = f"{rule}_first_{at}: {pair}", f'{rule}_more_{at}: ", " {pair}'
        if key not in asked.required:
            first, more = f"{first} | {rule}_first_{at + 1}", f"{more} | {rule}_more_{at + 1}"
        with placed(json_path(("properties", key))):
            held = json.dumps({**self_contained(value, schema), **guidance})
        check_length(length := length + len(held), most_length)
        rules += [first, more, f"{rule}_value_{at}: %json {held}"]
    return [*rules, f'{rule}_first_{at + 1}: ""', f'{rule}_more_{at + 1}: ""']
