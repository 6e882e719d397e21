"""What a simulated replica asks of those around it."""

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from lorikeet.simulator.replica import Replica


class World(Protocol):
    """What a replica asks of the fleet; by number: requests, adapters, tenants, replicas."""

    prompts: list[int]
    answers: list[int]
    adapter_of: list[int]
    tenant_of: list[int]
    ranks: list[int]
    sizes: list[int]
    gaps: defaultdict[int, float]

    def at(self, time_s: float, act: Callable[[float], None]) -> None:
        """Call act with time_s then."""

    def step_at(self, time_s: float, replica: "Replica") -> None:
        """Call the replica's step then, instead of when was said before."""

    def answered(self, request: int, now_s: float) -> None:
        """Its first token is there."""

    def ended(self, replica: "Replica") -> None:
        """One of its requests has its last token."""

    def wanted(self, adapter: int, replica: "Replica") -> None:
        """It begins to bring the adapter to its GPU, for requests."""

    def placed(self, adapter: int, replica: "Replica") -> None:
        """It begins to copy the adapter to its GPU."""
