"""Logic on JSON schemas: negation, and proofs that no value matches two schemas.

Grammars have no negation, so they enforce `not`, `if` and overlapping branches of `oneOf` only
where another schema says the same.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from typing import Any

import regex

from lorikeet.text.grammars.patterns import other_texts

_FRACTION = "fraction"
"""Type of the numbers that are no integers: JSON schema's `number` is this type and `integer`."""
_TYPES = frozenset(
    {"null", "boolean", "integer", _FRACTION, "string", "array", "object"},
)
_MOST_DEPTH = 24
_MATCH_S = 0.01


class Inexpressible(Exception):
    """Raised if no equivalent schema is known, or if the search for one takes too long."""


class SchemaLogic:
    """Negation of schemas and proofs that schemas are disjoint, within a limited number of steps.

    The schemas may have only keywords that held_schema keeps.
    """

    def __init__(self, resolve: Callable[[str], Any], most_steps: int) -> None:
        """Create the logic with its budget of steps.

        resolve: function that returns the target of a `$ref`; raises LookupError if it cannot.
        most_steps: limit on the visited schemas, and so on the size of results.
        """
        self._resolve, self._steps = resolve, most_steps

    def negated(self, schema: Any, depth: int = 0) -> Any:
        """Return a schema that matches exactly the values that `schema` does not match.

        depth: number of schemas that contain this schema.

        Raises Inexpressible if no such schema is known or the search takes too long.
        """
        self._step(depth)
        if isinstance(schema, bool):
            return not schema
        ways = list[Any]()
        for keyword, value in schema.items():
            if keyword in _UNNEGATABLE and value is not True and value != {}:
                raise Inexpressible
            ways += self._ways_to_fail(keyword, value, depth + 1)
        if "$ref" in schema and len(ways) > 1:
            raise Inexpressible  # until draft 7, keywords beside a $ref ask for nothing
        ways = [way for way in ways if way is not False]
        return ways[0] if len(ways) == 1 else bool(ways) and {"anyOf": ways}

    def are_disjoint(self, one: Any, other: Any, depth: int = 0) -> bool:
        """Return True if certainly no value matches both schemas, False if one may.

        depth: number of schemas that contain these schemas.

        Raises Inexpressible if the search takes too long.
        """
        self._step(depth)
        if one is False or other is False:
            return True
        if isinstance(one, bool) or isinstance(other, bool):
            return False
        for left, right in ((one, other), (other, one)):
            if any(self.are_disjoint(part, right, depth + 1) for part in self._all_parts(left)):
                return True
            for options in filter(None, (left.get("anyOf"), left.get("oneOf"))):
                if all(self.are_disjoint(option, right, depth + 1) for option in options):
                    return True
        common = self._types(one, depth) & self._types(other, depth)
        if not common or self._values_differ(one, other):
            return True
        if common <= {"integer", _FRACTION} and (_below(one, other) or _below(other, one)):
            return True
        required = [*one.get("required", ()), *other.get("required", ())]
        self._pay_for(*required)
        return common == {"object"} and any(
            self.are_disjoint(_property(one, name), _property(other, name), depth + 1)
            for name in dict.fromkeys(required)
        )

    def _all_parts(self, schema: Mapping[str, Any]) -> list[Any]:
        """Return the schemas in allOf and `$ref` that a value of `schema` must match too."""
        parts = [*schema.get("allOf", ())]
        if "$ref" in schema:
            parts.append(self._target(schema["$ref"]))
        return parts

    def _types(self, schema: Any, depth: int) -> frozenset[str]:
        """Return the types that values of a schema may have.

        depth: number of schemas that contain this schema.
        """
        self._step(depth)
        if isinstance(schema, bool):
            return _TYPES if schema else frozenset()
        types = frozenset(_TYPES)
        if "type" in schema:
            types &= _expanded(schema["type"])
        if (values := _values(schema)) is not None:
            self._steps -= len(values) // 4
            types &= {_type_of(value) for value in values}
        for part in self._all_parts(schema):
            types &= self._types(part, depth + 1)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                options = (self._types(option, depth + 1) for option in schema[keyword])
                types &= frozenset().union(*options)
        return types

    def _ways_to_fail(self, keyword: str, value: Any, depth: int) -> list[Any]:
        """Return schemas that together match the values that a keyword excludes.

        value: the keyword's value.
        depth: number of schemas that contain the subschemas in `value`.

        Raises Inexpressible if no such schemas are known.
        """
        match keyword:
            case "type":
                return _other_types(_expanded(value))
            case "enum" | "const":
                values = [value] if keyword == "const" else value
                self._pay_for(json.dumps(values))
                return _other_values(values)
            case "required":
                self._pay_for(*value)
                return [{"type": "object", "properties": {name: False}} for name in value]
            case "properties":
                self._pay_for(*value)
                return [
                    {"type": "object", "required": [name], "properties": {name: fails}}
                    for name, part in value.items()
                    if (fails := self.negated(part, depth)) is not False
                ]
            case "allOf":
                return [self.negated(part, depth) for part in value]
            case "anyOf":
                return [{"allOf": [self.negated(part, depth) for part in value]}]
            case "$ref":
                return [self.negated(self._target(value), depth)]
        if keyword in _BOUNDS:
            if isinstance(value, bool):  # of draft 4
                raise Inexpressible
            return _BOUNDS[keyword](value)
        return []  # a description, as `format` is

    def _values_differ(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        """Return True if `const`, `enum` and `pattern` prove that no value matches both schemas."""
        ours, theirs = _values(one), _values(other)
        if ours is not None and theirs is not None:
            texts, others = _texts(ours), _texts(theirs)
            self._pay_for(*texts, *others)
            return not texts & others
        return any(
            values is not None and self._none_match(values, schema.get("pattern"))
            for values, schema in ((ours, other), (theirs, one))
        )

    def _none_match(self, values: list[Any], pattern: object) -> bool:
        """Return True if all values are texts that certainly do not match a pattern.

        The result is False if a text has characters beyond ASCII, on which dialects of patterns
        disagree.
        """
        if not isinstance(pattern, str):
            return False
        self._steps -= 4 * len(values)
        texts = [value for value in values if isinstance(value, str) and value.isascii()]
        try:
            return len(texts) == len(values) and not any(
                regex.search(pattern, text, timeout=_MATCH_S) for text in texts
            )
        except regex.error:
            return False
        except TimeoutError:
            self._steps = 0
            raise Inexpressible from None

    def _target(self, ref: str) -> Any:
        try:
            return self._resolve(ref)
        except LookupError as error:
            raise Inexpressible from error

    def _pay_for(self, *texts: str) -> None:
        """Subtract from the budget of steps the cost of comparing texts or repeating them in the
        result: a step for every eight characters.
        """
        self._steps -= sum(map(len, texts)) // 8

    def _step(self, depth: int) -> None:
        self._steps -= 1
        if self._steps < 0 or depth > _MOST_DEPTH:
            raise Inexpressible


def _expanded(types: str | list[str]) -> frozenset[str]:
    named = {types} if isinstance(types, str) else set(types)
    return frozenset(named | {"integer", _FRACTION} if "number" in named else named)


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "integer" if value == int(value) else _FRACTION
        case str():
            return "string"
    return "array" if isinstance(value, list) else "object"


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that `const` or `enum` allows; None if the schema has neither keyword."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _texts(values: Iterable[Any]) -> set[str]:
    """Return the values as JSON texts; two texts are equal exactly if JSON schema takes their
    values as equal.
    """
    return set(map(_text, values))


def _text(value: Any) -> str:
    return json.dumps(json.loads(json.dumps(value), parse_int=float), sort_keys=True)


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list({_text(value): value for value in values}.values())


def _below(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return True if the bounds of two schemas show that all numbers which `one` allows are less
    than all numbers which `other` allows.
    """
    most, least = _number(one, "maximum"), _number(other, "minimum")
    under, over = _number(one, "exclusiveMaximum"), _number(other, "exclusiveMinimum")
    highest = min((bound for bound in (most, under) if bound is not None), default=None)
    lowest = max((bound for bound in (least, over) if bound is not None), default=None)
    if highest is None or lowest is None or highest > lowest:
        return False
    return highest < lowest or highest == under or lowest == over


def _number(schema: Mapping[str, Any], keyword: str) -> float | None:
    bound = schema.get(keyword)
    return None if isinstance(bound, bool) or not isinstance(bound, int | float) else bound


def _property(schema: Mapping[str, Any], name: str) -> Any:
    """Return a schema that the property `name` must match in each object that `schema` matches."""
    if name in (named := schema.get("properties", {})):
        return named[name]
    return True if "patternProperties" in schema else schema.get("additionalProperties", True)


def _other_types(types: frozenset[str]) -> list[Any]:
    others = _TYPES - types
    if _FRACTION in others and "integer" not in others:
        raise Inexpressible
    if _FRACTION in others:
        others = others - {_FRACTION, "integer"} | {"number"}
    return [{"type": sorted(others)}] if others else []


def _other_values(values: list[Any]) -> list[Any]:
    """Return schemas that together match all values except `values`.

    Raises Inexpressible for arrays and objects.
    """
    by_type = dict[str, list[Any]]()
    for value in values:
        by_type.setdefault(_type_of(value), []).append(value)
    if by_type.keys() & {"array", "object"}:
        raise Inexpressible
    ways = list[Any]()
    numbers = [*by_type.pop("integer", ()), *by_type.pop(_FRACTION, ())]
    free = ["array", "object", *({"null", "boolean", "string"} - by_type.keys())]
    if numbers:
        apart = [{"anyOf": [{"exclusiveMaximum": n}, {"exclusiveMinimum": n}]} for n in numbers]
        ways.append({"type": "number", "allOf": apart})
    else:
        free.append("number")
    ways.append({"type": sorted(free)})
    if booleans := by_type.get("boolean"):
        ways += [{"enum": [value]} for value in (True, False) if value not in booleans]
    if strings := by_type.get("string"):
        ways.append({"type": "string", "pattern": f"^{other_texts(strings)}$"})
    return ways


def listed_values(schema: Any, annotations: Collection[str]) -> list[Any] | None:
    """Return the distinct values that a schema matches; None if the schema does not list them.

    annotations: keywords to ignore.
    """
    if not isinstance(schema, Mapping):
        return None
    asked = {key: value for key, value in schema.items() if key not in annotations}
    if asked.keys() == {"anyOf"}:
        options = [listed_values(option, annotations) for option in asked["anyOf"]]
        return None if None in options else _distinct(chain(*filter(None, options)))
    if asked in ({"type": "boolean"}, {"type": "null"}):
        return [True, False] if asked["type"] == "boolean" else [None]
    values = _values(asked)
    if values is None or asked.keys() - {"const", "enum", "type"}:
        return None
    types = _expanded(asked["type"]) if "type" in asked else _TYPES
    return _distinct(value for value in values if _type_of(value) in types)


_BOUNDS: Mapping[str, Callable[[Any], list[Any]]] = {
    "minimum": lambda least: [{"type": "number", "exclusiveMaximum": least}],
    "maximum": lambda most: [{"type": "number", "exclusiveMinimum": most}],
    "exclusiveMinimum": lambda bound: [{"type": "number", "maximum": bound}],
    "exclusiveMaximum": lambda bound: [{"type": "number", "minimum": bound}],
    "minLength": lambda least: [{"type": "string", "maxLength": least - 1}] if least else [],
    "maxLength": lambda most: [{"type": "string", "minLength": most + 1}],
    "minItems": lambda least: [{"type": "array", "maxItems": least - 1}] if least else [],
    "maxItems": lambda most: [{"type": "array", "minItems": most + 1}],
    "minProperties": lambda least: (
        [{"type": "object", "maxProperties": least - 1}] if least else []
    ),
    "maxProperties": lambda most: [{"type": "object", "minProperties": most + 1}],
}
"""Functions by the keyword of a bound: each takes the keyword's value and returns schemas of the
values that break the bound.
"""
_UNNEGATABLE = frozenset(
    {
        "additionalItems", "additionalProperties", "contains", "dependencies", "dependentRequired",
        "dependentSchemas", "if", "items", "multipleOf", "not", "oneOf", "pattern",
        "patternProperties", "prefixItems", "propertyNames", "unevaluatedItems",
        "unevaluatedProperties", "uniqueItems", "$dynamicRef", "$recursiveRef",
    }
)  # fmt: skip


def rebased(part: Any, name: str) -> Any:
    """Return a copy of a part of a schema, to be embedded as `$defs/name` of another schema.

    Each `$ref` within the embedded schema leads into the copy.
    """
    if isinstance(part, Mapping):
        moved = {key: rebased(value, name) for key, value in part.items()}
        match part.get("$ref"):
            case str(ref) if ref.startswith("#"):
                moved["$ref"] = f"#/$defs/{name}{ref[1:]}"
        return moved
    return [rebased(each, name) for each in part] if isinstance(part, list) else part
