"""Sender of one growing answer into the gateway's stream."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from lorikeet.apis.answer import Answer
from lorikeet.protocol.messages import AnswerHeader, Call, RunningUsage, StreamItem
from lorikeet.protocol.response_stream import ResponseStream, logged
from lorikeet.text.choice import SchemaCheck
from lorikeet_engine.request import Output, PromptLogprobs, Tokens

Abort = Callable[[str, int], object]
"""Function that aborts one choice: takes the request's id and the choice's index."""
_REPORT_EVERY = 16
"""Number of generated tokens between two RunningUsage items: the bill of an answer that its client
cuts off lacks fewer tokens than that.
"""
_PROMPT_LOGPROBS_AT_ONCE = 128
"""Number of prompt tokens whose log probabilities are formatted in one callback of the event loop.

Formatting this many tokens with 20 alternatives each takes about 4 ms. One step of the engine
computes the log probabilities of thousands of tokens.
"""


class AnswerSender:
    """Sender that turns the engine's outputs for one call into items of its answer as they arrive.

    ended: future that is done once the whole answer is sent. Of an answer that is checked against
        its format at the end, it is done once all but the last items are sent: `end` sends those.
        The future fails if Lorikeet's own code raises an exception.

    Constructor arguments:
    request_id: id of the attempt to answer the call.
    prompts: token ids of each prompt.
    stream: stream to the gateway, into which the items go.
    abort: called for each choice that has ended, for example at a stop string, while the engine
        still generates it.
    """

    def __init__(
        self,
        call: Call,
        request_id: str,
        answer: Answer,
        prompts: Sequence[Sequence[int]],
        stream: ResponseStream,
        abort: Abort,
    ) -> None:
        self._request_id = request_id
        # the log has no log probabilities of prompts and no pooled values
        self._logs = call.sampling.prompt_logprobs is None and not call.endpoint.pools
        self._log = b""  # of outputs since the last items
        self._answer, self._stream, self._abort = answer, stream, abort
        self._counter = _TokenCounter(call, prompts)
        self._header: AnswerHeader | None = None
        self._waiting = deque[Output]()  # for the header, or for the next callback
        self._is_scheduled = False
        self._event_loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._event_loop.create_future()

    def replay(self, output: Tokens) -> None:
        """Convert an output of another, lost replica, whose items the client has; send nothing.

        Call it for all these outputs before `begin`, so that the answer goes on behind them.
        """
        self._counter.add(output)
        self._counter.report()
        self._answer.take((output,))
        self._answer.stopped.clear()

    def begin(self, header: AnswerHeader) -> None:
        """Send the answer's first header, then the items from outputs that arrived before this
        call.

        header: tells the gateway that this replica has taken the call.
        """
        self._header = header
        self._stream.put(self._request_id, (header,))
        self._work()

    def take(self, output: Output) -> None:
        """Take one output of the engine and send the items that it adds to the answer. Raises
        nothing.
        """
        self._waiting.extend(_split(output))
        if self._header is not None and not self._is_scheduled:
            self._work()

    def end(self, checks: Sequence[SchemaCheck]) -> None:
        """Send the last items of an answer whose choices have been checked.

        checks: one check for each choice.
        """
        self._stream.put(self._request_id, self._answer.end(checks), ended=True)

    def _work(self) -> None:
        """Send waiting outputs. Log probabilities of a prompt's many tokens are sent in parts;
        between two parts the event loop runs other tasks.
        """
        assert self._header is not None
        self._is_scheduled = False
        while self._waiting and not self.ended.done():
            output = self._waiting.popleft()
            try:
                self._advance(output, self._header)
            except Exception as error:
                self.ended.set_exception(error)
            if isinstance(output, PromptLogprobs) and self._waiting:
                self._is_scheduled = True
                self._event_loop.call_soon(self._work)
                return

    def _advance(self, output: Output, header: AnswerHeader) -> None:
        items: list[StreamItem] = []
        if isinstance(output, Tokens):
            if self._logs:
                self._log += logged(output)
            if header.is_first and output.timings is not None:
                self._header = replace(header, status=None, load_s=output.timings.load_s)
                items.append(self._header)
            if self._counter.add(output):
                items.append(self._counter.report())
        items += self._answer.take((output,))
        for choice in self._answer.stopped:
            self._abort(self._request_id, choice)
        self._answer.stopped.clear()
        ended = self._answer.ended
        if items or ended:
            self._stream.put(self._request_id, items, self._log, ended=ended)
            self._log = b""
        if ended or self._answer.awaits_checks:
            self.ended.set_result(None)


class _TokenCounter:
    """Counter of the tokens that a call has used so far.

    A call with max_tokens 0 uses only its prompts' tokens: its answer leaves out the one token that
    the engine generates for each prompt.

    prompts: token ids of each prompt.
    """

    def __init__(self, call: Call, prompts: Sequence[Sequence[int]]) -> None:
        self._n, self._prompts = call.n, [len(prompt) for prompt in prompts]
        self._answers = call.max_tokens != 0
        self._computed: set[int] = set()
        self._prompt_tokens = self._cached_tokens = self._output_tokens = 0
        self._reported_tokens = self._reported_prompts = 0

    def add(self, output: Tokens) -> bool:
        """Count an output's generated tokens, and its prompt's tokens.

        Return whether, since the last report, a token was generated for another prompt, or at least
        _REPORT_EVERY tokens in all.
        """
        if self._answers:
            self._output_tokens += len(output.token_ids)
        prompt = output.choice // self._n
        if prompt not in self._computed:
            self._computed.add(prompt)
            self._prompt_tokens += self._prompts[prompt]
            self._cached_tokens += output.timings.cached_tokens if output.timings else 0
        made = self._output_tokens - self._reported_tokens
        return made >= _REPORT_EVERY or len(self._computed) > self._reported_prompts

    def report(self) -> RunningUsage:
        """Return the tokens of the prompts for which a token was generated, and those of all
        choices.
        """
        self._reported_tokens, self._reported_prompts = self._output_tokens, len(self._computed)
        return RunningUsage(self._output_tokens, self._prompt_tokens, self._cached_tokens)


def _split(output: Output) -> list[Output]:
    """Split an output of the engine into parts, each short enough for one event-loop callback."""
    if not isinstance(output, PromptLogprobs) or len(output.logprobs) <= _PROMPT_LOGPROBS_AT_ONCE:
        return [output]
    parts = range(0, len(output.logprobs), _PROMPT_LOGPROBS_AT_ONCE)
    return [
        replace(output, logprobs=output.logprobs[at : at + _PROMPT_LOGPROBS_AT_ONCE])
        for at in parts
    ]
