"""A replica without Ray: the demo model, a catalog in a folder, calls as a gateway sends them."""

import asyncio
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from array import array
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from functools import partial

import pytest

from demo.fill_catalog import fill_catalog
from demo.tasks import TASKS
from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.store.object_store import open_store
from lorikeet.errors import InvalidSetting
from lorikeet.placement.learned_prompts import LearnedPrompts
from lorikeet.protocol import response_stream as response_stream_module
from lorikeet.protocol.messages import (
    AnswerHeader,
    Call,
    EncodedCall,
    Endpoint,
    Format,
    Refusal,
)
from lorikeet.protocol.placement_decision import (
    LearnedPrompt,
    PinnedPrompt,
    PinTarget,
    PlacementDecision,
    PrefetchTarget,
)
from lorikeet.protocol.status_update import from_stats
from lorikeet.replica import pinned_prompts, request_builder
from lorikeet.replica import replica as replica_module
from lorikeet.replica.replica import Replica
from lorikeet.request_defaults import RequestDefaults
from lorikeet.settings import Settings
from lorikeet.text.adapter_templates import AdapterTemplates
from lorikeet.text.prompts import PromptEncoder, encode_call
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.errors import EngineClosed
from lorikeet_engine.request import SamplingParams, SchedulingParams
from tests.engine import forked_engines
from tests.replica.breakable import break_file, breakable_engine
from tests.replica.slow_engine import SLOW_S, slow_to_compile, slow_to_submit
from tests.serving.local_gateway import answer_of, local_gateway

BASE = "lorikeet-demo"
TASK = TASKS[0]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    root = tmp_path_factory.mktemp("replica")
    given = {"LORIKEET_CATALOG": str(root / "catalog"), "LORIKEET_CACHE_DIR": str(root / "cache")}
    settings = Settings.from_env(given)
    fill_catalog(settings, root)
    return settings


@pytest.fixture
def ref(settings):
    state = CatalogReader(open_store(settings.catalog)).refresh()
    return state.resolve(TASK.model, TASK.tenant)


CALL = Call(
    request_id="r",
    endpoint=Endpoint.COMPLETIONS,
    created=0,
    tenant=TASK.tenant,
    model=BASE,
    adapter=None,
    prompts=("once upon",),
    max_tokens=8,
    sampling=SamplingParams(temperature=0, ignore_eos=True),
)
ENCODED = EncodedCall(CALL, (array("i", [5, 6, 7]),))


def run(settings, scenario):
    async def inside():
        replica = Replica("r0", BASE, settings)
        try:
            return await asyncio.wait_for(scenario(replica), 60)
        finally:
            replica.close()

    return asyncio.run(inside())


async def items_of(replica, call):
    return await rest_of(answer_of(replica, call))


async def rest_of(answer):
    return [item async for item in answer]


def kill_engine(how=signal.SIGKILL):
    """Send a signal to the process of the one engine that this process hosts."""
    (pid,) = forked_engines.processes()
    os.kill(pid, how)


async def until(holds, replica):
    """Wait until something holds of the replica's report."""
    deadline = time.monotonic() + 20.0
    while not holds(await replica.report()):
        assert time.monotonic() < deadline, "not in time"
        await asyncio.sleep(0.01)


