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


class Residency(IntEnum):
    """The fastest place that holds an adapter's weights; larger is nearer to the GPU."""

    REMOTE = 0
    DISK = 1
    HOST = 2
    GPU = 3

    def __str__(self) -> str:
        return self.name.lower()
