"""The only code that knows Ray Serve's request router, an alpha interface."""

import logging
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from lorikeet.routing.ranking import Candidate, rank_replicas

log = logging.getLogger(__name__)

RESIDENT_KEY = "gpu"
"""Key in a replica's routing stats: the digests of the adapters on its GPU."""


class AdapterRouter(RequestRouter):
    """Sends a request to a replica where its adapter is.

    The handle names the adapter's digest as the multiplexed model id.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Rank the replicas; never raises, since Serve would leave the request hanging."""
        try:
            if pending_request is not None:
                pending_request.routing_context.should_backoff = True
            return self._rank(candidate_replicas, pending_request)
        except Exception:
            log.exception("routing_failed")
            return [candidate_replicas]

    def _rank(
        self, replicas: list[RunningReplica], pending: PendingRequest | None
    ) -> list[list[RunningReplica]]:
        digest = pending.metadata.multiplexed_model_id if pending else ""
        by_id = {replica.replica_id.unique_id: replica for replica in replicas}
        candidates = [
            Candidate(
                replica=name,
                queue=self.replica_queue_len_cache.get(replica.replica_id) or 0,
                resident=digest in replica.routing_stats.get(RESIDENT_KEY, ()),
            )
            for name, replica in by_id.items()
        ]
        return [
            [by_id[name] for name in group] for group in rank_replicas(digest or None, candidates)
        ]

    def _get_pending_request_matching_internal_request_id(
        self, request_metadata: Any = None
    ) -> PendingRequest | None:
        # Calls made while answering one HTTP request share an internal id: Serve's own lookup by
        # id then finds only the last of them and the others hang. The metadata object is unique.
        for pending in self._pending_requests_to_fulfill:
            if pending.metadata is request_metadata and not pending.future.done():
                return pending
        return None
