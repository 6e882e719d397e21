"""What makes a version of an adapter out of a blob, however the blob came here."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lorikeet.api.admin.documents import version_json
from lorikeet.api.follower import CatalogFollower
from lorikeet.api.intake import check_served, examine
from lorikeet.api.services import Services
from lorikeet.catalog.records import BlobFacts
from lorikeet.catalog.state import CatalogState
from lorikeet_engine.adapter import AdapterRef

_WORKERS = 4

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Order:
    """What an admin wants registered.

    base_model: the one it was trained on; None: the one it names. shared None leaves that as it
    is. actor: the id of the admin's key.
    """

    tenant: str
    name: str
    actor: str
    promote: bool = False
    shared: bool | None = None
    base_model: str | None = None


class Registration:
    """Examines blobs and records them.

    A few threads of its own do what blocks: many uploads at once make each other wait, and not
    the follower, through which keys are revoked.
    """

    def __init__(self, services: Services, follower: CatalogFollower) -> None:
        self._services = services
        self._follower = follower
        self.workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="upload")

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do in a thread what blocks."""
        return await asyncio.get_running_loop().run_in_executor(self.workers, work, *arguments)

    async def check(self, tenant: str | None, base_model: str | None) -> None:
        """Refuse what no bytes could make right. Raises UnknownTenant, InvalidInput."""
        if tenant is not None:
            await self._follower.survey(lambda state: state.tenant(tenant))
        if base_model:
            check_served(base_model, self._services.base_models)

    async def examine(self, order: Order, blob: Path) -> BlobFacts:
        """Find out all that could make a blob fail later. Raises InvalidAdapter."""
        services = self._services
        tenant = await self._follower.ask(lambda state: state.tenant(order.tenant))
        return await self.run(
            examine,
            blob,
            services.base_models,
            services.limits.lowered_to(tenant.max_rank, tenant.max_adapter_bytes),
            order.base_model,
            services.adapter_memory,
        )

    async def record(
        self, order: Order, blob: Path, facts: BlobFacts
    ) -> tuple[dict[str, Any], bool]:
        """The blob's version as JSON, and whether it is a new one."""
        catalog = self._services.catalog
        known = await self._follower.ask(partial(_is_version, order, facts))
        register = partial(
            catalog.register, shared=order.shared, promote=order.promote, actor=order.actor
        )
        version = await self.run(register, order.tenant, order.name, blob, facts)
        return version_json(catalog.state.adapter(order.tenant, order.name), version), not known

    async def next_ref(self, order: Order, facts: BlobFacts) -> AdapterRef:
        """What the blob will be called if nobody registers another first."""

        def find(state: CatalogState) -> AdapterRef:
            record = state.find(order.tenant, order.name)
            known = record and record.with_digest(facts.digest)
            number = known.version if known else len(record.versions) + 1 if record else 1
            return AdapterRef(order.tenant, order.name, number, facts.digest)

        return await self._follower.ask(find)


def _is_version(order: Order, facts: BlobFacts, state: CatalogState) -> bool:
    record = state.find(order.tenant, order.name)
    return record is not None and record.with_digest(facts.digest) is not None
