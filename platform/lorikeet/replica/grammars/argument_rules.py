"""Rules of a JSON schema on arguments that a tool call names one after another."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

from lorikeet.errors import InvalidInput
from lorikeet.replica.grammars.schema_logic import rebased

_WHOLE = "arguments"
MOST_SCHEMAS_LENGTH = 2**22
_MOST_PARTS = 256
_TOO_MANY = "too many $ref, allOf and anyOf on all arguments, or a $ref to itself: write them out"
_UNSUPPORTED = frozenset(
    {
        "const", "dependencies", "dependentRequired", "dependentSchemas", "else", "enum", "if",
        "maxProperties", "minProperties", "not", "oneOf", "patternProperties", "propertyNames",
        "then", "unevaluatedProperties",
    }
)  # fmt: skip
"""JSON schema keywords that the grammar rules cannot enforce at the top level of the arguments'
schema.
"""


@dataclass(frozen=True, slots=True)
class ArgumentRules:
    """Constraints of a JSON schema on a function's arguments.

    properties: schema of each argument by its name.
    required: names of required arguments.
    closed: True if arguments other than `properties` are forbidden.
    """

    properties: Mapping[str, Any] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    closed: bool = False

    def merged(self, part: Mapping[str, Any]) -> "ArgumentRules | None":
        """Return these constraints combined with another schema's constraints; None if they
        contradict.

        part: the other schema. Raises InvalidInput if it is malformed or has unsupported keywords.
        """
        properties, required = part.get("properties", {}), part.get("required", [])
        names = isinstance(required, list) and all(isinstance(key, str) for key in required)
        if not isinstance(properties, Mapping) or not names:
            raise invalid("want properties by name, and a list of the required ones")
        types, others = part.get("type", "object"), part.get("additionalProperties", True)
        if types != "object" and not (isinstance(types, list) and "object" in types):
            return None
        unsupported = part.keys() & _UNSUPPORTED
        if not (isinstance(others, bool) or others == {}):
            unsupported |= {"additionalProperties"}
        if "patternProperties" in unsupported:
            unsupported |= {"propertyNames"}  # which is held as patternProperties
        if unsupported:
            raise invalid(
                f"{', '.join(sorted(unsupported))} on all arguments of a call cannot be held in "
                "this model's syntax: remove it, or set it on single properties"
            )
        closed = others is False
        both = {
            key: _both_of(self.properties[key], properties[key])
            for key in self.properties.keys() & properties.keys()
        }
        return ArgumentRules(
            {
                key: both.get(key, value)
                for key, value in {**self.properties, **properties}.items()
                if not (closed and key not in properties)
                and not (self.closed and key not in self.properties)
            },
            (*self.required, *required),
            self.closed or closed,
        )

    def satisfiable(self) -> "ArgumentRules | None":
        """Return the constraints without the properties that they forbid; None if no arguments can
        meet them.

        If a property is forbidden, so are all arguments that `properties` does not name. A required
        argument without a schema may have any value.
        """
        never = {key for key, value in self.properties.items() if value is False}
        named = {key: self.properties[key] for key in self.properties if key not in never}
        missing = [key for key in self.required if key not in named]
        if never.intersection(missing) or (self.closed and missing):
            return None
        properties = named | dict.fromkeys(missing, True)
        return replace(self, properties=properties, closed=self.closed or bool(never))


def alternatives(schema: Mapping[str, Any]) -> list[ArgumentRules]:
    """Return the alternative constraints of a schema; arguments must meet at least one alternative.

    Raises InvalidInput for unsupported keywords, too many alternatives, or a schema that no
    arguments can meet.
    """
    alternatives, begun = list[ArgumentRules](), list[tuple[ArgumentRules, list[Any]]]()
    begun.append((ArgumentRules(), [schema]))  # constraints until now, schemas still to merge
    for _ in range(_MOST_PARTS):
        if not begun:
            break
        known, parts = begun.pop()
        match parts:
            case []:
                if rules := known.satisfiable():
                    alternatives.append(rules)
            case [True, *rest]:
                begun.append((known, rest))
            case [False, *_]:
                pass
            case [{"$ref": str(ref), **others}, *rest]:
                begun.append((known, [referred(ref, schema), others, *rest]))
            case [{"allOf": list(all_of), **others}, *rest]:
                _check_count(all_of, rest)
                begun.append((known, [*all_of, others, *rest]))
            case [{"anyOf": list(any_of), **others}, *rest]:
                _check_count(any_of, begun)
                begun += [(known, [part, others, *rest]) for part in reversed(any_of)]
            case [Mapping() as part, *rest] if not part.keys() & {"$ref", "allOf", "anyOf"}:
                if both := known.merged(part):
                    begun.append((both, rest))
            case _:
                raise invalid("want schemas in allOf and anyOf, and a text as $ref")
    else:
        raise invalid(_TOO_MANY)
    if not alternatives:
        raise invalid("no object meets their schema")
    return alternatives


def _check_count(more: list[Any], parts: list[Any]) -> None:
    """Raise InvalidInput if two lists of schemas together have more than _MOST_PARTS entries."""
    if len(more) + len(parts) > _MOST_PARTS:
        raise invalid(_TOO_MANY)


def referred(ref: str, schema: Mapping[str, Any]) -> Any:
    """Return the part of a schema that a `$ref` names. Raises InvalidInput if there is none."""
    part: Any = schema
    try:
        if not ref.startswith("#"):
            raise KeyError
        for step in filter(None, unquote(ref[1:]).split("/")):
            key = step.replace("~1", "/").replace("~0", "~")
            part = part[int(key) if isinstance(part, list) else key]
    except (LookupError, TypeError, ValueError):
        raise invalid("want a $ref to a part of the schema, such as #/$defs/place") from None
    return part


def check_length(length: int, most_length: int) -> None:
    """Raise InvalidInput if the schemas of all properties together exceed `most_length`.

    length: number of characters of the schemas.
    """
    if length > most_length:
        raise invalid(
            "too large: each property with a $ref holds a copy of the schema, in each part of "
            f"an anyOf, over {MOST_SCHEMAS_LENGTH} characters in all: write out what $ref names"
        )


def self_contained(value: Any, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a property's schema so that it can stand alone: if it has a `$ref`, the schema of all
    arguments is embedded in it.

    value: the property's schema.
    schema: schema of the arguments object.

    Raises InvalidInput if `value` is not a schema.
    """
    if value is True:
        return {}
    if not isinstance(value, Mapping):
        raise invalid("want a schema for each property")
    if '"$ref"' not in json.dumps(value):
        return value
    return {**rebased(value, _WHOLE), "$defs": {_WHOLE: rebased(schema, _WHOLE)}}


def _both_of(one: Any, other: Any) -> Any:
    """Return a schema of the values that match both schemas."""
    return False if one is False or other is False else {"allOf": [one, other]}


def invalid(problem: str) -> InvalidInput:
    """Return the error that refuses the parameters of a function.

    problem: fault of the parameters.
    """
    return InvalidInput(f"a function's parameters: {problem}", param="tools")
