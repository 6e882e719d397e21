"""Tinker's own client samples from a gateway, with a scripted replica."""

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.types import Receive

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.records import Scope
from lorikeet.errors import Expired
from lorikeet.gateway.app import create_app
from lorikeet.gateway.pushing.pushed_versions import AdapterUses
from lorikeet.gateway.replica_response import ReplicaResponse
from lorikeet.gateway.services import ServedModel, Services
from lorikeet.gateway.tinker import sample_futures
from lorikeet.gateway.tinker.requests import CANCEL, RETRIEVE, SAMPLE, sampling_session_id
from lorikeet.gateway.tinker.sample_futures import SampleFutures
from lorikeet.protocol.messages import AnswerHeader, Call, Endpoint, Refusal
from lorikeet.protocol.peers import Peers
from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.request import FinishReason
from tests.gateway.conftest import (
    LIMITS,
    SHAPE,
    Gateway,
    Items,
    encoders_of,
    header,
    leaving,
    listening,
    serving,
)
from tests.gateway.linked_peers import LinkedPeers, link
from tests.gateway.scripted_replica import ScriptedReplica
from tests.gateway.test_bad_requests import error_of
from tests.waiting import eventually

tinker = pytest.importorskip("tinker")
TEXT = "é fine 😀<|eos|>"
PROMPT = [5, 9, 17, 30]
TARGETS = tinker.TensorData(data=[3] * 3, dtype="int64", shape=[3, 1])
INPUT = tinker.ModelInput.from_ints(PROMPT)


@pytest.fixture(scope="module")
def _of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with serving(tmp_path_factory.mktemp("tinker"), tinker=True) as running:
        yield running


@pytest.fixture
def gateway(shared: Gateway) -> Gateway:
    return shared


@pytest.fixture
def replica(gateway: Gateway, tmp_path: Path) -> ScriptedReplica:
    """Replica of the gateway whose model writes TEXT and an end of sequence."""
    scripted = ScriptedReplica(tmp_path)
    gateway.engines.replay = scripted.writes(TEXT)
    return scripted


def client_of(gateway: Gateway, tenant: str = "acme") -> Any:
    return tinker.ServiceClient(base_url=gateway.url, api_key="tml-" + gateway.keys[tenant])


@pytest.fixture
def client(gateway: Gateway) -> Iterator[Any]:
    with client_of(gateway) as made:
        yield made


@pytest.fixture
def sampler(client: Any, replica: ScriptedReplica) -> Any:
    return client.create_sampling_client(base_model="tiny").result()


def params(**fields: Any) -> Any:
    return tinker.SamplingParams(**{"max_tokens": 20, **fields})


def body(model: str = "tiny", prompt: list[int] = PROMPT, **params: Any) -> dict[str, Any]:
    return {
        "sampling_session_id": sampling_session_id(model),
        "prompt": {"chunks": [{"tokens": prompt, "type": "encoded_text"}]},
        "sampling_params": params,
    }


def ids_of(replica: ScriptedReplica, text: str) -> list[int]:
    return list(replica.encoder.backend.encode(text, add_special_tokens=False).ids)


def test_token_ids_go_in_and_come_out(
    gateway: Gateway, sampler: Any, replica: ScriptedReplica
) -> None:
    parts = tinker.ModelInput.empty().append(tinker.EncodedTextChunk(tokens=PROMPT[:2]))
    parts = parts.append_int(PROMPT[2]).append_int(PROMPT[3])
    answer = sampler.sample(parts, 2, params()).result()
    assert gateway.engines.encoded[-1].prompts[0].tolist() == PROMPT, "without a chat template"
    expected = ids_of(replica, TEXT)
    assert [sequence.tokens for sequence in answer.sequences] == [expected] * 2
    assert [sequence.logprobs for sequence in answer.sequences] == [[0.0] * len(expected)] * 2
    assert [sequence.stop_reason for sequence in answer.sequences] == ["stop"] * 2
    assert len({sequence.sequence_id for sequence in answer.sequences}) == 2
    assert answer.prompt_logprobs is None
    assert answer.topk_prompt_logprobs is None


