"""The engine's request for a call: prompts as tokens, the room for an answer, a tried grammar."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

from lorikeet.answer_stream.answer import RESPONSE_COPIES
from lorikeet.answer_stream.prompt_echoes import PromptEchoes, prompt_echoes
from lorikeet.answer_stream.reasoning import Thinking
from lorikeet.errors import ContextLengthExceeded, InvalidInput
from lorikeet.protocol.messages import Call, Endpoint
from lorikeet.replica.grammars.answer_grammar import answer_grammar
from lorikeet.replica.grammars.sandbox import GrammarSandbox
from lorikeet.replica.prompts import PromptEncoder
from lorikeet_engine.request import Request

T = TypeVar("T")

MOST_LOGPROBS = 2**19
"""The most of one body, which a replica and a gateway hold whole: 40 MB of short tokens."""
MOST_PROMPT_IDS = 2**20
"""The most of one answer, whose choices repeat their prompt's: 7 MB."""
MOST_ECHOED = 2**22
"""The most characters of one answer's prompts, which each of its choices begins with."""
_ENCODERS, _OF_A_TENANT = 3, 2
"""Threads, and how many of them may work for one tenant: its long prompts delay its own."""
_SHORT_PROMPT_TOKENS = 256
"""Prompts up to about this long take less time than a thread waits beside a busy event loop."""


@dataclass(frozen=True, slots=True)
class EncodedCall:
    """The engine's request for a call, and what its answer is read by.

    thinking: whether the model thinks before it answers. tried_grammar: the request's grammar but
    for thinking, behind which nobody sees at once what it costs; None if the answer is free.
    echoes: what the answer repeats of the prompts.
    """

    request: Request
    thinking: Thinking
    tried_grammar: str | None
    echoes: PromptEchoes


class RequestBuilder:
    """Builds the engine's requests, without holding up the event loop that calls it.

    Long prompts take seconds to tokenise, which threads do, and schemas to compile, which processes
    of their own try first.
    """

    def __init__(self, encoder: PromptEncoder, model: Path, max_context: int) -> None:
        """model: the base model's folder. max_context: the engine's, in tokens."""
        self._encoder, self._max_context = encoder, max_context
        self._threads = ThreadPoolExecutor(_ENCODERS, thread_name_prefix="encode")
        self._turns = WeakValueDictionary[str, asyncio.Semaphore]()  # by tenant
        self._grammars = GrammarSandbox(model)

    async def build(self, call: Call) -> EncodedCall:
        """Return the engine's request for a call. Raises InvalidInput, InvalidRequest.

        Only a call that asks for tools or a format may have a grammar (grammar.py and its like).
        """
        encode = partial(encode_call, encoder=self._encoder, max_context=self._max_context)
        encoded = await self._in_time(encode, call)
        if encoded.tried_grammar is None:
            return encoded
        tried = await self._with_grammar_tried(call, encoded.request, encoded.tried_grammar)
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
        turn = self._turns.setdefault(call.tenant, asyncio.Semaphore(_OF_A_TENANT))
        await turn.acquire()
        loop, working = asyncio.get_running_loop(), self._threads.submit(encode, call)

        def done(_: Future[T]) -> None:  # also where the client has left, but the thread goes on
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(turn.release)

        working.add_done_callback(done)
        return await asyncio.wrap_future(working)

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

    A plain chat is rendered by the model's template and tokenised, and has no grammar.

    max_context: the engine's, in tokens.
    """
    prompts = encoder.encode(call)
    room = max_answer_tokens(call, prompts, max_context)
    check_prompt_echoes(call, prompts)
    echoes = prompt_echoes(call, prompts, encoder.backend)
    check_echo(call, echoes)
    room = fit_body(call, len(prompts) * call.n, room, prompts_logprobs(call, prompts))
    thinking = encoder.thinking(call, prompts)
    tried_grammar = grammar = answer_grammar(call, encoder.syntax, encoder.vocabulary)
    if grammar is not None and thinking is not Thinking.NEVER:
        grammar = answer_grammar(call, encoder.syntax, encoder.vocabulary, thinking)
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
    return EncodedCall(request, thinking, tried_grammar, echoes)


def max_answer_tokens(call: Call, prompts: Sequence[Sequence[int]], engine_context: int) -> int:
    """Return the most tokens of a choice, at least 1: what the longest prompt leaves free.

    Raises ContextLengthExceeded where prompt and max_tokens are more than the caller's own limit.
    What the engine's context does not hold is the engine's to refuse.
    """
    longest = max(map(len, prompts))
    limit = call.max_context
    if limit is None:
        return max(1, engine_context - longest)
    if longest + (call.max_tokens or 1) > limit:
        if longest < limit:
            param = "max_tokens"
        else:
            param = "prompt" if call.endpoint is Endpoint.COMPLETIONS else "messages"
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens for this tenant or key. "
            f"However, the prompt has {longest} and the answer up to {call.max_tokens or 1}: "
            f"shorten the prompt, or ask for fewer tokens",
            param=param,
        )
    return max(1, min(engine_context, limit) - longest)


def check_prompt_echoes(call: Call, prompts: Sequence[Sequence[int]]) -> None:
    """Check that one body holds the prompts' token ids, where asked for. Raises InvalidInput."""
    if not call.return_token_ids or call.endpoint is not Endpoint.COMPLETIONS:
        return  # a chat's prompt is told once
    ids = call.n * sum(map(len, prompts))
    if ids > MOST_PROMPT_IDS:
        raise InvalidInput(
            f"{call.n} choices that tell the {ids // call.n} tokens of their prompts: "
            f"{MOST_PROMPT_IDS} is the most of one answer. Send fewer prompts, or a smaller n",
            param="return_token_ids",
        )


