"""Load test, run as by `make loadtest`, against a server with known delays."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lorikeet.apis.chat.answer import failed_completion_event

ROOT = Path(__file__).parents[2]
KEYS = {"acme": "lk_acme", "bolt": "lk_bolt"}


@dataclass(frozen=True)
class Run:
    """One finished run of Locust."""

    exit_code: int
    output: str
    report: dict[str, Any]


class Locust:
    """Runs the load test; options as on the command line, without the dashes."""

    def __init__(self, folder: Path) -> None:
        self.keys, self.out = folder / "keys", folder / "out" / "report.json"
        self.keys.mkdir()
        for tenant, key in KEYS.items():
            (self.keys / tenant).write_text(f"{key}\n")

    def __call__(self, url: str, **options: object) -> Run:
        usual = {"keys": self.keys, "out": self.out, "popularity": "uniform", "seed": 1}
        given = usual | {name.replace("_", "-"): value for name, value in options.items()}
        flags = [part for name, value in given.items() for part in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless"]
        done = subprocess.run(
            [*command, "--host", url, *flags],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return Run(done.returncode, done.stdout + done.stderr, json.loads(self.out.read_text()))


@pytest.fixture
def locust(tmp_path: Path) -> Locust:
    return Locust(tmp_path)


def test_the_report_has_the_plan_and_the_servers_delays(server: Any, locust: Locust) -> None:
    run = locust(server.url, rate=15, duration=4, lengths="fixed:60/6", base_share=0.25)
    assert run.exit_code == 0, run.output
    assert run.report["failed"] == 0
    assert run.report["asked"] == len(server.seen) - 2, "two requests measured the tokenizer"
    assert run.report["prompt_tokens"] == 60 * run.report["asked"]
    assert run.report["completion_tokens"] == 6 * run.report["asked"]
    assert {body["max_tokens"] for body in server.seen[2:]} == {6}
    for tier in ("none", "gpu", "host", "disk"):
        measured = run.report["tiers"][tier]
        assert measured["requests"] >= 3
        ttft_s, really_s = measured["ttft_s"]["p50"], np.median(server.ttft_s[tier])
        assert server.first_token_s[tier] <= ttft_s == pytest.approx(really_s, abs=0.08), tier
        assert measured["itl_s"]["p50"] == pytest.approx(np.median(server.itl_s[tier]), abs=0.01)
    assert run.report["tiers"]["remote"]["requests"] == 0
    for heading in ("residency", "gpu", "host", "disk", "none"):
        assert heading in run.output


def test_a_slow_server_does_not_slow_the_arrivals(server: Any, locust: Locust) -> None:
    server.first_token_s = dict.fromkeys(server.first_token_s, 2.0)
    run = locust(server.url, rate=20, duration=1, lengths="fixed:60/1")
    received_s = np.array(server.received_s[2:]) - server.received_s[2]
    assert run.exit_code == 0, run.output
    assert len(received_s) >= 8
    assert received_s[-1] < 2.0, "the last was asked before the first was answered"


def test_a_refused_request_fails_the_run(server: Any, locust: Locust) -> None:
    server.refused = frozenset({"acme/b"})
    run = locust(server.url, rate=10, duration=2, lengths="fixed:60/2")
    assert run.exit_code != 0
    assert run.report["failures"] == {"429 rate_limited": run.report["failed"]}
    assert run.report["tiers"]["gpu"]["requests"] > 0
    assert "429 rate_limited" in run.output


@pytest.mark.parametrize(
    ("last_words", "reason"),
    [
        (b"", "the stream broke off"),
        (failed_completion_event("step_failed", "The step failed."), "mid-stream: step_failed"),
    ],
)
def test_a_stream_that_breaks_off_fails_the_run(
    server: Any, locust: Locust, last_words: bytes, reason: str
) -> None:
    server.broken, server.last_words = frozenset({"acme/a"}), last_words
    run = locust(server.url, rate=10, duration=2, lengths="fixed:60/3")
    assert run.exit_code != 0
    assert run.report["failures"] == {reason: run.report["failed"]}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"popularity": "zipf"}, "want distinct"),
        ({"arrivals": "trace:chat"}, "want poisson"),
        ({"keys": "no-such-folder"}, "start the demo first"),
    ],
)
def test_invalid_options_are_reported_and_fail_the_run(
    server: Any, locust: Locust, options: dict[str, str], reason: str
) -> None:
    run = locust(server.url, **options)
    assert run.exit_code != 0
    assert reason in run.output
    assert not server.seen


def test_only_loopback_addresses_are_accepted(locust: Locust) -> None:
    run = locust("http://192.0.2.1")
    assert run.exit_code != 0
    assert "is not this machine" in run.output
