"""The one report of all load programs: what answers took, and where their adapters were found."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.table import Table

from loadtest.client import Server
from loadtest.streamed_answer import StreamedAnswer

TIERS = ("gpu", "host", "disk", "remote", "none")
"""Where an adapter can be found; none: the base model was asked."""
PERCENTILES = (50, 90, 99)
_ASKED = 200  # half of them the slowest


def quantiles(values: Sequence[float]) -> dict[str, float | None]:
    """p50, p90 and p99; None of nothing."""
    return {f"p{p}": float(np.percentile(values, p)) if len(values) else None for p in PERCENTILES}


def quantiles_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    """quantiles, in milliseconds to two decimals."""
    found = quantiles(seconds).items()
    return {name: None if value is None else round(1e3 * value, 2) for name, value in found}


def ttfts_s(answers: Iterable[StreamedAnswer]) -> list[float]:
    """Each answer's seconds from when it was due to its first tokens."""
    return [answer.deltas_s[0] - answer.due_s for answer in answers]


def gaps_s(answers: Iterable[StreamedAnswer]) -> list[float]:
    """Seconds from one delta of an answer to the next, of all answers."""
    return [later - sooner for answer in answers for sooner, later in pairwise(answer.deltas_s)]


def lateness_s(answers: Iterable[StreamedAnswer]) -> list[float]:
    """Each request's seconds from when it was due until it was sent."""
    return [answer.sent_s - answer.due_s for answer in answers]


def split(answers: Iterable[StreamedAnswer]) -> tuple[list[StreamedAnswer], Counter[str]]:
    """The answers that are whole, and how many of the others failed in which way."""
    all_answers = list(answers)
    failures = Counter(answer.failure for answer in all_answers if answer.failure)
    return [answer for answer in all_answers if not answer.failure], failures


def all_whole(answers: list[StreamedAnswer]) -> list[StreamedAnswer]:
    """The answers. Raises RuntimeError if one is not whole."""
    bad = [answer for answer in answers if answer.failure]
    if bad:
        first = f"{bad[0].failure}: {bad[0].last_bytes}"
        raise RuntimeError(f"{len(bad)} of {len(answers)} answers are bad: {first}")
    return answers


def by_residency(answers: Iterable[StreamedAnswer]) -> dict[str, list[StreamedAnswer]]:
    """Answers by where the adapter was when the request arrived; all of TIERS are there."""
    found: dict[str, list[StreamedAnswer]] = {tier: [] for tier in TIERS}
    for answer in answers:
        found.setdefault(answer.residency or "none", []).append(answer)
    return found


def stages_ms(server: Server, answers: Sequence[StreamedAnswer]) -> dict[str, dict[str, Any]]:
    """The stages of those whose first tokens took longest, and of any: quantiles of each stage.

    Asks for each request's explanation, which its gateway keeps for an hour.
    """
    by_ttft = sorted(answers, key=lambda answer: answer.due_s - answer.deltas_s[0])
    half = _ASKED // 2
    chosen = {"slowest": by_ttft[:half], "any": answers[:: max(1, len(answers) // half)][:half]}
    headers = {"Authorization": f"Bearer {server.key}"}
    told = {}
    with httpx.Client(base_url=server.url, headers=headers, timeout=30) as client:
        for name, some in chosen.items():
            found: dict[str, list[float]] = {}
            for answer in some:
                reply = client.get(f"/v1/requests/{answer.request_id}").raise_for_status()
                for stage in reply.json()["stages"]:
                    found.setdefault(stage["stage"], []).append(stage["ms"] / 1e3)
            told[name] = {stage: quantiles_ms(took_s) for stage, took_s in found.items()}
    return told


def stage_lines(stages: dict[str, dict[str, Any]]) -> list[str]:
    """To be printed: p50 and p99 of each stage, milliseconds."""
    return [
        f"  {name}, ms (p50, p99): "
        + "; ".join(f"{stage} {ms['p50']:.1f}, {ms['p99']:.1f}" for stage, ms in found.items())
        for name, found in stages.items()
    ]


@dataclass(slots=True)
class Report:
    """All answers of a run, and how long it took, for people and as JSON.

    If the generator's lag is not small, it was the limit and not the server.
    """

    answers: list[StreamedAnswer] = field(default_factory=list)
    elapsed_s: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether something was asked, and everything that was asked was answered."""
        return bool(self.answers) and not self.failures

    @property
    def failures(self) -> Counter[str]:
        """How many failed in which way."""
        return split(self.answers)[1]

    @property
    def lag_s(self) -> float:
        """How late the generator itself sent a request, at worst: a part of that one's TTFT."""
        return max(lateness_s(self.answers), default=0.0)

    def as_json(self, workload: Mapping[str, Any]) -> dict[str, Any]:
        """The whole report; workload: the options it was made with."""
        seconds = self.elapsed_s or float("nan")
        whole, failures = split(self.answers)
        output_tokens = sum(answer.request.output_tokens for answer in whole)
        return {
            "workload": dict(workload),
            "asked": len(self.answers),
            "failed": failures.total(),
            "failures": dict(failures),
            "elapsed_s": self.elapsed_s,
            "generator_lag_s": self.lag_s,
            "requests_per_s": len(self.answers) / seconds,
            "prompt_tokens": sum(answer.prompt_tokens for answer in whole),
            "completion_tokens": output_tokens,
            "completion_tokens_per_s": output_tokens / seconds,
            "all": _tier(whole),
            "tiers": {name: _tier(found) for name, found in by_residency(whole).items()},
        }

    def write(self, path: Path, workload: Mapping[str, Any]) -> None:
        """as_json(), into a file whose folder is made if need be."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.as_json(workload), indent=2) + "\n")

    def table(self) -> Table:
        """One line for each tier that any request met, and one for all."""
        table = Table(title="Latency by where the adapter was when the request arrived, ms")
        table.add_column("residency", no_wrap=True)
        for name in ("requests", *_headings("TTFT"), *_headings("ITL")):
            table.add_column(name, justify="right")
        whole, _ = split(self.answers)
        for name, found in [*by_residency(whole).items(), ("all", whole)]:
            if found or name == "all":
                times = *_cells(ttfts_s(found)), *_cells(gaps_s(found))
                table.add_row(name, str(len(found)), *times)
        return table


def _tier(answers: Sequence[StreamedAnswer]) -> dict[str, Any]:
    return {
        "requests": len(answers),
        "ttft_s": quantiles(ttfts_s(answers)),
        "itl_s": quantiles(gaps_s(answers)),
    }


def _headings(name: str) -> list[str]:
    return [f"{name}\np{p}" for p in PERCENTILES]


def _cells(seconds: list[float]) -> list[str]:
    found = quantiles(seconds).values()
    return ["–" if value is None else f"{1000 * value:.1f}" for value in found]
