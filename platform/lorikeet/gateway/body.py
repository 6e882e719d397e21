"""Request bodies: read within a size, and into a schema."""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from fastapi import Depends
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request

from lorikeet.errors import InvalidInput, RequestTooLarge, UnsupportedParameter

MAX_JSON_BYTES = 8 * 2**20
_NAMES_QUOTED = 5
_NAME_LENGTH = 64

NoOps = Mapping[str, Sequence[Any]]
"""OpenAI's fields that are not served, with the values of them that ask for nothing.

Clients send such defaults unasked. They are taken as absent; any other value is refused by name.
"""


class Body(BaseModel):
    """A JSON object: null means absent, unknown fields are refused, types are not converted.

    nulls: fields of which null has a meaning. no_ops: unknown fields' values that mean absent too.
    hints: what to do about unknown fields.
    """

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        json_schema_extra={"additionalProperties": False},
    )
    nulls: ClassVar[Collection[str]] = ()
    no_ops: ClassVar[NoOps] = {}
    hints: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {
            name: value
            for name, value in data.items()
            if (value is not None or name in cls.nulls)
            and not _among(value, cls.no_ops.get(name, ()))
        }
        fields = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = [name for name in given if name not in fields]
        if unknown:  # one error for all: a million unknown fields must not cost a million errors
            names = [name[:_NAME_LENGTH] for name in unknown[:_NAMES_QUOTED]]
            raise unsupported(*names, hint=cls.hints.get(names[0], ""))
        return given


B = TypeVar("B", bound=Body)


async def read_json(request: Request, schema: type[B]) -> B:
    """Parse the body; an empty one is {}. Raises InvalidInput or one of its kinds."""
    parts = [part async for part in limited(request, MAX_JSON_BYTES)]
    try:
        return schema.model_validate_json(b"".join(parts) or b"{}")
    except ValidationError as error:
        raise describe(error.errors(include_url=False, include_input=False)) from None


def json_body(schema: type[B]) -> Any:
    """Return a route's dependency that is its parsed body, for routes that run in a thread."""

    async def read(request: Request) -> B:
        return await read_json(request, schema)

    return Depends(read)


async def limited(request: Request, max_bytes: int) -> AsyncIterator[bytes]:
    """Yield the body's parts as they come. Raises RequestTooLarge before passing on too much."""
    too_large = RequestTooLarge(f"the body is larger than {max_bytes} bytes, the limit here")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large
    received = 0
    async for part in request.stream():
        received += len(part)
        if received > max_bytes:
            raise too_large
        yield part


def describe(problems: Sequence[Any]) -> InvalidInput:
    """Return the first of pydantic's problems. Quotes names of fields, never values."""
    problem = problems[0]
    if problem["type"] == "json_invalid":
        return InvalidInput("the body is not JSON: " + problem["msg"].partition(": ")[2])
    if problem["type"] == "unsupported":
        names = problem["ctx"]["names"]
        paths = [_path((*problem["loc"], name)) for name in names] or [_path(problem["loc"])]
        message = f"not supported here: {', '.join(paths)}{problem['ctx']['hint']}"
        return UnsupportedParameter(message, param=paths[0])
    misfit_param = problem.get("ctx", {}).get("param")
    path = _path((*problem["loc"], misfit_param) if misfit_param else problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    return InvalidInput(f"{path}: {message}" if path else message, param=path or None)


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
