"""Tools and response formats: what an answer may call, and what JSON it must be."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, model_validator
from typing_extensions import TypedDict

from lorikeet.gateway.apis.chat_messages import FunctionName
from lorikeet.gateway.apis.fields import refuse_kind
from lorikeet.gateway.body import Body, json_text, misfit
from lorikeet.protocol.messages import Format, ToolUse

MAX_TOOLS = 128
MAX_SCHEMAS_LENGTH = 2**20
"""Characters of the JSON text of all tools, and of a response format's schema."""

FUNCTIONS_ALONE = "functions are the only tools here"

Mode = Literal["none", "auto", "required"]


def refuse_long_json(value: object) -> object:
    """Refuse what is too long for a prompt or a grammar, before it is copied again and again."""
    if len(json_text(value)) > MAX_SCHEMAS_LENGTH:
        raise ValueError(f"want at most {MAX_SCHEMAS_LENGTH} characters of JSON")
    return value


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

    @model_validator(mode="before")
    @classmethod
    def _known_kind(cls, data: Any) -> Any:
        """Refuse another kind of tool by its type, before one of its fields is."""
        if isinstance(data, dict):
            refuse_kind(data.get("type"), ("function",), FUNCTIONS_ALONE)
        return data


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
        case {"type": str(kind)}:
            refuse_kind(kind, ("function",), FUNCTIONS_ALONE)
    raise ValueError(
        'want "none", "auto", "required" or {"type": "function", "function": {"name": "…"}}'
    )


ToolChoice = Annotated[
    str | NamedTool, PlainValidator(_parse_choice, json_schema_input_type=Mode | NamedTool)
]
Tools = Annotated[
    list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True), BeforeValidator(refuse_long_json)
]


def _parse_function_call(value: object) -> str | NamedTool:
    match value:
        case "none" | "auto":
            return str(value)
        case {"name": str(name)}:
            return NamedTool(type="function", function=NamedFunction(name=name))
    raise ValueError('want "none", "auto" or {"name": "…"}')


Functions = Annotated[
    list[Function], Field(max_length=MAX_TOOLS, fail_fast=True), BeforeValidator(refuse_long_json)
]
FunctionCall = Annotated[
    str | NamedTool,
    PlainValidator(
        _parse_function_call, json_schema_input_type=Literal["none", "auto"] | NamedFunction
    ),
]


def check_functions(
    functions: Sequence[Function], choice: str | NamedTool | None, tools: Sequence[Tool]
) -> None:
    """Check deprecated functions, and a choice of one. Raises a misfit."""
    if functions and tools:
        raise misfit("functions", "want either them or tools, not both")
    names = {function.name for function in functions}
    if len(names) < len(functions):
        raise misfit("functions", "want a name of its own for each function")
    if isinstance(choice, dict) and choice["function"]["name"] not in names:
        raise misfit("function_call", "want the name of one of the functions")


def function_use(functions: Sequence[Function], choice: str | NamedTool | None) -> ToolUse | None:
    """Return what a chat with deprecated functions may call: one of them at most."""
    tools = [Tool(type="function", function=function) for function in functions]
    use = tool_use(tools, choice, parallel=False)
    return None if use is None else replace(use, functions=True)


def check_choice(
    tools: Sequence[Tool], choice: str | NamedTool | None, parallel: bool | None
) -> None:
    """Check that a choice fits the tools. Raises a misfit."""
    if not tools:
        if choice == "required" or isinstance(choice, dict):
            raise misfit("tool_choice", "want tools with it")
        if parallel is False:
            raise misfit("parallel_tool_calls", "want tools with it")
        return
    names = {tool.function.name for tool in tools}
    if len(names) < len(tools):
        raise misfit("tools", "want a name of its own for each function")
    if isinstance(choice, dict) and choice["function"]["name"] not in names:
        raise misfit("tool_choice", "want the name of one of the tools")


def tool_use(
    tools: Sequence[Tool], choice: str | NamedTool | None, parallel: bool | None
) -> ToolUse | None:
    """Return what a chat may call, by a choice that fits; None if nothing."""
    if not tools or choice == "none":
        return None
    shown = tuple(tool.model_dump(exclude_unset=True) for tool in tools)
    if isinstance(choice, dict):
        return ToolUse(shown, forced=(choice["function"]["name"],), parallel=False)
    names = tuple(tool.function.name for tool in tools)
    return ToolUse(shown, names if choice == "required" else (), parallel is not False)


class JsonSchema(Body):
    """A JSON schema and what it is called; the model is told neither, its answer is held to it."""

    name: FunctionName
    description: str | None = None
    schema_: Annotated[dict[str, Any], BeforeValidator(refuse_long_json)] = Field(
        default={}, alias="schema"
    )
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

    def as_format(self, param: str) -> Format | None:
        """Return what the answer must be; None for text. param: what the API calls this field."""
        if self.type == "text":
            return None
        schema = {"type": "object"} if self.json_schema is None else self.json_schema.schema_
        return Format(json.dumps(schema), param=param)
