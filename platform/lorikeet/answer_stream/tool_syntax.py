"""How models write calls of tools: as their chat templates show them.

Which of these a model has, if it has one of them, is read off its template.
"""

from dataclasses import dataclass
from enum import Enum


class CallStyle(Enum):
    """How one call is written.

    JSON: an object, or an array of them. PYTHON: name(key=value, …), of literals as Python or JSON
    has them. GEMMA: call:name{key:value, …}, with <escape> around strings.
    """

    JSON = "json"
    PYTHON = "python"
    GEMMA = "gemma"


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """How a family of models writes calls.

    before, between, after: what it writes around one call or several. opens, closes: what has to be
    around calls, beside whitespace; where nothing opens them, an answer calls from its first
    character or not at all. arguments: the key of a JSON call's arguments; its name is at "name".
    """

    before: str
    between: str
    after: str
    opens: str = ""
    closes: str = ""
    style: CallStyle = CallStyle.JSON
    arguments: str = "arguments"

    @property
    def tokens(self) -> tuple[str, ...]:
        """What is text even where it is a special token: what opens and closes calls or strings."""
        quote = "<escape>" if self.style is CallStyle.GEMMA else ""
        return tuple(text for text in (self.opens, self.closes, quote) if text)

    @property
    def can_be_held(self) -> bool:
        """Whether a grammar can hold a model to it, and to schemas of arguments."""
        return self.style is not CallStyle.GEMMA


HERMES = ToolSyntax(
    before="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    after="\n</tool_call>",
    opens="<tool_call>",
    closes="</tool_call>",
)
"""Hermes, Qwen 2.5, Qwen 3, SmolLM 3."""
MISTRAL = ToolSyntax(
    before="[TOOL_CALLS] [",
    between=", ",
    after="]",
    opens="[TOOL_CALLS]",
)
"""Mistral: one list of all calls."""
GRANITE = ToolSyntax(
    before="<|tool_call|>[",
    between=", ",
    after="]",
    opens="<|tool_call|>",
)
"""Granite 3: one list of all calls."""
PHI = ToolSyntax(
    before="<|tool_call|>",
    between="<|/tool_call|><|tool_call|>",
    after="<|/tool_call|>",
    opens="<|tool_call|>",
    closes="<|/tool_call|>",
)
"""Phi-4-mini, where its template shows the tools."""
FUNCTOOLS = ToolSyntax(
    before="functools[",
    between=", ",
    after="]",
    opens="functools",
)
"""Phi-4-mini under vLLM's template: one list of all calls."""
OLMO = ToolSyntax(
    before="<function_calls>",
    between="\n",
    after="</function_calls>",
    opens="<function_calls>",
    closes="</function_calls>",
    style=CallStyle.PYTHON,
)
"""OLMo 3 Instruct: a call a line."""
TOOL_CODE = ToolSyntax(
    before="```tool_code\n",
    between="\n",
    after="\n```",
    opens="```tool_code",
    closes="```",
    style=CallStyle.PYTHON,
)
"""Gemma, where its template shows this block of code, as Google's guides do: a call a line."""
PYTHON_LIST = ToolSyntax(before="[", between=", ", after="]", style=CallStyle.PYTHON)
"""Gemma 3 under vLLM's template."""
FUNCTION_GEMMA = ToolSyntax(
    before="<start_function_call>",
    between="<end_function_call><start_function_call>",
    after="<end_function_call>",
    opens="<start_function_call>",
    closes="<end_function_call>",
    style=CallStyle.GEMMA,
)
"""FunctionGemma."""
LLAMA = ToolSyntax(before="", between="; ", after="", arguments="parameters")
"""Llama 3.1 and later; <|python_tag|>, which may come first, is a special token and no text."""


def syntax_of(template: str) -> ToolSyntax | None:
    """Return the syntax that a chat template shows; None if it is none of these."""
    if "<tool_call>" in template and "<function=" not in template:
        return HERMES
    if "[TOOL_CALLS]" in template and "[ARGS]" not in template:
        return MISTRAL
    if "<|/tool_call|>" in template:
        return PHI
    if "functools[" in template:
        return FUNCTOOLS
    if "<|tool_call|>" in template:
        return GRANITE
    if "<function_calls>" in template and "<invoke" not in template:
        return OLMO
    if "<start_function_call>" in template:
        return FUNCTION_GEMMA
    if "```tool_code" in template:
        return TOOL_CODE
    if "a python list of the function calls" in template:
        return PYTHON_LIST
    if '"parameters": ' in template:
        return LLAMA
    return None
