"""Tools that a model may call in its answer, and response formats that the answer must follow."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator, model_validator
from typing_extensions import TypedDict

from lorikeet.apis.body import Body, json_text, misfit, unsupported
from lorikeet.apis.chat.messages import FunctionName
from lorikeet.apis.fields import KIND, refuse_kind
from lorikeet.protocol.messages import Format, ToolUse

MAX_TOOLS = 128
MAX_SCHEMAS_LENGTH = 2**20
"""Maximum length of the JSON text of all tools together, in characters.

The schema of a response format has a limit of its own, of the same length.
"""

FUNCTIONS_ALONE = "functions are the only tools here"

Mode = Literal["none", "auto", "required"]


def refuse_long_json(value: object) -> object:
    """Return a value unchanged. Raises ValueError if its JSON text is longer than
    MAX_SCHEMAS_LENGTH.

    Longer values would be copied many times before a prompt or grammar refuses them.
    """
    if len(json_text(value)) > MAX_SCHEMAS_LENGTH:
        raise ValueError(f"want at most {MAX_SCHEMAS_LENGTH} characters of JSON")
    return value


class Function(Body):
    """A function that the model may call.

    parameters: JSON schema; absent: the function has no parameters.
    """

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """Tool that the model may call. A tool is always a function."""

    type: Literal["function"]
    function: Function

    @model_validator(mode="before")
    @classmethod
    def _known_kind(cls, data: Any) -> Any:
        """Refuse an unsupported tool type with an error that names it, instead of one about its
        unknown fields.
        """
        if isinstance(data, dict):
            refuse_kind(data.get("type"), ("function",), FUNCTIONS_ALONE)
        return data


class OtherTool(Body):
    """Tool that OpenAI or Anthropic defines, such as web_search, and that is not served: the model
    does not get it.

    Such a tool is accepted only together with at least one tool that is served.
    """

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})

    type: Annotated[str, Field(pattern=KIND)]


def check_no_others(tools: Sequence[object], instead: str) -> None:
    """Raise a validation error (body.unsupported) that names the first OtherTool, if there is one.

    instead: advice for the error.
    """
    for index, tool in enumerate(tools):
        if isinstance(tool, OtherTool):
            raise unsupported(f"tools[{index}].type", hint=f" ({tool.type}): {instead}")


def left_out(tools: Sequence[object]) -> tuple[str, ...]:
    """Return the types of the tools that are not served and hence withheld from the model."""
    return tuple(dict.fromkeys(tool.type for tool in tools if isinstance(tool, OtherTool)))


class NamedFunction(TypedDict):
    """Name of the function that the model must call."""

    name: str


class NamedTool(TypedDict):
    """Choice of one function that the model must call."""

    type: Literal["function"]
    function: NamedFunction


class NamedTools(TypedDict):
    """Tools that the model may call, and whether it must call a tool."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedToolsParam(TypedDict):
    """Restriction to some of the request's tools, in the JSON form of a request."""

    type: Literal["allowed_tools"]
    allowed_tools: NamedTools


class AllowedTools(NamedTuple):
    """Restriction to some of the request's tools: the model gets no other tools.

    names: names of the tools that the model gets.
    required: whether the model must call one of these tools.
    """

    names: tuple[str, ...]
    required: bool


Choice = str | NamedTool | AllowedTools


def _parse_choice(value: object) -> Choice:
    if value in ("none", "auto", "required"):
        return str(value)
    match value:
        case {"type": "function", "function": {"name": str(name)}}:
            return NamedTool(type="function", function=NamedFunction(name=name))
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as allowed},
        }:
            return AllowedTools(tuple(map(_allowed_name, allowed)), mode == "required")
        case {"type": str(kind)}:
            refuse_kind(kind, ("function", "allowed_tools"), FUNCTIONS_ALONE)
    raise ValueError(
        'want "none", "auto", "required", {"type": "function", "function": {"name": "…"}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": […]}}'
    )


def _allowed_name(tool: object) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
        case {"type": str(kind)}:
            refuse_kind(kind, ("function",), FUNCTIONS_ALONE)
    raise ValueError('want allowed tools of the form {"type": "function", "function": {"name": …}}')


