"""What tenants feel of one another, on a service whose delays are known."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from lorikeet.cli import app
from lorikeet.cli.planning import bench
from lorikeet.cli.planning.isolation import MeasuredTenant, RunMeasurements, TenantComparison
from lorikeet.protocol.messages import Call, Refusal
from tests.gateway.conftest import Gateway, Items, repeat, serving
from tests.waiting import eventually

TENANTS = ("acme", "globex")
WAIT_S = 0.5


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """acme has an adapter of its own; globex has none."""
    with serving(tmp_path_factory.mktemp("bench")) as running:
        (running.folder / "keys.json").write_text(json.dumps(running.keys))
        yield running


def command(gateway: Gateway, *options: str) -> list[str]:
    keys = str(gateway.folder / "keys.json")
    return ["bench", "isolation", "--url", gateway.url, "--keys", keys, *options]


def run(gateway: Gateway, *options: str) -> Result:
    quick = ("--seconds", "0.5", "--rate", "20")
    return CliRunner().invoke(app, command(gateway, *quick, *options), env={"COLUMNS": "100"})


def by_tenant(result: Result) -> dict[str, Any]:
    return {row["tenant"]: row for row in json.loads(result.stdout)["tenants"]}


class SlowBesideOthers:
    """Answers that wait while another tenant asks too."""

    def __init__(self) -> None:
        self._asked_s = dict.fromkeys(TENANTS, 0.0)

    async def __call__(self, call: Call) -> Items:
        now_s = self._asked_s[call.tenant] = time.monotonic()
        if all(now_s - asked_s < 0.2 for asked_s in self._asked_s.values()):
            await asyncio.sleep(WAIT_S)
        async for item in repeat(call):
            yield item


async def refuses_globex(call: Call) -> Items:
    if call.tenant == "globex":
        yield Refusal("unavailable", "no room")
        return
    async for item in repeat(call):
        yield item


def test_every_tenant_is_asked_for_alone_and_beside_others(gateway: Gateway) -> None:
    gateway.engines.replay = repeat
    result = run(gateway, "--json", "--rate", "globex=40")
    assert result.exit_code == 0, result.output
    rows = by_tenant(result)
    assert {name: row["model"] for name, row in rows.items()} == {
        "acme": "acme/support",
        "globex": "tiny",
    }
    for row in rows.values():
        assert row["requests"]["alone"] == row["requests"]["shared"] > 0
        assert row["errors"] == {"alone": {}, "shared": {}}
        for metric in ("ttft_s", "itl_s"):
            for figure in row[metric].values():
                growth = figure["shared"] / figure["alone"] - 1
                assert figure["growth"] == (
                    pytest.approx(growth) if figure["alone"] >= 1e-4 else None
                )
    assert rows["globex"]["requests"]["alone"] > rows["acme"]["requests"]["alone"]


def test_a_metric_that_grows_too_much_is_named_and_fails(gateway: Gateway) -> None:
    gateway.engines.replay = SlowBesideOthers()
    result = run(gateway, "--max-growth", "50%")
    assert result.exit_code == 1
    said = " ".join(result.stderr.split())
    assert "a p99 grew by more than 50%: acme (" in said
    assert "acme/support" in result.stdout


def test_a_metric_near_zero_alone_has_no_relative_growth() -> None:
    alone, shared = RunMeasurements(1, [0.1], [3e-5]), RunMeasurements(1, [0.1], [0.04])
    row = TenantComparison(MeasuredTenant("acme", "lk", "acme/support", 1), alone, shared)
    between = bench._figure(row, bench._METRICS[1], 0.99)
    assert between.cells() == ("0.0", "40.0", "–")
    assert list(bench._grown([row], 0.5)) == []


def test_errors_are_counted_and_metrics_without_answers_are_unmeasured(gateway: Gateway) -> None:
    gateway.engines.replay = refuses_globex
    result = run(gateway, "--max-growth", "100000%", "--json")
    assert result.exit_code == 1
    row = by_tenant(result)["globex"]
    assert row["errors"]["alone"] == {"503 unavailable": row["requests"]["alone"]}
    assert row["ttft_s"]["p50"] == {"alone": None, "shared": None, "growth": None}
    assert "globex (time to first token: not measured)" in " ".join(result.stderr.split())
    assert "acme" not in result.stderr


def test_a_key_that_is_not_taken_is_named_before_anything_is_sent(gateway: Gateway) -> None:
    keys = gateway.folder / "wrong.json"
    keys.write_text(json.dumps(gateway.keys | {"globex": "lk_wrong"}))
    asked = len(gateway.engines.calls)
    result = CliRunner().invoke(app, [*command(gateway), "--keys", str(keys)])
    assert result.exit_code == 1
    assert "globex's key: 401 invalid_api_key" in " ".join(result.stderr.split())
    assert "lk_" not in result.output
    assert len(gateway.engines.calls) == asked


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"acme": 5}', '{"acme": "lk_\\n"}'])
def test_a_file_without_keys_is_wrong_usage(gateway: Gateway, tmp_path: Path, content: str) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(content)
    assert CliRunner().invoke(app, [*command(gateway), "--keys", str(keys)]).exit_code == 2


@pytest.mark.parametrize("options", [["--rate", "x=1"], ["--rate", "0"], ["--max-growth", "25"]])
def test_options_that_cannot_be_understood_are_wrong_usage(
    gateway: Gateway, options: list[str]
) -> None:
    assert run(gateway, *options).exit_code == 2


def test_an_interrupt_shows_the_results_so_far(gateway: Gateway) -> None:
    gateway.engines.replay = repeat
    asked = len(gateway.engines.calls)
    arguments = command(gateway, "--json", "--seconds", "60", "--rate", "50")
    running = subprocess.Popen(
        [sys.executable, "-c", "from lorikeet.cli import main; main()", *arguments],
        stdout=subprocess.PIPE,
        text=True,
    )
    # calls of two seconds, so that the first ones have been answered
    assert eventually(lambda: len(gateway.engines.calls) > asked + 100, within_s=30)
    running.send_signal(signal.SIGINT)
    said, _ = running.communicate(timeout=30)
    assert running.returncode == 130
    answer = json.loads(said)
    assert answer["complete"] is False
    acme, globex = answer["tenants"]
    assert acme["requests"]["alone"] > 3
    assert acme["ttft_s"]["p50"]["alone"] > 0
    assert globex["requests"] == {"alone": 0, "shared": 0}
