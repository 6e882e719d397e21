"""Classified prompts per second, beside prompts of as many tokens that generate one token.

python -m loadtest.engine.classification --json classification.json [--config qwen3-8b]

Both sets of requests have adapters on all linears; those of the first also have a classification
head. The sets are computed by turns. Prints a row.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

import torch

from loadtest.engine import harness, plain
from loadtest.engine.offline import Work
from loadtest.engine.random_adapters import LABELS, Targets
from lorikeet_engine.adapter import Pooling
from lorikeet_engine.engine import Engine
from lorikeet_engine.request import Failed, Pooled, Request, Tokens

TURNS = 5
_CHECKED = 4
WORKS = (
    Work("64 adapters with heads", 512, 1, adapters=64, on=Targets.CLASSES),
    Work("64 adapters", 512, 1, adapters=64),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Rates of prompts that heads score, and of prompts that generate one token.

    classified_per_s, generated_per_s: requests per second, medians of TURNS.
    ratio: classified_per_s as a multiple of generated_per_s.
    off: largest difference between the scores of a request alone and beside all others, as a share
        of the request's largest absolute score.
    """

    work: Work
    classified_per_s: float
    generated_per_s: float
    ratio: float
    off: float


def measure(engine: Engine, work: Work, without: Work) -> Row:
    """Check some scores, then time both sets of requests by turns.

    work: requests for adapters with heads.
    without: as many requests for adapters without.

    Raises AssertionError if scores depend on the other requests of a step.
    """
    together = _requests(engine, work, 0)
    scores, _ = _run(engine, together)
    _run(engine, _requests(engine, without, 0))
    off = 0.0
    for request in together[:: len(together) // _CHECKED | 1]:
        again = replace(request, request_id=f"{request.request_id} alone", salt="alone")
        (alone,), _ = _run(engine, [again])
        beside = scores[together.index(request)]
        assert len(alone) == LABELS
        off = max(off, float((alone - beside).abs().max() / alone.abs().max()))
    most = plain.tolerance(engine._runner.model.dtype)
    assert off <= most, f"scores differ by {off:.4f} in another batch, and {most:.4f} is allowed"
    rates: list[tuple[float, float]] = []
    for turn in range(1, TURNS + 1):
        classified, generated = (
            each.requests / _run(engine, _requests(engine, each, turn))[1]
            for each in (work, without)
        )
        rates.append((classified, generated))
    classified, generated = map(median, zip(*rates, strict=True))
    return Row(work, classified, generated, classified / generated, off)


def measure_all(engine: Engine, works: Iterable[Work]) -> list[Row]:
    """Measure the first of two sets of requests beside the second; print the row."""
    work, without = works
    return harness.show([measure(engine, work, without)])


def _requests(engine: Engine, work: Work, run: int) -> list[Request]:
    drawn = work.draw(engine.info.vocab_size, run)
    if work.on is not Targets.CLASSES:
        return drawn
    return [replace(request, pools=Pooling.LAST) for request in drawn]


def _run(engine: Engine, requests: list[Request]) -> tuple[list[torch.Tensor], float]:
    """Compute requests that are submitted at once; return scores and the seconds that it took.

    The scores are in the order of the requests: none for requests that generate.
    """
    scores, left = dict[str, torch.Tensor](), len(requests)
    began_s = time.perf_counter()
    for request in requests:
        engine.submit(request)
    while left:
        engine.wait(1.0)
        for output in engine.step():
            if isinstance(output, Failed):
                raise output.error
            if isinstance(output, Pooled):
                scores[output.request_id] = torch.tensor(output.values)
            left -= isinstance(output, Tokens) and output.finish is not None
    took_s = time.perf_counter() - began_s
    return [scores[each.request_id] for each in requests if each.request_id in scores], took_s


if __name__ == "__main__":
    harness.run(__doc__, "classification", WORKS, measure_all)
