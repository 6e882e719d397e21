"""Message of a parity proof, from a gateway to a replica, which answers with a Parity."""

from dataclasses import dataclass

from lorikeet.parity.figures import Bounds
from lorikeet.parity.probes import Probes
from lorikeet_engine.adapter import AdapterRef


@dataclass(frozen=True, slots=True)
class ParityTest:
    """Request to compare an adapter's log-probabilities with its trainer's (parity proof).

    request_id: beginning of the ids of the proof's requests on the engine.
    probes: sequences of tokens with the trainer's log-probabilities.
    bounds: differences above which the proof warns or refuses.
    """

    request_id: str
    adapter: AdapterRef
    probes: Probes
    bounds: Bounds
