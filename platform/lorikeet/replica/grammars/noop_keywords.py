"""JSON schema keywords without effect, which llguidance would refuse."""

from collections.abc import Callable, Mapping
from typing import Any

_SCHEMAS = frozenset(
    {"additionalItems", "additionalProperties", "contains", "else", "if", "items", "not"}
    | {"propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"}
)
_LISTS_OF_SCHEMAS = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_NAMED_SCHEMAS = frozenset(
    {"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"}
)


def without_noop_keywords(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return an equivalent schema without keywords that have no effect.

    Raises RecursionError if the schema is nested too deeply.
    """
    parts = {key: _part(key, value) for key, value in schema.items()}
    return {key: value for key, value in parts.items() if not _is_noop(key, value, parts)}


def _part(key: str, value: Any) -> Any:
    if key in _NAMED_SCHEMAS and isinstance(value, Mapping):
        return {name: _subschema(part) for name, part in value.items()}
    if key in _LISTS_OF_SCHEMAS and isinstance(value, list):
        return [_subschema(part) for part in value]
    return _subschema(value) if key in _SCHEMAS else value


def _subschema(part: Any) -> Any:
    """Clean a subschema; return booleans and other values unchanged."""
    return without_noop_keywords(part) if isinstance(part, Mapping) else part


def _is_noop(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    is_noop = _NOOP_IF.get(key)
    return is_noop is not None and is_noop(value, schema)


def _allows_all(value: Any, _: Mapping[str, Any] | None = None) -> bool:
    return value is True or value == {}


def _each_allows_all(value: Any, _: Mapping[str, Any]) -> bool:
    return isinstance(value, Mapping) and all(p == [] or _allows_all(p) for p in value.values())


def _contains_any(_: Any, schema: Mapping[str, Any]) -> bool:
    return schema.get("minContains") == 0 and "maxContains" not in schema


_NOOP_IF: Mapping[str, Callable[[Any, Mapping[str, Any]], bool]] = {
    "contains": _contains_any,
    "dependencies": _each_allows_all,
    "dependentRequired": _each_allows_all,
    "dependentSchemas": _each_allows_all,
    "else": lambda value, schema: "if" not in schema or _allows_all(value),
    "if": lambda _, schema: all(_allows_all(schema.get(key, True)) for key in ("then", "else")),
    "maxContains": lambda _, schema: "contains" not in schema,
    "minContains": lambda _, schema: "contains" not in schema or _contains_any(_, schema),
    "minProperties": lambda value, _: value == 0,
    "not": lambda value, _: value is False,
    "patternProperties": lambda value, _: value == {},
    "propertyNames": _allows_all,
    "then": lambda value, schema: "if" not in schema or _allows_all(value),
    "unevaluatedItems": _allows_all,
    "unevaluatedProperties": _allows_all,
    "uniqueItems": lambda value, _: value is False,
}
