"""Parts that the gateway's application is built from, and the interface to its replicas."""

import logging
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lorikeet.batch_store import BatchStore
from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.kept_view import KeptView
from lorikeet.catalog.resumable_uploads import PART_BYTES
from lorikeet.chat_template import template_digest
from lorikeet.errors import InvalidSetting
from lorikeet.file_store import FileStore
from lorikeet.gateway.audit import AuditStream
from lorikeet.gateway.call_encoders import CallEncoders
from lorikeet.gateway.pushing.pushed_versions import AdapterUses
from lorikeet.gateway.sampling_defaults import read_sampling_defaults
from lorikeet.metrics.gateway import GatewayMetrics
from lorikeet.parity.figures import Parity
from lorikeet.prices import Prices
from lorikeet.protocol.messages import EncodedCall, Refusal, SmokeResult, SmokeTest, StreamItem
from lorikeet.protocol.parity import ParityTest
from lorikeet.protocol.peers import Peers
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet.request_defaults import RequestDefaults
from lorikeet.response_store import ResponseStore
from lorikeet.settings import Settings
from lorikeet.tenancy.monthly_budget import RecordedUsage
from lorikeet.tokenizer_vocabulary import TokenizerVocabulary, read_vocabulary
from lorikeet.usage.ledger import UsageLedger
from lorikeet_engine.adapter import AdapterRef, Embedder, Head, Residency
from lorikeet_engine.adapter_format import (
    FLOAT32_MEMORY,
    AdapterLimits,
    AdapterMemory,
    BaseCopy,
    BaseShape,
    WholeModule,
    base_head,
    quantized_linears,
    read_config,
    read_embedder,
    served_quantization,
)
from lorikeet_engine.errors import AdapterRejected, ModelError

if TYPE_CHECKING:  # their libraries are imported only where they are switched on
    from lorikeet.gateway.oidc_tokens import OidcTokens
    from lorikeet.tracing.exporter import TraceExporter

log = logging.getLogger(__name__)


class EngineClient(Protocol):
    """Interface to the replicas, implemented over Ray Serve by ServeEngineClient (serving/)."""

    def stream_answer(
        self, base_model: str, encoded: EncodedCall
    ) -> AsyncGenerator[StreamItem, None]:
        """Stream the answer to a call: AnswerHeaders, then bytes. If the answer fails, a Refusal
        is the stream's last item.

        Closing or cancelling the stream frees the request's resources at once. Raises LorikeetError
        if no replica completes the call.
        """
        ...

    async def smoke(self, base_model: str, test: SmokeTest) -> SmokeResult | Refusal:
        """Have a replica generate with and without an adapter, to test the adapter (smoke test).

        Raises LorikeetError if no replica completes the test.
        """
        ...

    async def parity(self, base_model: str, test: ParityTest) -> Parity | Refusal:
        """Have a replica compare an adapter's log-probabilities with its trainer's (parity proof).

        Raises LorikeetError if no replica completes the proof.
        """
        ...

    async def changed_copies(self, base_model: str, copies: Sequence[BaseCopy]) -> Sequence[str]:
        """Let a replica compare an adapter's copies of base-model matrices with the base model's
        own.

        Return the modules whose copy differs. Raises LorikeetError if no replica compares the
        copies.

        copies: the adapter's copies.
        """
        ...

    async def changed_rows(
        self, base_model: str, modules: Sequence[WholeModule]
    ) -> Mapping[str, Sequence[int]]:
        """Let a replica compare an adapter's whole modules with the base model's own.

        Return the ids of the rows that differ, by module; a module that cannot be compared is left
        out. Raises LorikeetError if no replica compares the modules.

        modules: the modules, with a digest of each row.
        """
        ...

    async def deliver(self, base_model: str, ref: AdapterRef, blob: Path) -> bool:
        """Send an adapter to the replicas that lack it.

        Return whether all replicas have the adapter on their hosts. Each replica keeps the adapter
        until `release`, or until a minute has passed since the last call of `deliver`.

        blob: file with the adapter's blob.
        """
        ...

    async def expect(self, base_model: str, digest: str, blob: Path, size_bytes: int) -> None:
        """Announce an adapter to the replicas while its blob is still being written, before
        `deliver`.

        digest: SHA-256 of the whole blob.
        blob: file to which the blob is being written.
        size_bytes: size of the whole blob.
        """
        ...

    async def holds(self, base_model: str, digest: str) -> bool:
        """Return whether all replicas have an adapter on their hosts or GPUs.

        digest: SHA-256 of the adapter's blob.
        """
        ...

    async def release(self, base_model: str, digest: str) -> None:
        """Allow replicas to evict a delivered adapter again.

        digest: SHA-256 of the adapter's blob.
        """
        ...

    async def reports(self, tier: Residency = Residency.DISK) -> Sequence[ReplicaReport]:
        """Return a report of every replica of every base model: its adapters and its load.

        tier: farthest tier from the GPU whose adapters are listed. Adapters in the GPU's arena (its
            memory for adapters) are always listed.
        """
        ...

    def ready(self) -> bool:
        """Return whether any replica of any base model has started, by the last state that Serve
        reported.
        """
        ...

    def max_context(self, base_model: str) -> int | None:
        """Return the maximum length of prompt plus output, in tokens, that all replicas of a base
        model accept.

        None: not known yet.
        """
        ...


