"""Attacks by one tenant, which another tenant's requests must not notice."""

import json
import os
import subprocess
import sys
import time
from statistics import quantiles

import pytest

from tests.attack.conftest import ATTACK_S, ROWS, Row, service_bytes
from tests.attack.programs import ATTACKS, BASE
from tests.e2e.conftest import ROOT, Service
from tests.e2e.load import Load, Result, Target
from tests.waiting import eventually

pytestmark = [pytest.mark.ray, pytest.mark.attack, pytest.mark.timeout(3 * ATTACK_S + 600)]

QUIET_S = min(60.0, ATTACK_S / 2)
RECOVERY_S = 60.0
MOST_TIMES_SLOWER = 2.0
MOST_TIMES_LARGER = 1.1


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_fails_and_slows_no_other_tenants_requests(
    attack: str, service: Service, attacker: list[Target]
) -> None:
    other = Load(service.url, [Target(BASE, service.tenant_keys["kestrel"])], streams=1)
    with other:
        other.wait_for(answers=20)
        quiet_bytes, quiet_s = service_bytes(service), time.monotonic()
        time.sleep(QUIET_S)
        attacked_s = time.monotonic()
        saw = run(attack, service, attacker)
        ended_s = time.monotonic()
        small_again = eventually(
            lambda: service_bytes(service) < MOST_TIMES_LARGER * quiet_bytes, RECOVERY_S
        )
        after_bytes = service_bytes(service)
    quiet = [each for each in other.sent(quiet_s) if each.sent_s < attacked_s]
    during = [each for each in other.sent(attacked_s) if each.sent_s < ended_s]
    failed = [each for each in during if each in other.unfinished()]
    row = Row(
        attack, saw, len(during), len(failed), p99_s(quiet), p99_s(during), quiet_bytes, after_bytes
    )
    ROWS.append(row)
    assert not failed, failed[:3]
    assert row.p99_s <= MOST_TIMES_SLOWER * row.quiet_p99_s
    assert small_again


def run(attack: str, service: Service, attacker: list[Target]) -> str:
    """Run an attack's program; return the outcomes that it counted."""
    command = [sys.executable, "-m", "tests.attack.programs", attack, service.url, str(ATTACK_S)]
    ran = subprocess.run(
        [*command, *(target.model for target in attacker)],
        cwd=ROOT,
        env={**os.environ, "ATTACK_KEY": attacker[0].key},
        capture_output=True,
        text=True,
        timeout=ATTACK_S + 300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ", ".join(f"{count} × {what}" for what, count in json.loads(ran.stdout).items())


def p99_s(results: list[Result]) -> float:
    """99th percentile of the time to first token, in seconds."""
    waits = [each.begun_s - each.sent_s for each in results if each.begun_s is not None]
    return quantiles(waits, n=100, method="inclusive")[98] if len(waits) > 1 else float("inf")
