"""Engine request of a call: its prompts, limits of the answer, and a checked grammar."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from lorikeet.apis.answer import RESPONSE_COPIES
from lorikeet.errors import InvalidInput
from lorikeet.protocol.messages import Call, EncodedCall, Endpoint, Thinking
from lorikeet.replica.grammar_matcher import MORE_TOKENS
from lorikeet.replica.grammar_sandbox import GrammarSandbox, SchemasRefused, Unchecked
from lorikeet.text.choice import SaidChoice, SchemaCheck
from lorikeet.text.grammars.answer_grammar import answer_grammar
from lorikeet.text.grammars.harmony_grammar import harmony_grammar, tried_harmony_grammar
from lorikeet.text.grammars.schema_faults import (
    AnswerSchema,
    checked_schemas,
    ignored_keywords,
    whole_schema,
    without_schemas,
)
from lorikeet.text.harmony import place_behind
from lorikeet.text.prompt_echoes import PromptEchoes, prompt_echoes
from lorikeet.text.prompts import MAX_OWN_TOKENIZERS, PromptEncoder
from lorikeet.text.tenant_threads import TenantThreads, ThreadCache
from lorikeet.text.tools.syntax import HARMONY
from lorikeet_engine.adapter import Pooling
from lorikeet_engine.errors import EngineOverloaded
from lorikeet_engine.request import Request

T = TypeVar("T")

MOST_LOGPROBS = 2**19
"""Limit on the number of log probabilities in one JSON body. Replica and gateway hold the whole
body in memory.

At this limit, they take about 40 MB.
"""
MOST_PROMPT_IDS = 2**20
"""Limit on the number of prompt token ids that an answer's choices repeat: 7 MB of JSON."""
MOST_ECHOED = 2**22
"""Limit on the number of prompt characters that an answer's choices repeat."""
_AGAIN_S = 0.5
"""Seconds before a grammar that there was no time to try is tried again."""
_SHORT_PROMPT_TOKENS = 4096
"""Limit on the tokens of prompts that are prepared on the event loop.

Preparing so short prompts takes less time than waiting for a thread.
"""


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """Engine request of a call, and the context that decodes its answer.

    thinking: whether the model, at the end of the prompt, never thinks, may begin to or has begun.
    tried_grammar: grammar that the sandbox tries: the request's grammar without its rules for
        thinking, which may be any text. None if the answer is unconstrained.
    echoes: the prompts in the forms in which the answer repeats them.
    ignored: names of fields and of schemas' keywords that have no effect on the answer.
    checked: schemas that the finished answer is checked against, because the grammar enforces only
        a part of them.
    """

    request: Request
    thinking: Thinking
    tried_grammar: str | None
    echoes: PromptEchoes
    ignored: tuple[str, ...]
    checked: tuple[AnswerSchema, ...] = ()


