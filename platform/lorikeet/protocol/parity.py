"""Message of a parity proof, from a gateway to a replica, which answers with a Parity."""

from dataclasses import dataclass

from lorikeet.parity.figures import Bounds
from lorikeet.parity.probes import Probes
from lorikeet_engine.adapter import AdapterRef


@dataclass(frozen=True, slots=True)
class ParityTest:
    """Request to score a trainer's probes with an adapter.

    request_id: beginning of the ids of the proof's requests on the engine.
    """

    request_id: str
    adapter: AdapterRef
    probes: Probes
    bounds: Bounds
