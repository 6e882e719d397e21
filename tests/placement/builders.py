"""Short builders of ResolvedPins and reports."""

from lorikeet.catalog.records import PinRecord
from lorikeet.catalog.rules.pin_budget import PinnedVersion
from lorikeet.placement.pin_placement import PlacementPlan, place_pins
from lorikeet.placement.pinned_versions import ResolvedPin, ResolvedPins
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.telemetry.status import AdapterStatus, EngineStatus, TierStatus

REPLICAS = ["r0", "r1", "r2"]
ROOMY = 10**6


def ref(name: str, tenant: str = "acme", digest: str = "") -> AdapterRef:
    return AdapterRef(tenant, name, 1, digest or f"{name}-digest")


def promise(
    *refs: AdapterRef,
    tier: Residency = Residency.GPU,
    replicas: int | None = None,
    priority: int = 0,
    created: float = 0.0,
    size: int = 10,
) -> ResolvedPin:
    """Build a pin of the ref's adapter, or of its tenant if there are several refs.

    replicas: number of replicas that are to hold the pin; None: all.
    created: time at which the pin was created.
    size: size of each adapter.
    """
    name = refs[0].name if len(refs) == 1 else None
    pin = PinRecord(
        refs[0].tenant, name, "prod", tier, replicas, priority, "", None, created, "ann"
    )
    return ResolvedPin(pin, tuple(PinnedVersion(each, "tiny", size) for each in refs))


def held(
    adapter: AdapterRef,
    tier: Residency,
    image_bytes: int | None = None,
    uses: float = 0.0,
    *,
    leases: int = 0,
    pinned: bool = False,
) -> AdapterStatus:
    """Build an adapter's status, in one piece if it is on the GPU."""
    pieces = ((0, image_bytes),) if tier is Residency.GPU and image_bytes else ()
    named = adapter.tenant, adapter.name, adapter.version, adapter.digest
    return AdapterStatus(*named, tier, image_bytes, uses, pinned, leases=leases, pieces=pieces)


def report(
    replica: str,
    gpu: int = ROOMY,
    host: int = ROOMY,
    disk: int = ROOMY,
    base_model: str = "tiny",
    adapters: tuple[AdapterStatus, ...] = (),
    tensor_parallel: int = 1,
) -> ReplicaReport:
    room = {Residency.GPU: gpu, Residency.HOST: host, Residency.DISK: disk}
    tiers = {tier: TierStatus(0, 0, size, size, 0) for tier, size in room.items()}
    status = EngineStatus(tiers=tiers, tensor_parallel=tensor_parallel)
    return ReplicaReport(replica, base_model, status, adapters)


def place(
    *promises: ResolvedPin,
    reports: list[ReplicaReport] | None = None,
    budgets: dict[str, int] | None = None,
) -> PlacementPlan:
    everywhere = [report(replica) for replica in REPLICAS]
    return place_pins(
        ResolvedPins(promises, budgets or {}), everywhere if reports is None else reports
    )
