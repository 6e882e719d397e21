"""Registration: makes a version of an adapter out of a blob, however the blob came here."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lorikeet.catalog.records import BlobFacts
from lorikeet.catalog.state import CatalogState
from lorikeet.errors import InvalidAdapter, Unavailable
from lorikeet.gateway.admin.blob_validation import check_base_model, validate_blob
from lorikeet.gateway.admin.serializers import Json, described_version_json
from lorikeet.gateway.catalog_view import GatewayCatalogView
from lorikeet.gateway.services import Services
from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.adapter_format import AdapterLimits, BaseCopy, ValueScan, base_copies

_WORKERS = 4

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RegistrationRequest:
    """A blob that somebody wants registered.

    base_model: the one it was trained on; None: the one it names. shared None leaves that as it
    is. promote: make it prod. actor: the id of the key that asks for it.
    """

    tenant: str
    name: str
    actor: str
    promote: bool = False
    shared: bool | None = None
    base_model: str | None = None


class RegisteredVersion(NamedTuple):
    """A version as JSON. is_new: whether there was none with this blob."""

    version: Json
    is_new: bool


class Registration:
    """Validates blobs and records them.

    What blocks runs in a few threads of its own: many uploads at once make each other wait, and
    not the catalog view, through which keys are revoked.
    """

    def __init__(self, services: Services, catalog_view: GatewayCatalogView) -> None:
        self._services = services
        self._catalog_view = catalog_view
        self.workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="upload")
        self.downloads = asyncio.Semaphore(_WORKERS)
        """Held while a whole blob from the store lies on this machine's disk."""

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do blocking work in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.workers, work, *arguments)

    async def check(self, tenant: str | None, base_model: str | None) -> AdapterLimits:
        """Refuse what no blob could make right; return the blob's limits.

        tenant None: not known yet. Raises UnknownTenant, InvalidInput.
        """
        if base_model:
            check_base_model(base_model, self._services.base_models)
        if tenant is None:
            return self._services.limits
        await self._catalog_view.refresh()
        return await self.limits(tenant)

    async def validate(
        self,
        order: RegistrationRequest,
        blob: Path,
        digest: str | None = None,
        scan: ValueScan | None = None,
    ) -> BlobFacts:
        """Find out all that could make a blob fail later. Raises InvalidAdapter.

        digest: the blob's, where it is known; scan: what was found as it came.
        Where copies of the base model's matrices lay beside the adapter, a replica compares them:
        raises Unavailable without one.
        """
        facts = await self.run(
            validate_blob,
            blob,
            self._services.base_models,
            await self.limits(order.tenant),
            order.base_model,
            self._services.adapter_memory,
            digest,
            scan,
        )
        if copies := await self.run(base_copies, blob):
            await self._compare(facts.base_model, copies)
        return facts

    async def record(
        self, order: RegistrationRequest, blob: Path, facts: BlobFacts
    ) -> RegisteredVersion:
        """Record a blob as a version."""
        exists = await self._catalog_view.ask(partial(_is_version, order, facts))
        register = partial(
            self._services.catalog.register,
            shared=order.shared,
            promote=order.promote,
            actor=order.actor,
        )
        version = await self.run(register, order.tenant, order.name, blob, facts)
        adapter = await self._catalog_view.ask(
            lambda state: state.adapter(order.tenant, order.name)
        )
        about = described_version_json(adapter, version, self._services.base_models)
        return RegisteredVersion(about, is_new=not exists)

    async def next_ref(self, order: RegistrationRequest, facts: BlobFacts) -> AdapterRef:
        """Return what the blob will be called if no other is registered first."""

        def find(state: CatalogState) -> AdapterRef:
            record = state.find(order.tenant, order.name)
            same = record and record.with_digest(facts.digest)
            number = same.version if same else len(record.versions) + 1 if record else 1
            return AdapterRef(order.tenant, order.name, number, facts.digest)

        return await self._catalog_view.ask(find)

    async def _compare(self, base_model: str, copies: Sequence[BaseCopy]) -> None:
        try:
            async with asyncio.timeout(self._services.first_item_timeout_s):
                changed = await self._services.engines.changed_copies(base_model, copies)
        except TimeoutError as error:
            raise Unavailable(
                f"no replica of {base_model} compared the copies of its weights in the file within "
                f"{self._services.first_item_timeout_s:g} s: see `lorikeet status`, then try again"
            ) from error
        for module in changed:
            raise InvalidAdapter(
                f"the file's {module}.weight is not that of {base_model}, and whole modules cannot "
                "be served: train it by LoRA; if it was not to be trained, save with "
                "save_pretrained(..., save_embedding_layers=False)",
                param=module,
            )

    async def limits(self, tenant: str) -> AdapterLimits:
        """Return the limits of a tenant's blobs. Raises UnknownTenant."""
        record = await self._catalog_view.ask(lambda state: state.tenant(tenant))
        return self._services.limits.lowered_to(record.max_rank, record.max_adapter_bytes)


def _is_version(order: RegistrationRequest, facts: BlobFacts, state: CatalogState) -> bool:
    record = state.find(order.tenant, order.name)
    return record is not None and record.with_digest(facts.digest) is not None
