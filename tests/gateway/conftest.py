"""A gateway on loopback with a real catalog and a replica that replays scripted answers."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
import uvicorn
from safetensors.numpy import save_file

from loadtest.ports import free_port
from lorikeet.addresses import Address
from lorikeet.apis.answer import event_stream, whole_answer
from lorikeet.apis.chat.answer import EventStream
from lorikeet.batch_store import BatchStore
from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.records import Scope
from lorikeet.catalog.store.local import LocalStore
from lorikeet.catalog.store.object_store import ObjectStore
from lorikeet.file_store import FileStore
from lorikeet.gateway.app import create_app
from lorikeet.gateway.call_encoders import CallEncoders
from lorikeet.gateway.http_protocol import BoundedHttpProtocol
from lorikeet.gateway.listeners import AdminListener, PublicListener
from lorikeet.gateway.services import ServedModel, Services
from lorikeet.parity.figures import Parity, Verdict
from lorikeet.protocol.messages import (
    AnswerHeader,
    Call,
    Continuation,
    EncodedCall,
    Endpoint,
    FinalUsage,
    Refusal,
    SmokeResult,
    SmokeTest,
    StreamItem,
    Work,
)
from lorikeet.protocol.parity import ParityTest
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet.response_store import ResponseStore
from lorikeet.text.choice import Choice, Ending
from lorikeet.text.logprobs import LogprobsJson
from lorikeet.text.prompts import PromptEncoder
from lorikeet.text.template_server import TemplateProcesses
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.adapter_format import (
    AdapterLimits,
    BaseCopy,
    BaseShape,
    WholeModule,
    write_blob,
)
from lorikeet_engine.telemetry.status import EngineStatus, LiveStats, TierStatus
from tests.forked_processes import start_template_server
from tests.placement.builders import held
from tests.waiting import eventually

if TYPE_CHECKING:
    import anthropic
    import openai

    from tests.gateway.scripted_replica import ScriptedReplica

SHAPE = BaseShape("llama", 1, 8, 16, 2, 1, 4, vocabulary=24)
WIDER = BaseShape("llama", 1, 16, 32, 4, 2, 4, vocabulary=24)
FILES_BYTES = 10_000_000
LIMITS = AdapterLimits(max_rank=4, max_bytes=100_000)
Items = AsyncGenerator[StreamItem, None]
Script = Callable[..., "ScriptedReplica"]


@pytest.fixture(autouse=True, scope="module")
def _template_servers_forked() -> Iterator[None]:
    """Fork the processes that render templates; tests/text starts them as gateways do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TemplateProcesses, "_start_server", start_template_server)
        yield


@pytest.fixture
def own_gateway(tmp_path: Path) -> Iterator["Gateway"]:
    """Run a gateway with tenants acme and globex; acme has the adapter acme/support."""
    with serving(tmp_path) as running:
        yield running


@pytest.fixture
def gateway(own_gateway: "Gateway") -> "Gateway":
    """Return a gateway of the test's own; files whose tests change no catalog return `shared`."""
    return own_gateway


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Gateway"]:
    """Run a gateway like `gateway` that stores responses and has vLLM's and Tinker's endpoints,
    shared by tests that change nothing in it.
    """
    folder = tmp_path_factory.mktemp("unchanged")
    more = {"load_from": folder / "shared", "tinker": True}
    with serving(folder, responses_lifetime_s=3600, **more) as running:
        yield running


@pytest.fixture(scope="module")
def _of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Gateway"]:
    with serving(tmp_path_factory.mktemp("shared")) as running:
        yield running


@pytest.fixture
def shared(_of_module: "Gateway") -> "Gateway":
    """Return a gateway like `own_gateway`, shared by tests that change no more than its replica."""
    vars(_of_module.engines).update(vars(ReplayEngines()))
    return _of_module


@pytest.fixture
def script(gateway: "Gateway", tmp_path: Path) -> Script:
    """Return a function that lets the gateway's replica answer every call with a text.

    The function takes the text, and what ScriptedReplica takes beside its folder.
    """
    from tests.gateway.scripted_replica import ScriptedReplica  # which imports this file

    def answer_with(text: str, *given: Any, **named: Any) -> ScriptedReplica:
        scripted = ScriptedReplica(tmp_path, *given, **named)
        gateway.engines.replay = scripted.writes(text)
        return scripted

    return answer_with


