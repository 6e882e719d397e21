"""Grammar of an answer: its format or tool calls, preceded by the model's thinking."""

import json
import re
from collections.abc import Collection

from lorikeet.protocol.messages import Call, Thinking
from lorikeet.text.detokenizer import Vocabulary
from lorikeet.text.grammars.format_grammar import format_grammar, format_rule
from lorikeet.text.grammars.tool_grammar import call_grammar, text_grammar
from lorikeet.text.reasoning import THINK_TAGS, ThinkTags
from lorikeet.text.tools.syntax import ToolSyntax

_START = re.compile("^start:", re.MULTILINE)


def answer_grammar(
    call: Call,
    syntax: ToolSyntax | None,
    vocabulary: Vocabulary,
    thinking: Thinking = Thinking.NEVER,
    tags: ThinkTags = THINK_TAGS,
) -> str | None:
    """Return the grammar of a call's answer; None if the answer is unconstrained.

    syntax: the model's syntax of tool calls; required if the call has tools.
    vocabulary: tokens of the model's tokenizer.
    thinking: whether the model may think, or has begun to; the grammar allows thinking before
        the answer.
    tags: the model's tags of thinking.
    """
    excluded = () if thinking is Thinking.NEVER else tags.marks
    grammar = _without_thinking(call, syntax, vocabulary, excluded)
    if grammar is None or thinking is Thinking.NEVER:
        return grammar
    return _behind_thinking(grammar, thinking, tags, vocabulary)


def _without_thinking(
    call: Call, syntax: ToolSyntax | None, vocabulary: Vocabulary, excluded: Collection[str]
) -> str | None:
    """Return the grammar of the part of an answer that follows the thinking.

    excluded: tags of thinking, which a text must not contain; empty if the model does not think.
    """
    if (use := call.tools) is not None:
        assert syntax is not None
        if use.forced or call.format is not None:
            return call_grammar(use, syntax, vocabulary, call.format)
        return text_grammar(use, syntax, vocabulary, excluded) if use.strict else None
    if call.format is None or not excluded:
        return format_grammar(call.format) if call.format is not None else None
    return f"start: {format_rule(call.format)}"


def _behind_thinking(
    answer: str, thinking: Thinking, tags: ThinkTags, vocabulary: Vocabulary
) -> str:
    """Return a grammar of thinking, which is any text, followed by an answer.

    The closing tag ends the thinking. The answer follows after at most two line ends. If thinking
    is only possible and not yet begun, the answer may also begin at once.
    """
    opens, closes = map(vocabulary.added.get, tags.marks)
    # added tokens that clients see as text, but that grammars do not match as text
    words = sorted({*vocabulary.added.values()} - vocabulary.special - {closes})
    begun = "thought LINE_ENDS? answer"
    of_token = f"<[{opens}]>" + (f" {json.dumps(tags.word)}" if tags.word else "")
    opening = "opening" if opens is None else f"(opening | {of_token})"
    start = begun if thinking is Thinking.BEGUN else f"({opening} {begun}) | answer"
    inside = f"(THOUGHT <[{','.join(map(str, words))}]>)* " if words else ""
    closing = "closing" if closes is None else f"(closing | THOUGHT <[{closes}]>)"
    rules = [
        f"start: {start}",
        _START.sub("answer:", answer, count=1),
        f"thought: {inside}{closing}",
        # parsers read the tag in letters like its token
        f"closing[lazy]: THOUGHT {json.dumps(tags.closes)}",
        "THOUGHT: /(?s:.*)/",
        r"LINE_ENDS: /\n{1,2}/",
    ]
    if thinking is Thinking.POSSIBLE:
        rules.append(f"opening[lazy]: {json.dumps(tags.opens)}")
    return "\n".join(rules)
