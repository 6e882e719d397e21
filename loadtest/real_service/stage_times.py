"""Where the time of requests went, as the service itself tells it."""

from collections.abc import Sequence
from typing import Any

import httpx

from loadtest.client import Server
from loadtest.report import quantiles_ms
from loadtest.streamed_answer import StreamedAnswer

_ASKED = 200  # half of them the slowest


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