def test_a_sample_at_its_limit_ends_for_its_length(
    gateway: Gateway, sampler: Any, replica: ScriptedReplica
) -> None:
    gateway.engines.replay = replica.writes("one", FinishReason.LENGTH)
    assert sampler.sample(INPUT, 1, params()).result().sequences[0].stop_reason == "length"


def test_sampling_parameters_reach_the_replica(gateway: Gateway, sampler: Any) -> None:
    given = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "seed": 11, "max_tokens": 3}
    sampler.sample(INPUT, 4, params(**given)).result()
    call = gateway.engines.last
    sampling = call.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 7, 0.9)
    assert (sampling.seed, call.max_tokens, call.n) == (11, 3, 4)
    sampler.sample(INPUT, 1, tinker.SamplingParams()).result()
    call = gateway.engines.last
    assert (call.max_tokens, call.sampling.temperature, call.sampling.top_k) == (None, 1.0, 0)


@pytest.mark.parametrize(
    ("stop", "texts", "ids", "ignores_eos"),
    [
        (None, (), (), False),
        ([], (), (), True),
        ("a", ("a",), (), False),
        (["a", "b"], ("a", "b"), (), False),
        ([4, 5], (), (4, 5), False),
    ],
)
def test_strings_and_token_ids_stop_a_sample(
    gateway: Gateway, sampler: Any, stop: Any, texts: Any, ids: Any, ignores_eos: bool
) -> None:
    sampler.sample(INPUT, 1, params(stop=stop)).result()
    call = gateway.engines.last
    assert (call.stop, call.sampling.stop_token_ids) == (texts, ids)
    assert call.sampling.ignore_eos is ignores_eos


def test_a_stop_strings_tokens_end_the_sample(sampler: Any, replica: ScriptedReplica) -> None:
    (sequence,) = sampler.sample(INPUT, 1, params(stop="😀")).result().sequences
    assert sequence.tokens == ids_of(replica, TEXT)[:-1]
    assert len(sequence.logprobs) == len(sequence.tokens)
    assert sequence.stop_reason == "stop"


def test_log_probabilities_of_prompts_come_on_request(sampler: Any) -> None:
    scored = [None, -1.0, -2.0, -3.0]
    assert sampler.compute_logprobs(INPUT).result() == scored
    assert sampler.compute_logprobs(INPUT, prompt_logprobs_last_n=2).result() == [
        *(None, None),
        *scored[2:],
    ]
    answer = sampler.sample(INPUT, 2, params(), True, topk_prompt_logprobs=1).result()
    assert answer.prompt_logprobs == scored
    assert answer.topk_prompt_logprobs == [None, *[[(PROMPT[0], -0.5)]] * 3]
    only_top = sampler.sample(INPUT, 1, params(), topk_prompt_logprobs=1).result()
    assert only_top.prompt_logprobs is None
    assert only_top.topk_prompt_logprobs == answer.topk_prompt_logprobs


def test_a_session_samples_the_version_that_it_began_with(
    tmp_path: Path, replica: ScriptedReplica
) -> None:
    with serving(tmp_path / "own", tinker=True) as gateway, client_of(gateway) as client:
        gateway.engines.replay = replica.writes(TEXT)

        def sampled(made: Any) -> int:
            made.sample(INPUT, 1, params()).result()
            return gateway.engines.last.adapter.version

        path = "tinker://acme/support"
        old = client.create_sampling_client(model_path=path).result()
        assert old.get_base_model() == "org/Tiny-1B", "by which the client gets its tokenizer"
        gateway.register("acme/support", seed=1)
        gateway.admin("POST", "/adapters/acme/support/promote", {"version": 2})
        new = client.create_sampling_client(model_path="tinker://support@prod").result()
        assert [sampled(old), sampled(new)] == [1, 2]
        named = client.create_sampling_client(model_path=f"{path}@1").result()
        assert sampled(named) == 1
        again = tinker.SamplingClient.from_sampler_handle(
            old.get_sampler_handle(), api_key="tml-" + gateway.keys["acme"]
        )
        assert sampled(again) == 1
        assert named._get_sampler_submit().result().model_path == f"{path}@1"


