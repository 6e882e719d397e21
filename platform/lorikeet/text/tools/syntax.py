"""Syntaxes of tool calls by model family, recognised by the model's chat template."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum


class CallStyle(Enum):
    """Syntax in which a model family writes one tool call.

    JSON: an object, or an array of objects.
    NAMED: the function's name, a mark, and an object of the arguments.
    PYTHON: name(key=value, …) with literals of Python or JSON.
    GEMMA: call:name{key:value, …} with a mark of its own on both sides of each string.
    XML: tags around the function's name, and around the key and the value of each argument, which
        is bare text.
    """

    JSON = "json"
    NAMED = "named"
    PYTHON = "python"
    GEMMA = "gemma"
    XML = "xml"


@dataclass(frozen=True, slots=True)
class XmlTags:
    """Tags of one call in the style XML.

    name, key, value: text before and after the function's name, an argument's key, and its value.
    end: tag after the arguments; empty if only the closing mark of the call ends them.
    space: whitespace after the function's name, a key with a closing tag, and a value.
    pad: text on both sides of each value.
    """

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    end: str
    space: str
    pad: str = ""


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """Syntax of one model family's tool calls.

    before, between, after: text around calls as the family writes it, for grammars.
    opens, closes: marks required around calls, for parsers. Without an opening mark, an answer that
        makes calls must begin with the calls.
    style: syntax of one call.
    arguments: key of a JSON call's arguments; the key of its function is always "name". In the
        style NAMED, the mark before the arguments.
    tags: tags of a call in the style XML.
    quote: mark on both sides of each string of a call in the style GEMMA.
    """

    before: str
    between: str
    after: str
    opens: str = ""
    closes: str = ""
    style: CallStyle = CallStyle.JSON
    arguments: str = "arguments"
    tags: XmlTags | None = None
    quote: str = ""

    @property
    def tokens(self) -> tuple[str, ...]:
        """Marks around tool calls that must be decoded as text even if they are special tokens."""
        within = [self.quote, self.arguments if self.style is CallStyle.NAMED else ""]
        if self.tags is not None:
            within += [*self.tags.key, *self.tags.value, self.tags.end]
            within = [text for text in within if text.startswith("<") and text.endswith(">")]
        return tuple(text for text in (self.opens, self.closes, *within) if text)


HERMES = ToolSyntax(
    before="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    after="\n</tool_call>",
    opens="<tool_call>",
    closes="</tool_call>",
)
"""Tool calls of Hermes, Qwen 2.5, Qwen 3, SmolLM 3, Granite 4."""
EXAONE = replace(
    HERMES,
    before="<tool_call>",
    between="</tool_call>\n<tool_call>",
    after="</tool_call>",
)
"""Tool calls of EXAONE 4: as Hermes's, each on one line."""
MISTRAL = ToolSyntax(
    before="[TOOL_CALLS] [",
    between=", ",
    after="]",
    opens="[TOOL_CALLS]",
)
"""Tool calls of Mistral: all calls in one list."""
MINISTRAL = ToolSyntax(
    before="[TOOL_CALLS]",
    between="[TOOL_CALLS]",
    after="",
    opens="[TOOL_CALLS]",
    style=CallStyle.NAMED,
    arguments="[ARGS]",
)
"""Tool calls of Ministral 3, Devstral 2 and Magistral 1.2: `name[ARGS]{…}` after each mark."""
GRANITE = ToolSyntax(
    before="<|tool_call|>[",
    between=", ",
    after="]",
    opens="<|tool_call|>",
)
"""Tool calls of Granite 3: all calls in one list."""
NEMOTRON = ToolSyntax(
    before="<TOOLCALL>[",
    between=", ",
    after="]</TOOLCALL>",
    opens="<TOOLCALL>",
    closes="</TOOLCALL>",
)
"""Tool calls of Nemotron Nano 2: all calls in one list. Nemotron 3 has those of Qwen 3 Coder."""
PHI = ToolSyntax(
    before="<|tool_call|>",
    between="<|/tool_call|><|tool_call|>",
    after="<|/tool_call|>",
    opens="<|tool_call|>",
    closes="<|/tool_call|>",
)
"""Tool calls of Phi-4-mini if its own template shows the tools."""
FUNCTOOLS = ToolSyntax(
    before="functools[",
    between=", ",
    after="]",
    opens="functools",
)
"""Tool calls of Phi-4-mini with vLLM's template: all calls in one list."""
OLMO = ToolSyntax(
    before="<function_calls>",
    between="\n",
    after="</function_calls>",
    opens="<function_calls>",
    closes="</function_calls>",
    style=CallStyle.PYTHON,
)
"""Tool calls of OLMo 3 Instruct: one call a line."""
TOOL_CODE = ToolSyntax(
    before="```tool_code\n",
    between="\n",
    after="\n```",
    opens="```tool_code",
    closes="```",
    style=CallStyle.PYTHON,
)
"""Tool calls of Gemma with a template that shows this code block, as in Google's guides: one call a
line.
"""
PYTHON_LIST = ToolSyntax(before="[", between=", ", after="]", style=CallStyle.PYTHON)
"""Tool calls of Gemma 3 with vLLM's template."""
FUNCTION_GEMMA = ToolSyntax(
    before="<start_function_call>",
    between="<end_function_call><start_function_call>",
    after="<end_function_call>",
    opens="<start_function_call>",
    closes="<end_function_call>",
    style=CallStyle.GEMMA,
    quote="<escape>",
)
"""Tool calls of FunctionGemma."""
GEMMA_4 = ToolSyntax(
    before="<|tool_call>",
    between="<tool_call|><|tool_call>",
    after="<tool_call|>",
    opens="<|tool_call>",
    closes="<tool_call|>",
    style=CallStyle.GEMMA,
    quote='<|"|>',
)
"""Tool calls of Gemma 4."""
_PARAMETERS = XmlTags(
    name=("<function=", ">"),
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    end="</function>",
    space="\n",
)
QWEN_XML = ToolSyntax(
    before="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    after="\n</tool_call>",
    opens="<tool_call>",
    closes="</tool_call>",
    style=CallStyle.XML,
    tags=replace(_PARAMETERS, pad="\n"),
)
"""Tool calls of Qwen 3.5 and later, of Qwen 3 Coder, and of Nemotron 3."""
SEED = ToolSyntax(
    before="<seed:tool_call>\n",
    between="\n</seed:tool_call>\n<seed:tool_call>\n",
    after="\n</seed:tool_call>",
    opens="<seed:tool_call>",
    closes="</seed:tool_call>",
    style=CallStyle.XML,
    tags=_PARAMETERS,
)
"""Tool calls of Seed-OSS."""
_ARGUMENTS = XmlTags(
    name=("", ""),
    key=("<arg_key>", "</arg_key>"),
    value=("<arg_value>", "</arg_value>"),
    end="",
    space="",
)
GLM = ToolSyntax(
    before="<tool_call>",
    between="</tool_call><tool_call>",
    after="</tool_call>",
    opens="<tool_call>",
    closes="</tool_call>",
    style=CallStyle.XML,
    tags=_ARGUMENTS,
)
"""Tool calls of GLM 4.7 and later: name<arg_key>key</arg_key><arg_value>value</arg_value>."""
GLM_4_5 = replace(GLM, between="</tool_call>\n<tool_call>", tags=replace(_ARGUMENTS, space="\n"))
"""Tool calls of GLM 4.5 and 4.6: as those of GLM 4.7, each tag on a line."""
LLAMA = ToolSyntax(before="", between="; ", after="", arguments="parameters")
"""Tool calls of Llama 3.1 and later.

<|python_tag|> may come first; it is a special token and left out of the text.
"""