def test_a_header_comes_first_and_says_where_the_adapter_was(settings, ref):
    async def scenario(replica):
        call = replace(
            CALL,
            adapter=ref,
            endpoint=Endpoint.CHAT,
            prompts=(),
            messages=({"role": "user", "content": TASK.example.prompt},),
            max_tokens=None,
            sampling=SamplingParams(temperature=0),
        )
        cold = await items_of(replica, call)
        warm = await items_of(replica, call)
        return cold, warm, await replica.report(Residency.GPU)

    cold, warm, there = run(settings, scenario)
    assert isinstance(cold[0], AnswerHeader)
    assert cold[0].residency < Residency.GPU
    assert (warm[0].replica, warm[0].digest) == ("r0", ref.digest)
    assert warm[0].residency is Residency.GPU
    assert warm[0].status.seq > cold[0].status.seq
    (adapter,) = there.adapters
    assert (there.replica, adapter.digest) == ("r0", ref.digest)
    assert adapter.gpu_bytes == there.status.tiers[Residency.GPU].used_bytes
    for items in (cold, warm):
        message = json.loads(items[-1])["choices"][0]["message"]
        assert message["content"] == TASK.example.answer


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_the_text_of_a_chat(settings, ref, stream):
    async def scenario(replica):
        call = replace(
            CALL,
            adapter=ref,
            endpoint=Endpoint.RESPONSES,
            prompts=(),
            messages=({"role": "user", "content": TASK.example.prompt},),
            max_tokens=None,
            sampling=SamplingParams(temperature=0, logprobs=1),
            stream=stream,
            request_fields=b'"store":false',
        )
        return await items_of(replica, call)

    items = run(settings, scenario)
    raw = b"".join(item for item in items if isinstance(item, bytes))
    if stream:
        raw = raw.split(b"data: ")[-1]
    last = json.loads(raw)
    response = last["response"] if stream else last
    (message,) = response["output"]
    (part,) = message["content"]
    assert response["status"] == "completed"
    assert part["text"] == TASK.example.answer
    assert "".join(token["token"] for token in part["logprobs"]) == TASK.example.answer
    assert response["usage"]["output_tokens"] >= len(part["logprobs"])


