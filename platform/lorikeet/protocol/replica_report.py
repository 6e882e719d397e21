"""What one replica tells the platform about itself."""

from dataclasses import dataclass
from functools import cached_property

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

    @cached_property
    def adapters(self) -> tuple[AdapterStatus, ...]:
        """The adapters that were asked for."""
        return tuple(AdapterStatus(*row) for row in self.rows)  # type: ignore[arg-type]
