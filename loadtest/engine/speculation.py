"""Speculation, on and off by turns: output tokens per second, and tokens a step.

python -m loadtest.engine.speculation --json speculation.json [--config qwen3-8b] [--rows '32*']
    [--speculation lookup|mtp|draft]

The answers are given beforehand, so that a model of random weights has the acceptance of an
extraction: COPIED of their tokens come in spans from the prompt. Each step computes and samples as
ever; only then do the given tokens replace the sampled ones. Before that, answers that the model
chooses itself are compared with the plain path; where they repeat themselves, they have drafts.

Predictions of an MTP head or a draft LoRA are replaced in the same way: RIGHT of them come true.
The draft LoRA is one of the adapters.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from statistics import median
from typing import Any

import numpy as np
import torch

from loadtest.engine import harness
from loadtest.engine.offline import Run, Work, generate
from lorikeet_engine.adapter import Adapter, AdapterRef
from lorikeet_engine.device.async_copies import upload
from lorikeet_engine.engine import Engine
from lorikeet_engine.request import FinishReason, Request
from lorikeet_engine.sampling.draws import SamplingRow
from lorikeet_engine.sampling.processed_logprobs import ProcessedLogprobs
from lorikeet_engine.sampling.sampler import Sampler
from lorikeet_engine.scheduling.recent_answers import RecentAnswers
from lorikeet_engine.scheduling.sequence import Sequence as DecodedSequence

COPIED = 0.7
RIGHT = {"mtp": 0.8, "draft": 3.0}
"""Mean number of predictions that come true, the first ones, by EngineSettings.speculation."""
TURNS = 3
_SPAN = 28  # mean number of tokens of a copied span

WORKS = (
    Work("1 extraction", 1024, 512, adapters=1, requests=1),
    Work("32 extractions, 32 adapters", 1024, 256, adapters=32, requests=32),
    Work("256 extractions, 32 adapters", 256, 128, adapters=32),
    Work("1 plain", 1024, 512, adapters=1, requests=1),
    Work("32 plain, 32 adapters", 1024, 256, adapters=32, requests=32),
    Work("256 plain, 32 adapters", 256, 128, adapters=32),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Speed of a set of requests with and without speculation, each the median of TURNS turns.

    off_per_s, on_per_s: output tokens per second, prefill included.
    gain: on_per_s as a multiple of off_per_s.
    accepted: share of the drafted tokens that were accepted; None without drafts.
    tokens_a_step: output tokens of a request for each step that it takes part in, with speculation.
    off_gap_ms, on_gap_ms: 99th percentile of the time between the tokens of consecutive steps.
    shortfall: as in throughput.Row, with speculation.
    """

    work: Work
    off_per_s: float
    on_per_s: float
    gain: float
    accepted: float | None
    tokens_a_step: float
    off_gap_ms: float
    on_gap_ms: float
    shortfall: float


class GivenTokens(Sampler):
    """Sampler whose tokens are replaced by given answers.

    texts [requests, tokens] int64: answer of the request whose seed is the row's number; None to
        keep the sampled tokens.
    """

    texts: np.ndarray[Any, np.dtype[np.int64]] | None = None

    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
        processed: ProcessedLogprobs | None = None,
    ) -> torch.Tensor:
        """Return the given tokens, once the device has sampled others."""
        sampled = super().sample(logits, rows, processed)
        if self.texts is None:
            return sampled
        last = self.texts.shape[1] - 1
        given = [self.texts[row.seed, min(row.step, last)] for row in rows]
        return sampled.copy_(upload(np.array(given, np.int64), logits.device))


def measure(engine: Engine, work: Work) -> Row:
    """Compare a set of requests with and without speculation.

    engine: engine with speculation.
    """
    assert isinstance(engine._sampler, GivenTokens), "an engine that samples its own answers"
    shortfall = harness.check(engine, work)
    budget = engine._parts.draft_budget
    assert budget is not None, "an engine without speculation"
    budget.answers, budget._pause = RecentAnswers(), 0  # the check's predictions were not given
    off, on = list[Run](), list[Run]()
    before, steps = engine.status(), 0
    for turn in range(TURNS):
        with _without_drafts(engine):
            off.append(_run(engine, work, turn))
        started = engine.status().step_sequences
        on.append(_run(engine, work, turn))
        steps += round(engine.status().step_sequences.total - started.total)
    after = engine.status()
    drafted = after.drafted_tokens - before.drafted_tokens
    accepted = after.accepted_tokens - before.accepted_tokens
    off_per_s, on_per_s = (median(run.tokens_per_s for run in runs) for runs in (off, on))
    return Row(
        work,
        off_per_s,
        on_per_s,
        gain=on_per_s / off_per_s,
        accepted=accepted / drafted if drafted else None,
        tokens_a_step=TURNS * work.requests * work.output_tokens / steps,
        off_gap_ms=_p99_ms(off),
        on_gap_ms=_p99_ms(on),
        shortfall=shortfall,
    )


