"""The parts that the gateway's application is built from."""

import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.kept_view import KeptView
from lorikeet.catalog.resumable_uploads import PART_BYTES
from lorikeet.chat_template import template_digest
from lorikeet.errors import InvalidSetting
from lorikeet.metrics.gateway import GatewayMetrics
from lorikeet.protocol.messages import Call, Refusal, SmokeResult, SmokeTest, StreamItem
from lorikeet.protocol.peers import Peers
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet.responses.store import ResponseStore
from lorikeet.settings import Settings
from lorikeet.tenancy.monthly_budget import RecordedUsage
from lorikeet.usage.ledger import UsageLedger
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.adapter_format import (
    FLOAT32_MEMORY,
    AdapterLimits,
    AdapterMemory,
    BaseCopy,
    BaseShape,
    quantized_linears,
    read_config,
    served_quantization,
)
from lorikeet_engine.errors import ModelError

if TYPE_CHECKING:  # its libraries are wanted only where traces are
    from lorikeet.tracing.exporter import TraceExporter


class EngineClient(Protocol):
    """What a gateway asks of replicas; ServeEngineClient (serving/) does it over Ray Serve."""

    def stream_answer(self, base_model: str, call: Call) -> AsyncGenerator[StreamItem, None]:
        """Stream a replica's answer: an AnswerHeader, then bytes, or a Refusal before the first.

        Closing or cancelling the stream frees at once what the request holds. Raises LorikeetError.
        """
        ...

    async def smoke(self, base_model: str, test: SmokeTest) -> SmokeResult | Refusal:
        """Run a smoke test of an adapter on a replica. Raises LorikeetError."""
        ...

    async def changed_copies(self, base_model: str, copies: Sequence[BaseCopy]) -> Sequence[str]:
        """Ask a replica which copies are not the base model's matrices. Raises LorikeetError."""
        ...

    async def deliver(self, base_model: str, ref: AdapterRef, blob: Path) -> bool:
        """Have all replicas keep an adapter on their hosts until `release`; whether all have it.

        Replicas keep it for a minute: this is called again for as long as they should. Those that
        lack it are sent the blob.
        """
        ...

    async def expect(self, base_model: str, digest: str, blob: Path, size_bytes: int) -> None:
        """Tell replicas of a blob that is being written to this file, and may be delivered then."""
        ...

    async def holds(self, base_model: str, digest: str) -> bool:
        """Ask whether all replicas have an adapter on their hosts, or nearer."""
        ...

    async def release(self, base_model: str, digest: str) -> None:
        """Let replicas evict an adapter again that was delivered."""
        ...

    async def reports(self, tier: Residency = Residency.DISK) -> Sequence[ReplicaReport]:
        """Ask every replica of every base model what it holds and does.

        tier: adapters there or nearer are listed; those in the GPU's arena always are.
        """
        ...

    def ready(self) -> bool:
        """Whether any replica of any base model has started, as far as Serve has said."""
        ...


async def no_pages() -> Sequence[bytes]:
    """Return no pages: the default where this gateway is the whole service."""
    return ()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A base model that is served. aliases: what adapters may call it, e.g. its Hub name.

    quantization: what its linears were rounded to, in words; None: to nothing. chat_template: what
    template_digest finds in its folder.
    """

    shape: BaseShape
    aliases: tuple[str, ...] = ()
    quantization: str | None = None
    chat_template: str | None = None


@dataclass(frozen=True, slots=True)
class Services:
    """The parts behind the API. base_models: by the name that clients use.

    gateways: how many there are; each enforces its share of a tenant's limit. refresh_s: how old
    the view of the catalog may be. first_item_timeout_s: how long a replica may take to answer
    at all; how long it may take to generate is not limited here. max_open_requests: what this
    gateway carries at once, of all tenants together; None: no bound. part_bytes: the size of a
    large upload's parts. adapter_memory: what the engines keep adapters in, as far as it is known
    here. name: this gateway's. peers: the other gateways. recorded_usage: what tenants have used,
    for their budgets. usage: what this gateway counts of it. usage_flush_s: how often it and the
    replicas write that to the store. max_queue_s: how long a request may wait for its turn on a
    replica; None: as long as it takes. max_running: this gateway's part of the requests that the
    replicas of each base model run at once. traces: where traces of ended requests go, if anywhere.
    metrics: this gateway's. metrics_pages: asks each replica and the controller for its part of the
    metrics page. kept_view: the file of the catalog's last view, for starts while the store is
    away. push_folder: for pushed blobs, on the disk cache's file system. responses: the stored
    ones, where storing is on.
    """

    catalog: AdapterCatalog
    base_models: Mapping[str, ServedModel]
    limits: AdapterLimits
    engines: EngineClient
    gateways: int = 1
    refresh_s: float = 1.0
    first_item_timeout_s: float = 60.0
    max_open_requests: int | None = None
    part_bytes: int = PART_BYTES
    adapter_memory: AdapterMemory = FLOAT32_MEMORY
    name: str = "gateway"
    peers: Peers = field(default_factory=Peers)
    recorded_usage: RecordedUsage | None = None
    usage: UsageLedger = field(default_factory=UsageLedger)
    usage_flush_s: float = 15.0
    max_queue_s: float | None = None
    max_running: Mapping[str, int] = field(default_factory=dict)
    traces: "TraceExporter | None" = None
    metrics: GatewayMetrics = field(default_factory=GatewayMetrics)
    metrics_pages: Callable[[], Awaitable[Sequence[bytes]]] = no_pages
    kept_view: KeptView | None = None
    push_folder: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    responses: ResponseStore | None = None


def read_base_models(settings: Settings) -> dict[str, ServedModel]:
    """Read config.json of every base model's folder. Raises InvalidSetting, naming the folder.

    An adapter may call its base model by the served name, the folder's, or the one in config.json.
    """
    models = settings.base_models
    return {name: _read(models[name], settings.weight_dtype[name]) for name in models}


def _read(folder: Path, weight_dtype: str) -> ServedModel:
    try:
        config = read_config(folder)
        shape, stored = BaseShape.from_config(config), quantized_linears(config)
    except ModelError as error:
        raise InvalidSetting(
            f"LORIKEET_BASE_MODELS: {folder} is no Hugging Face model folder that can be served: "
            f"{error}"
        ) from error
    return ServedModel(
        shape,
        tuple(filter(None, (folder.name, config.get("_name_or_path")))),
        served_quantization(stored, weight_dtype),
        template_digest(folder),
    )
