"""The engine's request for a call: prompts as tokens, the room for an answer, a tried grammar."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from lorikeet.answer_stream.reasoning import Thinking
from lorikeet.protocol.messages import Call
from lorikeet.replica.grammar_sandbox import GrammarSandbox
from lorikeet.replica.prompts import PromptEncoder, fit_body, max_answer_tokens
from lorikeet_engine.request import Request

T = TypeVar("T")

_ENCODERS = 2
_SHORT_PROMPT_TOKENS = 256
"""Prompts up to about this long take less time than a thread waits beside a busy event loop."""


@dataclass(frozen=True, slots=True)
class EncodedCall:
    """The engine's request for a call, and what its answer is read by.

    thinking: whether the model thinks before it answers. answer_grammar: the request's grammar but
    for thinking, behind which nobody sees at once what it costs; None if the answer is free.
    """

    request: Request
    thinking: Thinking
    answer_grammar: str | None


class RequestBuilder:
    """Builds the engine's requests, without holding up the event loop that calls it.

    Long prompts take seconds to tokenise, which threads do, and schemas to compile, which processes
    of their own try first.
    """

    def __init__(self, encoder: PromptEncoder, model: Path, max_context: int) -> None:
        """model: the base model's folder. max_context: the engine's, in tokens."""
        self._encoder, self._max_context = encoder, max_context
        self._threads = ThreadPoolExecutor(_ENCODERS, thread_name_prefix="encode")
        self._grammars = GrammarSandbox(model)

    async def build(self, call: Call) -> EncodedCall:
        """Return the engine's request for a call. Raises InvalidInput, InvalidRequest."""
        encode = partial(encode_call, encoder=self._encoder, max_context=self._max_context)
        encoded = await self._in_time(encode, call)
        if encoded.answer_grammar is None:
            return encoded
        tried = await self._with_grammar_tried(call, encoded.request, encoded.answer_grammar)
        return replace(encoded, request=tried)

    async def count_tokens(self, call: Call) -> int:
        """Return how many tokens a call's prompts have. Raises InvalidInput."""
        return sum(map(len, await self._in_time(self._encoder.encode, call)))

    def close(self) -> None:
        """End the processes that try grammars. Safe to call twice."""
        self._grammars.close()

    async def _in_time(self, encode: Callable[[Call], T], call: Call) -> T:
        if _is_short(call):
            return encode(call)
        return await asyncio.get_running_loop().run_in_executor(self._threads, encode, call)

    async def _with_grammar_tried(self, call: Call, request: Request, grammar: str) -> Request:
        """Return the request, which may wait in the engine for what is left. See `check`."""
        began_s = time.monotonic()
        await self._grammars.check(call, grammar)
        scheduling = request.scheduling
        if scheduling.max_queue_s is None:
            return request
        left_s = round(scheduling.max_queue_s - (time.monotonic() - began_s), 1)
        return replace(request, scheduling=replace(scheduling, max_queue_s=max(0.1, left_s)))


def encode_call(call: Call, encoder: PromptEncoder, max_context: int) -> EncodedCall:
    """Encode a call, whose grammar is not tried. Takes long for long prompts. Raises InvalidInput.

    max_context: the engine's, in tokens.
    """
    prompts = encoder.encode(call)
    room = max_answer_tokens(call, prompts, max_context)
    room = fit_body(call, len(prompts) * call.n, room)
    thinking = encoder.thinking(call, prompts)
    answer_grammar = grammar = encoder.grammar(call)
    if grammar is not None and thinking is not Thinking.NEVER:
        grammar = encoder.grammar(call, thinking)
    sampling = replace(
        call.sampling,
        max_tokens=room if call.max_tokens is None else min(max(call.max_tokens, 1), room),
        min_tokens=min(call.min_tokens, room),
        grammar=grammar,
    )
    request = Request(
        call.request_id,
        prompts,
        sampling,
        call.n,
        call.adapter,
        salt=call.tenant,
        scheduling=call.scheduling,
    )
    return EncodedCall(request, thinking, answer_grammar)


def _is_short(call: Call) -> bool:
    """Whether a call is encoded in a fraction of a millisecond; schemas may take long."""
    short = call.work.prompt_tokens <= _SHORT_PROMPT_TOKENS
    return short and call.tools is None and call.format is None
