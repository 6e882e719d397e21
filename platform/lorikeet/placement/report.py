"""What one replica tells the platform about itself."""

from dataclasses import dataclass

from lorikeet_engine.request import EngineReport


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """One engine replica at one moment. base_model: the name it serves."""

    replica: str
    base_model: str
    engine: EngineReport
