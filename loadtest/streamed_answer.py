"""Streamed answer as a load program records it: arrival times of deltas, completeness, failure.

Nothing is parsed while deltas arrive; the answer is judged after its end.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

_LONGEST = 40  # bytes of the longest match of `tokens` in any format
_END = b"0\r\n\r\n"
_KEPT = 4096  # bytes at the end of an answer that are kept for judging
_CODE = re.compile(rb'"(?:error_)?code": ?"([^"]+)"')

Clock = Callable[[], float]
"""Function that returns the seconds since the start of the run."""


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """Byte patterns that recognise parts of a streamed answer of one API.

    tokens: matches once in each event with tokens, and in no other event.
    end: matches in the last event.
    cut_off: matches in an answer that reached its token limit.
    prompt_tokens, output_tokens: names of the token counts.
    """

    tokens: re.Pattern[bytes]
    end: re.Pattern[bytes]
    cut_off: re.Pattern[bytes]
    prompt_tokens: bytes
    output_tokens: bytes


OPENAI = StreamFormat(
    re.compile(rb'"text": ?"|"content": ?"[^"]'),  # the first event of a chat has an empty content
    re.compile(rb"data: \[DONE\]"),
    re.compile(rb'"finish_reason": ?"length"'),
    b"prompt_tokens",
    b"completion_tokens",
)
"""Format of chat completions and completions."""
RESPONSES = StreamFormat(
    re.compile(rb"event: response\.output_text\.delta"),
    re.compile(rb"event: response\.(in)?complete"),
    re.compile(rb'"reason": ?"max_output_tokens"'),
    b"input_tokens",
    b"output_tokens",
)
MESSAGES = StreamFormat(
    re.compile(rb'"type": ?"text_delta"'),
    re.compile(rb"event: message_stop"),
    re.compile(rb'"stop_reason": ?"max_tokens"'),
    b"input_tokens",
    b"output_tokens",
)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Request for a stream of `output_tokens` tokens.

    seed: seed of the random prompt and of sampling.
    format: format of the answer.
    """

    model: str
    prompt_tokens: int
    output_tokens: int
    seed: int
    temperature: float = 0.0
    format: StreamFormat = OPENAI


@dataclass(slots=True)
class StreamedAnswer:
    """Record of one request and its answer. Times are seconds from the start of the run.

    due_s: planned time of sending.
    sent_s: actual time of sending.
    deltas_s: times at which tokens arrived, one or several at a time.
    events: number of events with tokens in each delta.
    failure: "" for a complete answer with as many tokens as requested; else a short text, by which
        failures are grouped.
    last_bytes: end of a failed answer.
    """

    request: LoadRequest
    due_s: float
    sent_s: float = 0.0
    deltas_s: list[float] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    ended_s: float = 0.0
    request_id: str = ""
    replica: str = ""
    residency: str = ""
    prompt_tokens: int = 0
    failure: str = "not answered"
    last_bytes: str = ""


class AnswerReader:
    """Reader of one HTTP response, head included, that fills a `StreamedAnswer`."""

    def __init__(self, answer: StreamedAnswer, now_s: Clock) -> None:
        self.answer, self.now_s = answer, now_s
        self._format = answer.request.format
        self._head = b""
        self._tail = b""
        self._left: int | None = None  # bytes left of a body with Content-Length
        self._begun = False

    def feed(self, data: bytes) -> bool:
        """Record received data; return whether the answer has ended and been judged."""
        now_s = self.now_s()
        if not self._begun:
            self._head += data
            head, blank, data = self._head.partition(b"\r\n\r\n")
            if not blank:
                return False
            self._head, self._begun = head, True
            length = self._header(b"content-length")
            self._left = int(length) if length else None
        seen = self._tail[1 - _LONGEST :]
        if events := sum(end > len(seen) for end in self._ends(seen + data)):
            self.answer.deltas_s.append(now_s)
            self.answer.events.append(events)
        self._tail = (self._tail + data)[-_KEPT:]
        if self._left is None:
            ended = self._tail.endswith(_END)
        else:
            self._left -= len(data)
            ended = self._left <= 0
        if ended:
            self.end()
        return ended

    def end(self) -> None:
        """Judge an answer that has ended: read its headers, token counts and failure."""
        if self.answer.ended_s:
            return
        answer = self.answer
        answer.ended_s = self.now_s()
        answer.request_id = self._header(b"x-request-id")
        answer.replica = self._header(b"x-lorikeet-replica")
        answer.residency = self._header(b"x-lorikeet-residency")
        answer.prompt_tokens = self._counted(self._format.prompt_tokens)
        answer.failure = self._failure()
        if answer.failure:
            answer.last_bytes = self._tail[-300:].decode(errors="replace")

    def fail(self, error: OSError) -> None:
        """Judge an answer whose connection broke, with the error as its failure."""
        self.end()
        self.answer.failure, self.answer.last_bytes = type(error).__name__, repr(error)

    def _header(self, name: bytes) -> str:
        found = re.search(rb"\r\n" + name + rb": *([^\r]*)", self._head, re.IGNORECASE)
        return found[1].decode() if found else ""

    def _ends(self, data: bytes) -> list[int]:
        return [found.end() for found in self._format.tokens.finditer(data)]

    def _counted(self, name: bytes) -> int:
        """Return the token count of this name in the answer: the last one, since some streams send
        earlier counts too.
        """
        found = re.findall(rb'"' + name + rb'": ?(\d+)', self._tail)
        return int(found[-1]) if found else 0

    def _failure(self) -> str:
        """Return the failure of the answer; "" if the answer is complete."""
        status, wanted = self._head[9:12].decode(), self.answer.request.output_tokens
        error = re.search(rb'"error": ?\{', self._tail)
        code = _CODE.search(self._tail, error.start()) if error else None
        why = code[1].decode() if code else ""
        if status != "200":
            return f"{status} {why}".strip() or "no answer"
        if error:
            return f"mid-stream: {why}"
        if not self._format.end.search(self._tail):
            return "the stream broke off"
        ended = self._format.cut_off.search(self._tail)
        if not ended or self._counted(self._format.output_tokens) != wanted:
            return f"not {wanted} tokens"
        return "" if self.answer.deltas_s else "an answer without text"
