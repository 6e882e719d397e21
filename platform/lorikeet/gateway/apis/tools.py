"""Tools and response formats: what an answer may call, and what JSON it must be."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, model_validator
from typing_extensions import TypedDict

from lorikeet.gateway.apis.chat_messages import FunctionName
from lorikeet.gateway.body import Body, misfit, unsupported
from lorikeet.protocol.messages import Format, ToolUse

MAX_TOOLS = 128

Mode = Literal["none", "auto", "required"]


class Function(Body):
    """A function that the model may call. parameters: a JSON schema; absent: it takes none."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool; functions are the only ones."""

    type: Literal["function"]
    function: Function


class NamedFunction(TypedDict):
    """The name of a function."""

    name: str


class NamedTool(TypedDict):
    """A choice of one function, which must be called."""

    type: Literal["function"]
    function: NamedFunction


def _parse_choice(value: object) -> str | NamedTool:
    if value in ("none", "auto", "required"):
        return str(value)
    match value:
        case {"type": "function", "function": {"name": str(name)}}:
            return NamedTool(type="function", function=NamedFunction(name=name))
        case {"type": "allowed_tools" | "custom"}:
            raise unsupported()
    raise ValueError(
        'want "none", "auto", "required" or {"type": "function", "function": {"name": "…"}}'
    )


ToolChoice = Annotated[
    str | NamedTool, PlainValidator(_parse_choice, json_schema_input_type=Mode | NamedTool)
]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


def tool_use(
    tools: Sequence[Tool], choice: str | NamedTool | None, parallel: bool | None
) -> ToolUse | None:
    """Return what a chat may call; None if nothing. Raises a misfit."""
    if not tools:
        if choice == "required" or isinstance(choice, dict):
            raise misfit("tool_choice", "want tools with it")
        if parallel is False:
            raise misfit("parallel_tool_calls", "want tools with it")
        return None
    names = tuple(tool.function.name for tool in tools)
    if len(set(names)) < len(names):
        raise misfit("tools", "want a name of its own for each function")
    if choice == "none":
        return None
    shown = tuple(tool.model_dump(exclude_unset=True) for tool in tools)
    if isinstance(choice, dict):
        name = choice["function"]["name"]
        if name not in names:
            raise misfit("tool_choice", "want the name of one of the tools")
        return ToolUse(shown, forced=(name,), parallel=False)
    return ToolUse(shown, names if choice == "required" else (), parallel is not False)


class JsonSchema(Body):
    """A JSON schema and what it is called; the model is told neither, its answer is held to it."""

    name: FunctionName
    description: str | None = None
    schema_: dict[str, Any] = Field(default={}, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """Text, any JSON object, or JSON that a schema allows (held to it, strict or not)."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise misfit("json_schema", "want it with the type json_schema, and only there")
        return self

    def as_format(self) -> Format | None:
        """Return what the answer must be; None for text."""
        if self.type == "text":
            return None
        schema = {"type": "object"} if self.json_schema is None else self.json_schema.schema_
        return Format(json.dumps(schema))
