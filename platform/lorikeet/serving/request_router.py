"""Ray Serve request router that ranks replicas by expected cost.

The only module that uses Serve's request router API, which is alpha.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from lorikeet.protocol.messages import Call, SmokeTest, Work
from lorikeet.protocol.status_update import from_stats
from lorikeet.routing.fleet import STATS_AGE_S, Fleet
from lorikeet.routing.locations import MAX_HASHED_CHARACTERS, prefix_hashes
from lorikeet.routing.ranking import RoutingRequest
from lorikeet.serving.fleet_registry import fleet_of

log = logging.getLogger(__name__)

_NO_REQUEST = RoutingRequest(Work(prompt_tokens=1))


class AdapterAffinityRouter(RequestRouter):
    """Router that sends a call to the replica with the lowest expected cost.

    Serve creates one in each gateway, by the class path in serving/deployments.py, and calls
    `choose_replicas` at each `run_call.remote` of engine_client.py. The ranking comes from
    Fleet.rank_replicas (routing/fleet.py).

    A call with a keyword argument `replica` goes to the replica of that name and to no other.
    No method raises: Serve would leave the request hanging.
    """

    def initialize_state(self, **_: Any) -> None:
        """Set up the router with the Fleet that engine_client.py uses too (fleet_registry.py).

        Serve calls this once, before any other method.
        """
        self._fleet: Fleet = fleet_of(self.app_name, self._deployment_id.name)
        self._listed: list[RunningReplica] = []
        self._by_name: dict[str, RunningReplica] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return groups of replicas: one for each ranked replica, best first, then one with the
        others.

        Serve tries the groups in order until a replica has a free request slot. If no replica has,
        Serve waits a little and calls this again.
        """
        try:
            if pending_request is not None:
                pending_request.routing_context.should_backoff = True
            return self._ranked(candidate_replicas, pending_request)
        except Exception:
            log.exception("routing_failed")
            return [candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Update the fleet with the replicas that Serve lists, and with each replica's last
        stats.
        """
        super().update_replicas(replicas)
        try:
            names = {replica.replica_id.unique_id: replica for replica in replicas}
            self._fleet.set_replicas(names)
            for name, replica in names.items():
                update = from_stats(replica.routing_stats)
                if update is not None:
                    self._fleet.on_status_update(name, update, STATS_AGE_S)
        except Exception:
            log.exception("replicas_not_updated")

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Mark a replica as lost, after Serve's router has found it dead."""
        super().on_replica_actor_died(replica_id)
        self._fleet.on_replica_lost(replica_id.unique_id)

    def on_request_routed(
        self,
        pending_request: PendingRequest,
        replica_id: ReplicaID,
        result: object,  # noqa: ARG002
    ) -> None:
        """Record the replica that accepted a request; it may differ from the assigned replica."""
        try:
            call = call_of(pending_request)
            if call is not None:
                self._fleet.on_accepted(call.request_id, replica_id.unique_id)
        except Exception:
            log.exception("acceptance_not_noted")

    def _ranked(
        self, listed: list[RunningReplica], pending: PendingRequest | None
    ) -> list[list[RunningReplica]]:
        if listed is not self._listed:  # Serve makes a new list whenever replicas change
            self._by_name = {replica.replica_id.unique_id: replica for replica in listed}
            self._listed = listed
        by_name = self._by_name
        only = pending.kwargs.get("replica") if pending else None
        if only is not None:
            return [[by_name[only]]] if only in by_name else []
        request = _request_of(pending)
        candidates = self._fleet.rank_replicas(request, self._queue_length)
        best = [candidate.replica for candidate in candidates if candidate.replica in by_name]
        call = call_of(pending)
        if call is not None and best:
            self._fleet.assign(call.request_id, best[0], request, candidates)
        others = [name for name in self._fleet.usable if name in by_name and name not in best]
        ranks = [[name] for name in best] + [others]
        return [[by_name[name] for name in rank] for rank in ranks]

    def _queue_length(self, name: str) -> int | None:
        replica = self._by_name.get(name)
        return self.replica_queue_len_cache.get(replica.replica_id) if replica else None

    def _get_pending_request_matching_internal_request_id(
        self, request_metadata: Any = None
    ) -> PendingRequest | None:
        # All calls made for one HTTP request share an internal id. Serve's own lookup by that id
        # finds only the last of them, and the others hang. The metadata object is unique.
        for pending in self._pending_requests_to_fulfill:
            if pending.metadata is request_metadata and not pending.future.done():
                return pending
        return None


def call_of(pending: PendingRequest | None) -> Call | None:
    """Return the Call that a pending request carries; None if it carries none."""
    argument = pending.args[0] if pending and pending.args else None
    return argument if isinstance(argument, Call) else None


def _request_of(pending: PendingRequest | None) -> RoutingRequest:
    argument = pending.args[0] if pending and pending.args else None
    match argument:
        case Call():
            return routing_request_of(argument)
        case SmokeTest():
            return RoutingRequest(Work(prompt_tokens=1), argument.adapter)
    return _NO_REQUEST


def routing_request_of(call: Call) -> RoutingRequest:
    """Return a call as routing sees it: work, adapter, tenant and hashes of its prompt's prefix.

    Hashes the first prompt if there are several. Tenant and adapter are part of the hashes.
    """
    digest = call.adapter.digest if call.adapter else None
    chain = prefix_hashes(_beginning(call), call.tenant, digest)
    return RoutingRequest(call.work, call.adapter, chain, call.tenant)


def _beginning(call: Call) -> str | Sequence[int]:
    """Return the beginning of a call's prompt, which is hashed for routing.

    The rest is left out, since a prompt may have megabytes, and Serve may ask for a ranking many
    times.
    """
    if call.prompts:
        return call.prompts[0]
    texts, length = list[str](), 0
    for text in _texts(call):
        texts.append(text[:MAX_HASHED_CHARACTERS])
        length += len(text)
        if length >= MAX_HASHED_CHARACTERS:
            break
    return "\n".join(texts)


def _texts(call: Call) -> Iterator[str]:
    if call.tools:  # first, as in chat templates
        yield from map(json.dumps, call.tools.tools)
    for message in call.messages:
        yield from (message["role"], message["content"])
        if calls := message.get("tool_calls"):
            yield json.dumps(calls)
