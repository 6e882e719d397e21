"""Registration: a blob, received by any route, becomes a version of an adapter."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
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
from lorikeet.request_defaults import RequestDefaults
from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.adapter_format import (
    MAX_LISTED,
    AdapterLimits,
    BaseCopy,
    ValueScan,
    base_copies,
    keep_rows,
    whole_modules,
)

_WORKERS = 4

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RegistrationRequest:
    """Request to register a blob (adapter's file) as a version of an adapter.

    actor: id of the key that requests it.
    promote: also point the alias prod to the new version.
    shared: whether all tenants may use the adapter; None: unchanged.
    base_model: base model that the adapter was trained on; None: the one that the blob names.
    defaults: the version's own request defaults; None: the base model's.
    """

    tenant: str
    name: str
    actor: str
    promote: bool = False
    shared: bool | None = None
    base_model: str | None = None
    defaults: RequestDefaults | None = None


class RegisteredVersion(NamedTuple):
    """Version of an adapter, as JSON, that a registration created or found to exist.

    is_new: whether the adapter had no version with this blob and these request defaults before.
    """

    version: Json
    is_new: bool


class Registration:
    """Validator of uploaded blobs (adapters' files) that records valid ones as catalog versions.

    Blocking work runs in a few threads reserved for registrations. Many concurrent uploads thus
    delay each other, but not the catalog view, through which gateways learn of revoked keys.
    """

    def __init__(self, services: Services, catalog_view: GatewayCatalogView) -> None:
        self._services = services
        self._catalog_view = catalog_view
        self.workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="upload")
        self.downloads = asyncio.Semaphore(_WORKERS)
        """Semaphore that limits the number of blobs, downloaded from the store, that lie on this
        machine's disk at once.
        """

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call work(*arguments), which may block, in a thread reserved for registrations; return
        its result.
        """
        return await asyncio.get_running_loop().run_in_executor(self.workers, work, *arguments)

    async def check(self, tenant: str | None, base_model: str | None) -> AdapterLimits:
        """Check a registration before its blob arrives; return the limits on the blob's rank and
        size.

        tenant: owner of the adapter; None: not yet known, so the service's limits are returned.
        base_model: base model that the request names; None: the blob will name it.

        Raises UnknownTenant; InvalidInput if the base model is not served.
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
        *,
        shrinks: bool = False,
    ) -> BlobFacts:
        """Check a blob for all that could make its adapter fail on a replica; return facts about
        the blob.

        order: the registration for which the blob was uploaded.
        digest: SHA-256 of the blob; None: compute it.
        scan: scan of the tensors' values made during the upload; None: read the whole blob.
        shrinks: whether rows of whole modules may still be removed from the blob.

        If the blob contains copies of the base model's matrices, a replica compares the copies with
        the base model. Raises InvalidAdapter if a check fails, and Unavailable if no replica can
        compare.
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
            shrinks,
        )
        # of resized matrices, `validate_upload` compares the rows
        rows = self._services.base_models[facts.base_model].shape.vocabulary
        copies = [each for each in await self.run(base_copies, blob) if each.shape[0] == rows]
        if copies:
            await self._compare(facts.base_model, copies)
        return facts

    async def validate_upload(
        self,
        order: RegistrationRequest,
        blob: Path,
        digest: str | None = None,
        scan: ValueScan | None = None,
    ) -> BlobFacts:
        """Check a blob, and remove rows of whole modules that equal the base model's, in place;
        return facts about the blob as it is then.

        Modules of which more than MAX_LISTED rows differ stay whole. Takes and raises what
        `validate` does.
        """
        facts = await self.validate(order, blob, digest, scan, shrinks=True)
        modules = await self.run(whole_modules, blob)
        if not modules:
            return facts
        changed = await self._replica_compares(
            facts.base_model, self._services.engines.changed_rows(facts.base_model, modules)
        )
        kept = {module: ids for module, ids in changed.items() if len(ids) <= MAX_LISTED}
        if kept:
            smaller = blob.with_name(f"{blob.name}.rows")
            await self.run(keep_rows, blob, smaller, kept)
            await self.run(smaller.replace, blob)
        return await self.validate(order, blob, None if kept else facts.digest)

    async def record(
        self, order: RegistrationRequest, blob: Path, facts: BlobFacts
    ) -> RegisteredVersion:
        """Store a validated blob and register it as a version of the adapter that `order` names.

        facts: facts about the blob, from `validate`.
        """
        exists = await self._catalog_view.ask(partial(_is_version, order, facts))
        register = partial(
            self._services.catalog.register,
            defaults=order.defaults,
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
        """Return the AdapterRef that a blob will have once it is registered: of the version that
        already has this blob and these request defaults, else of the adapter's next version.

        The version number in the AdapterRef is wrong if another version of the adapter is
        registered first.
        """

        def find(state: CatalogState) -> AdapterRef:
            record = state.find(order.tenant, order.name)
            same = record and record.registered(facts.digest, order.defaults)
            number = same.version if same else len(record.versions) + 1 if record else 1
            return facts.ref(order.tenant, order.name, number)

        return await self._catalog_view.ask(find)

    async def _compare(self, base_model: str, copies: Sequence[BaseCopy]) -> None:
        changed = await self._replica_compares(
            base_model, self._services.engines.changed_copies(base_model, copies)
        )
        for module in changed:
            raise InvalidAdapter(
                f"the file's {module}.weight differs from {base_model}'s, and adapter_config.json "
                "does not name it in modules_to_save: train it so, or by LoRA; if it was not meant "
                "to be trained, save with save_pretrained(..., save_embedding_layers=False)",
                param=module,
            )

    async def _replica_compares(self, base_model: str, comparison: Awaitable[T]) -> T:
        """Return the result of a replica's comparison of weights with its base model's.

        Raises Unavailable if it takes too long.
        """
        try:
            async with asyncio.timeout(self._services.first_item_timeout_s):
                return await comparison
        except TimeoutError as error:
            raise Unavailable(
                f"no replica of {base_model} compared its weights with those in the file within "
                f"{self._services.first_item_timeout_s:g} s: see `lorikeet status`, then try again"
            ) from error

    async def limits(self, tenant: str) -> AdapterLimits:
        """Return the limits on the rank and size of a tenant's blobs, the stricter of the service's
        and the tenant's.

        Raises UnknownTenant if there is no such tenant.
        """
        record = await self._catalog_view.ask(lambda state: state.tenant(tenant))
        return self._services.limits.lowered_to(record.max_rank, record.max_adapter_bytes)


def _is_version(order: RegistrationRequest, facts: BlobFacts, state: CatalogState) -> bool:
    record = state.find(order.tenant, order.name)
    return record is not None and record.registered(facts.digest, order.defaults) is not None
