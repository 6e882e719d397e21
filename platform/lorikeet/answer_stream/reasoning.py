"""What a model thinks before it answers, apart from the answer.

Families that think write it between two tags at the beginning of an answer, and their chat
templates take such text out of past turns; by that they are known. Some templates write the first
tag themselves, or both where the caller wants no thinking.
"""

from collections.abc import Callable
from enum import Enum

OPENS, CLOSES = "<think>", "</think>"
THINK_TAGS = (OPENS, CLOSES)


class Thinking(Enum):
    """Whether a model thinks before an answer, as far as the prompt says."""

    NEVER = "never"
    POSSIBLE = "possible"
    BEGUN = "begun"


def thinking_behind(prompt: str) -> Thinking:
    """Return what may come behind a prompt, of whose text the end is enough."""
    end = prompt.rstrip()
    if end.endswith(OPENS):
        return Thinking.BEGUN
    return Thinking.NEVER if end.endswith(CLOSES) else Thinking.POSSIBLE


def thinking_within(said: str) -> Thinking:
    """Return what may come where an answer goes on with a text that is its beginning."""
    if said.rfind(OPENS) > said.rfind(CLOSES):
        return Thinking.BEGUN
    return Thinking.NEVER if said.strip() else Thinking.POSSIBLE


class ReasoningParser:
    """Takes what a model thinks off the beginning of one choice's text, however that is cut.

    Only the first thing that an answer has can be thinking; tags behind it are text. Line ends
    around thinking are dropped with the tags. `thinks` while thinking has begun and not ended;
    `removed` counts the characters that are no part of the answer, as far as that is known;
    `closed_at` is how many they were when the closing tag had come.
    """

    def __init__(self, thinking: Thinking) -> None:
        assert thinking is not Thinking.NEVER
        begun = thinking is Thinking.BEGUN
        self._look: Callable[[bool], str] = self._in_thought if begun else self._before_thought
        self._spaces: list[str] = []  # before what may be an opening tag
        self._rest = ""  # may be a part of a tag
        self._thought: list[str] = []  # for the delta that is being made
        self._has_thought = False
        self._line_ends = 0  # behind what was thought; dropped unless more is
        self.thinks = begun
        self.removed = 0
        self.closed_at: int | None = None

    def push(self, text: str, *, last: bool = False) -> str:
        """Take new text, `last` if no more comes; return what of it is the answer's."""
        self._rest += text
        return self._look(last)

    def take(self) -> str:
        """Return what was thought since this was called last."""
        thought = "".join(self._thought)
        self._thought.clear()
        return thought

    # Each looks for one thing at the rest's beginning, and hands on what is behind it.

    def _before_thought(self, last: bool) -> str:
        begun = self._rest.lstrip()
        self._spaces.append(self._rest[: len(self._rest) - len(begun)])
        self._rest = begun
        if begun.startswith(OPENS):
            self.removed += sum(map(len, self._spaces))
            self._remove(len(OPENS))
            self.thinks = True
            self._look = self._in_thought
        elif last or not OPENS.startswith(begun):
            self._rest = "".join((*self._spaces, begun))
            self._look = self._in_answer
        else:
            return ""
        return self._look(last)

    def _in_thought(self, last: bool) -> str:
        at = self._rest.find(CLOSES)
        if at >= 0:
            self._think(at)
            self._remove(len(CLOSES))
            self.thinks = False
            self.closed_at = self.removed
            self._look = self._behind_thought
            return self._look(last)
        tag = 0 if last else _partial_length(CLOSES, self._rest)
        self._think(len(self._rest) - tag)
        return ""

    def _behind_thought(self, last: bool) -> str:
        self._remove(len(self._rest) - len(self._rest.lstrip("\n")))
        if not self._rest:
            return ""
        self._look = self._in_answer
        return self._look(last)

    def _in_answer(self, last: bool) -> str:  # noqa: ARG002
        text, self._rest = self._rest, ""
        return text

    def _think(self, length: int) -> None:
        text = self._remove(length)
        if not self._has_thought:
            text = text.lstrip("\n")
        if thought := text.rstrip("\n"):
            self._thought.append("\n" * self._line_ends + thought)
            self._has_thought, self._line_ends = True, 0
        self._line_ends += len(text) - len(thought)

    def _remove(self, length: int) -> str:
        removed, self._rest = self._rest[:length], self._rest[length:]
        self.removed += length
        return removed


def _partial_length(tag: str, text: str) -> int:
    """Return the length of the longest end of a text that begins a tag and is not all of it."""
    return next(length for length in range(len(tag) - 1, -1, -1) if text.endswith(tag[:length]))