HARMONY = ToolSyntax(
    before="<|channel|>commentary to=functions.",
    between="",
    after="<|call|>",
    opens="<|channel|>",
    closes="<|call|>",
)
"""Tool calls of gpt-oss: one message each, whose header names the function.

Thinking and answer are messages too. harmony.py parses them all, by the ids of the marks.
"""


SYNTAXES: Mapping[str, ToolSyntax] = {
    name: each for name, each in globals().items() if isinstance(each, ToolSyntax)
}
"""Each syntax by the name of its constant."""


def syntax_of(template: str) -> ToolSyntax | None:
    """Return the tool-call syntax that a chat template shows; None if it shows no known one."""
    if "<|channel|>" in template and "<|message|>" in template:
        return HARMONY
    if "<function=" in template:
        if "<parameter=" not in template:
            return None
        return SEED if "<seed:tool_call>" in template else QWEN_XML
    if "<arg_key>" in template:  # within the same marks as Hermes's
        return GLM if "</arg_key><arg_value>" in template else GLM_4_5
    if "<tool_call>" in template:
        return EXAONE if "<tool_call>{" in template else HERMES
    if "<TOOLCALL>" in template:
        return NEMOTRON
    if "[TOOL_CALLS]" in template:
        if "[CALL_ID]" in template:
            return None
        return MINISTRAL if "[ARGS]" in template else MISTRAL
    if "<|/tool_call|>" in template:
        return PHI
    if "functools[" in template:
        return FUNCTOOLS
    if "<|tool_call|>" in template:
        return GRANITE
    if "<function_calls>" in template and "<invoke" not in template:
        return OLMO
    if GEMMA_4.opens in template and GEMMA_4.quote in template:
        return GEMMA_4
    if "<start_function_call>" in template:
        return FUNCTION_GEMMA
    if "```tool_code" in template:
        return TOOL_CODE
    if "a python list of the function calls" in template:
        return PYTHON_LIST
    if '"parameters": ' in template and "parameter name=" not in template:
        return LLAMA  # else the parameters of the tools that it shows, and calls in tags
    return None
