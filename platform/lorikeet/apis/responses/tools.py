"""Tools of /v1/responses: functions, on their own or in namespaces. The model does not get other
tools.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator
from typing_extensions import TypedDict

from lorikeet.apis.body import Body, NoOps, misfit
from lorikeet.apis.chat.messages import FunctionName
from lorikeet.apis.fields import refuse_kind
from lorikeet.apis.tools import (
    FUNCTIONS_ALONE,
    MAX_TOOLS,
    AllowedTools,
    Choice,
    Function,
    Mode,
    NamedTool,
    OtherTool,
    Tool,
    check_no_others,
    refuse_long_json,
)


def dotted(namespace: str | None, name: str) -> str:
    """Return the name by which the model knows a function: namespace.name, or name alone."""
    return name if namespace is None else f"{namespace}.{name}"


class FunctionTool(Body):
    """Function that the model may call.

    strict: constrain the arguments of calls to the parameters; absent means false.
    """

    no_ops: ClassVar[NoOps] = {"allowed_callers": (["direct"],), "async": (False,)}
    dropped: ClassVar[Collection[str]] = {"defer_loading"}  # tool_search is left out, so all load
    hints: ClassVar[dict[str, str]] = {"function": ": its name and parameters stand beside type"}

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_chat(self, namespace: str | None = None) -> Tool:
        """Return the function as a tool in the form of OpenAI's chat API, without absent fields.

        namespace: namespace that the function is in, if any.
        """
        given = self.model_dump(exclude_none=True, exclude={"type"})
        function = Function.unchecked(**given | {"name": dotted(namespace, self.name)})
        return Tool.unchecked(type="function", function=function)


class NamespaceTool(Body):
    """Namespace of functions, such as those of an MCP server. The model knows function f as
    `name.f`.
    """

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


OfferedTool = FunctionTool | NamespaceTool | OtherTool


def _parse_tool(value: object) -> OfferedTool:
    match value:
        case {"type": "namespace"}:
            return NamespaceTool.model_validate(value)
        case {"type": str(kind)} if kind != "function":
            return OtherTool(type=kind)
    return FunctionTool.model_validate(value)


class FunctionChoice(TypedDict):
    """Choice of one function that the model must call."""

    type: Literal["function"]
    name: str


class AllowedTool(TypedDict):
    """Function that the model may call, or a namespace whose functions it may call."""

    type: Literal["function", "namespace"]
    name: str


class AllowedChoice(TypedDict):
    """Restriction to some of the request's tools: the model gets no other tools.

    mode: `required` if the model must call one of these tools.
    """

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


def _parse_choice(value: object) -> str | FunctionChoice | AllowedChoice:
    match value:
        case "none" | "auto" | "required":
            return str(value)
        case {"type": "function", "name": str(name)}:
            return FunctionChoice(type="function", name=name)
        case {
            "type": "allowed_tools",
            "mode": "auto" | "required" as mode,
            "tools": [{"type": str(first)}, *_] as tools,
        }:
            allowed = list(_allowed(tools))
            if not allowed:
                refuse_kind(first, ("function", "namespace"), FUNCTIONS_ALONE)
                raise ValueError("want a function among the allowed tools")
            return AllowedChoice(type="allowed_tools", mode=mode, tools=allowed)
        case {"type": str(kind)} if kind not in ("function", "allowed_tools"):
            refuse_kind(kind, (), FUNCTIONS_ALONE)
    raise ValueError(
        'want "none", "auto", "required", {"type": "function", "name": "…"} or '
        '{"type": "allowed_tools", "mode": "auto", "tools": […]}'
    )


def _allowed(tools: Sequence[object]) -> Iterator[AllowedTool]:
    """Yield the functions and namespaces among allowed tools. Tools of other types are never
    offered.
    """
    for tool in tools:
        match tool:
            case {"type": "function" | "namespace" as kind, "name": str(name)}:
                yield AllowedTool(type=kind, name=name)
            case {"type": str(kind)} if kind not in ("function", "namespace"):
                continue
            case _:
                raise ValueError('want allowed tools of the form {"type": "function", "name": "…"}')


ResponseTools = Annotated[
    list[Annotated[OfferedTool, PlainValidator(_parse_tool, json_schema_input_type=OfferedTool)]],
    Field(max_length=MAX_TOOLS, fail_fast=True),
    BeforeValidator(refuse_long_json),
]
ResponseToolChoice = Annotated[
    str | FunctionChoice | AllowedChoice,
    PlainValidator(_parse_choice, json_schema_input_type=Mode | FunctionChoice | AllowedChoice),
]


def chat_tools(tools: Sequence[OfferedTool]) -> list[Tool]:
    """Return the functions among a request's tools, in the form of OpenAI's chat API.

    Raises a validation error: body.misfit for too many functions, body.unsupported if there are
    tools but no function.
    """
    functions = list[Tool]()
    for tool in tools:
        if isinstance(tool, FunctionTool):
            functions.append(tool.for_chat())
        elif isinstance(tool, NamespaceTool):
            functions.extend(inner.for_chat(tool.name) for inner in tool.tools)
    if len(functions) > MAX_TOOLS:
        raise misfit("tools", f"want at most {MAX_TOOLS} functions in all")
    if not functions:
        check_no_others(tools, FUNCTIONS_ALONE)
    return functions


def chat_choice(
    choice: str | FunctionChoice | AllowedChoice | None, functions: Sequence[Tool]
) -> Choice | None:
    """Convert the Responses API's tool_choice to the form of tool_choice in OpenAI's chat API.

    functions: the functions among the tools, as chat_tools returns them.
    """
    if choice is None or isinstance(choice, str):
        return choice
    if choice["type"] == "function":
        return NamedTool(type="function", function={"name": choice["name"]})
    names = list[str]()
    for tool in choice["tools"]:
        within = f"{tool['name']}."
        inner = [f.function.name for f in functions if f.function.name.startswith(within)]
        names += inner if tool["type"] == "namespace" and inner else [tool["name"]]
    return AllowedTools(tuple(names), choice["mode"] == "required")


def repeated(tools: Sequence[OfferedTool]) -> list[dict[str, Any]]:
    """Return the supported tools in the form in which the answer repeats them."""
    return [_repeated(tool) for tool in tools if not isinstance(tool, OtherTool)]


def _repeated(tool: FunctionTool | NamespaceTool) -> dict[str, Any]:
    if isinstance(tool, NamespaceTool):
        head = {"description": ""} | tool.model_dump(exclude_none=True, exclude={"tools"})
        return head | {"tools": [_repeated(inner) for inner in tool.tools]}
    return {"parameters": None, "strict": False} | tool.model_dump(exclude_none=True)
