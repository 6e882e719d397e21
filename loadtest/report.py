"""Report of a load program: latencies, failures and stages of its answers.

The quantiles are printed by all load programs; `Report` is the table and the JSON of the Locust
test.
"""

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
"""Tiers in which an adapter can be found; "none": the base model was requested."""
PERCENTILES = (50, 90, 99)
_ASKED = 200  # requests whose stages are fetched, half of them the slowest


def quantiles(values: Sequence[float]) -> dict[str, float | None]:
    """Return p50, p90 and p99; None each if there are no values."""
    return {f"p{p}": float(np.percentile(values, p)) if len(values) else None for p in PERCENTILES}


def quantiles_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    """Return `quantiles` in milliseconds, rounded to two decimals."""
    found = quantiles(seconds).items()
    return {name: None if value is None else round(1e3 * value, 2) for name, value in found}


def ttfts_s(answers: Iterable[StreamedAnswer]) -> list[float]:
    """Return each answer's seconds from its due time to its first tokens."""
    return [answer.deltas_s[0] - answer.due_s for answer in answers]


def gaps_s(answers: Iterable[StreamedAnswer]) -> list[float]:
    """Return the seconds between consecutive deltas of each answer, over all answers."""
    return [later - sooner for answer in answers for sooner, later in pairwise(answer.deltas_s)]


def lateness_s(answers: Iterable[StreamedAnswer]) -> list[float]:
    """Return each request's seconds from its due time until it was sent."""
    return [answer.sent_s - answer.due_s for answer in answers]


def split(answers: Iterable[StreamedAnswer]) -> tuple[list[StreamedAnswer], Counter[str]]:
    """Return the complete answers, and the counts of failures by kind."""
    all_answers = list(answers)
    failures = Counter(answer.failure for answer in all_answers if answer.failure)
    return [answer for answer in all_answers if not answer.failure], failures


def all_whole(answers: list[StreamedAnswer]) -> list[StreamedAnswer]:
    """Return the answers unchanged. Raise RuntimeError if any is incomplete."""
    bad = [answer for answer in answers if answer.failure]
    if bad:
        first = f"{bad[0].failure}: {bad[0].last_bytes}"
        raise RuntimeError(f"{len(bad)} of {len(answers)} answers are incomplete: {first}")
    return answers


def by_residency(answers: Iterable[StreamedAnswer]) -> dict[str, list[StreamedAnswer]]:
    """Group answers by the adapter's tier at arrival; every tier of TIERS is a key."""
    found: dict[str, list[StreamedAnswer]] = {tier: [] for tier in TIERS}
    for answer in answers:
        found.setdefault(answer.residency or "none", []).append(answer)
    return found


def stages_ms(server: Server, answers: Sequence[StreamedAnswer]) -> dict[str, dict[str, Any]]:
    """Return quantiles of each stage, for the slowest requests and for a sample of all.

    Each request's stages are fetched from the service (`GET /v1/requests/ID`), whose gateway keeps
    them for an hour. The slowest requests are those with the longest time to first token.
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
    """Format p50 and p99 of each stage in milliseconds, one line per group."""
    return [
        f"  {name}, ms (p50, p99): "
        + "; ".join(f"{stage} {ms['p50']:.1f}, {ms['p99']:.1f}" for stage, ms in found.items())
        for name, found in stages.items()
    ]


@dataclass(slots=True)
class Report:
    """Answers and duration of a run, shown as a table and written as JSON.

    A large `lag_s` means that the load generator was the limit, not the server.
    """

    answers: list[StreamedAnswer] = field(default_factory=list)
    elapsed_s: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether at least one request was sent and every request got a complete answer."""
        return bool(self.answers) and not self.failures

    @property
    def failures(self) -> Counter[str]:
        """Counts of failures by kind."""
        return split(self.answers)[1]

    @property
    def lag_s(self) -> float:
        """Largest delay with which the generator sent a request. The delay counts in the request's
        TTFT.
        """
        return max(lateness_s(self.answers), default=0.0)

    def as_json(self, workload: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole report.

        workload: options of the run.
        """
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
        """Write `as_json` to a file; make its folder if necessary."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.as_json(workload), indent=2) + "\n")

    def table(self) -> Table:
        """Return a table with a row for each tier in which a request found its adapter, and a row
        for all requests.
        """
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
