"""Records of ended requests are kept whole, newest first, within a limit of bytes."""

import random
import uuid
from dataclasses import replace
from itertools import islice

import pytest

from lorikeet.protocol.messages import Candidate, Cost, FinalUsage
from lorikeet.request_log.ended_requests import RECENT, EndedRequests
from lorikeet.request_log.record import AttemptRecord, RequestRecord
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.request import EngineTimings

ROOMY = 2**30


def ids(count: int) -> list[str]:
    return [uuid.uuid4().hex for _ in range(count)]


def story(request_id: str) -> RequestRecord:
    """Return a record with all fields set and distinct times."""
    names = tuple(random.sample(("replica-1", "replica-2", "replica-3"), 3))
    costs = (random.random() for _ in range(5 * len(names)))
    candidates = tuple(Candidate(name, Residency.GPU, Cost(*islice(costs, 5))) for name in names)
    tenant = f"tenant-{random.randrange(200)}"
    digest = f"{random.Random(tenant).getrandbits(256):064x}"
    return RequestRecord(
        request_id,
        "/v1/chat/completions",
        None,
        random.random(),
        tenant,
        f"key-{tenant}",
        f"{tenant}/own",
        "base",
        adapter=AdapterRef(tenant, "own", 1, digest),
        validated_s=random.random(),
        until_s=random.random(),
        ended=True,
        replica=names[0],
        residency=Residency.GPU,
        attempts=(AttemptRecord(request_id, names[0], random.random(), None, candidates, None),),
        usage=FinalUsage(12, 8, 34, (EngineTimings(queued_s=random.random(), steps=9),)),
    )


@pytest.mark.parametrize("count", [1, 31, 32, 33, 133])
def test_a_kept_record_is_found_whole(count: int) -> None:
    archive = EndedRequests(ROOMY)
    kept = {request_id: story(request_id) for request_id in ids(count)}
    for one in kept.values():
        archive.keep(one, 0.0)
    assert {request_id: archive.find(request_id, 0.0) for request_id in kept} == kept
    assert archive.find(*ids(1), 0.0) is None


def test_the_oldest_records_are_dropped_first() -> None:
    archive, many = EndedRequests(100_000), ids(1000)
    for request_id in many:
        archive.keep(story(request_id), 0.0)
    found = [request_id for request_id in many if archive.find(request_id, 0.0)]
    assert found == many[-len(found) :]
    assert 200 < len(found) < 500  # some 300 bytes each
    assert 90_000 < archive.held_bytes <= 100_000


def test_an_old_record_is_not_found() -> None:
    archive, many = EndedRequests(ROOMY), ids(50)
    for now_s, request_id in enumerate(many):
        archive.keep(story(request_id), float(now_s))
    assert [archive.find(request_id, 20.0) is None for request_id in many] == [
        now_s < 20 for now_s in range(50)
    ]


def test_old_records_are_dropped() -> None:
    archive, many = EndedRequests(ROOMY), ids(96)
    for now_s, request_id in enumerate(many):
        archive.keep(story(request_id), float(now_s))
    archive.forget(60.0)
    assert [archive.find(request_id, 0.0) is None for request_id in many] == [
        now_s < 32 for now_s in range(96)
    ]


def test_an_id_is_not_matched_across_two_records() -> None:
    archive, many = EndedRequests(ROOMY), ids(32)
    for request_id in many:
        archive.keep(story(request_id), 0.0)
    assert archive.find(many[3][16:] + many[4][:16], 0.0) is None


@pytest.mark.parametrize("count", [0, 1, 31, 33, RECENT, RECENT + 1, 200])
def test_a_tenants_last_records_are_found_newest_first(count: int) -> None:
    archive, own, others = EndedRequests(ROOMY), ids(count), ids(3 * count)
    for request_id, three in zip(own, zip(*[iter(others)] * 3, strict=True), strict=True):
        for other in three:
            archive.keep(replace(story(other), tenant="other"), 0.0)
        archive.keep(replace(story(request_id), tenant="own"), 0.0)
    found = [record.request_id for record in archive.recent("own", 0.0)()]
    assert found == own[::-1][:RECENT]
    assert archive.recent("nobody", 0.0)() == []


def test_a_tenants_old_or_dropped_records_are_not_among_its_last() -> None:
    archive, many = EndedRequests(30_000), ids(300)
    for now_s, request_id in enumerate(many):
        archive.keep(replace(story(request_id), tenant=f"t{now_s % 2}"), float(now_s))
    read = archive.recent("t0", 270.0)
    archive.keep(replace(story(ids(1)[0]), tenant="t0"), 300.0)
    assert [record.request_id for record in read()] == many[270:299:2][::-1]
    kept = [request_id for request_id in many[::2] if archive.find(request_id, 0.0)]
    assert [record.request_id for record in archive.recent("t0", 0.0)()][1:] == kept[::-1][:49]
    archive.forget(1000.0)
    assert archive._recent == {}
