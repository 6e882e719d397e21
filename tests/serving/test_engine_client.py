"""ServeEngineClient with a fake handle: answers, cancellation and retries."""

import asyncio
import time
from array import array
from contextlib import aclosing
from dataclasses import replace

import grpc
import pytest

from lorikeet.errors import GenerationFailed, ReplicasLost, Unavailable
from lorikeet.protocol.messages import (
    AnswerHeader,
    Attempt,
    Call,
    EncodedCall,
    Endpoint,
    FinalUsage,
    Refusal,
    Resumed,
    ResumeReason,
    Work,
)
from lorikeet.protocol.response_stream import logged
from lorikeet.routing.fleet import fleet_of
from lorikeet.routing.ranking import RoutingRequest
from lorikeet.serving import engine_client as engines_module
from lorikeet.serving.engine_client import ServeEngineClient
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.errors import LoadFault
from lorikeet_engine.request import SamplingParams, Tokens
from tests.serving.fake_stream import FakeStream
from tests.waiting import until

BASE, GATEWAY = "tiny", "g0"
CALL = Call("r", Endpoint.CHAT, 0, "acme", BASE, None)
HEADER, USAGE = AnswerHeader("r0", None, None), FinalUsage(1, 0, 1)


class Handle:
    """Fake handle of one replica, `r0`, driven by the test."""

    app_name, deployment_name = "test", "engine-tiny"

    def __init__(self):
        self.calls, self.responses_opened, self.opened_at = [], [], []
        self.run_call = self.status_updates = self.response_stream = self

    def options(self, **_):
        return self

    def remote(self, encoded=None, gateway=None, replica=None):
        stream = FakeStream()
        if encoded is not None:
            assert gateway == GATEWAY
            self.calls.append((encoded, stream))
        elif gateway is not None:
            self.responses_opened.append(stream)
            self.opened_at.append(replica)
        return stream

    def broadcast(self, *_):
        raise RuntimeError("nobody is there")

    def deliver(self, *items, log=b"", ended=False, attempt=-1):
        attempt_id = self.calls[attempt][0].attempt_id
        self.responses_opened[-1].say([(attempt_id, list(items), log, ended)])


def run(scenario):
    async def inside():
        fleet_of(Handle.app_name, Handle.deployment_name).set_replicas(["r0"])
        handle = Handle()
        engines = ServeEngineClient({BASE: handle}, GATEWAY)
        await until(lambda: handle.responses_opened)
        try:
            await asyncio.wait_for(scenario(engines, handle), 20)
        finally:
            for task in engines._tasks:
                task.cancel()

    asyncio.run(inside())


def encoded(call):
    return EncodedCall(call, (array("i", [1, 2]),))


async def asked(engines, handle, call=CALL):
    """Return the task of a call that has reached its replica; its result: the answer's items."""

    async def items():
        return [item async for item in engines.stream_answer(BASE, encoded(call))]

    asking = asyncio.create_task(items())
    await until(lambda: handle.calls)
    return asking


def test_the_client_is_ready_while_there_are_replicas():
    async def scenario(engines, _):
        assert engines.ready()
        fleet_of(Handle.app_name, Handle.deployment_name).set_replicas([])
        assert not engines.ready()

    run(scenario)


def test_an_answer_comes_on_the_response_stream_and_its_call_is_not_cancelled():
    async def scenario(engines, handle):
        asking = await asked(engines, handle)
        sent, fleet = RoutingRequest(Work(prompt_tokens=1)), fleet_of("test", "engine-tiny")
        fleet.assign("r", "r0", sent)  # as the router does; Serve has not reported the replica
        handle.deliver(HEADER, b"a")
        handle.deliver(USAGE, b"b", ended=True)
        attempt, *items = await asking
        assert isinstance(attempt, Attempt)
        assert attempt.replica == "r0"
        assert items == [HEADER, b"a", USAGE, b"b"]
        ((_, call),) = handle.calls
        assert not call.cancelled
        call.end()
        await until(lambda: len(engines._tasks) == 1)

    run(scenario)


