"""What an adapter is called and where its weights can be."""

from dataclasses import dataclass
from enum import IntEnum


@dataclass(frozen=True, slots=True, order=True)
class AdapterRef:
    """One immutable version of one adapter, the same everywhere from the catalog to the GPU.

    digest: SHA-256 of the adapter's blob, 64 lower-case hex digits. Two refs with the same digest
    have the same weights, so caches are keyed by it alone.
    """

    tenant: str
    name: str
    version: int
    digest: str

    def __str__(self) -> str:
        return f"{self.tenant}/{self.name}@{self.version}"


@dataclass(frozen=True, slots=True)
class TouchedModules:
    """What of its base model an adapter changes.

    linears: by name, in the model's order, lm_head and embed_tokens among them. layers: how many
    have any of the others. min_rank: the smallest rank. parameters: the numbers in all its A and B,
    and in the rows of trained tokens. tokens: how many those are.
    """

    linears: tuple[str, ...]
    layers: int
    min_rank: int
    parameters: int
    tokens: int = 0


class Residency(IntEnum):
    """The fastest place that holds an adapter's weights; larger is nearer to the GPU."""

    REMOTE = 0
    DISK = 1
    HOST = 2
    GPU = 3

    def __str__(self) -> str:
        return self.name.lower()
