"""Grammar rules for the arguments of tool calls in XML: <parameter=key>value</parameter>."""

import json
from collections.abc import Callable, Mapping
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
from lorikeet.text.grammars.bare_texts import ANY_TEXT, BareTexts
from lorikeet.text.grammars.format_grammar import in_lark
from lorikeet.text.grammars.held_schema import json_path
from lorikeet.text.tools.argument_values import schema_types
from lorikeet.text.tools.syntax import XmlTags

_NAME = regex.compile(r"[^<>\n]{1,256}")
_BRACKETED = frozenset({"array", "object"})


def xml_arguments(
    rule: str, schema: Mapping[str, Any], tags: XmlTags, literal: Callable[[str], str]
) -> list[str]:
    """Return the grammar rules for an XML call's arguments.

    A string is bare text, held to the same keywords as in JSON; other values are JSON. At the
    top level of the schema the rules enforce properties, $ref, allOf, anyOf, required and boolean
    additionalProperties; other keywords that constrain values raise InvalidInput there.

    rule: name of the first rule, and prefix of the names of the other rules.
    schema: schema of the arguments object.
    tags: tags of the syntax.
    literal: function that turns a text into a literal of a Lark rule.
    """
    ways = alternatives(schema)
    rules = [f"{rule}: {' | '.join(f'{rule}_of_{at}' for at in range(len(ways)))}"]
    try:
        for at, one in enumerate(ways):
            most = MOST_SCHEMAS_LENGTH // len(ways)
            rules += _parameters(f"{rule}_of_{at}", one, schema, _Written(tags, literal), most)
    except RecursionError as error:
        raise invalid("nested too deeply") from error
    return rules


def _parameters(
    rule: str,
    asked: ArgumentRules,
    schema: Mapping[str, Any],
    written: "_Written",
    most_length: int,
) -> list[str]:
    """Return the grammar rules of arguments that meet one of the schema's alternatives
    (anyOf).

    rule: name of the first rule, and prefix of the names of the other rules.
    asked: the alternative's constraints.
    schema: schema of the arguments object, for `$ref`.
    written: tags of the syntax, as literals.
    most_length: limit on the characters of the properties' schemas together.

    Raises InvalidInput if a property has no schema, a name that XML cannot hold, or the schemas
    exceed `most_length`.
    """
    if not asked.properties:
        if asked.closed:
            return [f'{rule}: ""']
        return [
            f"{rule}: ({rule}_any)*",
            f"{rule}_any: {written.begin(f'/{_NAME.pattern}/')} {rule}_value",
            *written.text(f"{rule}_value", ANY_TEXT),
        ]
    rules, named, length = list[str](), list[str](), 0
    for at, (key, value) in enumerate(asked.properties.items()):
        place = json_path(("properties", key))
        if not _NAME.fullmatch(key):
            raise invalid(f"{json.dumps(key)}: want a name without <, > and line ends")
        name = f"{rule}_value_{at}"
        pair = f"{written.begin(json.dumps(key))} {name}"
        named.append(pair if key in asked.required else f"({pair})?")
        types, ways = schema_types(value, schema), list[str]()
        with placed(place):
            text = BareTexts(schema, types).of(value) if "string" in types else None
            whole = self_contained(value, schema)
        if text:
            ways.append(f"{name}_text")
            rules += written.text(ways[0], text)
        if others := types & _BRACKETED if "string" in types else types:
            ways.append(f"{name}_json {written.end}")
            own = {key: part for key, part in whole.items() if key != "$defs"}
            shared = {"$defs": whole["$defs"]} if "$defs" in whole else {}
            held = {"allOf": [own, {"type": sorted(others)}], **shared}
            held["x-guidance"] = schema["x-guidance"]
            check_length(length := length + len(json.dumps(held)), most_length)
            rules.append(f"{name}_json: %json {json.dumps(held)}")
        if not ways:
            with placed(place):
                raise invalid("no value fits its schema")
        rules.append(f"{name}: {' | '.join(ways)}")
    return [f"{rule}: {' '.join(named)}", *rules]


class _Written:
    """Tags of a syntax as literals of Lark rules."""

    def __init__(self, tags: XmlTags, literal: Callable[[str], str]) -> None:
        self._tags, self._literal = tags, literal
        self._closes = tags.value[1]
        self.end = literal(f"{tags.pad}{self._closes}{tags.space}")

    def begin(self, key: str) -> str:
        """Return the literals up to the value of a parameter.

        key: Lark expression of the parameter's key.
        """
        before, behind = self._tags.key
        gap = self._tags.space if self._tags.value[0] else ""
        behind = f"{behind}{gap}{self._tags.value[0]}{self._tags.pad}"
        return f"{self._literal(before)} {key} {self._literal(behind)}"

    def text(self, rule: str, text: str) -> list[str]:
        """Return the grammar rules of a text up to its end tag, and of the tag.

        text: Lark expression of the text.
        """
        terminal, closes = rule.upper(), in_lark(regex.escape(self._closes))
        unclosed = f"({text}) & ~/(?s:.*){closes}(?s:.*)/"
        if self._literal(self._closes).startswith("<["):  # the tag is a token
            end = self._literal(f"{self._closes}{self._tags.space}")
            return [
                f"{rule}: {terminal} {end}",
                f"{terminal}: ({unclosed}) {json.dumps(self._tags.pad)}",
            ]
        return [f"{rule}[lazy]: {terminal} {self.end}", f"{terminal}: {unclosed}"]
