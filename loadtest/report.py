"""What a load test measured: TTFT and inter-token latency for each tier an adapter was found in."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

TIERS = ("gpu", "host", "disk", "remote", "none")
PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Tier:
    """The answers to requests whose adapter was in one place. Times in seconds."""

    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Counts and percentiles; a percentile of nothing is null."""
        return {
            "requests": len(self.ttft_s),
            "ttft_s": _percentiles(self.ttft_s),
            "itl_s": _percentiles(self.itl_s),
        }


@dataclass(slots=True)
class Report:
    """Collects answers and failures as they come.

    lag_s: how late the generator itself sent a request, at worst; it is part of that request's
    TTFT. If it is not small, the generator and not the server was the limit.
    """

    tiers: dict[str, Tier] = field(default_factory=lambda: {tier: Tier() for tier in TIERS})
    failures: Counter[str] = field(default_factory=Counter)
    asked: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    lag_s: float = 0.0
    elapsed_s: float = 0.0

    def sent(self, lag_s: float) -> None:
        """A request went out, lag_s after it should have."""
        self.asked += 1
        self.lag_s = max(self.lag_s, lag_s)

    def answered(
        self,
        residency: str,
        due_s: float,
        pieces_s: list[float],
        *,
        prompt_tokens: int,
        completion_tokens: int,
    ) -> None:
        """A complete answer to a request that was due at due_s; same clock as pieces_s."""
        tier = self.tiers.setdefault(residency, Tier())
        tier.ttft_s.append(pieces_s[0] - due_s)
        tier.itl_s.extend(np.diff(pieces_s).tolist())
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens

    def failed(self, reason: str) -> None:
        """A request without a complete answer."""
        self.failures[reason] += 1

    @property
    def passed(self) -> bool:
        """Something was asked, and everything that was asked was answered."""
        return self.asked > 0 and self.everything().as_json()["requests"] == self.asked

    def everything(self) -> Tier:
        """All tiers together."""
        tiers = self.tiers.values()
        return Tier(
            [ttft for tier in tiers for ttft in tier.ttft_s],
            [itl for tier in tiers for itl in tier.itl_s],
        )

    def as_json(self, workload: Mapping[str, Any]) -> dict[str, Any]:
        """The whole report; workload: the options it was made with."""
        seconds = self.elapsed_s or float("nan")
        return {
            "workload": dict(workload),
            "asked": self.asked,
            "failed": self.asked - len(self.everything().ttft_s),
            "failures": dict(self.failures),
            "elapsed_s": self.elapsed_s,
            "generator_lag_s": self.lag_s,
            "requests_per_s": self.asked / seconds,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "completion_tokens_per_s": self.completion_tokens / seconds,
            "all": self.everything().as_json(),
            "tiers": {name: tier.as_json() for name, tier in self.tiers.items()},
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
        for name, tier in [*self.tiers.items(), ("all", self.everything())]:
            if tier.ttft_s or name == "all":
                table.add_row(
                    name, str(len(tier.ttft_s)), *_cells(tier.ttft_s), *_cells(tier.itl_s)
                )
        return table


def _percentiles(values: list[float]) -> dict[str, float | None]:
    return {f"p{p}": float(np.percentile(values, p)) if values else None for p in PERCENTILES}


def _headings(name: str) -> list[str]:
    return [f"{name}\np{p}" for p in PERCENTILES]


def _cells(values: list[float]) -> list[str]:
    found = _percentiles(values).values()
    return ["–" if value is None else f"{1000 * value:.1f}" for value in found]