@pytest.mark.parametrize("ended_by_serve", [True, False])
def test_a_cancelled_call_ends_by_itself_and_its_task_is_cancelled_only_if_it_does_not(
    monkeypatch, ended_by_serve
):
    """grpc.aio keeps memory of each call that is cancelled by its task."""
    monkeypatch.setattr(engines_module, "_CANCEL_S", 20 if ended_by_serve else 0.02)
    if not ended_by_serve:
        monkeypatch.setattr(FakeStream, "cancel", lambda _: None)

    async def scenario(engines, handle):
        asking = await asked(engines, handle)
        handle.deliver(HEADER, b"a")
        await asyncio.sleep(0.01)
        (awaiting,) = [task for task in engines._tasks if "_await_call" in repr(task)]
        asking.cancel()
        await until(awaiting.done)
        assert awaiting.cancelling() == (0 if ended_by_serve else 1)

    run(scenario)


def test_closing_the_answer_cancels_the_call():
    async def scenario(engines, handle):
        async with aclosing(engines.stream_answer(BASE, encoded(CALL))) as items:
            reading = asyncio.create_task(anext(items))
            await until(lambda: handle.calls)
            handle.deliver(HEADER, b"a")
            await reading
        assert handle.calls[0][1].cancelled

    run(scenario)


def test_a_refusal_by_the_call_is_the_answer():
    async def scenario(engines, handle):
        asking = await asked(engines, handle)
        refusal = Refusal("invalid_value", "no")
        handle.calls[0][1].say(refusal)
        assert await asking == [refusal]

    run(scenario)


@pytest.mark.parametrize("call_has_ended", [True, False])
def test_a_call_whose_answer_was_too_large_for_the_stream_is_not_retried(call_has_ended):
    async def scenario(engines, handle):
        asking = await asked(engines, handle)
        handle.deliver(HEADER)
        if call_has_ended:
            handle.calls[0][1].end()
            await asyncio.sleep(0.02)
        handle.responses_opened[-1].say(ended_by(grpc.StatusCode.RESOURCE_EXHAUSTED))
        with pytest.raises(GenerationFailed):
            await asking
        assert len(handle.calls) == 1

    run(scenario)


def test_a_call_without_a_first_byte_is_retried_when_its_replica_dies():
    async def scenario(engines, handle):
        asking = await asked(engines, handle)
        handle.deliver(HEADER)
        lost = ended_by(grpc.StatusCode.UNAVAILABLE)
        handle.responses_opened[-1].say(lost)
        handle.calls[0][1].say(lost)
        await until(lambda: len(handle.calls) == 2 and len(handle.responses_opened) == 2)
        handle.deliver(HEADER, USAGE, b"whole", ended=True)
        handle.deliver(b"too late", attempt=0)
        assert [item for item in await asking if isinstance(item, bytes)] == [b"whole"]

    run(scenario)


def test_a_call_without_a_first_byte_is_sent_again_when_its_replica_falls_silent(monkeypatch):
    monkeypatch.setattr(engines_module, "_SILENCE_CHECK_S", 0.02)

    async def scenario(engines, handle):
        fleet = fleet_of(Handle.app_name, Handle.deployment_name)
        asking = await asked(engines, handle)
        handle.deliver(HEADER)
        monkeypatch.setattr(fleet, "take_silent", lambda: {"r0": [handle.calls[0][0].attempt_id]})
        await until(lambda: len(handle.calls) == 2)
        monkeypatch.setattr(fleet, "take_silent", dict)
        handle.deliver(HEADER, USAGE, b"whole", ended=True)
        handle.deliver(b"too late", attempt=0)
        assert [item for item in await asking if isinstance(item, bytes)] == [b"whole"]
        assert handle.calls[0][1].cancelled

    run(scenario)