ToolChoice = Annotated[
    Choice,
    PlainValidator(_parse_choice, json_schema_input_type=Mode | NamedTool | AllowedToolsParam),
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
    """Raise a validation error (body.misfit) unless a chat's deprecated fields `functions` and
    `function_call` fit each other.

    functions: value of `functions`.
    choice: parsed value of `function_call`.
    tools: value of `tools`; must be empty if there are functions.
    """
    if functions and tools:
        raise misfit("functions", "want either them or tools, not both")
    names = {function.name for function in functions}
    if len(names) < len(functions):
        raise misfit("functions", "want a name of its own for each function")
    if isinstance(choice, dict) and choice["function"]["name"] not in names:
        raise misfit("function_call", "want the name of one of the functions")


def function_use(functions: Sequence[Function], choice: str | NamedTool | None) -> ToolUse | None:
    """Return the tools of a chat that uses the deprecated field `functions`; None without
    functions.

    The model may make at most one call.

    choice: parsed value of function_call.
    """
    tools = [Tool(type="function", function=function) for function in functions]
    use = tool_use(tools, choice, parallel=False)
    return None if use is None else replace(use, functions=True)


def check_choice(tools: Sequence[Tool], choice: Choice | None, parallel: bool | None) -> None:
    """Raise a validation error (body.misfit) if two tools have one name, or if tool_choice or
    parallel_tool_calls does not fit the tools.

    choice: parsed value of tool_choice.
    parallel: value of parallel_tool_calls.
    """
    if not tools:
        if choice == "required" or isinstance(choice, dict | AllowedTools):
            raise misfit("tool_choice", "want tools with it")
        if parallel is False:
            raise misfit("parallel_tool_calls", "want tools with it")
        return
    names = {tool.function.name for tool in tools}
    if len(names) < len(tools):
        raise misfit("tools", "want a name of its own for each function")
    if isinstance(choice, dict) and choice["function"]["name"] not in names:
        raise misfit("tool_choice", "want the name of one of the tools")
    if isinstance(choice, AllowedTools) and not names.issuperset(choice.names):
        raise misfit("tool_choice", "want the names of some of the tools")


def tool_use(tools: Sequence[Tool], choice: Choice | None, parallel: bool | None) -> ToolUse | None:
    """Return the tools of a chat and how the model may call them; None if it may call none.

    choice: parsed value of tool_choice, checked by check_choice.
    parallel: value of parallel_tool_calls; None: true.
    """
    if not tools or choice == "none":
        return None
    if isinstance(choice, AllowedTools):
        tools = [tool for tool in tools if tool.function.name in choice.names]
        choice = "required" if choice.required else "auto"
    shown = tuple(tool.model_dump(exclude_unset=True) for tool in tools)
    if isinstance(choice, dict):
        return ToolUse(shown, forced=(choice["function"]["name"],), parallel=False)
    names = tuple(tool.function.name for tool in tools)
    return ToolUse(shown, names if choice == "required" else (), parallel is not False)


class JsonSchema(Body):
    """Named JSON schema that the answer is constrained to. The schema is not part of the prompt."""

    name: FunctionName
    description: str | None = None
    schema_: Annotated[dict[str, Any], BeforeValidator(refuse_long_json)] = Field(
        default={}, alias="schema"
    )
    strict: bool | None = None


class ResponseFormat(Body):
    """Answer format: text, any JSON object, or JSON constrained to a schema.

    A schema is always enforced. With `strict: false`, keywords that cannot be enforced are left out
    of the grammar instead of refused, and the finished answer is checked against the schema.
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise misfit("json_schema", "want it with the type json_schema, and only there")
        return self

    def as_format(self, param: str) -> Format | None:
        """Return the format that the answer is constrained to; None for text.

        param: name of this field in the client's API, for errors.
        """
        if self.type == "text":
            return None
        if self.json_schema is None:
            return Format(json.dumps({"type": "object"}), param=param)
        strict = self.json_schema.strict is not False
        return Format(json.dumps(self.json_schema.schema_), param=param, strict=strict)
