"""Values of tool-call arguments that a model writes as bare text, typed by the tool's schema.

In such a syntax `5` may be a number or a string: the schema of the argument decides.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from lorikeet.text.tools.python_calls import python_value

STRING_ALONE = frozenset({"string"})
_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
_TYPE_NAMES = {type(None): "null", bool: "boolean", int: "number", float: "number"} | {
    str: "string",
    list: "array",
    dict: "object",
}
_MOST_SCHEMAS = 256
"""Limit on the schemas that are visited for one argument; beyond it any type is possible."""


def argument_value(text: str, types: frozenset[str]) -> Any:
    """Return the value that a model's text stands for.

    An argument that can only be a string: the text itself.
    An argument that may be a string: the text's JSON value, if the argument may have its type; else
        the text.
    Any other argument: the text's JSON value or Python literal, such as True; else the text.

    text: the text that the model wrote.
    types: the types that the argument may have, as `argument_types` returns them.
    """
    if types == STRING_ALONE:
        return text
    may_be_text = "string" in types
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return text if may_be_text else _literal(text)
    return text if may_be_text and type_of(value) not in types - STRING_ALONE else value


def argument_types(parameters: Any, name: str) -> frozenset[str]:
    """Return the types that a function's argument may have: all types if its schema tells none.

    JSON schema's `integer` is "number" here.

    parameters: schema of the function's arguments object.
    name: name of the argument.
    """
    schemas = _Schemas(parameters)
    found = [schemas.types(each) for each in schemas.named(parameters, name)]
    return frozenset().union(*found) if found else _TYPES


def schema_types(schema: Any, parameters: Any) -> frozenset[str]:
    """Return the types that a schema allows; JSON schema's `integer` is "number" here.

    parameters: schema of the function's arguments object, to which `$ref` refers.
    """
    return _Schemas(parameters).types(schema)


def declared(parameters: Any) -> frozenset[str]:
    """Return the names in `properties` of the schema of a function's arguments object."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return frozenset(properties) if isinstance(properties, Mapping) else frozenset()


class _Schemas:
    """Reader of one function's schemas, within a limited number of steps. Schemas may be malformed.

    root: schema of the function's arguments object, to which `$ref` refers.
    """

    def __init__(self, root: Any) -> None:
        self._root, self._left = root, _MOST_SCHEMAS

    def named(self, schema: Any, name: str) -> Iterator[Any]:
        """Yield the schemas that an object's schema and its parts give to a property."""
        self._left -= 1
        if self._left < 0 or not isinstance(schema, Mapping):
            return
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            yield properties[name]
        for part in (*self._parts(schema), *_list(schema, "anyOf"), *_list(schema, "oneOf")):
            yield from self.named(part, name)

    def types(self, schema: Any) -> frozenset[str]:
        """Return the types that a schema allows, and possibly more."""
        self._left -= 1
        if self._left < 0 or not isinstance(schema, Mapping):
            return _TYPES
        types = _TYPES
        if "type" in schema:
            kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            types &= {"number" if kind == "integer" else str(kind) for kind in kinds}
        if "const" in schema:
            types &= {type_of(schema["const"])}
        if values := _list(schema, "enum"):
            types &= {type_of(value) for value in values}
        for part in self._parts(schema):
            types &= self.types(part)
        for keyword in ("anyOf", "oneOf"):
            if options := _list(schema, keyword):
                types &= frozenset().union(*map(self.types, options))
        return types

    def _parts(self, schema: Mapping[str, Any]) -> list[Any]:
        """Return the schemas of allOf and `$ref`."""
        parts = _list(schema, "allOf")
        if isinstance(ref := schema.get("$ref"), str):
            parts.append(self._referred(ref))
        return parts

    def _referred(self, ref: str) -> Any:
        part = self._root
        try:
            for step in filter(None, unquote(ref.removeprefix("#")).split("/")):
                key = step.replace("~1", "/").replace("~0", "~")
                part = part[int(key) if isinstance(part, list) else key]
        except (LookupError, TypeError, ValueError):
            return None  # any type
        return part


def _list(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return list(value) if isinstance(value, list) else []


def type_of(value: Any) -> str:
    """Return the name of a JSON value's type; an integer is a "number"."""
    return _TYPE_NAMES.get(type(value), "string")


def _literal(text: str) -> Any:
    try:
        return python_value(text)
    except (ValueError, RecursionError):
        return text


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("want a finite number")
    return value
