"""Grammars of arguments of calls in Python, key=value, …, in llguidance's dialect of Lark."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

import regex

from lorikeet.errors import InvalidInput

_WHOLE = "arguments"
_MOST_SCHEMAS_LENGTH = 2**22
_MOST_PARTS = 256
_TOO_MANY = "too many $ref, allOf and anyOf around them, or a $ref to itself: write them out"
_NOT_HELD = frozenset(
    {
        "const", "dependencies", "dependentRequired", "dependentSchemas", "else", "enum", "if",
        "maxProperties", "minProperties", "not", "oneOf", "patternProperties", "propertyNames",
        "then", "unevaluatedProperties",
    }
)  # fmt: skip
"""What a schema may say of all arguments together that no rule of them holds."""
_WORD = regex.compile(r"\w+")
"""What is written as it is before the = of an argument; other names as strings."""


@dataclass(frozen=True, slots=True)
class ArgumentRules:
    """What a schema asks of arguments: of each by its key, and of which ones there are."""

    properties: Mapping[str, Any] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    closed: bool = False  # whether there may be no others

    def meeting(self, part: Mapping[str, Any]) -> "ArgumentRules | None":
        """Return what asks for what a further schema does too; None if no arguments meet that.

        Raises InvalidInput if it is no schema.
        """
        properties, required = part.get("properties", {}), part.get("required", [])
        names = isinstance(required, list) and all(isinstance(key, str) for key in required)
        if not isinstance(properties, Mapping) or not names:
            raise _wrong("want properties by name, and a list of the required ones")
        types, others = part.get("type", "object"), part.get("additionalProperties", True)
        if types != "object" and not (isinstance(types, list) and "object" in types):
            return None
        unheld = part.keys() & _NOT_HELD
        if not (isinstance(others, bool) or others == {}):
            unheld |= {"additionalProperties"}
        if unheld:
            raise _wrong(
                f"{', '.join(sorted(unheld))} cannot be held of all arguments of a call in Python: "
                "take it out, or say it of single properties"
            )
        closed = others is False
        both = {
            key: _meeting_both(self.properties[key], properties[key])
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
        """Return them without properties that may never be there; None if no arguments meet them.

        Where there are any such, other arguments than those that are named are not written. What is
        required and not named may be anything.
        """
        never = {key for key, value in self.properties.items() if value is False}
        named = {key: self.properties[key] for key in self.properties if key not in never}
        missing = [key for key in self.required if key not in named]
        if never.intersection(missing) or (self.closed and missing):
            return None
        properties = named | dict.fromkeys(missing, True)
        return replace(self, properties=properties, closed=self.closed or bool(never))


def python_arguments(rule: str, schema: Mapping[str, Any]) -> list[str]:
    """Return the rules of key=value, …: those that the schema names, in its order, values as JSON.

    Where it names none, any, unless it allows none. What it says of all of them together is held as
    far as it is $ref, allOf, anyOf, additionalProperties that are true or false, and which ones are
    required; InvalidInput is raised for more.
    """
    met = _alternatives(schema)
    rules = [f"{rule}: {' | '.join(f'{rule}_of_{at}' for at in range(len(met)))}"]
    try:
        for at, one in enumerate(met):
            rules += _pairs(f"{rule}_of_{at}", one, schema, _MOST_SCHEMAS_LENGTH // len(met))
    except RecursionError as error:
        raise _wrong("nested too deeply") from error
    return rules


def _alternatives(schema: Mapping[str, Any]) -> list[ArgumentRules]:
    """Return of what arguments have to meet one. Raises InvalidInput."""
    met, begun = list[ArgumentRules](), list[tuple[ArgumentRules, list[Any]]]()
    begun.append((ArgumentRules(), [schema]))  # what was read, and what has to be met beside that
    for _ in range(_MOST_PARTS):
        if not begun:
            break
        known, parts = begun.pop()
        match parts:
            case []:
                if rules := known.satisfiable():
                    met.append(rules)
            case [True, *rest]:
                begun.append((known, rest))
            case [False, *_]:
                pass
            case [{"$ref": str(ref), **others}, *rest]:
                begun.append((known, [_referred(ref, schema), others, *rest]))
            case [{"allOf": list(all_of), **others}, *rest]:
                _bounded(all_of, rest)
                begun.append((known, [*all_of, others, *rest]))
            case [{"anyOf": list(any_of), **others}, *rest]:
                _bounded(any_of, begun)
                begun += [(known, [part, others, *rest]) for part in reversed(any_of)]
            case [Mapping() as part, *rest] if not part.keys() & {"$ref", "allOf", "anyOf"}:
                if both := known.meeting(part):
                    begun.append((both, rest))
            case _:
                raise _wrong("want schemas in allOf and anyOf, and a text as $ref")
    else:
        raise _wrong(_TOO_MANY)
    if not met:
        raise _wrong("no object meets their schema")
    return met


def _bounded(more: list[Any], parts: list[Any]) -> None:
    """Raise InvalidInput where there would be too many, before they are there."""
    if len(more) + len(parts) > _MOST_PARTS:
        raise _wrong(_TOO_MANY)


def _referred(ref: str, schema: Mapping[str, Any]) -> Any:
    """Return the part of a schema that a reference names. Raises InvalidInput if there is none."""
    part: Any = schema
    try:
        if not ref.startswith("#"):
            raise KeyError
        for step in filter(None, unquote(ref[1:]).split("/")):
            key = step.replace("~1", "/").replace("~0", "~")
            part = part[int(key) if isinstance(part, list) else key]
    except (LookupError, TypeError, ValueError):
        raise _wrong("want a $ref to a part of them, such as #/$defs/place") from None
    return part


def _pairs(
    rule: str, asked: ArgumentRules, schema: Mapping[str, Any], most_length: int
) -> list[str]:
    """Return the rules of arguments that meet an alternative of a schema. Raises InvalidInput."""
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
    # what may come from this property on where none was written before it, and where one was
    for at, (key, value) in enumerate(asked.properties.items()):
        name = key if _WORD.fullmatch(key) else json.dumps(key)
        pair = f"{json.dumps(f'{name}=')} {rule}_value_{at} {rule}_more_{at + 1}"
        first, more = f"{rule}_first_{at}: {pair}", f'{rule}_more_{at}: ", " {pair}'
        if key not in asked.required:
            first, more = f"{first} | {rule}_first_{at + 1}", f"{more} | {rule}_more_{at + 1}"
        held = json.dumps({**_standing_alone(value, schema), **guidance})
        if (length := length + len(held)) > most_length:
            raise _wrong(
                "too large where each that has a $ref has a copy of them all, and so has each part "
                f"of an anyOf around them, over {_MOST_SCHEMAS_LENGTH} characters: write out what "
                "$ref names"
            )
        rules += [first, more, f"{rule}_value_{at}: %json {held}"]
    return [*rules, f'{rule}_first_{at + 1}: ""', f'{rule}_more_{at + 1}: ""']


def _standing_alone(value: Any, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a property's schema; with the whole one in it, where it refers to any of that."""
    if value is True:
        return {}
    if not isinstance(value, Mapping):
        raise _wrong("want a schema for each property")
    if '"$ref"' not in json.dumps(value):
        return value
    return {**_referring(value), "$defs": {_WHOLE: _referring(schema)}}


def _meeting_both(one: Any, other: Any) -> Any:
    """Return a schema of what meets two."""
    return False if one is False or other is False else {"allOf": [one, other]}


def _referring(part: Any) -> Any:
    """Return a part of a schema, whose references are into the copy of the whole."""
    if isinstance(part, Mapping):
        referring = {key: _referring(value) for key, value in part.items()}
        match part.get("$ref"):
            case str(ref) if ref.startswith("#"):
                referring["$ref"] = f"#/$defs/{_WHOLE}{ref[1:]}"
        return referring
    return [_referring(each) for each in part] if isinstance(part, list) else part


def _wrong(problem: str) -> InvalidInput:
    return InvalidInput(f"a function's parameters: {problem}", param="tools")
