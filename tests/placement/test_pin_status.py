"""Status of pins: met, loading or unmet."""

from dataclasses import replace

import pytest

from lorikeet.placement.pin_placement import pinned_prompt
from lorikeet.placement.pin_status import PinState, PromptStatus, pin_statuses
from lorikeet.placement.pinned_versions import ResolvedPin, ResolvedPins
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet.request_defaults import RequestDefaults
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.telemetry.status import AdapterStatus
from tests.placement.builders import held, place, promise, ref, report

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


def test_a_prompts_progress_counts_the_replicas_that_keep_its_adapter() -> None:
    pin = promise(SUPPORT, replicas=2)
    versions = [replace(each, prompt=RequestDefaults(None, "A clerk.")) for each in pin.versions]
    pin = ResolvedPin(replace(pin.pin, prompt="A clerk."), tuple(versions))
    prompt = pinned_prompt(versions[0])
    assert prompt is not None
    one, other, third = (report(name) for name in ("r0", "r1", "r2"))
    kept = place(pin, reports=[one, other, third]).targets
    first, second = (each for each in (one, other, third) if kept[each.replica])
    assert kept[first.replica][SUPPORT.digest].prompts == (prompt,)

    def status(**prompts: str | None) -> PromptStatus | None:
        said = [
            replace(each, prompts={prompt.name: prompts[each.replica]})
            if each.replica in prompts
            else each
            for each in (one, other, third)
        ]
        (found,) = pin_statuses(ResolvedPins((pin,)), said)
        return found.prompt

    assert status() == PromptStatus(0, 2, None)
    assert status(**{first.replica: None, second.replica: ""}) == PromptStatus(1, 2, None)
    assert status(**{first.replica: None, second.replica: "no"}) == PromptStatus(1, 2, "no")
    assert status(r0=None, r1=None, r2=None) == PromptStatus(2, 2, None)


def test_adapters_with_equal_weights_have_their_prompts_computed_together() -> None:
    twin = ref("twin", "globex", SUPPORT.digest)
    pins = []
    for adapter, tier in ((SUPPORT, Residency.HOST), (twin, Residency.GPU)):
        pin = promise(adapter, tier=tier)
        texts = RequestDefaults(None, adapter.tenant)
        versions = tuple(replace(each, prompt=texts) for each in pin.versions)
        pins.append(ResolvedPin(replace(pin.pin, prompt=adapter.tenant), versions))
    for order in (pins, pins[::-1]):
        (target,) = place(*order, reports=[report("r0")]).targets["r0"].values()
        assert target.tier is Residency.GPU
        assert {each.ref.tenant for each in target.prompts} == {"acme", "globex"}


def test_each_pin_has_its_own_shortfalls_and_bytes() -> None:
    pins = (promise(SUPPORT, LEGAL, size=10), promise(SUPPORT, created=1.0, size=10))
    first, second = pin_statuses(ResolvedPins(pins), [report("r0", gpu=15)])
    assert (first.versions, first.image_bytes) == (2, 20)
    assert [each.ref for each in first.shortfalls] == [LEGAL]
    assert (second.state, second.shortfalls) == (PinState.LOADING, ())
