"""Identity of adapters, and the tiers that hold their weights."""

from dataclasses import dataclass
from enum import IntEnum


@dataclass(frozen=True, slots=True, order=True)
class AdapterRef:
    """One immutable version of one adapter; the same value everywhere from the catalog to the GPU.

    digest: SHA-256 of the adapter's blob, 64 lower-case hex digits. Two refs with the same digest
        have the same weights, so caches are keyed by the digest alone.
    """

    tenant: str
    name: str
    version: int
    digest: str

    def __str__(self) -> str:
        return f"{self.tenant}/{self.name}@{self.version}"


@dataclass(frozen=True, slots=True)
class TouchedModules:
    """Modules of the base model that an adapter changes.

    linears: names of the adapted linears in the model's order, which may include lm_head and
        embed_tokens.
    layers: number of decoder layers in which a linear is adapted.
    min_rank: smallest rank of an adapted linear.
    parameters: number of elements of all A and B, and of the rows of trained tokens.
    tokens: number of trained tokens.
    """

    linears: tuple[str, ...]
    layers: int
    min_rank: int
    parameters: int
    tokens: int = 0


class Residency(IntEnum):
    """Tier that holds an adapter's weights; a larger value is nearer to the GPU."""

    REMOTE = 0
    DISK = 1
    HOST = 2
    GPU = 3

    def __str__(self) -> str:
        return self.name.lower()