class RequestBuilder:
    """Builder of engine requests that does not block the calling event loop.

    Threads write grammars, and a child process compiles each grammar once as a trial, before the
    engine compiles it.
    """

    def __init__(self, encoder: PromptEncoder, model: Path, max_context: int) -> None:
        """Create the threads.

        encoder: encoder of the base model's prompts, whose syntax of tool calls, tags of thinking
            and vocabulary grammars need.
        model: folder of the base model.
        max_context: the engine's longest sequence, tokens.
        """
        self._encoder, self._max_context = encoder, max_context
        self._threads = TenantThreads()
        self._own = ThreadCache(encoder.with_vocabulary, MAX_OWN_TOKENIZERS, self._threads)
        self._grammars = GrammarSandbox(model)

    async def encoder_of(self, encoded: EncodedCall) -> PromptEncoder:
        """Return an encoder with the tokenizer, the syntax of tool calls and the tags of thinking
        of the call's adapter, to read the answer. The encoder cannot encode prompts.
        """
        encoder = self._encoder
        if encoded.tokenizer is not None:
            encoder = await self._own.get(encoded.call.tenant, encoded.tokenizer)
        return encoder.with_marks(encoded.marks)

    async def build(self, encoded: EncodedCall) -> PreparedCall:
        """Return the engine's request for a call. Only calls with tools or a format have a grammar
        (text/grammars/).

        A call that goes on with an answer waits until its grammar can be tried, as long as its
        gateway waits for this replica.

        Raises InvalidInput if the call asks for an impossible answer, for example by a faulty
        schema, EngineOverloaded if the grammar of a new call cannot be tried in time.
        """
        goes_on = bool(encoded.log)
        if goes_on:
            scheduling = replace(encoded.call.scheduling, max_queue_s=None)
            encoded = replace(encoded, call=replace(encoded.call, scheduling=scheduling))
        call, encoder = encoded.call, await self.encoder_of(encoded)
        prepare = partial(prepare_call, encoded, encoder)
        prepared = await self._run(partial(prepare, self._max_context), encoded)
        if prepared.tried_grammar is None:
            return prepared
        try:
            return await self._tried(call, prepared, patient=goes_on)
        except SchemasRefused as error:
            refused = error.schemas
        loose = without_schemas(call, refused)
        plain = replace(prepared, ignored=encoded.ignored)
        held = await self._run(partial(with_grammar, plain, loose, encoder), encoded)
        ignored = (*held.ignored, *map(whole_schema, refused))
        held = replace(held, ignored=ignored, checked=(*held.checked, *refused))
        return await self._tried(loose, held, patient=goes_on)

    async def check(
        self, call: Call, schemas: Sequence[AnswerSchema], said: Sequence[SaidChoice]
    ) -> list[SchemaCheck]:
        """Check the finished choices of an answer against its schemas. Raises EngineClosed if the
        replica is closing.

        schemas: schemas of the call that its grammar does not fully enforce.
        said: text and tool calls of each choice.
        """
        checks = list[SchemaCheck]()
        failure: str | None = None
        for index, choice in enumerate(said):
            if failure is not None:  # the other choices would take as long
                checks.append(SchemaCheck(index, None, failure))
                continue
            try:
                found = await self._broken(call, schemas, choice)
                checks.append(SchemaCheck(index, found is None, found))
            except Unchecked as error:
                failure = str(error)
                checks.append(SchemaCheck(index, None, failure))
        return checks

    async def _broken(
        self, call: Call, schemas: Sequence[AnswerSchema], said: SaidChoice
    ) -> str | None:
        """Return the first violation of the schemas in a choice, in words; None if there is none.

        Raises Unchecked if the choice cannot be checked.
        """
        by_tool = {each.tool: each.schema for each in schemas}
        for tool, text in said.calls or [(None, said.text)]:
            if tool not in by_tool:
                continue
            found = await self._grammars.broken(call, by_tool[tool], text)
            if found is not None:
                return found if tool is None else f"{tool}: {found}"
        return None

    def close(self) -> None:
        """End the process that tries grammars. Safe to call twice."""
        self._grammars.close()

    async def _run(self, prepare: Callable[[], T], encoded: EncodedCall) -> T:
        if _is_short(encoded):
            return prepare()
        return await self._threads.run(encoded.call.tenant, prepare)

    async def _tried(self, call: Call, prepared: PreparedCall, *, patient: bool) -> PreparedCall:
        """Try a call's grammar in the sandbox; return the prepared call.

        The time that the trial took is subtracted from the time that the call may still wait in
        the engine's queue.

        patient: try again while there is no time to try it, instead of raising EngineOverloaded.

        Raises InvalidInput if the grammar is invalid or too complex (SchemasRefused if the schemas
        at fault may be left out of it), and EngineOverloaded if it cannot be tried in time.
        """
        began_s = time.monotonic()
        assert prepared.tried_grammar is not None
        while True:
            try:
                await self._grammars.check(call, prepared.tried_grammar)
                break
            except EngineOverloaded:
                if not patient:
                    raise
            await asyncio.sleep(_AGAIN_S)
        request, scheduling = prepared.request, prepared.request.scheduling
        if scheduling.max_queue_s is None:
            return prepared
        left_s = round(scheduling.max_queue_s - (time.monotonic() - began_s), 1)
        scheduling = replace(scheduling, max_queue_s=max(0.1, left_s))
        return replace(prepared, request=replace(request, scheduling=scheduling))


