"""Grammars of answers behind thinking, in llguidance's dialect of Lark."""

import json
import re

from lorikeet.answer_stream.detokenizer import Vocabulary
from lorikeet.answer_stream.reasoning import CLOSES, OPENS, Thinking

_START = re.compile("^start:", re.MULTILINE)


def behind_thinking(answer: str, thinking: Thinking, vocabulary: Vocabulary) -> str:
    """Return a grammar of thinking, which is any text, and then of what another grammar allows.

    answer: in Lark. Where thinking is only possible, an answer may begin at once. What is thought
    has to end: with the closing tag the answer's grammar begins, behind two line ends at most.
    """
    assert thinking is not Thinking.NEVER
    opens, closes = (vocabulary.added.get(tag) for tag in (OPENS, CLOSES))
    # tokens that are words to a client, and to a grammar no text
    words = sorted({*vocabulary.added.values()} - vocabulary.special - {closes})
    begun = "thought LINE_ENDS? answer"
    opening = "opening" if opens is None else f"(opening | <[{opens}]>)"
    start = begun if thinking is Thinking.BEGUN else f"({opening} {begun}) | answer"
    inside = f"(THOUGHT <[{','.join(map(str, words))}]>)* " if words else ""
    closing = "closing" if closes is None else f"(closing | THOUGHT <[{closes}]>)"
    rules = [
        f"start: {start}",
        _START.sub("answer:", answer, count=1),
        f"thought: {inside}{closing}",
        # readers take letters for the token
        f"closing[lazy]: THOUGHT {json.dumps(CLOSES)}",
        "THOUGHT: /(?s:.*)/",
        r"LINE_ENDS: /\n{1,2}/",
    ]
    if thinking is Thinking.POSSIBLE:
        rules.append(f"opening[lazy]: {json.dumps(OPENS)}")
    return "\n".join(rules)
