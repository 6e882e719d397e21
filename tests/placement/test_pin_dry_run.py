"""Dry run of a pin: the moves that one more pin would cause."""

from dataclasses import replace

from lorikeet.placement.pin_dry_run import PinDryRun, PlannedLoad, PlannedRelease, dry_run_pin
from lorikeet.placement.pin_placement import place_pins
from lorikeet.placement.pinned_versions import ResolvedPin, ResolvedPins
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet_engine.adapter import Residency
from tests.placement.builders import held, promise, ref, report

SUPPORT, LEGAL = ref("support"), ref("legal")


def moves(new: ResolvedPin, reports: list[ReplicaReport], *before: ResolvedPin) -> PinDryRun:
    others = tuple(one for one in before if one.pin.key != new.pin.key)
    return dry_run_pin(new.pin.key, ResolvedPins(before), ResolvedPins((*others, new)), reports)


def test_missing_adapters_are_loaded_from_their_present_tier() -> None:
    near = held(SUPPORT, Residency.HOST)
    there = held(SUPPORT, Residency.GPU, 12)
    reports = [report("r0"), report("r1", adapters=(near,)), report("r2", adapters=(there,))]
    assert moves(promise(SUPPORT), reports) == PinDryRun(
        loads=(
            PlannedLoad("r0", SUPPORT, Residency.REMOTE, Residency.GPU, 12),  # as it is on r2
            PlannedLoad("r1", SUPPORT, Residency.HOST, Residency.GPU, 12),
        ),
        releases=(),
        unmet=(),
        lost=(),
    )


def test_a_planned_load_of_another_pin_is_not_counted() -> None:
    assert moves(promise(SUPPORT, LEGAL), [report("r0")], promise(SUPPORT)).loads == (
        PlannedLoad("r0", LEGAL, Residency.REMOTE, Residency.GPU, 10),
    )


def test_a_pin_of_higher_priority_displaces_another_and_reports_it() -> None:
    reports = [report("r0", gpu=10), report("r1", gpu=20)]
    found = moves(promise(LEGAL, priority=1), reports, promise(SUPPORT))
    assert [(load.replica, load.ref) for load in found.loads] == [("r0", LEGAL), ("r1", LEGAL)]
    assert found.releases == (PlannedRelease("r0", SUPPORT, Residency.GPU),)
    assert found.unmet == ()
    assert [(each.pin.name, each.ref) for each in found.lost] == [("support", SUPPORT)]


def test_a_pin_that_was_unmet_before_is_not_reported_as_lost() -> None:
    before = promise(SUPPORT, size=50), promise(ref("sales"), size=5)
    found = moves(promise(LEGAL), [report("r0", gpu=20)], *before)
    assert found.lost == ()


def test_shortfalls_of_the_new_pin_are_unmet() -> None:
    found = moves(promise(LEGAL), [report("r0", gpu=5)], promise(SUPPORT))
    assert [each.ref for each in found.unmet] == [LEGAL]
    assert (found.loads, found.releases, found.lost) == ((), (), ())


def test_changed_options_move_only_the_adapters_they_affect() -> None:
    before = promise(SUPPORT)
    lower = replace(before, pin=replace(before.pin, tier=Residency.DISK))
    found = moves(lower, [report("r0")], before)
    assert found.releases == (PlannedRelease("r0", SUPPORT, Residency.GPU),)
    assert found.loads == ()  # the way to the disk is a part of the way that it was promised
    assert moves(before, [report("r0")], before) == PinDryRun((), (), (), ())


def test_the_dry_run_compares_the_plans_themselves() -> None:
    reports = [report(f"r{n}", gpu=25) for n in range(4)]
    before = tuple(promise(ref(f"a{n}"), replicas=2, created=n) for n in range(5))
    new = promise(LEGAL, replicas=3, priority=1)
    old = place_pins(ResolvedPins(before), reports).targets
    new_targets = place_pins(ResolvedPins((*before, new)), reports).targets
    found = moves(new, reports, *before)
    for replica in old:
        loads = {load.ref.digest for load in found.loads if load.replica == replica}
        releases = {each.ref.digest for each in found.releases if each.replica == replica}
        assert loads == new_targets[replica].keys() - old[replica].keys()
        assert releases == old[replica].keys() - new_targets[replica].keys()
