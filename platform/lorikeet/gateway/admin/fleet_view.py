"""Admin route GET /fleet: all data of the page at /ui."""

import asyncio
import gzip
import json
import logging
import time
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from starlette.responses import Response

from lorikeet.errors import StoreError
from lorikeet.gateway.admin.pin_report import PinReporter
from lorikeet.gateway.admin.serializers import host_pages_json, states_json
from lorikeet.gateway.catalog_view import GatewayCatalogView
from lorikeet.gateway.services import EngineClient
from lorikeet.placement.pin_status import PinState, PinStatus
from lorikeet.protocol.peers import Poll
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet.request_log.recent_traffic import RecentTraffic, lines_of, waiting_of
from lorikeet_engine.adapter import Residency
from lorikeet_engine.telemetry.status import AdapterStatus, TierStatus

FRESH_S = 0.5
"""Seconds for which a collected JSON document answers all requests. Ten open pages then cost no
more than a single page.
"""
PINS_FRESH_S = 3.0
"""Seconds between reads of the pins' states. For replicas, a read of the pins' states costs more
than the page's other data. The states change only when the controller examines the pins.
"""
MOST_ROWS = 50
"""Maximum number of rows of waiting requests, and of rows of pins. Sums include the rows that are
left out.
"""
_PINS_WAIT_S = 1.0
_PLAIN_BYTES = 4096
_DIGEST = 16  # digits sent of a digest: enough to tell adapters apart; digits compress badly
_QUICK = 1  # gzip level: takes an eighth of level 9's time, for 7% more bytes
_PINNED, _ARRIVING = 1, 2

log = logging.getLogger(__name__)

Json = dict[str, Any]


class _Packed(NamedTuple):
    plain: bytes
    gzipped: bytes


def fleet_routes(fleet: "FleetView") -> APIRouter:
    """Return the route GET /fleet: replicas with their arenas, traffic, waiting requests, pins.

    The response's size is bounded for any number of adapters: adapters outside a GPU's arena (its
    memory for adapters) are only counted, and each name is sent once and referred to by its index.
    Members of the JSON:

    tenants: names of tenants.
    adapters: [index of the tenant, name, version, rank, first digits of the digest].
    replicas[].blocks: adapters in the arena of the replica's GPU: [index of the adapter, number
        of leases (running sequences that use it), marks, offset, bytes, offset, bytes, …], an
        offset and bytes for each piece of the adapter; marks: 1 pinned, 2 arriving, or their
        sum.
    replicas[].gpu, host, disk: number of adapters in that tier, used_bytes, total_bytes.
    lines: time series of request rates, of the share of requests whose adapter was on the GPU,
        and of times to the first token; one value per second up to `now`.
    waiting: number of requests that wait for their first token, and a row for each tenant, base
        model and adapter, longest wait first.
    pins: number of pins in each state, and a row for each pin that is not yet fulfilled; null
        while the catalog does not answer.
    gateways.silent: number of gateways that did not answer in time; null if none could be
        asked.
    """
    router = APIRouter()

    @router.get("/fleet")
    async def show(request: Request) -> Response:
        packed, headers = await fleet.now(), {"cache-control": "no-store"}
        zipped = "gzip" in request.headers.get("accept-encoding", "")
        if len(packed.plain) < _PLAIN_BYTES or not zipped:
            return Response(packed.plain, headers=headers, media_type="application/json")
        headers |= {"content-encoding": "gzip", "vary": "accept-encoding"}
        return Response(packed.gzipped, headers=headers, media_type="application/json")

    return router


