"""Dry run of a pin: difference between the controller's placement plans with and without it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lorikeet.catalog.records import PinKey
from lorikeet.placement.pin_placement import PlacementPlan, Shortfall, image_sizes, place_pins
from lorikeet.placement.pin_status import AdapterTiers
from lorikeet.placement.pinned_versions import ResolvedPins
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet_engine.adapter import AdapterRef, Residency


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """Load of an adapter on a replica.

    now: tier nearest to the GPU in which the replica has the adapter now.
    to: tier that the plan requires.
    image_bytes: bytes of the adapter on a GPU.
    """

    replica: str
    ref: AdapterRef
    now: Residency
    to: Residency
    image_bytes: int


@dataclass(frozen=True, slots=True)
class PlannedRelease:
    """Release of a pinned adapter: the replica no longer has to keep it at this tier."""

    replica: str
    ref: AdapterRef
    tier: Residency


@dataclass(frozen=True, slots=True)
class PinDryRun:
    """Changes that a new pin (order to keep an adapter at a tier) would cause, by replica.

    unmet: versions of the new pin that would be on fewer replicas than wanted, with the reasons.
    lost: versions of other pins that the plan keeps on enough replicas without the new pin, but
        not with it.
    """

    loads: tuple[PlannedLoad, ...]
    releases: tuple[PlannedRelease, ...]
    unmet: tuple[Shortfall, ...]
    lost: tuple[Shortfall, ...]


def dry_run_pin(
    key: PinKey,
    before: ResolvedPins,
    after: ResolvedPins,
    reports: Sequence[ReplicaReport],
) -> PinDryRun:
    """Compare the placement plans of two sets of pins.

    key: key of the new pin.
    before: pins without the new pin.
    after: pins with the new pin.
    reports: replicas' last reports: their memory for pins, and the adapters they hold.
    """
    old, new = place_pins(before, reports), place_pins(after, reports)
    known = {(each.pin.key, each.ref) for each in old.shortfalls}
    return PinDryRun(
        tuple(_loads(old, new, _image_bytes(after, reports), AdapterTiers(reports))),
        tuple(_releases(old, new)),
        tuple(each for each in new.shortfalls if each.pin.key == key),
        tuple(
            each
            for each in new.shortfalls
            if each.pin.key != key and (each.pin.key, each.ref) not in known
        ),
    )


def _image_bytes(pins: ResolvedPins, reports: Sequence[ReplicaReport]) -> Mapping[str, int]:
    expected = {v.ref.digest: v.image_bytes for each in pins.all for v in each.versions}
    return expected | image_sizes(reports)


def _loads(
    old: PlacementPlan, new: PlacementPlan, image_bytes: Mapping[str, int], tiers: AdapterTiers
) -> Iterator[PlannedLoad]:
    for replica, targets in new.targets.items():
        for digest, target in targets.items():
            before, now = old.targets[replica].get(digest), tiers.tier(digest, replica)
            if (before is None or before.tier < target.tier) and now < target.tier:
                yield PlannedLoad(replica, target.ref, now, target.tier, image_bytes[digest])


def _releases(old: PlacementPlan, new: PlacementPlan) -> Iterator[PlannedRelease]:
    for replica, targets in old.targets.items():
        for digest, target in targets.items():
            after = new.targets[replica].get(digest)
            if after is None or after.tier < target.tier:
                yield PlannedRelease(replica, target.ref, target.tier)