def silence(monkeypatch, fleet, handle):
    """Let the replica of the last call be silent."""
    monkeypatch.setattr(engines_module, "_SILENCE_CHECK_S", 0.02)
    silent = {"silent": [handle.calls[-1][0].attempt_id]}
    monkeypatch.setattr(fleet, "take_silent", lambda: silent)


def test_a_begun_answer_leaves_silent_replicas_as_long_as_others_may_take_it(
    three_replicas, monkeypatch
):
    async def scenario(engines, handle):
        asking = await asked(engines, handle)
        for number in (1, 2):
            handle.deliver(replace(HEADER, replica=f"r{number}"), b"%d " % number, log=LONG)
            silence(monkeypatch, three_replicas, handle)
            await until(lambda n=number: len(handle.calls) == n + 1)
            handle.deliver(b"too late", attempt=-2)
        handle.deliver(replace(HEADER, replica="r3"), b"3 ", log=LONG)
        silence(monkeypatch, three_replicas, handle)
        await asyncio.sleep(0.2)
        handle.deliver(USAGE, b"end.", ended=True)
        items = await asking
        assert bytes_of(items) == b"1 2 3 end."
        assert [i for i in items if isinstance(i, Resumed)] == [Resumed(ResumeReason.SILENT)] * 2
        assert [sent.lost for sent, _ in handle.calls] == [(), ("r1",), ("r1", "r2")]

    run(scenario)


def test_an_answer_without_a_log_stays_at_a_silent_replica_and_at_one_that_is_being_stopped(
    three_replicas, monkeypatch, caplog
):
    caplog.set_level("INFO")
    monkeypatch.setattr(engines_module, "_LEAVE_S", 0.05)
    monkeypatch.setattr(engines_module, "_LEAVE_CHECK_S", 0.01)

    async def scenario(engines, handle):
        asking = await asked(engines, handle)
        handle.deliver(replace(HEADER, replica="r1"), b"begun ")
        silence(monkeypatch, three_replicas, handle)
        monkeypatch.setattr(type(three_replicas), "replicas", property(lambda _: ("r2",)))
        await asyncio.sleep(0.3)
        handle.deliver(USAGE, b"end.", ended=True)
        assert bytes_of(await asking) == b"begun end."
        assert len(handle.calls) == 1
        moves = {"replica_sends_no_status", "answers_leave_replica"}
        assert not moves & {record.message for record in caplog.records}

    run(scenario)


def ended_by(code):
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata())


@pytest.mark.parametrize("begun", [(), (HEADER,), (HEADER, b"a")])
def test_no_answer_is_lost_by_slowness(monkeypatch, begun):
    monkeypatch.setattr(engines_module, "_FIRST_ITEM_S", 0.01)

    async def scenario(engines, handle):
        handle.responses_opened[-1].say([])
        await asyncio.sleep(0.01)
        asking = await asked(engines, handle)
        handle.calls[0][1].end()
        if begun:
            handle.deliver(*begun)
        await asyncio.sleep(0.2)
        handle.deliver(*(HEADER, b"a")[len(begun) :], USAGE, b"end", ended=True)
        assert bytes_of(await asking) == b"aend"
        assert len(handle.calls) == 1

    run(scenario)


@pytest.mark.parametrize("call_ends_first", [True, False])
@pytest.mark.parametrize("how", ["died", "closed", "replaced"])
def test_an_answer_whose_stream_ends_after_its_call_goes_on_elsewhere(
    three_replicas, how, call_ends_first
):
    async def scenario(engines, handle):
        asking = await asked(engines, handle)
        stream, (_, call) = handle.responses_opened[-1], handle.calls[0]
        opened = len(handle.responses_opened) + (how != "replaced")
        handle.deliver(replace(HEADER, replica=handle.opened_at[-1]), b"a", log=LONG)
        if call_ends_first:
            call.end()
            await asyncio.sleep(0.02)
            assert len(handle.calls) == 1
        ends = {"died": ended_by(grpc.StatusCode.UNAVAILABLE), "closed": StopAsyncIteration()}
        stream.say(ends.get(how, []))
        await asyncio.sleep(0.02)
        assert call_ends_first or len(handle.calls) == 1, "its end may have come before"
        call.end()
        await until(lambda: len(handle.calls) == 2)
        assert handle.calls[1][0].log == LONG
        await until(lambda: len(handle.responses_opened) == opened)
        handle.deliver(replace(HEADER, replica="r2"), USAGE, b"b", ended=True)
        items = await asking
        assert bytes_of(items) == b"ab"
        assert [i for i in items if isinstance(i, Resumed)] == [Resumed(ResumeReason.REPLICA_LOST)]

    run(scenario)