@contextmanager
def serving(
    folder: Path,
    store: ObjectStore | None = None,
    responses_lifetime_s: float | None = None,
    clock: Callable[[], float] = time.time,
    served: Mapping[str, ServedModel] = {},
    *,
    apart: bool = False,
    **services: Any,
) -> Iterator["Gateway"]:
    """Run a gateway.

    clock: clock of stored responses and files, Unix seconds.
    served: further base models, and others than the usual `tiny` and `wider`.
    apart: run both listeners, tenants' at `public_url` and admins' at `url`; else one for all.
    """
    store = store or LocalStore(folder / "store")
    catalog = AdapterCatalog.init(store)
    if responses_lifetime_s is not None:
        services["responses"] = ResponseStore(store, responses_lifetime_s, clock)
    services.setdefault("files", FileStore(store, FILES_BYTES, clock))
    services.setdefault("batches", BatchStore(store, 20, clock) if services["files"] else None)
    engines = ReplayEngines()
    _, admin_key = catalog.create_key(None, {Scope.ADMIN}, actor="test")
    base_models = {
        "tiny": ServedModel(SHAPE, ("org/Tiny-1B",)),
        "wider": ServedModel(WIDER, ("org/Wider-2B",)),
        **served,
    }
    encoders = encoders_of(engines)
    app = create_app(Services(catalog, base_models, LIMITS, engines, encoders, **services))
    address = Address("127.0.0.1", free_port() if apart else 0)
    if apart:
        AdminListener(address).open_with(app)
    with listening(PublicListener(app) if apart else app) as public_url:
        url = f"http://{address}" if apart else public_url
        gateway = Gateway(url, catalog, engines, admin_key, folder, base_models=base_models)
        gateway.public_url = public_url
        for tenant in ("acme", "globex"):
            gateway.add_tenant(tenant)
        gateway.register("acme/support")
        yield gateway


