"""Request bodies: read within a size and a time, and into a schema."""

import asyncio
import json
import re
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Self, TypeVar

from fastapi import Depends
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request

from lorikeet.errors import InvalidInput, RequestTimeout, RequestTooLarge, UnsupportedParameter

MAX_JSON_BYTES = 8 * 2**20
BODY_S = 10.0
"""A JSON body has so long to come, and a second more for each LEAST_BYTES_PER_S that have."""
LEAST_BYTES_PER_S = 64 * 2**10
MAX_VALUES = 2**16
"""Most values and keys of a JSON body, about: 8 MiB of [] would hold up a gateway for 3 s."""
# also one that does not end, or each quote in it would be tried as a beginning
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
# servers refuse most others themselves; int() takes "+5" and "1_0" too, and breaks at 4,301 digits
_LENGTH = re.compile("[0-9]{1,18}")
_NAMES_QUOTED = 5
_LIMIT = "the limit here"
_NAME_LENGTH = 64

NoOps = Mapping[str, Sequence[Any]]
"""OpenAI's fields that are not served, with the values of them that ask for nothing.

Clients send such defaults unasked. They are taken as absent; any other value is refused by name.
"""


class Body(BaseModel):
    """A JSON object: null means absent, unknown fields are refused, types are not converted.

    nulls: fields of which null has a meaning. no_ops: unknown fields' values that mean absent too.
    dropped: unknown fields that mean nothing, whatever their value. hints: what to do about
    unknown fields. max_values: as MAX_VALUES.
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
        """Return one of fields that need no check, with defaults for the others.

        As model_construct, in a fifth of the time: that works out each default again.
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
        if unknown:  # one error for all: a million unknown fields must not cost a million errors
            names = [name[:_NAME_LENGTH] for name in unknown[:_NAMES_QUOTED]]
            raise unsupported(*names, hint=cls.hints.get(names[0], ""))
        return given


B = TypeVar("B", bound=Body)


@cache
def _field_names(schema: type[Body]) -> frozenset[str]:
    """Return what its fields are called in JSON."""
    return frozenset(field.alias or name for name, field in schema.model_fields.items())


@cache
def _with_defaults(schema: type[B]) -> B:
    """One with defaults, and places for the other fields: a dump keeps the order of these."""
    required = {name: None for name, field in schema.model_fields.items() if field.is_required()}
    return schema.model_construct(_fields_set=set(), **required)


async def read_json(request: Request, schema: type[B]) -> B:
    """Read the body and parse it. Raises InvalidInput or one of its kinds."""
    return parse_json(await read_body(request), schema)


async def read_body(request: Request) -> bytes:
    """Return a JSON body; an empty one is {}.

    Raises RequestTooLarge, RequestTimeout where it does not come, and InvalidInput for one that is
    compressed.
    """
    if request.headers.get("content-encoding", "").lower() not in ("", "identity"):
        problem = "Content-Encoding: want the body as it is: compressed ones are not taken"
        raise InvalidInput(problem, param="content-encoding")
    body = b"".join([part async for part in timed_parts(bounded_parts(request, MAX_JSON_BYTES))])
    return body.removeprefix(BOM_UTF8) or b"{}"


def parse_json(body: bytes, schema: type[B]) -> B:
    """Parse a body. Raises InvalidInput or one of its kinds.

    Parsing keeps the interpreter to itself, in a thread too, so what is parsed has to be bounded.
    """
    if _count_separators(body) > schema.max_values:
        ValueBudget(schema.max_values).spend(body)
    try:
        return schema.model_validate_json(body, context=ValueBudget(schema.max_values))
    except ValidationError as error:
        raise input_error(error.errors(include_url=False, include_input=False)) from None


def json_text(value: object) -> str:
    """Return the JSON text of a value. Raises ValueError for a number that is none, such as 1e999.

    Where any value is taken, a body is parsed with NaN and infinities, which JSON does not have.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise ValueError("want finite numbers") from None


def json_body(schema: type[B]) -> Any:
    """Return a route's dependency that is its parsed body, for routes that run in a thread."""

    async def read(request: Request) -> B:
        return await read_json(request, schema)

    return Depends(read)


async def bounded_parts(
    request: Request, max_bytes: int, limit: str = _LIMIT
) -> AsyncIterator[bytes]:
    """Yield the body's parts as they come. Raises RequestTooLarge before passing on too much.

    limit: what max_bytes is called where it is exceeded.
    """
    declared_bytes(request, max_bytes, limit)
    received = 0
    async for part in request.stream():
        received += len(part)
        if received > max_bytes:
            raise _too_large(max_bytes, limit)
        yield part


def declared_bytes(request: Request, max_bytes: int, limit: str = _LIMIT) -> int | None:
    """Return the body's size by its Content-Length; None if it has none.

    Raises InvalidInput, and RequestTooLarge where it is more than max_bytes.
    """
    declared = request.headers.get("content-length")
    if declared is None:
        return None
    if not _LENGTH.fullmatch(declared):
        problem = "Content-Length: want the body's size in bytes, such as 1024"
        raise InvalidInput(problem, param="content-length")
    if int(declared) > max_bytes:
        raise _too_large(max_bytes, limit)
    return int(declared)


async def timed_parts(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield a body's parts as they come. Raises RequestTimeout where they come too slowly.

    The time that their taker needs does not count.
    """
    loop = asyncio.get_running_loop()
    received, due_s = 0, loop.time() + BODY_S
    while True:
        try:
            async with asyncio.timeout_at(due_s + received / LEAST_BYTES_PER_S):
                part = await anext(parts, None)
        except TimeoutError:
            raise RequestTimeout(
                f"of the body {received} bytes have come in time: send all of it within "
                f"{BODY_S:g} s, or at {LEAST_BYTES_PER_S // 2**10} KiB a second"
            ) from None
        if part is None:
            return
        received += len(part)
        given_s = loop.time()
        yield part
        due_s += loop.time() - given_s


def _too_large(max_bytes: int, limit: str) -> RequestTooLarge:
    return RequestTooLarge(f"the body is larger than {max_bytes} bytes, {limit}")


class ValueBudget:
    """How many values JSON texts may have together; a key counts as one, about."""

    def __init__(self, max_values: int) -> None:
        self._max_values = self._left = max_values

    def spend(self, text: bytes) -> None:
        """Count a text's values. Raises RequestTooLarge when there are too many."""
        # commas in strings do not count; twice as many strings as values would be too many
        self._left -= _count_separators(_STRING.sub(b"", text, count=2 * self._left + 1))
        if self._left < 0:
            raise RequestTooLarge(
                f"the body has more than {self._max_values} JSON values and keys, the limit here"
            )


def _count_separators(text: bytes) -> int:
    """Count what comes before or between values."""
    return sum(map(text.count, (b",", b"[", b"{", b":")))


def input_error(problems: Sequence[Any]) -> InvalidInput:
    """Return the first of pydantic's problems. Quotes names of fields, never values."""
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
    """Return what a schema raises for its fields, or a field's parser for its value (no names)."""
    context = {"names": list(names), "hint": hint}
    return PydanticCustomError("unsupported", "not supported here", context)


def misfit(param: str, message: str) -> PydanticCustomError:
    """Return what a schema raises when `param` does not fit its other fields."""
    return PydanticCustomError("misfit", message, {"param": param})


def _among(value: object, others: Sequence[Any]) -> bool:
    """Whether the value is one of these; false is not 0, and 1 is not true."""
    return any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in others
    )


def _path(loc: Sequence[str | int]) -> str:
    """('messages', 0, 'role') → messages[0].role."""
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in loc)
    return path.removeprefix(".")