def prepare_call(encoded: EncodedCall, encoder: PromptEncoder, max_context: int) -> PreparedCall:
    """Prepare a call without trying its grammar.

    max_context: the engine's longest sequence, tokens.

    Raises InvalidInput if the call asks for an impossible answer, for example of more log
    probabilities than fit one body.
    """
    call, prompts = encoded.call, tuple(map(tuple, encoded.prompts))
    limit = max_answer_tokens(encoded, max_context)
    check_prompt_echoes(call, prompts)
    echoes = prompt_echoes(encoded)
    check_echo(call, echoes)
    prompt_logprobs = count_prompt_logprobs(call, prompts)
    limit = max_tokens_in_body(call, len(prompts) * call.n, limit, prompt_logprobs)
    sampling = replace(
        call.sampling,
        max_tokens=limit if call.max_tokens is None else min(max(call.max_tokens, 1), limit),
        min_tokens=min(call.min_tokens, limit),
    )
    request = Request(
        encoded.attempt_id,
        prompts,
        sampling,
        call.n,
        call.adapter,
        salt=call.tenant,
        scheduling=call.scheduling,
        pools=_pooling(call),
    )
    prepared = PreparedCall(request, encoded.thinking, None, echoes, encoded.ignored)
    if call.tools is None and call.format is None:
        return prepared
    return with_grammar(prepared, call, encoder)


def _pooling(call: Call) -> Pooling | None:
    """Return the way in which a call's prompts are pooled; None if they are not."""
    if call.embedder is not None:
        return call.embedder.pooling
    return Pooling.LAST if call.endpoint.pools else None


def with_grammar(prepared: PreparedCall, call: Call, encoder: PromptEncoder) -> PreparedCall:
    """Return a prepared call whose answer is constrained by the grammar of `call`, if it needs one.

    call: the prepared call, or a copy of it with looser schemas.

    Raises InvalidInput if a schema or format cannot be a grammar.
    """
    tried: str | None
    if encoder.syntax is HARMONY and call.endpoint.writes_messages:
        place = place_behind(prepared.request.prompts[0], encoder.vocabulary)
        tried = tried_harmony_grammar(call, encoder.vocabulary)
        grammar = harmony_grammar(call, encoder.vocabulary, place)
    else:
        tried = grammar = answer_grammar(call, encoder.syntax, encoder.vocabulary)
    if grammar is None:
        return prepared
    if prepared.thinking is not Thinking.NEVER:
        known = encoder.syntax, encoder.vocabulary, prepared.thinking, encoder.think_tags
        grammar = answer_grammar(call, *known)
    mark = MORE_TOKENS if encoder.adds_tokens else ""
    sampling = replace(prepared.request.sampling, grammar=f"{mark}{grammar}")
    return replace(
        prepared,
        request=replace(prepared.request, sampling=sampling),
        tried_grammar=None if tried is None else f"{mark}{tried}",
        ignored=(*prepared.ignored, *ignored_keywords(call)),
        checked=tuple(checked_schemas(call)),
    )


def max_answer_tokens(call: EncodedCall, engine_context: int) -> int:
    """Return the limit on each choice's tokens: context limit less longest prompt, at least 1.

    The context limit is the engine's or the call's (of its tenant or key), whichever is smaller.
    The engine refuses a request that exceeds its own context.

    engine_context: the engine's longest sequence, tokens.
    """
    limit = call.call.max_context
    context = engine_context if limit is None else min(engine_context, limit)
    return max(1, context - max(map(len, call.prompts)))


