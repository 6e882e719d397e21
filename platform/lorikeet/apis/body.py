"""JSON objects of requests: their schema, and its errors."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from lorikeet.errors import InvalidInput, RequestTooLarge, UnsupportedParameter

MAX_VALUES = 2**16
"""Approximate maximum number of values and keys in a JSON body. Without this limit, parsing 8 MiB
of [] would block a gateway for 3 s.
"""
# A string without an end matches too, else the search would start anew at each quote in it.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_NAMES_QUOTED = 5
_NAME_LENGTH = 64

NoOps = Mapping[str, Sequence[Any]]
"""Unsupported fields of the APIs, each with its values that have no effect.

Clients send such defaults without being asked. A field with one of these values counts as absent;
with any other value the request is refused and the field named.
"""


class Body(BaseModel):
    """Schema of a JSON object in a request: null means absent, unknown fields are refused, and
    types are not converted.

    Settings of a subclass:
    nulls: fields in which null has a meaning of its own.
    no_ops: unsupported fields, each with its values that have no effect; other values are refused.
    dropped: unknown fields that are ignored, whatever their value.
    hints: advice to add to the error for an unknown field, by the field's name.
    max_values: approximate limit of the values and keys in the whole body.
    """

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        json_schema_extra={"additionalProperties": False},
    )
    nulls: ClassVar[Collection[str]] = ()
    no_ops: ClassVar[NoOps] = {}
    dropped: ClassVar[Collection[str]] = ()
    hints: ClassVar[Mapping[str, str]] = {}
    max_values: ClassVar[int] = MAX_VALUES

    @classmethod
    def unchecked(cls, **fields: Any) -> Self:
        """Return an instance with the given fields, which are not validated, and defaults for all
        others: faster than pydantic's model_construct.
        """
        made: Self = _with_defaults(cls).model_copy(update=fields)
        return made

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        no_ops = cls.no_ops
        given = {
            name: value
            for name, value in data.items()
            if (value is not None or name in cls.nulls)
            and name not in cls.dropped
            and not (name in no_ops and _among(value, no_ops[name]))
        }
        fields = _field_names(cls)
        unknown = [name for name in given if name not in fields]
        if unknown:  # one error for all: a million unknown fields must not make a million errors
            names = [name[:_NAME_LENGTH] for name in unknown[:_NAMES_QUOTED]]
            raise unsupported(*names, hint=cls.hints.get(names[0], ""))
        return given


B = TypeVar("B", bound=Body)


@cache
def _field_names(schema: type[Body]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in schema.model_fields.items())


@cache
def _with_defaults(schema: type[B]) -> B:
    """Return an instance of a schema with all defaults, and None for each required field."""
    required = {name: None for name, field in schema.model_fields.items() if field.is_required()}
    return schema.model_construct(_fields_set=set(), **required)


def parse_json(body: bytes, schema: type[B]) -> B:
    """Parse a JSON body by a schema. Raises InvalidInput, or a subclass, if the body has too many
    values or does not fit the schema.

    Parsing holds the interpreter's lock, even in a thread, so the number of values must be bounded.
    """
    if _count_separators(body) > schema.max_values:
        ValueBudget(schema.max_values).spend(body)
    try:
        return schema.model_validate_json(body, context=ValueBudget(schema.max_values))
    except ValidationError as error:
        raise input_error(error.errors(include_url=False, include_input=False)) from None


def json_text(value: object) -> str:
    """Return the JSON text of a value. Raises ValueError for NaN and infinity."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise ValueError("want finite numbers") from None


class ValueBudget:
    """Limit on the number of JSON values that several texts of one request may contain together.

    A key of an object counts as about one value.
    """

    def __init__(self, max_values: int) -> None:
        self._max_values = self._left = max_values

    def spend(self, text: bytes) -> None:
        """Subtract the number of values in a JSON text. Raises RequestTooLarge if too few are
        left.
        """
        # strings are cut out, as their commas do not count; more strings than this are too many
        self._left -= _count_separators(_STRING.sub(b"", text, count=2 * self._left + 1))
        if self._left < 0:
            raise RequestTooLarge(
                f"the body has more than {self._max_values} JSON values and keys, the limit here"
            )


def _count_separators(text: bytes) -> int:
    """Count the characters that precede or separate values in a JSON text without its strings."""
    return sum(map(text.count, (b",", b"[", b"{", b":")))


def input_error(problems: Sequence[Any]) -> InvalidInput:
    """Return pydantic's first error as an InvalidInput that quotes field names, never values.

    problems: errors of a ValidationError, as its method errors() returns them.
    """
    problem = problems[0]
    if problem["type"] == "json_invalid":
        return InvalidInput("the body is not JSON: " + problem["msg"].partition(": ")[2])
    if problem["type"] == "unsupported":
        names = problem["ctx"]["names"]
        paths = [_path((*problem["loc"], name)) for name in names] or [_path(problem["loc"])]
        message = f"not supported here: {', '.join(paths)}{problem['ctx']['hint']}"
        return UnsupportedParameter(message, param=paths[0])
    if problem["type"] == "extra_forbidden":
        name = _path(problem["loc"])[:_NAME_LENGTH]
        return UnsupportedParameter(f"not supported here: {name}", param=name)
    misfit_param = problem.get("ctx", {}).get("param")
    path = _path((*problem["loc"], misfit_param) if misfit_param else problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    return InvalidInput(f"{path or 'the body'}: {message}", param=path or None)


def unsupported(*names: str, hint: str = "") -> PydanticCustomError:
    """Return the error for a validator to raise for unsupported fields.

    names: unsupported fields of the validated object; none: the validated field itself.
    hint: advice to append to the message.
    """
    context = {"names": list(names), "hint": hint}
    return PydanticCustomError("unsupported", "not supported here", context)


def misfit(param: str, message: str) -> PydanticCustomError:
    """Return the error for a validator to raise if a field does not fit the object's other fields.

    param: the field's name.
    """
    return PydanticCustomError("misfit", message, {"param": param})


def _among(value: object, others: Sequence[Any]) -> bool:
    """Return whether a value equals one of `others`. Unlike in Python, false differs from 0 and
    true from 1.
    """
    return any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in others
    )


def _path(loc: Sequence[str | int]) -> str:
    """Return a pydantic error's location as a path: ('messages', 0, 'role') → messages[0].role."""
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in loc)
    return path.removeprefix(".")
