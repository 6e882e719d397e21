"""Keywords of JSON schemas, each with a schema and answers, and their table in docs/openai.md.

`python -m tests.replica.schema_keywords` prints the table.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Fate(Enum):
    """Effect of a keyword on an answer: usually, and with `strict: false`."""

    HELD = "held", "held"
    IGNORED = "ignored and named", "ignored and named"
    CHECKED = "refused", "named, and checked afterwards"
    WHOLE = "refused", "named with its whole schema, which is checked afterwards"
    REFUSED = "refused", "refused"


@dataclass(frozen=True)
class Keyword:
    """Use of a keyword.

    name: keyword as the table has it, with the condition under which this is its fate.
    right, wrong: answers that match and do not match the schema.
    """

    name: str
    fate: Fate
    schema: Any
    right: tuple[Any, ...] = ()
    wrong: tuple[Any, ...] = ()


def _object(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", **keywords}


_AB = {"a": {"type": "integer"}, "b": {"type": "integer"}}
_HOSTS = "^([a-z]([a-z-]{0,61}[a-z])?[.])+[a-z]{2,63}$"
_KIND = {"kind": {"enum": ["dot", "line"]}, "length": {"type": "integer"}}
HELD = (
    Keyword("`type`", Fate.HELD, {"type": ["integer", "null"]}, (3, None), ("a", 1.5)),
    Keyword("`enum`, `const`", Fate.HELD, {"enum": ["a", 7, None]}, ("a", 7), ("b", 8)),
    Keyword(
        "`properties`, `required`, `additionalProperties`",
        Fate.HELD,
        _object(properties=_AB, required=["a"], additionalProperties=False),
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"b": 2}, {"a": 1, "c": 3}),
    ),
    Keyword(
        "`patternProperties` that exclude each other",
        Fate.HELD,
        _object(
            patternProperties={"^n_": {"type": "integer"}, "^s_": {"type": "string"}},
            additionalProperties=False,
        ),
        ({"n_a": 1, "s_b": "x"},),
        ({"n_a": "x"}, {"b": 1}),
    ),
    Keyword(
        "`propertyNames` with `enum`, or with a pattern or lengths",
        Fate.HELD,
        _object(propertyNames={"enum": ["a", "b"]}, additionalProperties={"type": "integer"}),
        ({}, {"a": 1}, {"a": 1, "b": 2}),
        ({"c": 1}, {"a": "x"}),
    ),
    Keyword(
        "`minProperties`, `maxProperties` of objects without optional properties, "
        "and `minProperties: 1` of up to 16",
        Fate.HELD,
        _object(properties=_AB, minProperties=1),
        ({"a": 1}, {"b": 1}, {"c": "x"}),
        ({},),
    ),
    Keyword(
        "`dependentRequired`, `dependentSchemas`, `dependencies`",
        Fate.HELD,
        _object(properties=_AB, dependentRequired={"a": ["b"]}),
        ({}, {"b": 1}, {"a": 1, "b": 1}),
        ({"a": 1},),
    ),
    Keyword(
        "`items`, `prefixItems`, `minItems`, `maxItems`",
        Fate.HELD,
        {"type": "array", "prefixItems": [{"type": "string"}], "items": False, "minItems": 1},
        (["a"],),
        ([], [1], ["a", "b"]),
    ),
    Keyword(
        "`uniqueItems` of up to 5 listed values, or of one item",
        Fate.HELD,
        {
            "items": {"$ref": "#/$defs/color"},
            "minItems": 1,
            "uniqueItems": True,
            "$defs": {"color": {"title": "Color", "enum": ["red", "green", "blue"]}},
        },
        (["red"], ["blue", "red"], ["green", "blue", "red"], "red"),
        ([], ["red", "red"], ["black"], ["red", "green", "blue", "red"]),
    ),
    Keyword(
        "`minLength`, `maxLength`",
        Fate.HELD,
        {"type": "string", "minLength": 1, "maxLength": 2},
        ("a", "ab"),
        ("", "abc"),
    ),
    Keyword(
        "`pattern`, also with a look-ahead that it begins with",
        Fate.HELD,
        {"type": "string", "pattern": "^(?!-)(?!.*--)[a-z-]+$"},
        ("a-b", "a"),
        ("-a", "a--b", "A", ""),
    ),
    Keyword(
        "`format`: `date`, `date-time`, `time`, `duration`, `email`, `hostname`, `ipv4`, `ipv6`, "
        "`uri`, `uuid`",
        Fate.HELD,
        {"type": "string", "format": "date"},
        ("2026-11-29",),
        ("2026-13-29", "today"),
    ),
    Keyword(
        "`minimum`, `maximum`, `exclusiveMinimum`, `exclusiveMaximum`, `multipleOf`",
        Fate.HELD,
        {"type": "integer", "minimum": 3, "exclusiveMaximum": 9, "multipleOf": 2},
        (4, 8),
        (2, 5, 10),
    ),
    Keyword(
        "`$ref` into the schema, by pointer, `$id` or `$anchor`",
        Fate.HELD,
        {
            "$id": "https://example.com/tree",
            "$defs": {"leaf": {"$anchor": "leaf", "type": "integer"}},
            "type": "array",
            "items": {"anyOf": [{"$ref": "#leaf"}, {"$ref": "https://example.com/tree"}]},
        },
        ([], [1, [2, []]]),
        (["a"], [[None]]),
    ),
    Keyword(
        "`allOf`, `anyOf`",
        Fate.HELD,
        {"allOf": [{"type": "integer"}, {"anyOf": [{"minimum": 5}, {"maximum": 2}]}]},
        (1, 7),
        (3, "a"),
    ),
    Keyword(
        "`oneOf` with options that exclude each other or that `not` could exclude",
        Fate.HELD,
        _object(properties=_AB, oneOf=[{"required": ["a"]}, {"required": ["b"]}]),
        ({"a": 1}, {"b": 1}),
        ({}, {"a": 1, "b": 1}),
    ),
    Keyword(
        "`not` of types, lists of values, bounds, `required`, and of `properties`, `allOf`, "
        "`anyOf`, `$ref` with these",
        Fate.HELD,
        {"type": "string", "not": {"enum": ["no", "never"]}},
        ("yes", "n", "nope", "", "never again"),
        ("no", "never"),
    ),
    Keyword(
        "`if`, `then`, `else`, with an `if` as in `not`",
        Fate.HELD,
        _object(
            **{"if": {"properties": {"kind": {"const": "line"}}, "required": ["kind"]}},
            then={"required": ["length"]},
            properties=_KIND,
        ),
        ({"kind": "dot"}, {"kind": "line", "length": 3}, {}),
        ({"kind": "line"},),
    ),
    Keyword(
        "`unevaluatedProperties: false` beside `properties`, `allOf` and `$ref`",
        Fate.HELD,
        _object(
            allOf=[{"properties": {"a": {"type": "integer"}}}],
            properties={"b": {"type": "integer"}},
            unevaluatedProperties=False,
        ),
        ({"a": 1, "b": 1},),
        ({"c": 1},),
    ),
    Keyword(
        "keywords that ask for nothing: `uniqueItems: false`, `propertyNames` of any string, "
        "`contains` with `minContains: 0`, keywords of other types",
        Fate.HELD,
        _object(
            properties={"a": {"type": "string", "uniqueItems": True}},
            propertyNames={"type": "string", "description": "A name."},
        ),
        ({"a": "x"}, {"b": 1}),
        ({"a": 1},),
    ),
)
IGNORED = (
    Keyword(
        "other values of `format`",
        Fate.IGNORED,
        {"type": "string", "format": "nanoid", "pattern": "^[a-z]{3}$"},
        ("abc",),
        ("ab", "ABC"),
    ),
)
CHECKED = (
    Keyword(
        "`uniqueItems: true` of other items",
        Fate.CHECKED,
        {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        (["a", "b"],),
        (["a", "a"],),
    ),
    Keyword("`contains`", Fate.CHECKED, {"contains": {"type": "integer"}}, ([1],), (["a"], [])),
    Keyword(
        "`oneOf` with options that may overlap otherwise",
        Fate.CHECKED,
        {"type": "string", "oneOf": [{"pattern": "a"}, {"pattern": "b"}]},
        ("a", "b"),
        ("ab",),
    ),
    Keyword(
        "`not`, `if` of anything else", Fate.CHECKED, {"not": {"pattern": "a"}}, ("b",), ("a",)
    ),
    Keyword(
        "`propertyNames` of anything else",
        Fate.CHECKED,
        _object(propertyNames={"anyOf": [{"pattern": "^a"}, {"pattern": "b$"}]}),
        ({"a": 1, "cb": 2},),
        ({"c": 1},),
    ),
    Keyword(
        "`minProperties`, `maxProperties` otherwise",
        Fate.CHECKED,
        _object(properties=_AB, minProperties=2),
        ({"a": 1, "b": 2},),
        ({"a": 1},),
    ),
    Keyword(
        "`unevaluatedProperties` otherwise, `unevaluatedItems`",
        Fate.CHECKED,
        _object(anyOf=[{"properties": _AB}], unevaluatedProperties=False),
        ({"a": 1},),
        ({"c": 1},),
    ),
    Keyword(
        "`pattern` with other look-ahead, look-behind, or references back",
        Fate.CHECKED,
        {"type": "string", "pattern": "^a(?!b)c?$|d"},
        ("ac", "d"),
        ("ab",),
    ),
    Keyword(
        "`$dynamicRef`, `$recursiveRef`",
        Fate.CHECKED,
        {
            "$dynamicAnchor": "node",
            "type": ["integer", "array"],
            "items": {"$dynamicRef": "#node"},
        },
        (1, [1, [2]]),
        (["a"],),
    ),
)
WHOLE = (
    Keyword(
        "`patternProperties` that one name may match twice",
        Fate.WHOLE,
        _object(patternProperties={"^a": {"type": "integer"}, "b$": True}),
        ({"ab": 1},),
        ({"ab": "x"},),
    ),
    Keyword(
        "`pattern` beside lengths, if both together are too complex",
        Fate.WHOLE,
        {"type": "string", "pattern": _HOSTS, "maxLength": 253},
        ("lorikeet.example",),
        ("lorikeet", "a." * 130 + "org"),
    ),
)
REFUSED = (
    Keyword("`$ref` out of the schema", Fate.REFUSED, {"$ref": "https://example.com/place"}),
)
KEYWORDS = (*HELD, *IGNORED, *CHECKED, *WHOLE, *REFUSED)


def table() -> str:
    """Return the keywords in Markdown: a list of those that are held, and a table of the others."""
    held = "; ".join(keyword.name for keyword in KEYWORDS if keyword.fate is Fate.HELD)
    rows = [
        f"| {keyword.name} | {' | '.join(keyword.fate.value)} |"
        for keyword in KEYWORDS
        if keyword.fate is not Fate.HELD
    ]
    head = ["| other keyword | fate | with `strict: false` |", "|---|---|---|"]
    return "\n".join([f"Held: {held}.", "", *head, *rows])


if __name__ == "__main__":
    print(table())
