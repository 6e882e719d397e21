"""Admin routes of the catalog's past: list its log, restore retired adapters, write snapshots.

Also defines Moment, the parameter by which other routes show a past state of the catalog.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Query
from pydantic import Field

from lorikeet.apis.body import Body
from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.history import History, HistoryQuery
from lorikeet.catalog.names import check_name
from lorikeet.catalog.state import CatalogState
from lorikeet.catalog.view import CatalogView
from lorikeet.errors import InvalidInput
from lorikeet.gateway.admin.serializers import adapter_json, entry_json
from lorikeet.gateway.auth import Actor
from lorikeet.gateway.body import json_body
from lorikeet.gateway.catalog_view import GatewayCatalogView

MOST_ENTRIES = 1000

T = TypeVar("T")
Seq = Annotated[int, Query(ge=1, le=10**12)]
UnixTime = Annotated[float, Query(ge=0, le=10**11)]


class Restore(Body):
    """Request to undo the retirement of one version, or of the whole adapter if version is None."""

    version: Annotated[int, Field(ge=1)] | None = None


@dataclass(frozen=True, slots=True)
class AsOf:
    """Moment in the catalog's history to show. Without `seq` and `time`: now.

    seq: number of a log entry; the moment is right after that entry.
    time: Unix seconds.
    """

    seq: int | None
    time: float | None

    async def ask_in_thread(
        self,
        catalog: AdapterCatalog,
        catalog_view: GatewayCatalogView,
        question: Callable[[CatalogState], T],
    ) -> T:
        """Return the answer to a question about the catalog's state at this moment.

        question: function of the state; called in a thread, since it may take long.

        Raises InvalidInput if there is no state of this moment, StoreError if the store fails.
        """
        if self.seq is None and self.time is None:
            return await catalog_view.ask_in_thread(question)
        await catalog_view.refresh()
        view = await catalog_view.in_thread(self._view, catalog.reader.history)
        return await catalog_view.in_thread(view.ask, question)

    def _view(self, history: History) -> CatalogView:
        if self.seq is not None:
            return history.as_of(self.seq)
        assert self.time is not None
        return history.as_of_time(self.time)


async def _moment(as_of_seq: Seq | None = None, as_of_time: UnixTime | None = None) -> AsOf:
    if as_of_seq is not None and as_of_time is not None:
        raise InvalidInput("want either as_of_seq or as_of_time", param="as_of_time")
    return AsOf(as_of_seq, as_of_time)


Moment = Annotated[AsOf, Depends(_moment)]
"""Parameter of routes that can show the catalog's past: ?as_of_seq or ?as_of_time."""


def history_routes(catalog: AdapterCatalog, catalog_view: GatewayCatalogView) -> APIRouter:
    """Return the routes that list the catalog's log (newest entry first), restore retired adapters
    and write a snapshot of the catalog.
    """
    router = APIRouter()

    @router.get("/log")
    async def log(
        tenant: str | None = None,
        name: str | None = None,
        actor: str | None = None,
        since: UnixTime | None = None,
        before: Seq | None = None,
        limit: Annotated[int, Query(ge=1, le=MOST_ENTRIES)] = 50,
    ) -> dict[str, Any]:
        if name is not None and tenant is None:
            raise InvalidInput("name: want its tenant too", param="tenant")
        for param, value in (("tenant", tenant), ("name", name)):
            if value is not None:
                check_name(value, param)
        wanted = HistoryQuery(tenant=tenant, name=name, actor=actor, since=since)
        await catalog_view.refresh()
        found = await catalog_view.in_thread(
            lambda history: history.find(wanted, limit, before), catalog.reader.history
        )
        return {"data": list(map(entry_json, found.entries)), "before": found.before}

    @router.post("/adapters/{tenant}/{name}/restore")
    def restore(
        tenant: str, name: str, wanted: Annotated[Restore, json_body(Restore)], actor: Actor
    ) -> dict[str, Any]:
        return adapter_json(catalog.restore(tenant, name, wanted.version, actor=actor))

    @router.post("/snapshots")
    def snapshot() -> dict[str, Any]:
        return {"seq": catalog.reader.snapshot()}

    return router
