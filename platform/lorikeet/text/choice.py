"""One choice of an answer, of any API: its text, thinking, tool calls and end."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import NamedTuple

from lorikeet.text.logprobs import LogprobsJson


class Ending(Enum):
    """Reason for the end of a choice; the values are OpenAI's.

    STOP: the model ended it, or a stop string or token did, possibly within a tool call.
    LENGTH: the token limit was reached.
    TOOL_CALLS: the choice called tools, and all calls are complete.
    """

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """Next part of a tool call.

    index: position of the call in its choice.
    arguments: next part of the arguments' JSON text.
    id, name: set in the first part of a call only. Parsers set the name, Answer sets the id.
    """

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished choice of an answer.

    text: all text of the answer.
    finish: reason for the end.
    calls: all parts of the choice's tool calls.
    logprobs: log probabilities of the text's tokens; None if not asked for.
    stop: the stop string that ended the choice; None if no stop string did.
    reasoning: thinking before the answer.
    prompt_logprobs: JSON of the prompt's log probabilities; None if not asked for.
    token_ids: ids of all tokens of the choice; None if not asked for.
    prompt_token_ids: JSON of the prompt's token ids; None if not asked for.
    """

    text: str
    finish: Ending
    calls: Sequence[ToolCallPart] = ()
    logprobs: LogprobsJson | None = None
    stop: str | None = None
    reasoning: str = ""
    prompt_logprobs: bytes | None = None
    token_ids: Sequence[int] | None = None
    prompt_token_ids: bytes | None = None


class SaidChoice(NamedTuple):
    """Text and tool calls of one finished choice, for checks against schemas.

    calls: name and arguments of each call.
    """

    text: str
    calls: Sequence[tuple[str | None, str]]


@dataclass(frozen=True, slots=True)
class SchemaCheck:
    """Check of one finished choice against the schemas that its grammar does not fully enforce.

    index: index of the choice.
    valid: whether the choice matches the schemas; None if the choice could not be checked.
    error: the first violation, as a place in the choice and a keyword of the schema, or the reason
        why the choice could not be checked; None if the choice is valid.
    """

    index: int
    valid: bool | None
    error: str | None = None


def whole_calls(parts: Sequence[ToolCallPart]) -> list[tuple[str | None, str]]:
    """Return the name and the whole arguments of each tool call of a choice, joined from
    its parts.
    """
    calls = [list(deltas) for _, deltas in groupby(parts, lambda delta: delta.index)]
    return [(each[0].name, "".join(delta.arguments for delta in each)) for each in calls]
