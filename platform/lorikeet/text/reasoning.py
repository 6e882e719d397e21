"""Thinking of a model before its answer, and the parser that separates the two.

Models that think write their thinking between two tags at the beginning of an answer. Chat
templates of such models remove thinking from past turns, so a template that contains the closing
tag shows that its model thinks. Some templates write the opening tag themselves, or both tags if
the caller wants no thinking.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from lorikeet.protocol.messages import Thinking


class ThinkTags(NamedTuple):
    """Tags between which a model writes its thinking.

    opens, closes: text of the opening and the closing tag.
    word: last part of `opens` that is plain text after the tag's special token, such as "thought"
        in "<|channel>thought"; "" if the tag has no such part.
    """

    opens: str
    closes: str
    word: str = ""

    @property
    def marks(self) -> tuple[str, str]:
        """Tokens, if the tokenizer has them, with which the opening and the closing tag begin."""
        return self.opens.removesuffix(self.word), self.closes


THINK_TAGS = ThinkTags("<think>", "</think>")
MISTRAL_TAGS = ThinkTags("[THINK]", "[/THINK]")
GEMMA_TAGS = ThinkTags("<|channel>thought", "<channel|>", "thought")


def tags_of(templates: Iterable[str]) -> ThinkTags | None:
    """Return the tags of thinking that a model's chat templates show; None if they show none."""
    text = "".join(templates)
    return next(
        (tags for tags in (THINK_TAGS, MISTRAL_TAGS, GEMMA_TAGS) if tags.closes in text), None
    )


def thinking_behind(prompt: str, tags: ThinkTags = THINK_TAGS) -> Thinking:
    """Return the state of the thinking at the end of a prompt.

    It is BEGUN after an opening tag, NEVER after a closing tag, else POSSIBLE.

    prompt: text of the prompt's end.
    """
    end = prompt.rstrip()
    if end.endswith(tags.opens):
        return Thinking.BEGUN
    return Thinking.NEVER if end.endswith(tags.closes) else Thinking.POSSIBLE


def thinking_within(said: str, tags: ThinkTags = THINK_TAGS) -> Thinking:
    """Return the state of the thinking after the beginning of an answer.

    It is BEGUN if an opening tag is not closed, POSSIBLE if there is no text yet, else NEVER.

    said: the beginning of the answer, which the client's call gives.
    """
    if said.rfind(tags.opens) > said.rfind(tags.closes):
        return Thinking.BEGUN
    return Thinking.NEVER if said.strip() else Thinking.POSSIBLE


class ReasoningParser:
    """Incremental parser that removes thinking from the beginning of one choice's text.

    Thinking can only come first in an answer; later tags are text. Line ends around thinking are
    removed with the tags.

    thinks: True while the model thinks: thinking has begun and not ended.
    removed: number of characters, from the text's beginning, that are no part of the answer.
    closed_at: value of `removed` right after the closing tag; None until that tag.
    """

    def __init__(self, thinking: Thinking, tags: ThinkTags = THINK_TAGS) -> None:
        assert thinking is not Thinking.NEVER
        self._opens, self._closes = tags.opens, tags.closes
        begun = thinking is Thinking.BEGUN
        self._look: Callable[[bool], str] = self._in_thought if begun else self._before_thought
        self._spaces: list[str] = []  # whitespace before a possible opening tag
        self._rest = ""  # possibly part of a tag
        self._thought: list[str] = []  # since the last `take`
        self._has_thought = False
        self._line_ends = 0  # trailing line ends of thinking; dropped unless more thinking follows
        self.thinks = begun
        self.removed = 0
        self.closed_at: int | None = None

    def push(self, text: str, *, last: bool = False) -> str:
        """Parse new text of the choice; return the part that belongs to the answer.

        last: True if no more text follows.
        """
        self._rest += text
        return self._look(last)

    def take(self) -> str:
        """Return the thinking that was parsed since the last call of this method."""
        thought = "".join(self._thought)
        self._thought.clear()
        return thought

    # One method for each state: it consumes the beginning of `_rest` and calls the next state's.

    def _before_thought(self, last: bool) -> str:
        begun = self._rest.lstrip()
        self._spaces.append(self._rest[: len(self._rest) - len(begun)])
        self._rest = begun
        if begun.startswith(self._opens):
            self.removed += sum(map(len, self._spaces))
            self._remove(len(self._opens))
            self.thinks = True
            self._look = self._in_thought
        elif last or not self._opens.startswith(begun):
            self._rest = "".join((*self._spaces, begun))
            self._look = self._in_answer
        else:
            return ""
        return self._look(last)

    def _in_thought(self, last: bool) -> str:
        at = self._rest.find(self._closes)
        if at >= 0:
            self._think(at)
            self._remove(len(self._closes))
            self.thinks = False
            self.closed_at = self.removed
            self._look = self._behind_thought
            return self._look(last)
        tag = 0 if last else _partial_length(self._closes, self._rest)
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
    """Return the length of the longest suffix of a text that is a proper prefix of a tag."""
    return next(length for length in range(len(tag) - 1, -1, -1) if text.endswith(tag[:length]))
