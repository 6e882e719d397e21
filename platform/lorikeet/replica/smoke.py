"""Runs a trial on one replica: with an adapter and without it, in the same steps."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from lorikeet.errors import InvalidAdapter
from lorikeet.protocol.messages import Continuation, SmokeResult, SmokeTest
from lorikeet.replica.prompts import PromptEncoder
from lorikeet_engine.adapter import Residency
from lorikeet_engine.errors import NotFinite
from lorikeet_engine.request import Request, SamplingParams

Run = Callable[[Request], Awaitable[tuple[Residency | None, Sequence[Sequence[int]]]]]
"""Runs a request; where its adapter was, and the tokens of each choice."""


async def run_smoke_test(
    trial: SmokeTest, replica: str, encoder: PromptEncoder, run: Run
) -> SmokeResult:
    """Continue every prompt twice. Raises EngineError, InvalidAdapter if it overflows."""
    request_id = trial.request_id
    base = Request(
        f"{request_id}-base",
        tuple(map(encoder.encode_turn, trial.prompts)),
        SamplingParams(max_tokens=trial.max_tokens, temperature=0.0),
        salt=request_id,  # nobody's cached prefixes
    )
    adapted = replace(base, request_id=f"{request_id}-adapter", adapter=trial.adapter)
    loading = replace(
        adapted,
        request_id=f"{request_id}-load",
        prompts=base.prompts[:1],
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
    )
    try:
        residency, _ = await run(loading)  # else the base model would be done before it is there
        (_, without), (_, with_it) = await asyncio.gather(run(base), run(adapted))
    except NotFinite as error:
        raise InvalidAdapter(error.message) from error

    def said(choices: Sequence[Sequence[int]]) -> tuple[Continuation, ...]:
        return tuple(
            Continuation(tuple(tokens), encoder.backend.decode(list(tokens))) for tokens in choices
        )

    return SmokeResult(replica, residency, said(without), said(with_it))
