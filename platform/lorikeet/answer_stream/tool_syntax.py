"""How models write calls of tools: as their chat templates show them.

These syntaxes cover most families that this engine runs; which one a model has, if it has one of
them, is read off its template.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """How a family of models writes calls.

    before, between, after: what it writes around the JSON of one call or several. arguments: the
    key of a call's arguments; its name is at "name". opens, closes: what has to be around such
    JSON, beside whitespace; where nothing opens it, an answer calls from its first character or not
    at all.
    """

    before: str
    between: str
    after: str
    arguments: str
    opens: str = ""
    closes: str = ""

    @property
    def tokens(self) -> tuple[str, ...]:
        """What is text even where it is a special token: what opens and closes."""
        return tuple(text for text in (self.opens, self.closes) if text)


HERMES = ToolSyntax(
    before="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    after="\n</tool_call>",
    arguments="arguments",
    opens="<tool_call>",
    closes="</tool_call>",
)
"""Hermes, Qwen 2.5, Qwen 3, SmolLM 3."""
MISTRAL = ToolSyntax(
    before="[TOOL_CALLS] [",
    between=", ",
    after="]",
    arguments="arguments",
    opens="[TOOL_CALLS]",
)
"""Mistral: one list of all calls."""
GRANITE = ToolSyntax(
    before="<|tool_call|>[",
    between=", ",
    after="]",
    arguments="arguments",
    opens="<|tool_call|>",
)
"""Granite 3: one list of all calls."""
PHI = ToolSyntax(
    before="<|tool_call|>",
    between="<|/tool_call|><|tool_call|>",
    after="<|/tool_call|>",
    arguments="arguments",
    opens="<|tool_call|>",
    closes="<|/tool_call|>",
)
"""Phi-4-mini, where its template shows the tools."""
FUNCTOOLS = ToolSyntax(
    before="functools[",
    between=", ",
    after="]",
    arguments="arguments",
    opens="functools",
)
"""Phi-4-mini under vLLM's template: one list of all calls."""
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
    if '"parameters": ' in template:
        return LLAMA
    return None