@contextmanager
def leaving(gateway: "Gateway", method: str, path: str, key: str, body: bytes) -> Iterator[None]:
    """Send a request whose client disconnects at the end of the context without reading."""
    at = httpx.URL(gateway.url)
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((at.host, at.port or 0)) as connection:
        connection.sendall(head.encode() + body)
        yield


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """Run a server for an ASGI application; yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(
            app, http=BoundedHttpProtocol, log_config=None, timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        assert eventually(lambda: server.started or not thread.is_alive())
        assert server.started
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=10)


@dataclass
class Gateway:
    url: str
    catalog: AdapterCatalog
    engines: "ReplayEngines"
    admin_key: str
    folder: Path
    keys: dict[str, str] = field(default_factory=dict)
    base_models: dict[str, ServedModel] = field(default_factory=dict)
    public_url: str = ""

    def add_tenant(self, tenant: str, max_concurrent: int | None = None) -> None:
        self.catalog.create_tenant(tenant, max_concurrent=max_concurrent, actor="test")
        _, self.keys[tenant] = self.catalog.create_key(tenant, {Scope.INFER}, actor="test")

    def register(self, adapter: str, seed: int = 0, **query: Any) -> dict[str, Any]:
        answer = self.upload(adapter, make_blob(self.folder / "made", seed=seed), **query)
        assert answer.is_success, answer.text
        version: dict[str, Any] = answer.json()
        return version

    def upload(self, adapter: str, blob: bytes, **query: Any) -> httpx.Response:
        path = f"/admin/v1/adapters/{adapter}/versions"
        return self.request("PUT", path, self.admin_key, content=blob, params=query)

    def admin(self, method: str, path: str, body: Any = None) -> httpx.Response:
        return self.request(method, f"/admin/v1{path}", self.admin_key, json=body)

    def post(self, path: str, body: Any, tenant: str = "acme", **rest: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, self.keys[tenant], content=content, **rest)

    def request(
        self,
        method: str,
        path: str,
        key: str | None,
        more_headers: Mapping[str, str] = {},
        **rest: Any,
    ) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        headers |= more_headers
        return httpx.request(method, self.url + path, headers=headers, timeout=60, **rest)

    def openai(self, tenant: str = "acme") -> "openai.OpenAI":
        import openai  # importing takes a second, and few test processes need it

        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=self.keys[tenant], max_retries=0, timeout=20
        )

    def anthropic(self, tenant: str = "acme", **options: Any) -> "anthropic.Anthropic":
        anthropic = pytest.importorskip("anthropic")
        given = {"api_key": self.keys[tenant], "max_retries": 0, "timeout": 20} | options
        return anthropic.Anthropic(base_url=self.url, **given)


def chat(model: str = "acme/support", content: str = "hello there", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": content}], **more}


@cache
def demo_encoder() -> PromptEncoder:
    return PromptEncoder(Path("demo/model"))


class ReplayEngines:
    """An EngineClient whose replica repeats the prompt's words, unless a test sets `replay`.

    A base model has the attributes `encoder` and `max_context` of the replay, if there are such.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, Call]] = []
        self.encoded: list[EncodedCall] = []
        self.closed: list[str] = []
        self.replay: Callable[[Call], Items] = repeat
        self.proofs: list[ParityTest] = []
        self.proved: Parity | Refusal = Parity(Verdict.ACCEPTED, 3, 0.01, 0.03, 0.0002)
        self.smoke_tests: list[tuple[str, SmokeTest]] = []
        self.try_out: Callable[[SmokeTest], SmokeResult | Refusal] = all_differ
        self.maps: list[ReplicaReport] = []
        self.base_matrices: set[str] = set()
        self.serves = True
        self.takes_pushes = True
        self.expected: list[tuple[str, str, Path, int]] = []
        self.changed: list[int] = []  # rows of whole modules that differ from the base model's
        self.held: dict[str, bytes] = {}  # blobs that replicas hold, by digest

    async def stream_answer(self, base_model: str, encoded: EncodedCall) -> Items:
        call = encoded.call
        self.calls.append((base_model, call))
        self.encoded.append(encoded)
        items = self.replay(call)
        try:
            async for item in items:
                yield item
        finally:
            await items.aclose()
            self.closed.append(call.request_id)

    async def smoke(self, base_model: str, test: SmokeTest) -> SmokeResult | Refusal:
        self.smoke_tests.append((base_model, test))
        return self.try_out(test)

    async def parity(self, base_model: str, test: ParityTest) -> Parity | Refusal:
        self.proofs.append(test)
        return self.proved

    async def changed_copies(self, base_model: str, copies: Sequence[BaseCopy]) -> list[str]:
        return [copy.module for copy in copies if copy.sha256 not in self.base_matrices]

    async def changed_rows(
        self, base_model: str, modules: Sequence[WholeModule]
    ) -> dict[str, list[int]]:
        return {module.module: self.changed for module in modules}

    async def deliver(self, base_model: str, ref: AdapterRef, blob: Path) -> bool:
        if self.takes_pushes:
            self.held[ref.digest] = blob.read_bytes()
        return self.takes_pushes

    async def expect(self, base_model: str, digest: str, blob: Path, size_bytes: int) -> None:
        self.expected.append((base_model, digest, blob, size_bytes))

    async def holds(self, base_model: str, digest: str) -> bool:
        return digest in self.held

    async def release(self, base_model: str, digest: str) -> None:
        """Do nothing: a released blob stays until memory is needed."""

    async def reports(self, tier: Residency = Residency.DISK) -> list[ReplicaReport]:
        if tier is Residency.GPU:
            return self.maps
        ref = AdapterRef("acme", "support", 1, "d" * 64)
        live = LiveStats(running=1, waiting=2, kv_pages_used=3, kv_pages_total=4)
        status = EngineStatus(live, {Residency.GPU: TierStatus(1, 5, 6, 0, 0)})
        adapter = held(ref, Residency.GPU, 64, leases=2, pinned=True)
        return [ReplicaReport("r0", "tiny", status, (adapter,))]

    def max_context(self, base_model: str) -> int | None:
        usual = 4096 if base_model == "tiny" else None
        context: int | None = getattr(self.replay, "max_context", usual)
        return context

    def ready(self) -> bool:
        return self.serves

    @property
    def last(self) -> Call:
        return self.calls[-1][1]

    @property
    def last_work(self) -> Work:
        return self.encoded[-1].work