async def no_pages() -> Sequence[bytes]:
    """Return no metrics pages: the default for a gateway without other processes to ask."""
    return ()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Base model that is served.

    shape: sizes of its layers.
    aliases: further names by which adapters may name the base model, e.g. its Hub name.
    quantization: format that the weights of its linear layers are rounded to, in words; None if
        not quantized.
    chat_template: digest of the chat template in its folder (template_digest); None without a
        template.
    vocabulary: vocabulary of the tokenizer in its folder; None if unknown.
    sampling_defaults: values of sampling fields that a request leaves out, by field; fields without
        a value here have the API's defaults.
    head: its own classification or reward head; None without one.
    embedder: way in which it embeds texts; None: its folder's is not served.
    """

    shape: BaseShape
    aliases: tuple[str, ...] = ()
    quantization: str | None = None
    chat_template: str | None = None
    vocabulary: TokenizerVocabulary | None = None
    sampling_defaults: Mapping[str, int | float] = field(default_factory=dict)
    head: Head | None = None
    embedder: Embedder | None = field(default_factory=Embedder)

    def sampling_of(self, own: RequestDefaults | None) -> Mapping[str, int | float]:
        """Return the values of sampling fields that a request leaves out, by field: an adapter's,
        then the base model's.

        own: the adapter's own request defaults.
        """
        return self.sampling_defaults if own is None else {**self.sampling_defaults, **own.sampling}


@dataclass(frozen=True, slots=True)
class Services:
    """Parts that the gateway's application is built from, and its settings.

    base_models: served base models, by the name that clients use.
    limits: limits that registered adapters must keep to.
    encoders: encoders of prompts, with the tokenizer of each base model.
    gateways: number of gateways; each enforces its share of a tenant's limits.
    refresh_s: seconds between refreshes of the catalog view.
    first_item_timeout_s: longest wait for a replica's first item, in seconds. The gateway sets no
        time limit for the items after it.
    max_open_requests: maximum number of requests that this gateway runs at once, all tenants
        together; None: no limit.
    part_bytes: size of a large upload's parts.
    adapter_memory: sizes of the engines' memory for adapters and dtype of adapters in it, as far as
        the gateway knows them.
    name: name of this gateway.
    peers: the other gateways.
    recorded_usage: usage of tenants as recorded in the store, for their budgets.
    usage: usage that this gateway has counted and not written to the store yet.
    prices: prices of tokens, for tenants' budgets in money.
    usage_flush_s: seconds between writes of usage to the store, by gateways and replicas.
    max_queue_s: longest time in seconds that a request may queue on a replica; None: no limit.
    max_running: by base model, this gateway's share of the requests that the replicas run at once.
    traces: exporter for traces of completed requests.
    metrics: metrics of this gateway.
    metrics_pages: function that asks each replica and the controller for their metrics.
    kept_view: file with the catalog's last view, for starts while the store is unreachable.
    push_folder: folder for pushed blobs, on the disk cache's file system.
    responses: store of responses; None: responses are not stored.
    files: store of files; None: files are not stored, and there are no batches.
    batches: store of batches; None if and only if there is none of files.
    uses: adapters that this gateway's requests in flight use.
    audit: stream of admins' changes; None: no stream.
    oidc: verifier of tokens that are accepted beside keys; None: keys alone.
    load_from: folder below which each tenant has a folder of its name, from which vLLM's endpoints
        load adapters; None: no such endpoints.
    tinker: serve the sampling side of Tinker's API.
    """

    catalog: AdapterCatalog
    base_models: Mapping[str, ServedModel]
    limits: AdapterLimits
    engines: EngineClient
    encoders: CallEncoders = field(default_factory=CallEncoders)
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
    prices: Prices = field(default_factory=dict)
    usage_flush_s: float = 15.0
    max_queue_s: float | None = None
    max_running: Mapping[str, int] = field(default_factory=dict)
    traces: "TraceExporter | None" = None
    metrics: GatewayMetrics = field(default_factory=GatewayMetrics)
    metrics_pages: Callable[[], Awaitable[Sequence[bytes]]] = no_pages
    kept_view: KeptView | None = None
    push_folder: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    responses: ResponseStore | None = None
    files: FileStore | None = None
    batches: BatchStore | None = None
    uses: AdapterUses = field(default_factory=AdapterUses)
    audit: AuditStream | None = None
    oidc: "OidcTokens | None" = None
    load_from: Path | None = None
    tinker: bool = False


def read_base_models(settings: Settings) -> dict[str, ServedModel]:
    """Read config.json and generation_config.json of every base model's folder.

    The aliases of a base model are its folder's name and the name in config.json. Raises
    InvalidSetting, which names the folder, if it cannot be read.
    """
    return {
        name: _read(folder, settings.weight_dtype[name], settings.generation_config[name])
        for name, folder in settings.base_models.items()
    }


def _read(folder: Path, weight_dtype: str, generation_config: str) -> ServedModel:
    try:
        config = read_config(folder)
        shape, stored = BaseShape.from_config(config), quantized_linears(config)
        head = base_head(config)
    except (ModelError, AdapterRejected) as error:
        raise InvalidSetting(
            f"LORIKEET_BASE_MODELS: {folder} is no Hugging Face model folder that can be served: "
            f"{error}"
        ) from error
    return ServedModel(
        shape,
        tuple(filter(None, (folder.name, config.get("_name_or_path")))),
        served_quantization(stored, weight_dtype),
        template_digest(folder),
        read_vocabulary(folder),
        read_sampling_defaults(folder) if generation_config == "auto" else {},
        head,
        _read_embedder(folder),
    )


def _read_embedder(folder: Path) -> Embedder | None:
    """Return the way in which a base model embeds texts; log a warning and return None if its files
    describe another than those that are served.
    """
    try:
        return read_embedder(folder) or Embedder()
    except AdapterRejected as error:
        log.warning("embeddings_off", extra={"folder": str(folder), "error": error.message})
        return None