def check_echo(call: Call, echoes: PromptEchoes) -> None:
    """Check that one body holds the prompts that its choices begin with. Raises InvalidInput."""
    characters = call.n * sum(map(len, echoes.texts))
    if characters > MOST_ECHOED:
        raise InvalidInput(
            f"{call.n} choices that begin with the {characters // call.n} characters of their "
            f"prompts: {MOST_ECHOED} is the most of one answer. Send fewer prompts, or a smaller n",
            param="echo",
        )


def prompts_logprobs(call: Call, prompts: Sequence[Sequence[int]]) -> int:
    """Return how many log probabilities of prompts' tokens the body of an answer has.

    Raises InvalidInput where one body does not hold them and a token of each choice.
    """
    logprobs, of_prompt = call.sampling.logprobs, call.prompt_logprobs
    each = call.n * (1 + logprobs) if call.echo and logprobs is not None else 0
    if of_prompt is not None:
        each += (1 + of_prompt) * (call.n if call.endpoint is Endpoint.COMPLETIONS else 1)
    tokens = sum(map(len, prompts))
    first_tokens = 0 if logprobs is None else len(prompts) * call.n * (1 + logprobs)
    if each and tokens * each + first_tokens > MOST_LOGPROBS:
        raise InvalidInput(
            f"prompts of {tokens} tokens with {each} log probabilities each: {MOST_LOGPROBS} is "
            "the most of one answer. Send fewer or shorter prompts, or ask for fewer",
            param="logprobs" if of_prompt is None else "prompt_logprobs",
        )
    return tokens * each


def fit_body(call: Call, choices: int, room: int, of_prompts: int = 0) -> int:
    """Return how much of the room of each choice one body holds; all of it for a chat's stream.

    of_prompts: prompts_logprobs, which the body holds as well. Raises InvalidInput where the
    caller's own max_tokens is more than that.
    """
    logprobs = call.sampling.logprobs
    repeats = call.endpoint is Endpoint.RESPONSES  # its last four events have all of them
    if logprobs is None or (call.stream and not repeats):
        return room
    copies = RESPONSE_COPIES if call.stream else 1
    left = MOST_LOGPROBS - of_prompts
    most = left // (choices * (1 + logprobs) * copies)
    max_tokens = min(call.max_tokens or 1, room)
    if max_tokens > most:
        raise InvalidInput(
            f"an answer of up to {choices} × {max_tokens} tokens with {1 + logprobs} log "
            f"probabilities each: {left} is the most without stream. "
            f"{'Want' if of_prompts else 'Set stream, or'} a smaller max_tokens",
            param="logprobs",
        )
    return min(room, most)


def _is_short(call: Call) -> bool:
    """Whether a call is encoded in a fraction of a millisecond; schemas may take long."""
    short = call.work.prompt_tokens <= _SHORT_PROMPT_TOKENS
    return short and call.tools is None and call.format is None
