"""Status of pins: met, loading or unmet."""

import pytest

from lorikeet.placement.pin_status import PinState, pin_statuses
from lorikeet.placement.pinned_versions import ResolvedPin, ResolvedPins
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.telemetry.status import AdapterStatus
from tests.placement.builders import held, promise, ref, report

SUPPORT, LEGAL = ref("support"), ref("legal")


def stands(one: ResolvedPin, *reports: ReplicaReport) -> PinState:
    (found,) = pin_statuses(ResolvedPins((one,)), reports)
    return found.state


def at(adapter: AdapterRef, tier: Residency) -> AdapterStatus:
    return held(adapter, tier, pinned=True)


@pytest.mark.parametrize("promised", [Residency.DISK, Residency.HOST, Residency.GPU])
@pytest.mark.parametrize("found", [Residency.DISK, Residency.HOST, Residency.GPU])
def test_a_pin_is_met_at_its_tier_or_nearer(promised: Residency, found: Residency) -> None:
    state = stands(promise(SUPPORT, tier=promised), report("r0", adapters=(at(SUPPORT, found),)))
    assert state is (PinState.MET if found >= promised else PinState.LOADING)


def test_a_pin_is_met_on_every_replica_or_on_the_number_it_wants() -> None:
    reports = [
        report("r0", adapters=(at(SUPPORT, Residency.GPU),)),
        report("r1"),
        report("w0", base_model="wide"),
    ]
    assert stands(promise(SUPPORT), *reports) is PinState.LOADING
    assert stands(promise(SUPPORT), reports[0], reports[2]) is PinState.MET
    assert stands(promise(SUPPORT, replicas=1), *reports) is PinState.MET


def test_a_tenants_pin_is_met_when_all_its_adapters_are_loaded() -> None:
    one = at(SUPPORT, Residency.GPU), at(LEGAL, Residency.HOST)
    assert stands(promise(SUPPORT, LEGAL), report("r0", adapters=one)) is PinState.LOADING
    assert stands(promise(SUPPORT, LEGAL, tier=Residency.HOST), report("r0", adapters=one)) is (
        PinState.MET
    )


def test_a_pin_with_a_shortfall_is_unmet_even_if_its_adapter_is_loaded() -> None:
    """The adapter is loaded by chance, and the next request for another may evict it."""
    there = report("r0", gpu=5, adapters=(at(SUPPORT, Residency.GPU),))
    assert stands(promise(SUPPORT), there) is PinState.UNMET


def test_each_pin_has_its_own_shortfalls_and_bytes() -> None:
    pins = (promise(SUPPORT, LEGAL, size=10), promise(SUPPORT, created=1.0, size=10))
    first, second = pin_statuses(ResolvedPins(pins), [report("r0", gpu=15)])
    assert (first.versions, first.image_bytes) == (2, 20)
    assert [each.ref for each in first.shortfalls] == [LEGAL]
    assert (second.state, second.shortfalls) == (PinState.LOADING, ())