def as_message(ref, **fields):
    return replace(
        CALL,
        adapter=ref,
        endpoint=Endpoint.MESSAGES,
        prompts=(),
        messages=({"role": "user", "content": TASK.example.prompt},),
        max_tokens=200,
        sampling=SamplingParams(temperature=0),
        **fields,
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_has_the_text_of_a_chat_and_the_counted_tokens(settings, ref, stream):
    async def scenario(replica):
        call = as_message(ref, stream=stream)
        counted = replace(call, endpoint=Endpoint.COUNT_TOKENS, adapter=None)
        return await items_of(replica, call), encode_call(counted, replica._encoder, 4096)

    items, count = run(settings, scenario)
    raw = b"".join(item for item in items if isinstance(item, bytes))
    if stream:
        events = [json.loads(line[6:]) for line in raw.split(b"\n") if line.startswith(b"data: ")]
        text = "".join(event["delta"].get("text", "") for event in events if "delta" in event)
        stopped, started = events[-2], events[0]["message"]["usage"]
        assert started["input_tokens"] == stopped["usage"]["input_tokens"]
        reason, taken = stopped["delta"]["stop_reason"], stopped["usage"]
    else:
        message = json.loads(raw)
        (block,) = message["content"]
        text, reason, taken = block["text"], message["stop_reason"], message["usage"]
    assert (text, reason) == (TASK.example.answer, "end_turn")
    prompt_tokens = taken["input_tokens"] + taken["cache_read_input_tokens"]
    assert count.work.prompt_tokens == prompt_tokens


def test_a_message_goes_on_with_the_assistants_last_one(settings, ref):
    begun, rest = TASK.example.answer[:3], TASK.example.answer[3:]
    turns = (
        {"role": "user", "content": TASK.example.prompt},
        {"role": "assistant", "content": begun},
    )

    async def scenario(replica):
        call = replace(
            as_message(ref), messages=turns, continue_final=True, generation_prompt=False
        )
        return await items_of(replica, call)

    (block,) = json.loads(run(settings, scenario)[-1])["content"]
    assert block["text"] == rest


def test_a_second_header_says_how_long_the_adapter_took_to_come(settings, ref):
    async def scenario(replica):
        call = replace(CALL, adapter=ref)
        cold = await items_of(replica, call)
        again = await items_of(replica, replace(call, request_id="again"))
        return cold, again

    cold, again = run(settings, scenario)
    for items, came in ((cold, True), (again, False)):
        first, second = (item for item in items if isinstance(item, AnswerHeader))
        assert first.load_s is None
        assert (second.replica, second.digest) == (first.replica, first.digest)
        assert second.residency == first.residency
        assert (second.load_s > 0) is came
        assert items.index(second) < min(i for i, item in enumerate(items) if type(item) is bytes)


def test_a_request_that_will_not_wait_for_its_adapter_gets_a_retry_after(settings, ref):
    async def scenario(replica):
        impatient = replace(
            CALL, adapter=ref, scheduling=SchedulingParams(TASK.tenant, max_load_s=0.0)
        )
        return (await items_of(replica, impatient))[-1]

    refusal = run(settings, scenario)
    assert refusal.code == "adapter_not_ready"
    assert refusal.retry_after_s > 0


def test_closing_an_answer_frees_its_pages_and_lease(settings, ref):
    async def scenario(replica):
        call = replace(CALL, adapter=ref, max_tokens=900, stream=True)
        async with aclosing(answer_of(replica, call)) as items:
            async for item in items:
                if isinstance(item, bytes):
                    break
        await until(lambda report: [a.leases for a in report.adapters] == [0], replica)
        await until(lambda report: report.status.live.kv_pages_used == 0, replica)

    run(settings, scenario)


def test_answers_that_cannot_reach_their_gateway_are_given_up(settings, ref):
    async def scenario(replica):
        endless = replace(CALL, adapter=ref, max_tokens=900, stream=True)
        calls = [replace(endless, request_id=str(n)) for n in range(3)]
        async with local_gateway(replica, "lost") as lost, local_gateway(replica, "well") as well:
            bodies = asyncio.create_task(rest_of(well.stream_answer(replace(CALL, max_tokens=200))))
            async with AsyncExitStack() as stack:
                streams = [
                    await stack.enter_async_context(aclosing(lost.stream_answer(c))) for c in calls
                ]
                for stream in streams:
                    assert isinstance(await anext(stream), AnswerHeader)
                async with local_gateway(replica, "lost"):  # the same one, after a broken line
                    for stream in streams:
                        assert (await rest_of(stream))[-1].code == "unavailable"
            whole = await bodies
        await until(lambda report: report.status.live.kv_pages_used == 0, replica)
        return whole

    whole = run(settings, scenario)
    assert json.loads(whole[-1])["usage"]["completion_tokens"] == 200


def test_the_call_itself_ends_with_one_item(settings):
    """Without any item, gRPC may lose the message that the replica has taken the call."""

    async def scenario(replica):
        async with local_gateway(replica, "other"):
            return await rest_of(replica.run_call(ENCODED, "other"))

    assert run(settings, scenario) == [None]


def test_a_stream_to_a_gateway_begins_with_an_empty_message(settings):
    async def scenario(replica):
        async with aclosing(replica.response_stream(replica.name, "other")) as stream:
            return await anext(stream)

    assert run(settings, scenario) == []


def test_a_call_of_a_gateway_without_a_stream_goes_elsewhere(settings, monkeypatch):
    monkeypatch.setattr(response_stream_module, "_OPENING_S", 0.1)

    async def scenario(replica):
        return await rest_of(replica.run_call(ENCODED, "deaf"))

    (refusal,) = run(settings, scenario)
    assert refusal.code == "unavailable"


def test_a_request_id_in_flight_is_refused_and_the_first_goes_on(settings):
    async def scenario(replica):
        first = asyncio.create_task(items_of(replica, replace(CALL, max_tokens=100)))
        await until(lambda report: report.status.live.running, replica)
        (refusal,) = await items_of(replica, CALL)
        return refusal, await first

    refusal, first = run(settings, scenario)
    assert isinstance(refusal, Refusal)
    assert json.loads(first[-1])["usage"]["completion_tokens"] == 100


def test_all_choices_end_when_their_caller_leaves(settings):
    async def scenario(replica):
        asked = asyncio.create_task(items_of(replica, replace(CALL, n=32, max_tokens=900)))
        await until(lambda report: report.status.live.running == 32, replica)
        asked.cancel()
        await until(lambda report: not report.status.live.running, replica)
        return (await replica.report()).status.live

    live = run(settings, scenario)
    assert (live.running, live.waiting) == (0, 0)


def test_a_schemas_wait_is_subtracted_from_the_engines_queue_time(settings, monkeypatch):
    submitted = []

    async def scenario(replica):
        async def check_slowly(_call, _grammar):
            await asyncio.sleep(0.5)

        def submit(request):
            submitted.append(request.scheduling.max_queue_s)
            raise EngineClosed("not here")

        monkeypatch.setattr(replica._requests._grammars, "check", check_slowly)
        monkeypatch.setattr(replica._engine, "submit", submit)
        bound = SchedulingParams(tenant=TASK.tenant, max_queue_s=5.0)
        for format_ in (Format("{}"), None):
            await items_of(replica, replace(CALL, format=format_, scheduling=bound))

    run(settings, scenario)
    assert 3.0 < submitted[0] <= 4.5
    assert submitted[1] == 5.0


def test_a_prompt_that_its_gateway_could_not_compare_with_the_context_is_refused(settings):
    async def scenario(replica):
        return await items_of(replica, replace(CALL, prompts=("word " * 1_200,)))

    (refusal,) = run(settings, scenario)
    assert (refusal.code, refusal.param) == ("context_length_exceeded", "prompt")
    assert refusal.message.startswith("This model's maximum context length is")


def test_a_plan_moves_adapters_nearer_and_the_autoscaler_gets_the_load(settings, ref):
    async def scenario(replica):
        quiet = await replica.record_autoscaling_stats()
        orders = PlacementDecision(
            sole_copies=0.25, prefetches=(PrefetchTarget(ref, Residency.GPU, 1.0),)
        )
        assert await replica.apply_plan({"r0": orders}) == "r0"
        await until(
            lambda report: [a.residency for a in report.adapters] == [Residency.GPU], replica
        )
        for n in range(2):
            await items_of(replica, replace(CALL, adapter=ref, request_id=f"r{n}"))
        return quiet, await replica.record_autoscaling_stats()

    quiet, used = run(settings, scenario)
    assert (quiet["working_bytes"], quiet["running_share"]) == (0, 0)
    assert "sole_copies" not in quiet
    assert 0 < used["working_bytes"] < used["arena_bytes"]
    assert used["sole_copies"] == 0.25


def test_a_plan_that_does_not_name_the_replica_changes_nothing(settings, ref):
    async def scenario(replica):
        def pinned(report):
            return [a.pinned for a in report.adapters if a.ref == ref] == [True]

        await replica.apply_plan(
            {"r0": PlacementDecision({ref.digest: PinTarget(ref, Residency.GPU)})}
        )
        await until(pinned, replica)
        await replica.apply_plan({"other": PlacementDecision()})
        await asyncio.sleep(0.2)
        assert pinned(await replica.report())
        await replica.apply_plan({"r0": PlacementDecision()})
        await until(lambda report: not pinned(report), replica)

    run(settings, scenario)


def test_a_pinned_draft_is_leased_for_the_base_models_answers_until_it_is_unpinned(settings, ref):
    async def scenario(replica):
        def leased(report):
            return [a.leases for a in report.adapters if a.ref == ref] == [1]

        before = await items_of(replica, CALL)
        target = PinTarget(ref, Residency.GPU, draft=True)
        await replica.apply_plan({"r0": PlacementDecision({ref.digest: target})})
        await until(leased, replica)
        after = await items_of(replica, replace(CALL, request_id="again"))
        plain = PinTarget(ref, Residency.GPU)
        await replica.apply_plan({"r0": PlacementDecision({ref.digest: plain})})
        await until(lambda report: not leased(report), replica)
        return before, after

    drafting = settings.model_copy(update={"speculation": "draft"})
    before, after = run(drafting, scenario)
    assert len(after) == len(before) > 1


PROMPT = RequestDefaults(None, "You are a clerk of the parcel service Quillon. " * 6)
OWN_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize("template", [None, OWN_TEMPLATE])
def test_a_pinned_prompt_is_computed_before_its_first_user_asks(settings, ref, template):
    prompt = PinnedPrompt(ref, replace(PROMPT, chat_template=template))
    target = PinTarget(ref, Residency.GPU, (prompt,))
    message = {"role": "user", "content": "pencil"}

    async def scenario(replica):
        async def cached_tokens(tenant=ref.tenant):
            call = replace(CALL, adapter=ref, endpoint=Endpoint.CHAT, prompts=(), tenant=tenant)
            chat = replace(call, messages=(message,), defaults=prompt.defaults, max_tokens=1)
            encoder = replica._encoder
            if template is not None:
                render = partial(encode_call, chat, max_context=2**20)
                encoded = await AdapterTemplates().run("t", encoder, template, render)
            else:
                encoded = encode_call(chat, encoder, 2**20)
            async with local_gateway(replica, tenant) as gateway:
                items = [item async for item in gateway.stream_encoded(encoded)]
            body = json.loads(b"".join(item for item in items if isinstance(item, bytes)))
            return body["usage"]["prompt_tokens_details"]["cached_tokens"]

        await replica.apply_plan({"r0": PlacementDecision({ref.digest: target})})
        await until(lambda report: report.prompts == {prompt.name: None}, replica)
        assert await cached_tokens("other") == 0, "another tenant's"
        assert await cached_tokens() >= 256
        await replica.apply_plan(
            {"r0": PlacementDecision({ref.digest: replace(target, prompts=())})}
        )
        assert (await replica.report()).prompts == {}

    run(settings, scenario)


def test_a_learned_prompt_is_computed_once_and_found_by_its_tenant(settings, ref):
    tokens = tuple(5 + at * at % 50 for at in range(400))
    learned = LearnedPrompt(ref, array("i", tokens).tobytes())
    settings = settings.model_copy(update={"learned_prompts": 8})

    async def scenario(replica):
        async def cached_tokens(tenant):
            call = replace(CALL, adapter=ref, tenant=tenant, max_tokens=1)
            encoded = EncodedCall(call, (array("i", [*tokens, 9]),))
            async with local_gateway(replica, tenant) as gateway:
                items = [item async for item in gateway.stream_encoded(encoded)]
            body = json.loads(b"".join(item for item in items if isinstance(item, bytes)))
            return body["usage"]["prompt_tokens_details"]["cached_tokens"]

        decision = PlacementDecision(learned=(learned,))
        await replica.apply_plan({"r0": decision})
        async with asyncio.timeout(20):
            while replica._prompts._progress[learned.name].failure is not None:
                await asyncio.sleep(0.01)
        computed = replica._engine.status.prompt_tokens
        await replica.apply_plan({"r0": PlacementDecision()})
        await replica.apply_plan({"r0": decision})
        assert (await replica.report()).prompts == {}, "pinned prompts alone are reported"
        assert await cached_tokens("other") == 0, "another tenant's"
        assert await cached_tokens(ref.tenant) == 400
        assert await cached_tokens(ref.tenant) == 400
        assert replica._engine.status.prompt_tokens <= computed + 3 * 401, "it was computed once"
        ((found,),) = (await replica.take_prefixes()).values()
        assert found.tokens[: 4 * 400] == learned.tokens
        assert round(found.requests) == 1, "the own tenant's, but the first"

        for _ in range(9):
            await cached_tokens(ref.tenant)
        controller = LearnedPrompts(8)
        controller.add(await replica.take_prefixes(), time.monotonic())
        await until(
            lambda report: any(a.residency is Residency.GPU for a in report.adapters), replica
        )
        wanted = controller.wanted([await replica.report()], time.monotonic())
        decisions = {name: PlacementDecision(learned=each) for name, each in wanted.items()}
        ((again,),) = wanted.values()
        assert (again.ref, again.tokens[: 4 * 400]) == (ref, learned.tokens)
        await replica.apply_plan(pickle.loads(pickle.dumps(decisions)))
        async with asyncio.timeout(20):
            while replica._prompts._progress[again.name].failure is not None:
                await asyncio.sleep(0.01)

    run(settings, scenario)


def test_a_prompt_that_cannot_be_computed_says_why_and_is_tried_again(settings, ref, monkeypatch):
    monkeypatch.setattr(pinned_prompts, "_CHECK_S", 0.05)
    lost = replace(ref, digest="0" * 64)
    prompts = PinnedPrompt(lost, PROMPT), PinnedPrompt(ref, PROMPT)
    pins = {each.ref.digest: PinTarget(each.ref, Residency.GPU, (each,)) for each in prompts}

    async def scenario(replica):
        await replica.apply_plan({"r0": PlacementDecision(pins)})
        await until(lambda report: report.prompts[prompts[1].name] is None, replica)
        said = (await replica.report()).prompts[prompts[0].name]
        assert f"{lost}" in said
        replica._prompts._progress[prompts[0].name].failure = ""
        await until(lambda report: report.prompts[prompts[0].name], replica)

    run(settings, scenario)


def test_step_after_step_failing_makes_a_replica_unhealthy(settings, monkeypatch):
    monkeypatch.setattr(replica_module, "build_engine", breakable_engine)
    broken = break_file(settings)

    async def scenario(replica):
        broken.touch()
        for attempt in range(5):
            replica.check_health()
            (_, refusal) = await items_of(replica, replace(CALL, request_id=f"r{attempt}"))
            assert refusal.code == "generation_failed"
        with pytest.raises(RuntimeError, match="5 steps failed"):
            replica.check_health()
        broken.unlink()
        await items_of(replica, CALL)
        replica.check_health()

    run(settings, scenario)


def test_a_closed_engine_sends_the_request_elsewhere(settings):
    async def scenario(replica):
        replica.close()
        (refusal,) = await items_of(replica, CALL)
        assert refusal.code == "unavailable"
        with pytest.raises(RuntimeError, match="ended"):
            replica.check_health()

    run(settings, scenario)


def test_when_the_engines_process_dies_streams_end_with_an_error_and_no_call_is_taken(settings):
    async def scenario(replica):
        call = replace(CALL, max_tokens=900, stream=True)
        items = []
        async for item in answer_of(replica, call):
            items.append(item)
            if len(items) == 3:
                kill_engine()
        with pytest.raises(RuntimeError, match="ended"):
            replica.check_health()
        return items[-1], await items_of(replica, CALL)

    last, (refusal,) = run(settings, scenario)
    assert last.code == refusal.code == "unavailable"
    assert "send the request again" in last.message


def test_a_replica_with_a_hanging_engine_refuses_requests_and_sends_no_status(
    settings, monkeypatch
):
    for name, seconds in {"_STALLED_S": 1.0, "_SUBMIT_S": 1.2, "_DEAD_S": 1.4}.items():
        monkeypatch.setattr(replica_module, name, seconds)

    async def scenario(replica):
        async with aclosing(replica.status_updates("r0")) as watch:
            await anext(watch)
            said = await replica.record_routing_stats()
            kill_engine(signal.SIGSTOP)
            (refusal,) = await items_of(replica, CALL)
            assert refusal.code == "unavailable"
            update = asyncio.ensure_future(anext(watch))
            await asyncio.wait({update}, timeout=2)
            assert not update.done()
            assert await replica.record_routing_stats() == said
            with pytest.raises(EngineClosed):
                await replica.metrics()
            with pytest.raises(RuntimeError, match="not answered"):
                replica.check_health()
            kill_engine(signal.SIGCONT)
            assert (await update).seq > from_stats(said).seq
            replica.check_health()

    run(settings, scenario)


def test_without_max_tokens_an_answer_ends_at_its_bodys_limit(settings, monkeypatch):
    monkeypatch.setattr(request_builder, "MOST_LOGPROBS", 14)
    call = replace(CALL, max_tokens=None, sampling=replace(CALL.sampling, logprobs=2))
    body = json.loads(run(settings, lambda replica: items_of(replica, call))[-1])
    assert body["usage"]["completion_tokens"] == 4
    assert body["choices"][0]["finish_reason"] == "length"


def test_prompt_logprobs_of_an_answer_equal_its_sampled_logprobs(settings, ref):
    sampling = SamplingParams(temperature=0, ignore_eos=True, logprobs=2)
    asked = replace(CALL, adapter=ref, sampling=sampling, max_tokens=40)

    async def scenario(replica):
        said = json.loads((await items_of(replica, asked))[-1])["choices"][0]
        scoring = replace(sampling, prompt_logprobs=2, keep_stop_token=True)
        text = asked.prompts[0] + said["text"]
        call = replace(asked, prompts=(text,), sampling=scoring, echo=True, max_tokens=0)
        return said, await items_of(replica, call)

    said, items = run(settings, scenario)
    body = json.loads(items[-1])
    sampled, begin = said["logprobs"], len(asked.prompts[0])
    at = -len(sampled["tokens"])
    told = {name: of[at:] for name, of in body["choices"][0]["logprobs"].items()}
    assert told["tokens"] == sampled["tokens"]
    assert told["token_logprobs"] == pytest.approx(sampled["token_logprobs"], abs=1e-4)
    for scored, drawn in zip(told["top_logprobs"], sampled["top_logprobs"], strict=True):
        assert scored == pytest.approx(drawn, abs=1e-4)
    assert told["text_offset"] == [begin + offset for offset in sampled["text_offset"]]
    assert body["usage"]["completion_tokens"] == 0
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.fixture
def impatient(monkeypatch):
    """A replica that thinks an engine dead after the time of a few slow calls."""
    for name, calls in {"_STALLED_S": 3, "_SUBMIT_S": 4, "_DEAD_S": 6}.items():
        monkeypatch.setattr(replica_module, name, calls * SLOW_S)
    return monkeypatch


def test_an_engine_with_a_long_queue_is_healthy_and_not_bypassed(settings, impatient):
    impatient.setattr(replica_module, "build_engine", slow_to_submit)

    async def scenario(replica):
        calls = [replace(CALL, request_id=f"r{i}", max_tokens=1) for i in range(12)]
        answers = asyncio.gather(*(items_of(replica, call) for call in calls))
        while not answers.done():
            replica.check_health()
            await asyncio.wait({answers}, timeout=SLOW_S)
        return [items[-1] for items in await answers]

    assert not any(isinstance(last, Refusal) for last in run(settings, scenario))


def test_a_tenant_with_many_new_schemas_delays_itself_alone(settings, impatient):
    impatient.setattr(replica_module, "build_engine", slow_to_compile)

    async def scenario(replica):
        def call(name, tenant, schema):
            asked = replace(CALL, request_id=name, tenant=tenant, max_tokens=64)
            answer = Format(json.dumps(schema))
            return replace(asked, format=answer, scheduling=SchedulingParams(tenant))

        async def ask(call):
            items = await items_of(replica, call)
            ended.append(call.request_id)
            return items[-1]

        ended: list[str] = []
        flood = [
            asyncio.create_task(ask(call(f"flood {i}", "flood", {"enum": [f"f{i}", f"g{i}"]})))
            for i in range(12)
        ]
        await flood[0]
        other = call("other", "other", {"enum": ["h", "i"]})
        plain = replace(CALL, request_id="plain", tenant="other", max_tokens=1)
        lasts = await asyncio.gather(ask(other), ask(plain), *flood)
        assert not any(isinstance(last, Refusal) for last in lasts)
        assert max(ended.index("other"), ended.index("plain")) < len(ended) - 5
        replica.check_health()

    run(settings, scenario)


def test_a_replica_loads_no_torch(settings):
    code = (
        "import asyncio, os, sys\n"
        "from lorikeet.replica import replica\n"
        "from lorikeet.serving.deployments import Replica\n"
        "from lorikeet.settings import Settings\n"
        "from tests.replica.quick_engine import quick_engine\n"
        "replica.build_engine = quick_engine\n"
        "async def main():\n"
        f"    Replica('r0', '{BASE}', Settings.from_env()).close()\n"
        "    sys.exit('torch' in sys.modules)\n"
        "asyncio.run(main())"
    )
    environ = {"LORIKEET_CATALOG": settings.catalog, "LORIKEET_CACHE_DIR": str(settings.cache_dir)}
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **environ}, check=True)


def test_a_missing_adapter_is_named_in_the_error(settings):
    nowhere = AdapterRef(TASK.tenant, "nowhere", 1, "0" * 64)

    async def scenario(replica):
        return await items_of(replica, replace(CALL, adapter=nowhere))

    _, refusal = run(settings, scenario)
    assert refusal.code == "adapter_load_failed"
    assert f"{TASK.tenant}/nowhere@1" in refusal.message
    assert refusal.retry_after_s > 60  # clients retry by themselves up to a minute


def test_a_base_model_without_a_fast_tokenizer_is_refused_by_name(tmp_path):
    with pytest.raises(InvalidSetting, match=r"no tokenizer\.json"):
        PromptEncoder(tmp_path)