class FleetView:
    """Data of the page at /ui, collected once for all concurrent requests of one event loop."""

    def __init__(
        self,
        engines: EngineClient,
        catalog_view: GatewayCatalogView,
        traffic: RecentTraffic,
        pin_reporter: PinReporter,
    ) -> None:
        self._engines, self._catalog_view = engines, catalog_view
        self._traffic, self._pin_reporter = traffic, pin_reporter
        self._asked: asyncio.Task[_Packed] | None = None
        self._asked_s = self._pins_read_s = 0.0
        self._reading_pins: asyncio.Task[None] | None = None
        self._pins: Json | None = None

    async def now(self) -> _Packed:
        """Return the page's JSON, plain and gzipped, at most FRESH_S seconds old."""
        asked, now_s = self._asked, time.monotonic()
        if asked is None or (asked.done() and now_s - self._asked_s > FRESH_S):
            self._asked_s = now_s
            asked = self._asked = asyncio.create_task(self._ask())
        return await asyncio.shield(
            asked
        )  # a client that disconnects must not cancel it for others

    async def _ask(self) -> _Packed:
        replicas, traffic, pins = await asyncio.gather(
            self._engines.reports(Residency.GPU), self._traffic.everywhere(), self._pin_statuses()
        )
        head = {"now": time.time(), "catalog_seq": self._catalog_view.state.seq}
        return await asyncio.to_thread(_pack, head, replicas, traffic, pins)

    async def _pin_statuses(self) -> Json | None:
        """Return the pins' states as last read, and begin a new read if they are older than
        PINS_FRESH_S seconds.

        If there are no states to return, wait for the read, at most _PINS_WAIT_S seconds. None: no
        read has succeeded yet, or the last one failed.
        """
        reading, now_s = self._reading_pins, time.monotonic()
        if reading is None or (reading.done() and now_s - self._pins_read_s > PINS_FRESH_S):
            self._pins_read_s = now_s
            reading = self._reading_pins = asyncio.create_task(self._read_pins())
        if self._pins is None:
            await asyncio.wait({reading}, timeout=_PINS_WAIT_S)
        return self._pins

    async def _read_pins(self) -> None:
        try:
            self._pins = _pins_json(await self._pin_reporter.pin_statuses())
        except Exception as error:
            if not isinstance(error, StoreError):
                log.exception("pin_statuses_failed")
            self._pins = None


def _pack(
    head: Json, replicas: Sequence[ReplicaReport], traffic: Poll, pins: Json | None
) -> _Packed:
    document = head | {
        "gateways": {"answered": len(traffic.answers), "silent": traffic.silent},
        **_replicas_json(replicas),
        "lines": lines_of(traffic.answers, head["now"]),
        "waiting": _waiting_json(traffic),
        "pins": pins,
    }
    plain = json.dumps(document, separators=(",", ":")).encode()
    return _Packed(plain, gzip.compress(plain, _QUICK))


def _replicas_json(replicas: Sequence[ReplicaReport]) -> Json:
    adapters = dict[tuple[str, str, int, int | None, str], int]()

    def block_json(block: AdapterStatus) -> list[int]:
        named = block.tenant, block.name, block.version, block.rank, block.digest[:_DIGEST]
        number = adapters.setdefault(named, len(adapters))
        marks = _PINNED * block.kept + _ARRIVING * block.arriving
        return [number, block.leases, marks, *chain.from_iterable(block.pieces)]

    rows = [
        {
            "replica": each.replica,
            "base_model": each.base_model,
            "running": each.status.live.running,
            "waiting": each.status.live.waiting,
            "oldest_wait_s": round(each.status.live.oldest_wait_s, 3),
            "kv_pages_used": each.status.live.kv_pages_used,
            "kv_pages_total": each.status.live.kv_pages_total,
            "states": states_json(each),
            "host_pages": host_pages_json(each),
            **{str(tier): _tier_json(held) for tier, held in each.status.tiers.items()},
            "blocks": [block_json(block) for block in each.adapters],
        }
        for each in sorted(replicas, key=lambda each: (each.base_model, each.replica))
    ]
    tenants = {tenant: at for at, tenant in enumerate(sorted({named[0] for named in adapters}))}
    return {
        "tenants": list(tenants),
        "adapters": [[tenants[tenant], *rest] for tenant, *rest in adapters],
        "replicas": rows,
    }


def _tier_json(tier: TierStatus) -> Json:
    return {
        "adapters": tier.adapters,
        "used_bytes": tier.used_bytes,
        "total_bytes": tier.capacity_bytes,
    }


def _waiting_json(traffic: Poll) -> Json:
    rows = waiting_of(traffic.answers)
    return {
        "requests": sum(row.requests for row in rows),
        "rows": [
            {
                "tenant": row.tenant,
                "adapter": row.adapter,
                "base_model": row.base_model,
                "requests": row.requests,
                "oldest_s": round(row.oldest_s, 3),
            }
            for row in rows[:MOST_ROWS]
        ],
    }


def _pins_json(pins: Iterable[PinStatus]) -> Json:
    counts, rows = dict.fromkeys(PinState, 0), list[Json]()
    for found in pins:
        counts[found.state] += 1
        if found.state is PinState.LOADING:
            rows.append({"pin": found.pin.label, "state": "loading"})
        if found.prompt is not None and found.prompt.computed < found.prompt.wanted:
            reason = found.prompt.failure or "is being computed"
            rows.append({"pin": found.pin.label, "state": "prompt", "reason": reason})
        for short in found.shortfalls:
            adapter = None if short.ref is None else str(short.ref)
            more = {"adapter": adapter, "reason": short.reason}
            rows.append({"pin": found.pin.label, "state": "unmet", **more})
    rows.sort(key=lambda row: row["state"] != "unmet")
    return {**{str(k.value): n for k, n in counts.items()}, "rows": rows[:MOST_ROWS]}