def test_a_path_may_add_adapters_up(tmp_path: Path, replica: ScriptedReplica) -> None:
    with serving(tmp_path / "own", tinker=True) as gateway, client_of(gateway) as client:
        gateway.engines.replay = replica.writes(TEXT)
        gateway.register("acme/other", seed=1)
        made = client.create_sampling_client(model_path="tinker://support+acme/other").result()
        made.sample(INPUT, 1, params()).result()
        names = {ref.name for ref in gateway.engines.last.adapter.members}
        assert names == {"support", "other"}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"model_path": "tinker://acme/nothing"}, "acme/nothing"),
        ({"base_model": "Qwen/Qwen3-8B"}, "want one of tiny"),
    ],
)
def test_an_unknown_model_is_named(client: Any, fields: Any, told: str) -> None:
    with pytest.raises(tinker.NotFoundError, match=told):
        client.create_sampling_client(**fields).result()


def test_other_tenants_adapters_are_unknown(gateway: Gateway, replica: ScriptedReplica) -> None:
    with client_of(gateway, "globex") as client, pytest.raises(tinker.NotFoundError):
        client.create_sampling_client(model_path="tinker://acme/support").result()
    answer = gateway.post(SAMPLE, body("acme/support"), "globex")
    assert error_of(answer, 404)["code"] == "model_not_found"


def test_a_key_for_some_adapters_samples_these_alone(
    gateway: Gateway, replica: ScriptedReplica
) -> None:
    given = {"adapters": ("support",), "actor": "test"}
    _, key = gateway.catalog.create_key("acme", {Scope.INFER}, **given)
    made = {"base_url": gateway.url, "api_key": f"tml-{key}"}
    with tinker.ServiceClient(**made) as client:
        sampler = client.create_sampling_client(model_path="tinker://support").result()
        assert sampler.sample(INPUT, 1, params()).result().sequences
        with pytest.raises(tinker.NotFoundError):
            client.create_sampling_client(base_model="tiny").result()
    listed = tinker.RestClient(**made).get_server_capabilities().result()
    assert not listed.supported_models


def test_the_served_base_models_are_listed(gateway: Gateway) -> None:
    rest = tinker.RestClient(base_url=gateway.url, api_key="tml-" + gateway.keys["acme"])
    listed = rest.get_server_capabilities().result().supported_models
    assert [model.model_name for model in listed] == ["tiny", "wider"]
    assert listed[0].max_context_length == 4096
    assert not listed[0].trainable
    info = rest.get_weights_info_by_tinker_path("tinker://acme/support").result()
    assert (info.base_model, info.is_lora, info.lora_rank) == ("org/Tiny-1B", True, 2)


def test_a_base_model_may_have_its_name_on_the_hub(
    gateway: Gateway, client: Any, replica: ScriptedReplica
) -> None:
    sampler = client.create_sampling_client(base_model="org/Wider-2B").result()
    assert sampler.sample(INPUT, 1, params()).result().sequences
    assert gateway.engines.calls[-1][0] == "wider"


def test_training_is_refused_by_name(client: Any) -> None:
    with pytest.raises(tinker.BadRequestError, match="create_model is not served: Lorikeet sampl"):
        client.create_lora_training_client("tiny", rank=4).result()


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"prompt_alt_tokens_k": 1}, "not supported here: prompt_alt_tokens_k"),
        ({"topk_sample_logprobs": 21}, "topk_sample_logprobs"),
        ({"target_prompt_logprobs": TARGETS}, "not supported here: target_prompt_logprobs"),
    ],
)
def test_unsupported_fields_are_refused_by_name(sampler: Any, asked: Any, told: str) -> None:
    with pytest.raises(tinker.BadRequestError, match=told):
        sampler.sample(INPUT, 1, params(), **asked).result()


def test_an_image_is_refused_with_a_remedy(sampler: Any) -> None:
    image = tinker.types.ImageChunk(data=b"x", format="png")
    with pytest.raises(tinker.BadRequestError, match="prompts are token ids"):
        sampler.sample(INPUT.append(image), 1, params()).result()


def test_a_prompt_beyond_the_context_is_refused(sampler: Any) -> None:
    long = tinker.ModelInput.from_ints([5] * 5000)
    with pytest.raises(tinker.BadRequestError, match="context"):
        sampler.sample(long, 1, params()).result()


