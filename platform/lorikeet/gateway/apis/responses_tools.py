"""The tools of a response: functions, alone or in namespaces, and others, which are left out."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator
from typing_extensions import TypedDict

from lorikeet.gateway.apis.chat_messages import FunctionName
from lorikeet.gateway.apis.fields import KIND, refuse_kind
from lorikeet.gateway.apis.tools import (
    FUNCTIONS_ALONE,
    MAX_TOOLS,
    Function,
    Mode,
    Tool,
    refuse_long_json,
)
from lorikeet.gateway.body import Body, NoOps, misfit, unsupported


def dotted(namespace: str | None, name: str) -> str:
    """Return a function's name as the model knows it; no name has a dot of its own."""
    return name if namespace is None else f"{namespace}.{name}"


class FunctionTool(Body):
    """A function that the model may call. strict: absent means that it is not."""

    no_ops: ClassVar[NoOps] = {
        "allowed_callers": (["direct"],),
        "async": (False,),
        "defer_loading": (False,),
    }
    hints: ClassVar[dict[str, str]] = {"function": ": its name and parameters stand beside type"}

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_chat(self, namespace: str | None = None) -> Tool:
        """Return it as a chat has it, without what is absent."""
        given = self.model_dump(exclude_none=True, exclude={"type"})
        function = Function.unchecked(**given | {"name": dotted(namespace, self.name)})
        return Tool.unchecked(type="function", function=function)


class NamespaceTool(Body):
    """Functions under a name, such as those of an MCP server: the model knows them as `name.f`."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class OtherTool(Body):
    """A tool that is not served, such as web_search; functions have to be offered beside it."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})

    type: Annotated[str, Field(pattern=KIND)]


OfferedTool = FunctionTool | NamespaceTool | OtherTool


def _parse_tool(value: object) -> OfferedTool:
    match value:
        case {"type": "namespace"}:
            return NamespaceTool.model_validate(value)
        case {"type": str(kind)} if kind != "function":
            return OtherTool(type=kind)
    return FunctionTool.model_validate(value)


class FunctionChoice(TypedDict):
    """A choice of one function, which must be called."""

    type: Literal["function"]
    name: str


def _parse_choice(value: object) -> str | FunctionChoice:
    match value:
        case "none" | "auto" | "required":
            return str(value)
        case {"type": "function", "name": str(name)}:
            return FunctionChoice(type="function", name=name)
        case {"type": str(kind)} if kind != "function":
            refuse_kind(kind, (), FUNCTIONS_ALONE)
    raise ValueError('want "none", "auto", "required" or {"type": "function", "name": "…"}')


ResponseTools = Annotated[
    list[Annotated[OfferedTool, PlainValidator(_parse_tool, json_schema_input_type=OfferedTool)]],
    Field(max_length=MAX_TOOLS, fail_fast=True),
    BeforeValidator(refuse_long_json),
]
ResponseToolChoice = Annotated[
    str | FunctionChoice,
    PlainValidator(_parse_choice, json_schema_input_type=Mode | FunctionChoice),
]


def chat_tools(tools: Sequence[OfferedTool]) -> list[Tool]:
    """Return the functions as a chat has them.

    Raises a misfit for too many, and unsupported where there are tools of which none is a function.
    """
    functions = list[Tool]()
    for tool in tools:
        if isinstance(tool, FunctionTool):
            functions.append(tool.for_chat())
        elif isinstance(tool, NamespaceTool):
            functions.extend(inner.for_chat(tool.name) for inner in tool.tools)
    if len(functions) > MAX_TOOLS:
        raise misfit("tools", f"want at most {MAX_TOOLS} functions in all")
    for index, tool in enumerate(tools):
        if isinstance(tool, OtherTool) and not functions:
            raise unsupported(f"tools[{index}].type", hint=f" ({tool.type}): {FUNCTIONS_ALONE}")
    return functions


def left_out(tools: Sequence[OfferedTool]) -> tuple[str, ...]:
    """Return the kinds of tools that are not served."""
    return tuple(dict.fromkeys(tool.type for tool in tools if isinstance(tool, OtherTool)))


def repeated(tools: Sequence[OfferedTool]) -> list[dict[str, Any]]:
    """Return the tools that are served as the answer repeats them."""
    return [_repeated(tool) for tool in tools if not isinstance(tool, OtherTool)]


def _repeated(tool: FunctionTool | NamespaceTool) -> dict[str, Any]:
    if isinstance(tool, NamespaceTool):
        head = tool.model_dump(exclude_none=True, exclude={"tools"})
        return head | {"tools": [_repeated(inner) for inner in tool.tools]}
    return {"parameters": None, "strict": False} | tool.model_dump(exclude_none=True)