def test_an_answer_stays_when_another_replicas_stream_ends(three_replicas):
    async def scenario(engines, handle):
        await until(lambda: len(handle.responses_opened) == 3)
        asking = await asked(engines, handle)
        handle.deliver(HEADER, b"a", log=LONG)
        await asyncio.sleep(0.02)
        handle.calls[0][1].end()
        handle.responses_opened[0].say(ended_by(grpc.StatusCode.UNAVAILABLE))
        await asyncio.sleep(0.05)
        handle.responses_opened[2].say([(handle.calls[0][0].attempt_id, [USAGE, b"b"], b"", True)])
        assert bytes_of(await asking) == b"ab"
        assert len(handle.calls) == 1

    run(scenario)


@pytest.mark.parametrize("arrives", [True, False])
def test_an_answer_without_an_item_is_sent_again_only_if_the_next_stream_lacks_it(
    monkeypatch, arrives
):
    monkeypatch.setattr(engines_module, "_FIRST_ITEM_S", 20 if arrives else 0.05)
    monkeypatch.setattr(engines_module, "_SETTLE_S", 0.0)

    async def scenario(engines, handle):
        asking = await asked(engines, handle)
        handle.responses_opened[-1].say(ended_by(grpc.StatusCode.UNAVAILABLE))
        await until(lambda: len(handle.responses_opened) == 2)
        if arrives:
            handle.deliver(HEADER)
            await asyncio.sleep(0.02)
        handle.calls[0][1].end()
        await (asyncio.sleep(0.1) if arrives else until(lambda: len(handle.calls) == 2))
        handle.deliver(HEADER, USAGE, b"whole", ended=True)
        assert bytes_of(await asking) == b"whole"
        assert len(handle.calls) == (1 if arrives else 2)

    run(scenario)


def test_a_lost_answer_that_cannot_go_on_fails():
    async def scenario(engines, handle):
        asking = await asked(engines, handle)
        handle.deliver(HEADER, b"a")  # without a log
        handle.calls[0][1].end()
        await asyncio.sleep(0.02)
        handle.responses_opened[-1].say(ended_by(grpc.StatusCode.UNAVAILABLE))
        with pytest.raises(Unavailable, match="the end of the answer was lost"):
            await asking
        assert len(handle.calls) == 1

    run(scenario)


def test_a_full_disk_sends_the_call_to_another_replica():
    call = replace(CALL, adapter=AdapterRef("acme", "support", 1, "d" * 64))
    refusal = Refusal("adapter_load_failed", "no room", fault=LoadFault.DISK)

    async def scenario(engines, handle):
        fleet = fleet_of("test", "engine-tiny")
        fleet.set_replicas(["r0", "r1"])
        asking = await asked(engines, handle, call)
        fleet.assign("r", "r0", RoutingRequest(Work(prompt_tokens=1), call.adapter))
        handle.deliver(HEADER)
        handle.deliver(refusal, ended=True)
        await until(lambda: len(handle.calls) == 2)
        handle.deliver(replace(HEADER, replica="r1"), USAGE, b"whole", ended=True)
        assert [item for item in await asking if isinstance(item, bytes)] == [b"whole"]

    run(scenario)


