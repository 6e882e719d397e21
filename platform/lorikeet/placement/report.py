"""What one replica tells the platform about itself."""

from dataclasses import dataclass

from lorikeet_engine.memory_map import MemoryMap
from lorikeet_engine.request import EngineReport


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """One engine replica at one moment. base_model: the name it serves."""

    replica: str
    base_model: str
    engine: EngineReport


@dataclass(frozen=True, slots=True)
class ReplicaMap:
    """What lies where in one replica's memory at one moment."""

    replica: str
    base_model: str
    memory: MemoryMap