def check_prompt_echoes(call: Call, prompts: Sequence[Sequence[int]]) -> None:
    """Raise InvalidInput if the answer would repeat more prompt token ids than fit one body."""
    if not call.return_token_ids or call.endpoint is not Endpoint.COMPLETIONS:
        return  # a chat returns its prompt once
    ids = call.n * sum(map(len, prompts))
    if ids > MOST_PROMPT_IDS:
        raise InvalidInput(
            f"{call.n} choices that repeat the {ids // call.n} token ids of their prompts: one "
            f"answer holds at most {MOST_PROMPT_IDS}. Send fewer prompts, or a smaller n",
            param="return_token_ids",
        )


def check_echo(call: Call, echoes: PromptEchoes) -> None:
    """Raise InvalidInput if the answer would repeat more prompt text than fits one body."""
    characters = call.n * sum(map(len, echoes.texts))
    if characters > MOST_ECHOED:
        raise InvalidInput(
            f"{call.n} choices that begin with the {characters // call.n} characters of their "
            f"prompts: one answer holds at most {MOST_ECHOED}. Send fewer prompts, or a smaller n",
            param="echo",
        )


def count_prompt_logprobs(call: Call, prompts: Sequence[Sequence[int]]) -> int:
    """Return the number of log probabilities of prompt tokens in an answer's body.

    Raises InvalidInput if the body cannot hold them together with the log probabilities of each
    choice's first token.
    """
    logprobs, of_prompt = call.sampling.logprobs, call.prompt_logprobs
    each = call.n * (1 + logprobs) if call.echo and logprobs is not None else 0
    if of_prompt is not None:
        each += (1 + of_prompt) * (call.n if call.endpoint is Endpoint.COMPLETIONS else 1)
    tokens = sum(map(len, prompts))
    first_tokens = 0 if logprobs is None else len(prompts) * call.n * (1 + logprobs)
    if each and tokens * each + first_tokens > MOST_LOGPROBS:
        raise InvalidInput(
            f"prompts of {tokens} tokens with {each} log probabilities each: one answer holds at "
            f"most {MOST_LOGPROBS}. Send fewer or shorter prompts, or ask for fewer",
            param="logprobs" if of_prompt is None else "prompt_logprobs",
        )
    return tokens * each


def max_tokens_in_body(call: Call, choices: int, limit: int, prompt_logprobs: int = 0) -> int:
    """Return the limit on each choice's tokens that makes their log probabilities fit into one
    body.

    The result is the argument `limit` for a streamed chat or completion, and without logprobs.

    Raises InvalidInput if the request's max_tokens does not fit.

    choices: number of choices of all prompts.
    limit: limit on each choice's tokens without regard to log probabilities.
    prompt_logprobs: number of log probabilities of prompt tokens in the same body.
    """
    logprobs = call.sampling.logprobs
    repeats = call.endpoint is Endpoint.RESPONSES  # its last four events repeat all logprobs
    if logprobs is None or (call.stream and not repeats):
        return limit
    copies = RESPONSE_COPIES if call.stream else 1
    left = MOST_LOGPROBS - prompt_logprobs
    most = left // (choices * (1 + logprobs) * copies)
    max_tokens = min(call.max_tokens or 1, limit)
    if max_tokens > most:
        raise InvalidInput(
            f"an answer of up to {choices} × {max_tokens} tokens with {1 + logprobs} log "
            f"probabilities each: one body holds at most {left}. "
            f"{'Want' if prompt_logprobs else 'Set stream, or'} a smaller max_tokens",
            param="logprobs",
        )
    return min(limit, most)


def _is_short(encoded: EncodedCall) -> bool:
    """Return True if preparing the call takes a fraction of a millisecond.

    Calls with tools or a format are never short: their schemas may take long.
    """
    call, tokens = encoded.call, sum(map(len, encoded.prompts))
    return tokens <= _SHORT_PROMPT_TOKENS and call.tools is None and call.format is None