def measure_all(engine: Engine, works: Iterable[Work]) -> list[Row]:
    """Measure sets of requests in order; print each row as it is measured."""
    engine._sampler = GivenTokens(engine._sampler.penalties)
    works = list(works)
    if engine._settings.speculation == "draft":
        (drawn, *_) = works[0].draw(engine.info.vocab_size, 1)
        _pin_draft(engine, drawn.adapter)
    return harness.show(measure(engine, work) for work in works)


def _pin_draft(engine: Engine, adapter: Adapter | None) -> None:
    budget = engine._parts.draft_budget
    assert isinstance(adapter, AdapterRef)
    assert budget is not None
    engine.pin(adapter, draft=True)
    while budget.adapter is None:
        engine.wait(1.0)
        engine.step()


def text(prompt: tuple[int, ...], tokens: int, copied: float, seed: int) -> list[int]:
    """Return an answer of spans copied from a prompt, with random tokens between them.

    copied: share of the tokens that are copied.
    """
    rng, answer = np.random.default_rng(seed), list[int]()
    while len(answer) < tokens:
        length = int(rng.geometric(1 / _SPAN)) if copied else 0
        own = max(1, round(length * (1 - copied) / copied)) if copied else tokens
        answer += rng.choice(prompt, own).tolist()
        begin = int(rng.integers(max(1, len(prompt) - length)))
        answer += prompt[begin : begin + length]
    return answer[:tokens]


def _run(engine: Engine, work: Work, turn: int) -> Run:
    """Run the requests with given answers. Raises AssertionError if other tokens come."""
    drawn = work.draw(engine.info.vocab_size, 1 + turn)
    requests = [_seeded(request, seed) for seed, request in enumerate(drawn)]
    copied = COPIED if "extraction" in work.name else 0.0
    texts = [text(r.prompts[0], work.output_tokens, copied, i) for i, r in enumerate(requests)]
    sampler = engine._sampler
    assert isinstance(sampler, GivenTokens)
    sampler.texts = np.array(texts)
    try:
        with _given_predictions(texts, RIGHT.get(engine._settings.speculation, 0.0)):
            run = generate(engine, requests)
    finally:
        sampler.texts = None
    for answer, given in zip(run.answers, texts, strict=True):
        name = answer.request.request_id
        assert answer.tokens == given, f"{name}: speculation changed the answer"
    return run


def _p99_ms(runs: list[Run]) -> float:
    return median(harness.percentiles(run.steps_ms(), 99)[0] for run in runs)


def _seeded(request: Request, seed: int) -> Request:
    return replace(request, sampling=replace(request.sampling, seed=seed))


@contextmanager
def _given_predictions(texts: Sequence[Sequence[int]], right: float) -> Iterator[None]:
    """Replace predicted tokens by those of given answers, and of wrong ones.

    right: mean number of predicted tokens that come true, the first ones.
    """
    accept, chance = DecodedSequence.accept, Random(0)

    def given(
        sequence: DecodedSequence, token: int, predicted: tuple[int, ...] = ()
    ) -> FinishReason | None:
        begin = len(sequence.tokens) - sequence.prompt_length + 1
        said = texts[sequence.seed][begin : begin + len(predicted)]
        true = int(right + chance.random())
        return accept(sequence, token, (*said[:true], *(token ^ 1 for token in said[true:])))

    DecodedSequence.accept = given  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        DecodedSequence.accept = accept  # type: ignore[method-assign]


@contextmanager
def _without_drafts(engine: Engine) -> Iterator[None]:
    scheduler = engine._scheduler
    drafts, scheduler._drafts = scheduler._drafts, None
    try:
        yield
    finally:
        scheduler._drafts = drafts


if __name__ == "__main__":
    sources = "lookup", "mtp", "draft"
    harness.run(__doc__, "speculation", WORKS, measure_all, speculation=sources)
