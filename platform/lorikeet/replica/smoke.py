"""Smoke test of an adapter on one replica: prompts with and without it, in the same steps."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from lorikeet.errors import InvalidAdapter
from lorikeet.protocol.messages import Continuation, SmokeResult, SmokeTest
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.errors import NotFinite
from lorikeet_engine.request import Request, SamplingParams


class Completions(NamedTuple):
    """Tokens that the engine generated for one request, a sequence for each choice.

    residency: tier of the request's adapter at the start; None for the base model.
    tokens: token ids of each choice.
    """

    residency: Residency | None
    tokens: Sequence[Sequence[int]]


Run = Callable[[Request], Awaitable[Completions]]


async def run_smoke_test(
    test: SmokeTest, replica: str, decode: Callable[[list[int]], str], run: Run
) -> SmokeResult:
    """Continue each prompt of a smoke test with the adapter and without it.

    Prompts that do not invoke an activated LoRA get its invocation tokens at their ends.

    replica: name of this replica, for the result.
    decode: function that returns the text of token ids.
    run: function that runs an engine request to its end.

    Raises InvalidAdapter if the adapter's values overflow, EngineError if a request fails
    otherwise.
    """
    request_id = test.request_id
    base = Request(
        f"{request_id}-base",
        tuple(_invoking(test.adapter, tuple(ids)) for ids in test.prompts),
        SamplingParams(max_tokens=test.max_tokens, temperature=0.0),
        salt=request_id,  # no prefixes that others cached
    )
    adapted = replace(base, request_id=f"{request_id}-adapter", adapter=test.adapter)
    loading = replace(
        adapted,
        request_id=f"{request_id}-load",
        prompts=base.prompts[:1],
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
    )
    try:
        residency = (await run(loading)).residency  # so that both others run together
        without, with_adapter = await asyncio.gather(run(base), run(adapted))
    except NotFinite as error:
        raise InvalidAdapter(error.message) from error

    def continuations(made: Completions) -> tuple[Continuation, ...]:
        return tuple(Continuation(tuple(ids), decode(list(ids))) for ids in made.tokens)

    return SmokeResult(replica, residency, continuations(without), continuations(with_adapter))


def _invoking(adapter: AdapterRef, prompt: tuple[int, ...]) -> tuple[int, ...]:
    if adapter.active_from(prompt) is None:
        return (*prompt, *adapter.invocation_tokens)
    return prompt
