"""What one more pin would move: the same plan as the controller's, made with and without it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lorikeet.catalog.records import PinKey
from lorikeet.placement.pin_status import AdapterTiers
from lorikeet.placement.plan import PlacementPlan, Shortfall, image_sizes, place_pins
from lorikeet.placement.resolved_pins import ResolvedPins
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet_engine.adapter import AdapterRef, Residency


@dataclass(frozen=True, slots=True)
class Load:
    """A replica brings an adapter nearer: an image of so many bytes, from where it is now."""

    replica: str
    ref: AdapterRef
    now: Residency
    to: Residency
    image_bytes: int


@dataclass(frozen=True, slots=True)
class Release:
    """A replica may evict below this tier what it had to keep there."""

    replica: str
    ref: AdapterRef
    tier: Residency


@dataclass(frozen=True, slots=True)
class Moves:
    """What changes, in the replicas' order.

    unmet: what of the new pin cannot be kept. lost: of other pins, what was and will be no more.
    """

    loads: tuple[Load, ...]
    releases: tuple[Release, ...]
    unmet: tuple[Shortfall, ...]
    lost: tuple[Shortfall, ...]


def moves_of(
    key: PinKey,
    before: ResolvedPins,
    after: ResolvedPins,
    reports: Sequence[ReplicaReport],
) -> Moves:
    """What changes from `before` to `after`, which has a new pin with this key."""
    old, new = place_pins(before, reports), place_pins(after, reports)
    known = {(each.pin.key, each.ref) for each in old.shortfalls}
    return Moves(
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
    old: PlacementPlan, new: PlacementPlan, image_bytes: Mapping[str, int], residents: AdapterTiers
) -> Iterator[Load]:
    for replica, keeps in new.plan.items():
        for digest, keep in keeps.items():
            before, now = old.plan[replica].get(digest), residents.tier(digest, replica)
            if (before is None or before.tier < keep.tier) and now < keep.tier:
                yield Load(replica, keep.ref, now, keep.tier, image_bytes[digest])


def _releases(old: PlacementPlan, new: PlacementPlan) -> Iterator[Release]:
    for replica, keeps in old.plan.items():
        for digest, keep in keeps.items():
            after = new.plan[replica].get(digest)
            if after is None or after.tier < keep.tier:
                yield Release(replica, keep.ref, keep.tier)