def refusing_first(gateway: Gateway, *refusals: Refusal, taken: bool) -> None:
    """Let the replica refuse one request for each refusal, then answer."""
    answers, left = gateway.engines.replay, list(refusals)

    async def refuse(call: Call) -> Items:
        if taken:
            yield header(call)
        yield left.pop(0)

    class Replay:
        encoder, max_context = answers.encoder, answers.max_context

        def __call__(self, call: Call) -> Items:
            return refuse(call) if left else answers(call)

    gateway.engines.replay = Replay()


@pytest.mark.parametrize("taken", [False, True])
def test_the_client_sends_a_refused_request_again(
    gateway: Gateway, sampler: Any, taken: bool
) -> None:
    begun = len(gateway.engines.calls)
    refusing_first(gateway, Refusal("overloaded", "too many", retry_after_s=1.0), taken=taken)
    assert sampler.sample(INPUT, 1, params()).result().sequences[0].tokens
    assert len(gateway.engines.calls) == begun + 2


def test_a_failure_of_the_engine_is_shown(gateway: Gateway, sampler: Any) -> None:
    refusing_first(gateway, Refusal("generation_failed", "it broke"), taken=True)
    with pytest.raises(tinker.RequestFailedError, match="it broke") as failed:
        sampler.sample(INPUT, 1, params()).result()
    assert failed.value.category == "server"
    refusing_first(gateway, Refusal("adapter_overflows", "it overflows"), taken=True)
    with pytest.raises(tinker.RequestFailedError, match="it overflows") as failed:
        sampler.sample(INPUT, 1, params()).result()
    assert failed.value.category == "user"


def test_the_client_waits_for_limits(tmp_path: Path, replica: ScriptedReplica) -> None:
    with serving(tmp_path / "own", tinker=True) as gateway, client_of(gateway) as client:
        gateway.engines.replay = replica.writes(TEXT)
        limits = {"max_concurrent": 1}
        gateway.admin("PATCH", "/tenants/acme", limits).raise_for_status()
        sampler = client.create_sampling_client(base_model="tiny").result()
        begun = [sampler.sample(INPUT, 1, params()) for _ in range(3)]
        assert all(future.result().sequences for future in begun)


def test_an_answer_is_the_same_when_it_is_asked_for_again(
    gateway: Gateway, replica: ScriptedReplica
) -> None:
    gateway.engines.replay = replica.writes(TEXT)
    asked = {"request_id": gateway.post(SAMPLE, body()).json()["request_id"]}
    answers = [gateway.post(RETRIEVE, asked) for _ in range(2)]
    assert answers[0].content == answers[1].content
    assert answers[0].headers["content-type"] == "application/x-protobuf"
    others = gateway.post(RETRIEVE, asked, "globex")
    assert error_of(others, 410)["code"] == "expired"
    told = gateway.request("GET", f"/v1/requests/{asked['request_id']}", gateway.keys["acme"])
    assert told.json()["outcome"] == "finished"