def test_calls_with_lost_blobs_pause_no_fetches_of_other_adapters():
    fleet, lost = fleet_of("test", "engine-tiny"), Refusal("adapter_load_failed", "lost")
    fleet.set_replicas([])  # forgets what other tests told it

    async def scenario(engines, handle):
        for number, digit in enumerate("de"):
            ref = AdapterRef("acme", "support", 1, digit * 64)
            asking = await asked(engines, handle, replace(CALL, request_id=digit, adapter=ref))
            await until(lambda number=number: len(handle.calls) == number + 1)
            fleet.assign(digit, "r0", RoutingRequest(Work(prompt_tokens=1), ref))
            handle.deliver(HEADER)
            handle.deliver(lost, ended=True)
            assert (await asking)[-1] == lost
        assert fleet._replicas["r0"].can_fetch(time.monotonic())

    run(scenario)


def test_a_call_is_refused_when_every_disk_is_full():
    call = replace(CALL, adapter=AdapterRef("acme", "support", 1, "d" * 64))
    refusal = Refusal("adapter_load_failed", "no room", fault=LoadFault.DISK)

    async def scenario(engines, handle):
        asking = await asked(engines, handle, call)
        sent = RoutingRequest(Work(prompt_tokens=1), call.adapter)
        fleet_of("test", "engine-tiny").assign("r", "r0", sent)
        handle.deliver(HEADER)
        handle.deliver(refusal, ended=True)
        assert (await asking)[-1] == refusal
        assert len(handle.calls) == 1

    run(scenario)


def log_of(*tokens):
    return logged(Tokens("r", 0, tokens))


LONG = log_of(*range(engines_module._PROGRESS_TOKENS))


def lose_replica(handle):
    """End the last call and the answer stream as the death of its replica does."""
    lost = ended_by(grpc.StatusCode.UNAVAILABLE)
    handle.responses_opened[-1].say(lost)
    handle.calls[-1][1].say(lost)


async def lost(handle, *items, log):
    """Let a replica add items to the answer and die; wait until another has the call."""
    calls, streams = len(handle.calls), len(handle.responses_opened)
    handle.deliver(replace(HEADER, replica=f"r{calls}"), *items, log=log)
    lose_replica(handle)
    await until(lambda: len(handle.calls) > calls and len(handle.responses_opened) > streams)


def bytes_of(items):
    return b"".join(item for item in items if isinstance(item, bytes))


@pytest.fixture
def three_replicas(monkeypatch):
    """List three replicas, r1 to r3, which `run` would replace by r0."""
    fleet = fleet_of(Handle.app_name, Handle.deployment_name)
    fleet.set_replicas(["r1", "r2", "r3"])
    monkeypatch.setattr(fleet, "set_replicas", lambda _: None)
    monkeypatch.setattr(fleet, "on_accepted", accepting(fleet))
    yield fleet
    monkeypatch.undo()
    fleet.set_replicas([])


def accepting(fleet):
    """Return on_accepted of a fleet that assigns each call to the replica that accepts it."""
    on_accepted = fleet.on_accepted

    def accept(request_id, replica):
        fleet.assign(request_id, replica, RoutingRequest(Work(prompt_tokens=1)))
        on_accepted(request_id, replica)

    return accept


def test_an_answer_goes_on_at_another_replica_after_each_of_two_losses(three_replicas):
    async def scenario(engines, handle):
        asking = await asked(engines, handle)
        await lost(handle, b"one ", log=LONG)
        await lost(handle, b"two ", log=log_of(*range(40)))
        handle.deliver(replace(HEADER, replica="r3"), b"three", USAGE, b".", ended=True)
        items = await asking
        assert bytes_of(items) == b"one two three."
        assert [i for i in items if isinstance(i, Resumed)] == (
            [Resumed(ResumeReason.REPLICA_LOST)] * 2
        )
        failed = [i.replica for i in items if isinstance(i, Attempt) and i.failure]
        assert failed == ["r1", "r2"]
        first, second, third = (sent for sent, _ in handle.calls)
        assert [sent.attempt_id for sent in (first, second, third)] == ["r", "r-1", "r-2"]
        assert [sent.call.request_id for sent in (first, second, third)] == ["r"] * 3
        assert [sent.log for sent in (first, second, third)] == (
            [b"", LONG, LONG + log_of(*range(40))]
        )
        assert [sent.work.prompt_tokens for sent in (first, second, third)] == [2, 34, 74]
        assert [sent.lost for sent in (first, second, third)] == [(), ("r1",), ("r1", "r2")]

    run(scenario)


