"""What one replica tells the platform about itself."""

from dataclasses import dataclass
from functools import cached_property

from lorikeet_engine.adapter import Residency
from lorikeet_engine.telemetry.status import AdapterRows, AdapterStatus, EngineStatus


@dataclass(frozen=True)
class ReplicaReport:
    """One engine replica at one moment. base_model: the name it serves.

    status: as its engine reported it last. rows: fields of the adapters that were asked for.
    quantization, fp8_kv: EngineInfo's.
    """

    replica: str
    base_model: str
    status: EngineStatus
    rows: AdapterRows = ()
    quantization: str | None = None
    fp8_kv: bool = False

    def pinnable_bytes(self, tier: Residency) -> int:
        """What pins can take at a tier, by what their adapters take on a GPU.

        Images elsewhere have a part for each GPU that shares the base model, all as large.
        """
        there = self.status.tiers[tier].pinnable_bytes
        return there if tier is Residency.GPU else there // self.status.tensor_parallel

    @cached_property
    def adapters(self) -> tuple[AdapterStatus, ...]:
        """The adapters that were asked for."""
        return tuple(AdapterStatus(*row) for row in self.rows)  # type: ignore[arg-type]