def test_an_adapter_is_in_use_until_its_sample_ends(
    tmp_path: Path, replica: ScriptedReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    uses, begin, begun = AdapterUses(), SampleFutures.begin, []

    async def watched(self: SampleFutures, response: ReplicaResponse, receive: Receive) -> None:
        assert isinstance(response.call.adapter, AdapterRef)
        begun.append(response.call.adapter.digest in uses)
        await begin(self, response, receive)
        begun.append(response.call.adapter.digest in uses)

    monkeypatch.setattr(SampleFutures, "begin", watched)
    with serving(tmp_path / "own", tinker=True, uses=uses) as gateway:
        replay = Held(gateway, replica)
        gateway.post(SAMPLE, body("acme/support")).raise_for_status()
        assert begun == [True, True]
        (digest,) = uses._requests
        replay.let_go.set()
        assert eventually(lambda: digest not in uses)


class Held:
    """Replay of calls that end when they are let go."""

    def __init__(self, gateway: Gateway, replica: ScriptedReplica) -> None:
        self.answers = replica.writes(TEXT)
        self.encoder, self.max_context = replica.encoder, replica.max_context
        self.let_go = threading.Event()
        gateway.engines.replay = self

    async def __call__(self, call: Call) -> Items:
        yield AnswerHeader("replica-7", None, None)
        while not self.let_go.is_set():
            await asyncio.sleep(0.01)
        async for item in self.answers(call):
            yield item


@pytest.fixture
def held(gateway: Gateway, replica: ScriptedReplica) -> Iterator[Held]:
    replay = Held(gateway, replica)
    yield replay
    replay.let_go.set()


def test_a_sample_that_runs_on_is_asked_for_again(
    gateway: Gateway, sampler: Any, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_futures, "_WAIT_S", 0.05)
    future = sampler.sample(INPUT, 1, params())
    with pytest.raises(TimeoutError):
        future.result(timeout=0.5)
    asked = {"request_id": gateway.engines.last.request_id}
    answer = gateway.post(RETRIEVE, asked)
    assert error_of(answer, 408)["code"] == "still_running"
    held.let_go.set()
    assert sampler.sample(INPUT, 1, params()).result().sequences
    assert eventually(lambda: gateway.post(RETRIEVE, asked).status_code in (200, 410))


def test_a_sample_that_its_client_cancels_ends_on_the_replica(gateway: Gateway, held: Held) -> None:
    asked = {"request_id": gateway.post(SAMPLE, body()).json()["request_id"]}
    assert gateway.post(CANCEL, asked, "globex").is_success
    assert asked["request_id"] not in gateway.engines.closed
    assert gateway.post(CANCEL, asked).is_success
    assert eventually(lambda: asked["request_id"] in gateway.engines.closed)
    assert error_of(gateway.post(RETRIEVE, asked), 410)["code"] == "expired"


def test_a_future_that_the_client_gives_up_is_cancelled(
    gateway: Gateway, sampler: Any, held: Held
) -> None:
    begun = len(gateway.engines.calls)
    future = sampler.sample(INPUT, 1, params())
    assert eventually(lambda: len(gateway.engines.calls) > begun)
    request_id = gateway.engines.last.request_id
    asyncio.run(_given_up(future))
    assert eventually(lambda: request_id in gateway.engines.closed)


async def _given_up(future: Any) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(future, 0.3)


def test_a_sample_that_nobody_asks_for_is_cancelled(
    gateway: Gateway, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_futures, "ABANDONED_S", 0.3)
    request_id = gateway.post(SAMPLE, body()).json()["request_id"]
    assert eventually(lambda: request_id in gateway.engines.closed)


def test_a_client_that_hangs_up_before_its_sample_is_taken_cancels_it(
    gateway: Gateway, replica: ScriptedReplica
) -> None:
    encoder = replica.encoder

    class Never:
        max_context = 4096

        async def __call__(self, call: Call) -> Items:
            await asyncio.sleep(60)
            yield b""

    never = Never()
    never.encoder = encoder  # type: ignore[attr-defined]
    gateway.engines.replay = never
    begun, ended = len(gateway.engines.calls), len(gateway.engines.closed)
    key = gateway.keys["acme"]
    with leaving(gateway, "POST", SAMPLE, key, json.dumps(body()).encode()):
        assert eventually(lambda: len(gateway.engines.calls) > begun)
    assert eventually(lambda: len(gateway.engines.closed) > ended)


class InTurn:
    """ASGI application that passes each request to the next of several applications."""

    def __init__(self, *apps: FastAPI) -> None:
        first, self._turns = apps[0], itertools.cycle(apps)
        self._first, running = first, first.router.lifespan_context

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(running(app))
                for other in apps[1:]:
                    await stack.enter_async_context(other.router.lifespan_context(other))
                yield

        first.router.lifespan_context = lifespan

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        app = self._first if scope["type"] == "lifespan" else next(self._turns)
        await app(scope, receive, send)


@pytest.fixture
def two_gateways(gateway: Gateway, replica: ScriptedReplica) -> Iterator[Gateway]:
    """Return a gateway whose requests go to two in turn."""
    served, engines, ends = {"tiny": ServedModel(SHAPE)}, gateway.engines, []
    apps = []
    for _ in range(2):
        ends.append(LinkedPeers())
        parts = AdapterCatalog(gateway.catalog.store), served, LIMITS, engines
        more = {"peers": ends[-1], "gateways": 2, "tinker": True}
        apps.append(create_app(Services(*parts, encoders_of(engines), **more)))
    link(ends)
    with listening(InTurn(*apps)) as url:
        yield replace(gateway, url=url)


def test_any_gateway_answers_for_a_sample(
    two_gateways: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):  # and once with the gateways' other order
        request_id = two_gateways.post(SAMPLE, body()).json()["request_id"]
        for _ in range(3):
            answer = two_gateways.post(RETRIEVE, {"request_id": request_id})
            assert answer.headers["content-type"] == "application/x-protobuf"
    answer = two_gateways.post(RETRIEVE, {"request_id": "0" * 32})
    assert error_of(answer, 410)["code"] == "expired"


def test_a_running_sample_reaches_the_gateway_that_its_client_asks(
    two_gateways: Gateway, replica: ScriptedReplica
) -> None:
    held = Held(two_gateways, replica)
    with client_of(two_gateways) as client:
        sampler = client.create_sampling_client(base_model="tiny").result()
        futures = [sampler.sample(INPUT, 1, params()) for _ in range(3)]
        assert eventually(lambda: len(two_gateways.engines.calls) >= 3)
        held.let_go.set()
        assert all(future.result().sequences for future in futures)


def test_any_gateway_cancels_a_sample(two_gateways: Gateway, replica: ScriptedReplica) -> None:
    held = Held(two_gateways, replica)
    request_id = two_gateways.post(SAMPLE, body()).json()["request_id"]
    assert two_gateways.post(CANCEL, {"request_id": request_id}).is_success
    assert eventually(lambda: request_id in two_gateways.engines.closed)
    held.let_go.set()


def test_a_used_up_budget_is_a_billing_error(gateway: Gateway, replica: ScriptedReplica) -> None:
    """The client then waits and tells its user; it would repeat a 429 in silence."""
    gateway.catalog.create_tenant("poor", tokens_per_month=1, actor="test")
    _, gateway.keys["poor"] = gateway.catalog.create_key("poor", {Scope.INFER}, actor="test")
    assert eventually(lambda: gateway.post(SAMPLE, body(), "poor").status_code == 402)
    answer = gateway.post(SAMPLE, body(), "poor")
    assert error_of(answer, 402)["code"] == "insufficient_quota"


async def _kept(sizes: list[int]) -> list[bool]:
    """Run samples with answers of these sizes one after another; return which are kept."""
    futures = SampleFutures(Peers(), 1)

    async def disconnect() -> dict[str, Any]:
        await asyncio.sleep(60)
        return {}

    async def answer(size: int) -> Items:
        yield AnswerHeader("replica-7", None, None)
        yield b"x" * size

    async def keeps(request_id: str) -> bool:
        try:
            return await futures.outcome("acme", request_id) is not None
        except Expired:
            return False

    for at, size in enumerate(sizes):
        call = Call(f"{at}", Endpoint.COMPLETIONS, 0, "acme", "tiny", None)
        await futures.begin(ReplicaResponse(call, answer(size), [], 1.0), disconnect)
        await keeps(f"{at}")
    await asyncio.sleep(0.01)
    return [await keeps(f"{at}") for at in range(len(sizes))]


def test_the_newest_answers_within_a_tenants_memory_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sample_futures, "TENANT_BYTES", 11_000)
    assert asyncio.run(_kept([4000] * 4)) == [False, False, True, True]
    assert asyncio.run(_kept([4000, 12_000])) == [False, False]
    monkeypatch.setattr(sample_futures, "GATEWAY_BYTES", 6000)
    assert asyncio.run(_kept([4000, 4000])) == [False, True]


def test_an_answer_is_kept_for_its_lifetime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_futures, "LIFETIME_S", 0.0)
    assert asyncio.run(_kept([10])) == [False]


def test_the_api_does_not_exist_unless_it_is_switched_on(tmp_path: Path) -> None:
    with serving(tmp_path) as gateway:
        answer = gateway.post(SAMPLE, body())
        assert "LORIKEET_TINKER" in error_of(answer, 404)["message"]
