"""Records of ended requests are kept whole, newest first, within a limit of bytes."""

import random
import uuid
from itertools import islice

import pytest

from lorikeet.protocol.messages import Candidate, Cost, FinalUsage
from lorikeet.request_log.ended_requests import EndedRequests
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