def test_an_answer_goes_on_at_most_twice(three_replicas):
    async def scenario(engines, handle):
        asking = await asked(engines, handle)
        await lost(handle, b"one ", log=LONG)
        await lost(handle, b"two ", log=LONG)
        handle.deliver(replace(HEADER, replica="r3"), b"three ", log=LONG)
        lose_replica(handle)
        with pytest.raises(Unavailable, match="send the request again"):
            await asking
        assert len(handle.calls) == 3

    run(scenario)


@pytest.mark.parametrize("items", [(), (b"begun ",)])
def test_a_request_with_which_two_replicas_die_at_once_is_refused(three_replicas, items):
    async def scenario(engines, handle):
        asking = await asked(engines, handle)
        await lost(handle, *items, log=log_of(1) if items else b"")
        handle.deliver(replace(HEADER, replica="r2"), log=log_of(1))
        lose_replica(handle)
        with pytest.raises(ReplicasLost, match="two replicas were lost"):
            await asking
        assert len(handle.calls) == 2

    run(scenario)


@pytest.mark.parametrize("change", [{"_AT_ONCE_S": 0.0}, {"_PROGRESS_TOKENS": 1}])
def test_a_request_may_lose_two_replicas_later(three_replicas, monkeypatch, change):
    for name, value in change.items():
        monkeypatch.setattr(engines_module, name, value)

    async def scenario(engines, handle):
        asking = await asked(engines, handle)
        await lost(handle, b"one ", log=log_of(1))
        await lost(handle, b"two ", log=log_of(2))
        handle.deliver(replace(HEADER, replica="r3"), USAGE, b".", ended=True)
        assert bytes_of(await asking) == b"one two ."

    run(scenario)


def test_a_replica_that_gives_its_answers_up_is_no_fault_of_theirs(three_replicas):
    async def scenario(engines, handle):
        asking = await asked(engines, handle)
        for replica in ("r1", "r2"):
            calls = len(handle.calls)
            handle.deliver(replace(HEADER, replica=replica), b"a", log=log_of(1))
            handle.deliver(Refusal("unavailable", "the engine was closed"), ended=True)
            await until(lambda calls=calls: len(handle.calls) > calls)
        handle.deliver(replace(HEADER, replica="r3"), USAGE, b".", ended=True)
        items = await asking
        assert bytes_of(items) == b"aa."
        assert [i.reason for i in items if isinstance(i, Resumed)] == (
            [ResumeReason.ENGINE_CLOSED] * 2
        )

    run(scenario)


def test_a_tenants_resumes_are_limited_by_its_rate_alone(three_replicas, monkeypatch):
    monkeypatch.setattr(engines_module, "_RESUMES_PER_MIN", 1)

    async def scenario(engines, handle):
        for number, tenant in enumerate(("acme", "globex")):
            call = replace(CALL, tenant=tenant, request_id=tenant)
            asking = asyncio.create_task(answer(engines, call))
            await until(lambda n=number: len(handle.calls) == 2 * n + 1)
            await lost(handle, b"a", log=LONG)
            handle.deliver(replace(HEADER, replica="r2"), USAGE, b".", ended=True)
            assert bytes_of(await asking) == b"a."
        asking = asyncio.create_task(answer(engines, CALL))
        await until(lambda: len(handle.calls) == 5)
        handle.deliver(replace(HEADER, replica="r1"), b"a", log=LONG)
        lose_replica(handle)
        with pytest.raises(Unavailable, match="too many") as raised:
            await asking
        assert 0 < raised.value.retry_after_s <= 60

    async def answer(engines, call):
        return [item async for item in engines.stream_answer(BASE, encoded(call))]

    run(scenario)


