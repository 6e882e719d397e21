"""What an engine says of who used its adapters: plain, picklable."""

from dataclasses import dataclass

from lorikeet_engine.adapter import AdapterRef


@dataclass(frozen=True, slots=True)
class SlotUse:
    """A tenant's use of an adapter since this was asked last.

    leased_s: its slot was leased for the tenant's requests, time that several leases share counted
    once; at each moment the tenants who lease it bear equal parts. loads, load_bytes: onto the GPU,
    because a request of the tenant wanted it, and before anybody else's did.
    """

    tenant: str
    ref: AdapterRef
    leased_s: float
    loads: int
    load_bytes: int
