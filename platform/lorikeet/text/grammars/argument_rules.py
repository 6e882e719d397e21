"""Rules of a JSON schema on arguments that a tool call names one after another."""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self, TypeVar
from urllib.parse import unquote

from lorikeet.errors import InvalidInput
from lorikeet.text.grammars.schema_logic import rebased
from lorikeet.text.tools.argument_values import schema_types

_WHOLE = "arguments"
_PARAMETERS = "a function's parameters: "
MOST_SCHEMAS_LENGTH = 2**22
_MOST_PARTS = 256
_TOO_MANY = "too many $ref, allOf and anyOf in one schema, or a $ref to itself: write them out"
_UNSUPPORTED = frozenset(
    {
        "const", "dependencies", "dependentRequired", "dependentSchemas", "else", "enum", "if",
        "maxProperties", "minProperties", "not", "oneOf", "patternProperties", "propertyNames",
        "then", "unevaluatedProperties",
    }
)  # fmt: skip
"""JSON schema keywords that the grammar rules cannot enforce on an object of arguments."""
Rules = TypeVar("Rules", bound="_Rules")


class _Rules(Protocol):
    """Constraints of a JSON schema on values of one type."""

    def merged(self, part: Mapping[str, Any]) -> Self | None:
        """Return these constraints combined with another schema's; None if they contradict."""
        ...

    def satisfiable(self) -> Self | None:
        """Return constraints that allow the same values, without parts that no value can meet; None
        if they allow no value.
        """
        ...


@dataclass(frozen=True, slots=True)
class ArgumentRules:
    """Constraints of a JSON schema on a function's arguments.

    properties: schema of each argument by its name.
    required: names of required arguments.
    others: schema of arguments that `properties` does not name; False forbids them.
    maps: True if `others` may be a schema; False if such a schema raises InvalidInput.
    """

    properties: Mapping[str, Any] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    others: Any = True
    maps: bool = False

    @property
    def closed(self) -> bool:
        """True if arguments other than `properties` are forbidden."""
        return self.others is False

    def merged(self, part: Mapping[str, Any]) -> "ArgumentRules | None":
        """Return these constraints combined with another schema's constraints; None if they
        contradict.

        part: the other schema. Raises InvalidInput if it is malformed or has unsupported keywords.
        """
        properties, required = part.get("properties", {}), part.get("required", [])
        names = isinstance(required, list) and all(isinstance(key, str) for key in required)
        if not isinstance(properties, Mapping) or not names:
            raise invalid("want properties by name, and a list of the required ones")
        if "object" not in schema_types(part, {}):
            return None
        others = part.get("additionalProperties", True)
        others = True if others == {} else others
        unsupported = part.keys() & _UNSUPPORTED
        if not (isinstance(others, bool) or self.maps):
            unsupported |= {"additionalProperties"}
        if "patternProperties" in unsupported:
            unsupported |= {"propertyNames"}  # which is held as patternProperties
        if unsupported:
            raise unheld(unsupported, "an object")
        return replace(
            self,
            properties={
                key: both_of(self.properties.get(key, self.others), properties.get(key, others))
                for key in {**self.properties, **properties}
            },
            required=(*self.required, *required),
            others=both_of(self.others, others),
        )

    def satisfiable(self) -> "ArgumentRules | None":
        """Return the constraints without the properties whose schema is False; None if no arguments
        can meet them.

        If a property is forbidden, so are all arguments that `properties` does not name. A required
        argument without a schema may have any value.
        """
        never = {key for key, value in self.properties.items() if value is False}
        named = {key: self.properties[key] for key in self.properties if key not in never}
        missing = [key for key in self.required if key not in named]
        if never.intersection(missing) or (self.closed and missing):
            return None
        properties = named | dict.fromkeys(missing, self.others)
        return replace(self, properties=properties, others=False if never else self.others)


def alternatives(schema: Mapping[str, Any]) -> list[ArgumentRules]:
    """Return the alternative constraints of a schema; arguments must meet at least one alternative.

    Raises InvalidInput for unsupported keywords, too many alternatives, or a schema that no
    arguments can meet.
    """
    if not (found := alternatives_of_type(ArgumentRules(), schema, schema)):
        raise invalid("no object meets their schema")
    return found


def alternatives_of_type(rules: Rules, schema: Any, root: Mapping[str, Any]) -> list[Rules]:
    """Return the alternative constraints of a schema on values of one type; values of this type
    must meet at least one alternative. No alternative means that no such value fits the schema.

    rules: constraints of the type before those of the schema.
    root: schema that `$ref` refers to.

    Raises InvalidInput for unsupported keywords and too many alternatives.
    """
    alternatives, begun = list[Rules](), list[tuple[Rules, list[Any]]]()
    begun.append((rules, [schema]))  # constraints until now, schemas still to merge
    for _ in range(_MOST_PARTS):
        if not begun:
            break
        known, parts = begun.pop()
        match parts:
            case []:
                if possible := known.satisfiable():
                    alternatives.append(possible)
            case [True, *rest]:
                begun.append((known, rest))
            case [False, *_]:
                pass
            case [{"$ref": str(ref), **others}, *rest]:
                begun.append((known, [referred(ref, root), others, *rest]))
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


def both_of(one: Any, other: Any) -> Any:
    """Return a schema of the values that match both schemas."""
    if one is False or other is False:
        return False
    if one is True or other is True:
        return one if other is True else other
    return {"allOf": [one, other]}


def unheld(keywords: Collection[str], on: str) -> InvalidInput:
    """Return the error that refuses keywords which no grammar rules of arguments enforce.

    on: type of the values that the keywords constrain, with its article.
    """
    return invalid(
        f"{', '.join(sorted(keywords))} on {on} cannot be held in this model's syntax: remove it, "
        "or set it on single properties"
    )


@contextmanager
def placed(path: str) -> Iterator[None]:
    """Add the JSON path of a schema to errors of `invalid` that are raised within."""
    try:
        yield
    except InvalidInput as error:
        problem = error.message.removeprefix(_PARAMETERS)
        raise InvalidInput(f"{_PARAMETERS}at {path}: {problem}", param="tools") from error


def invalid(problem: str) -> InvalidInput:
    """Return the error that refuses the parameters of a function.

    problem: fault of the parameters.
    """
    return InvalidInput(f"{_PARAMETERS}{problem}", param="tools")
