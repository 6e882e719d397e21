"""Delivery of a pushed blob to replicas without it, through a fake handle."""

import asyncio
import hashlib
from dataclasses import dataclass, field

import pytest
from ray.exceptions import RayActorError

from lorikeet.protocol.pushing import (
    HoldPushed,
    HoldState,
    PushedEnd,
    PushedPart,
    PushMessage,
    this_machine,
)
from lorikeet.serving import push_delivery
from lorikeet.serving.push_delivery import PushDelivery
from lorikeet_engine.adapter import AdapterRef

BLOB = bytes(range(256)) * 40
REF = AdapterRef("acme", "policy", 1, hashlib.sha256(BLOB).hexdigest())


@dataclass
class Holder:
    """Fake replica that receives messages.

    lost: whether it cannot be reached.
    hangs: whether it never answers.
    """

    blob: bytes | None = None
    lost: bool = False
    hangs: bool = False
    taken: list[PushMessage] = field(default_factory=list)

    async def get_async(self, message):
        self.taken.append(message)
        if self.lost:
            raise RayActorError
        if self.hangs:
            await asyncio.sleep(60)
        if isinstance(message, PushedEnd):
            parts = sorted(self.parts(), key=lambda part: part.offset)
            self.blob = b"".join(part.data for part in parts)
        return HoldState.LACKING if self.blob is None else HoldState.HELD

    def parts(self):
        return [message for message in self.taken if isinstance(message, PushedPart)]


class Answer:
    """Fake answer of one replica to a broadcast."""

    def __init__(self, holder, message):
        self._holder, self._message = holder, message

    async def get_async(self):
        return await self._holder.get_async(self._message)


class Handle:
    """Fake Serve handle of these replicas."""

    def __init__(self, *holders):
        self._holders = holders

    def broadcast(self, method, message):
        assert method == "push"
        return Broadcast([Answer(holder, message) for holder in self._holders])


class Broadcast:
    """Fake response of Serve to a broadcast."""

    def __init__(self, answers):
        self._answers = answers

    async def _fetch_replica_results_async(self):
        return self._answers


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(push_delivery, "_PART_BYTES", 128)
    monkeypatch.setattr(push_delivery, "_ANSWER_S", 0.3)
    monkeypatch.setattr(push_delivery, "_AFTER_SILENCE_S", 0.02)


@pytest.fixture
def blob(tmp_path):
    path = tmp_path / "blob"
    path.write_bytes(BLOB)
    return path


def deliver(blob, *holders):
    return asyncio.run(asyncio.wait_for(PushDelivery(Handle(*holders)).deliver(REF, blob), 20))


def test_a_replica_without_the_blob_is_sent_all_parts(blob):
    one, other = Holder(), Holder()
    assert deliver(blob, one, other)
    assert one.blob == other.blob == BLOB


def test_a_silent_replica_does_not_cause_a_transfer(blob):
    holding, silent = Holder(BLOB), Holder(lost=True)
    assert not deliver(blob, holding, silent)
    assert [type(message) for message in holding.taken] == [HoldPushed]


def test_a_silent_replica_does_not_delay_every_part(blob):
    lacking, silent = Holder(), Holder(hangs=True)

    async def scenario():
        began_s = asyncio.get_running_loop().time()
        sending = asyncio.create_task(PushDelivery(Handle(lacking, silent))._send(REF.digest, blob))
        while lacking.blob is None:
            await asyncio.sleep(0.01)
        sending.cancel()
        return asyncio.get_running_loop().time() - began_s

    took_s = asyncio.run(scenario())
    assert lacking.blob == BLOB
    assert len(lacking.parts()) == 80  # ten groups, each of which would wait for 0.3 s
    assert took_s < 1.5


def test_replicas_that_do_not_answer_are_logged(blob, caplog):
    deliver(blob, Holder(BLOB), Holder(lost=True))
    (record,) = [each for each in caplog.records if each.message == "push_unanswered"]
    assert (record.asked, "RayActorError" in record.error) == ("HoldPushed", True)


def test_replicas_of_the_same_machine_are_told_of_an_incoming_blob(blob, monkeypatch):
    here, lost = Holder(), Holder(lost=True)
    asyncio.run(PushDelivery(Handle(here, lost)).expect(REF.digest, blob, 99))
    (told,) = here.taken
    assert (told.digest, told.file, told.size_bytes) == (REF.digest, str(blob), 99)
    assert told.machine == this_machine()
    monkeypatch.setattr(push_delivery, "this_machine", lambda: None)
    asyncio.run(PushDelivery(Handle(here)).expect(REF.digest, blob, 99))
    assert len(here.taken) == 1
