"""Ray Serve request router that ranks replicas by expected cost.

The only module that uses Serve's request router API, which is alpha.
"""

import logging
from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from lorikeet.protocol.messages import EncodedCall, SmokeTest, Work
from lorikeet.protocol.status_update import from_stats
from lorikeet.routing.fleet import STATS_AGE_S, Fleet, fleet_of
from lorikeet.routing.locations import prefix_hashes
from lorikeet.routing.ranking import RoutingRequest

log = logging.getLogger(__name__)

_NO_REQUEST = RoutingRequest(Work(prompt_tokens=1))


class AdapterAffinityRouter(RequestRouter):
    """Router that sends a call to the replica with the lowest expected cost.

    Serve creates one in each gateway, by the class path in serving/deployments.py, and calls
    `choose_replicas` at each `run_call.remote` of engine_client.py. The ranking comes from
    Fleet.rank_replicas (routing/fleet.py).

    A call with a keyword argument `replica` goes to the replica of that name and to no other.

    A call avoids the replicas that were lost while they ran it. If there are no others, it may go
    to them: Serve forgets dead replicas itself, and a call without a candidate would hold up those
    behind it.

    No method raises: Serve would leave the request hanging.
    """

    def initialize_state(self, **_: Any) -> None:
        """Set up the router with the Fleet that engine_client.py uses too.

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
                self._fleet.on_accepted(call.attempt_id, replica_id.unique_id)
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
        call = call_of(pending)
        lost = call.lost if call is not None and by_name.keys() - call.lost else ()
        candidates = self._fleet.rank_replicas(request, self._queue_length)
        candidates = [candidate for candidate in candidates if candidate.replica not in lost]
        best = [candidate.replica for candidate in candidates if candidate.replica in by_name]
        if call is not None and best:
            self._fleet.assign(call.attempt_id, best[0], request, candidates)
        others = [
            name
            for name in self._fleet.usable
            if name in by_name and name not in best and name not in lost
        ]
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


def call_of(pending: PendingRequest | None) -> EncodedCall | None:
    """Return the call that a pending request carries; None if it carries none."""
    argument = pending.args[0] if pending and pending.args else None
    return argument if isinstance(argument, EncodedCall) else None


def _request_of(pending: PendingRequest | None) -> RoutingRequest:
    argument = pending.args[0] if pending and pending.args else None
    match argument:
        case EncodedCall():
            return routing_request_of(argument)
        case SmokeTest():
            return RoutingRequest(Work(prompt_tokens=1), argument.adapter)
    return _NO_REQUEST


def routing_request_of(encoded: EncodedCall) -> RoutingRequest:
    """Return a call as routing sees it: work, adapter, tenant and hashes of its prompt's prefix.

    Hashes the first prompt if there are several. Tenant and adapter are part of the hashes.
    """
    call = encoded.call
    chain = prefix_hashes(encoded.prompts[0], call.tenant, call.adapter)
    return RoutingRequest(encoded.work, call.adapter, chain, call.tenant)
