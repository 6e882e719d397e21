"""Report of a replica about itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from lorikeet_engine.adapter import Residency
from lorikeet_engine.telemetry.status import AdapterRows, AdapterStatus, EngineStatus


@dataclass(frozen=True)
class ReplicaReport:
    """Report of one replica's status and adapters.

    replica: the replica's name.
    base_model: name of the served base model.
    status: the engine's last status.
    rows: for each adapter that the report covers, the fields of an AdapterStatus as a plain tuple.
    quantization: format to which the base model's linears are rounded, in words; None if they are
        not.
    fp8_kv: whether the KV cache is FP8 instead of the base model's dtype.
    prompts: by PinnedPrompt.name, None for a pinned prompt that is computed, "" for one that is not
        yet, else the reason why its last computation failed.
    """

    replica: str
    base_model: str
    status: EngineStatus
    rows: AdapterRows = ()
    quantization: str | None = None
    fp8_kv: bool = False
    prompts: Mapping[str, str | None] = field(default_factory=dict)

    def pinnable_bytes(self, tier: Residency) -> int:
        """Return the limit on all pinned adapters of a tier, in bytes of their parts on one GPU.

        On host and disk, an adapter takes these bytes once for each GPU of the replica.
        """
        there = self.status.tiers[tier].pinnable_bytes
        return there if tier is Residency.GPU else there // self.status.tensor_parallel

    @cached_property
    def adapters(self) -> tuple[AdapterStatus, ...]:
        """Statuses of the adapters that the report covers."""
        return tuple(AdapterStatus(*row) for row in self.rows)  # type: ignore[arg-type]
