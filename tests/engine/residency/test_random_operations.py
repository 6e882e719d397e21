"""Random requests, leases and pins: adapters are whole, and every request is served."""

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.residency.gpu.adapters import GpuAdapters, Lease
from tests.engine.blobs import Shelf, everywhere
from tests.engine.residency.tiers_driver import TiersDriver

STEPS = st.lists(
    st.tuples(st.sampled_from(["request", "request", "lease", "lease", "release", "pin", "unpin"]),
              st.integers(0, 9)),
    max_size=40,
)  # fmt: skip


@pytest.fixture(scope="module")
def stocked(tmp_path_factory) -> tuple[Shelf, list[AdapterRef]]:
    shelf = Shelf(tmp_path_factory.mktemp("stocked"))
    ranks = [everywhere(n % 5 + 1) for n in range(8)] + [{(1, 6): 9}, {(0, 0): 2, (1, 3): 16}]
    return shelf, [shelf.make(f"x{n}", one) for n, one in enumerate(ranks)]


@given(steps=STEPS, gpu=st.sampled_from([1.3, 2.0, 3.1]), host=st.sampled_from([1.3, 2.5]))
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_a_lease_always_has_its_adapter_and_every_request_gets_one(
    steps, gpu, host, stocked, tmp_path_factory
):
    shelf, refs = stocked
    b = TiersDriver(shelf, tmp_path_factory.getbasetemp() / "anything", gpu, host, slots=4)
    leases: list[tuple[AdapterRef, Lease]] = []
    patch = pytest.MonkeyPatch()
    patch.setattr("lorikeet_engine.residency.gpu.adapters.GUARD_S", 0.01)
    try:
        for action, number in steps:
            apply(b, action, refs[number], leases)
            b.tiers.advance()
            check_all(b, leases)
        for _, lease in leases:
            lease.release()
        for ref in refs:
            b.lease(ref).release()
        check_all(b, [])
    finally:
        patch.undo()
        b.tiers.close()


def apply(
    b: TiersDriver, action: str, ref: AdapterRef, leases: list[tuple[AdapterRef, Lease]]
) -> None:
    if action == "request":
        b.tiers.request(ref)
        b.woken.wait(0.002)
    elif action == "lease" and (lease := b.tiers.lease(ref)) is not None:
        leases.append((ref, lease))
    elif action == "release" and leases:
        leases.pop(0)[1].release()
    elif action == "pin":
        b.tiers.pin(ref, Residency(int(ref.digest[0], 16) % 3 + 1))
    elif action == "unpin":
        b.tiers.unpin(ref.digest)


def check_all(b: TiersDriver, leases: list[tuple[AdapterRef, Lease]]) -> None:
    for ref, lease in leases:
        b.shelf.check(ref, b.tiers.weights, lease.slot)
        assert b.tiers.residency(ref) is Residency.GPU
    reports = b.tiers.adapters()
    assert sum(r.leases for r in reports) == len(leases)
    assert sum(r.gpu_bytes for r in reports) == b.gpu.used_bytes
    assert b.gpu.used_bytes <= b.gpu.capacity_bytes
    check_room(b.tiers._gpu)
    rows = b.tiers.weights.table[..., 2].flatten(1).any(dim=1)
    assert rows.sum() == sum(r.residency is Residency.GPU for r in reports)


def check_room(adapters: GpuAdapters) -> None:
    """Memory is available unless its adapter is leased, pinned, guarded or being copied."""
    now_s = time.monotonic()
    held = [
        resident.layout.elements
        for resident in adapters.snapshot()
        if resident.ref.digest in adapters._reservations or resident.held_at(now_s)
    ]
    adapters._clock = lambda: now_s
    assert adapters.available_elements == adapters._pool.elements - sum(held)
    adapters._clock = time.monotonic
