"""A request router that sends requests with consecutive seeds to consecutive replicas."""

from dataclasses import replace
from typing import Any

from ray.serve.request_router import PendingRequest, RunningReplica

from lorikeet.serving.request_router import AdapterAffinityRouter, call_of


class SeedsChooseReplicas(AdapterAffinityRouter):
    """The product's router, except for one adapter, whose requests go to the replica of their seed.

    Requests for that adapter with n consecutive seeds reach n replicas, whichever gateways route
    them.
    """

    def initialize_state(self, name: str, **prices: Any) -> None:
        """Set the adapter whose requests go by seed, and change coefficients of the cost model.

        name: the adapter's name without its tenant.
        prices: fields of CostCoefficients that replace the measured ones.
        """
        super().initialize_state()
        self._fleet._costs = replace(self._fleet._costs, **prices)
        self._name = name

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replica chosen by the request's seed if it is for the one adapter, else the
        product's choice.
        """
        encoded = call_of(pending_request)
        call = encoded.call if encoded is not None else None
        if call is None or call.adapter is None or call.adapter.name != self._name:
            return await super().choose_replicas(candidate_replicas, pending_request)
        ordered = sorted(candidate_replicas, key=lambda each: each.replica_id.unique_id)
        return [[ordered[(call.sampling.seed or 0) % len(ordered)]]]