def test_an_answer_waits_only_for_a_while_for_another_replica(three_replicas, monkeypatch):
    monkeypatch.setattr(engines_module, "_TAKE_OVER_S", 0.05)

    async def scenario(engines, handle):
        asking = await asked(engines, handle)
        await lost(handle, b"a", log=LONG)
        with pytest.raises(Unavailable, match="took the answer over"):
            await asking
        assert all(stream.cancelled for _, stream in handle.calls[1:])

    run(scenario)


def test_an_answer_leaves_each_replica_that_is_being_stopped(three_replicas, monkeypatch):
    monkeypatch.setattr(engines_module, "_LEAVE_S", 0.05)
    monkeypatch.setattr(engines_module, "_LEAVE_CHECK_S", 0.01)
    monkeypatch.setattr(engines_module, "_RESUMES_PER_MIN", 1)
    listed = ["r1", "r2", "r3"]
    monkeypatch.setattr(type(three_replicas), "replicas", property(lambda _: tuple(listed)))

    async def scenario(engines, handle):
        asking = await asked(engines, handle)
        for number in range(1, 5):  # more than there are attempts
            stopped, opened = handle.opened_at[-1], len(handle.opened_at)
            handle.deliver(replace(HEADER, replica=stopped), b"%d " % number, log=log_of(number))
            listed.clear()
            await asyncio.sleep(0.1)
            assert len(handle.calls) == number, "the last replica keeps its answers"
            listed[:] = ["r2" if stopped == "r1" else "r1"]
            await until(lambda n=number: len(handle.calls) == n + 1)
            assert handle.calls[-1][0].lost[-1] == stopped
            await until(lambda n=opened: len(handle.opened_at) > n)
        handle.deliver(replace(HEADER, replica=listed[0]), b"end", USAGE, b".", ended=True)
        items = await asking
        assert bytes_of(items) == b"1 2 3 4 end."
        assert [i for i in items if isinstance(i, Resumed)] == [Resumed(ResumeReason.DRAINED)] * 4

    run(scenario)


def test_an_answer_that_may_be_of_damaged_weights_does_not_go_on(three_replicas):
    call = replace(CALL, adapter=AdapterRef("acme", "support", 1, "d" * 64))
    damaged = Refusal("adapter_load_failed", "damaged")

    async def scenario(engines, handle):
        three_replicas.on_adapter_found("r2", "d" * 64, Residency.HOST)
        asking = await asked(engines, handle, call)
        handle.deliver(replace(HEADER, replica="r1"), b"a", log=LONG)
        handle.deliver(damaged, ended=True)
        assert (await asking)[-1] == damaged
        asking = asyncio.create_task(asked(engines, handle, call))
        asking = await asking
        await until(lambda: len(handle.calls) == 2)
        handle.deliver(replace(HEADER, replica="r1"), log=LONG)  # no bytes yet
        handle.deliver(damaged, ended=True)
        await until(lambda: len(handle.calls) == 3)
        assert handle.calls[2][0].log == b"", "it begins anew"
        handle.deliver(replace(HEADER, replica="r2"), USAGE, b".", ended=True)
        assert bytes_of(await asking) == b"."

    run(scenario)


@pytest.mark.parametrize(
    ("given", "drawn"),
    [
        ({"temperature": 1.0}, True),
        ({"temperature": 1.0, "seed": 5}, False),
        ({"temperature": 0.0}, False),
    ],
)
def test_drawn_tokens_have_one_seed_at_all_replicas(three_replicas, given, drawn):
    call = replace(CALL, sampling=SamplingParams(**given))

    async def scenario(engines, handle):
        asking = await asked(engines, handle, call)
        await lost(handle, b"a", log=LONG)
        handle.deliver(replace(HEADER, replica="r2"), USAGE, b".", ended=True)
        await asking
        seeds = {sent.call.sampling.seed for sent, _ in handle.calls}
        assert len(seeds) == 1
        assert (seeds != {given.get("seed")}) is drawn

    run(scenario)