def encoders_of(engines: ReplayEngines) -> CallEncoders:
    return CallEncoders(ReplayEncoders(engines))


class ReplayEncoders(Mapping[str, PromptEncoder]):
    """Encoders of all base models: that of the engines' replay, else the demo's."""

    def __init__(self, engines: ReplayEngines) -> None:
        self._engines = engines

    def __getitem__(self, base_model: str) -> PromptEncoder:
        encoder: PromptEncoder = getattr(self._engines.replay, "encoder", None) or demo_encoder()
        return encoder

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def header(call: Call) -> AnswerHeader:
    if call.adapter is None:
        return AnswerHeader("replica-7", None, None)
    return AnswerHeader("replica-7", call.adapter.digest, Residency.HOST)


@dataclass(frozen=True)
class Played:
    """AnswerProgress of a replayed answer."""

    taken: FinalUsage
    stopped_by: str | None = None

    def usage(self) -> FinalUsage:
        return self.taken

    def stop_string(self, choice: int) -> str | None:
        return self.stopped_by


async def repeat(call: Call) -> Items:
    """Replay an answer in which every choice is its prompt, word by word, and has no token ids."""
    yield header(call)
    prompts = [str(call.messages[-1]["content"])] if call.messages else list(map(str, call.prompts))
    texts = [text for text in prompts for _ in range(call.n)]
    usage = FinalUsage(sum(len(p.split()) for p in prompts), 0, sum(len(t.split()) for t in texts))
    if not call.stream:
        known: dict[str, Any] = {"token_ids": ()} if call.return_token_ids else {}
        if known and call.sampling.logprobs is not None:
            known["logprobs"] = LogprobsJson(call.endpoint)
        yield whole_answer(call, [Choice(text, Ending.STOP, **known) for text in texts], usage)
        return
    events = event_stream(call, Played(usage))
    for index, text in enumerate(texts):
        for word in text.split():
            yield events.delta(index, word + " ")
            await asyncio.sleep(0)
        yield events.delta(index, "", Ending.STOP)
    yield events.end(usage)


async def endless(call: Call) -> Items:
    """Replay a stream that ends only when closed."""
    assert call.stream
    assert call.endpoint is Endpoint.CHAT
    events = EventStream(call)
    yield header(call)
    while True:
        yield events.delta(0, "more ")
        await asyncio.sleep(0.01)


def all_differ(test: SmokeTest) -> SmokeResult:
    """Return a smoke test's result in which the adapter reverses the words."""
    base = [tuple(range(test.max_tokens)) for _ in test.prompts]
    return smoke_result(base, [tokens[::-1] for tokens in base])


def smoke_result(base: Sequence[Sequence[int]], adapted: Sequence[Sequence[int]]) -> SmokeResult:
    def said(choices: Sequence[Sequence[int]]) -> tuple[Continuation, ...]:
        return tuple(Continuation(tuple(c), " ".join(map(str, c))) for c in choices)

    return SmokeResult("replica-7", Residency.REMOTE, said(base), said(adapted))


def make_peft(
    folder: Path,
    *,
    seed: int = 0,
    config: dict[str, Any] | None = None,
    rank: int = 2,
    width: int = SHAPE.hidden,
) -> Path:
    """Write a PEFT folder with one adapted linear, as save_pretrained does."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = np.random.default_rng(seed)
    at = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{at}.lora_A.weight": numbers.standard_normal((rank, width), dtype=np.float32),
        f"{at}.lora_B.weight": numbers.standard_normal((width, rank), dtype=np.float32),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    words = {
        "peft_type": "LORA",
        "base_model_name_or_path": "/models/Tiny-1B",
        "r": rank,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(words | (config or {})))
    return folder


_blobs: dict[str, bytes] = {}


def make_blob(folder: Path, **peft: Any) -> bytes:
    """Return the blob of make_peft's adapter, which is made once for each content."""
    key = repr(peft)
    if key not in _blobs:
        out = folder / "blob"
        write_blob(make_peft(folder, **peft), out)
        _blobs[key] = out.read_bytes()
    return _blobs[key]
