"""Memory of engines for adapters, which an adapter's size is checked against."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lorikeet_engine.errors import AdapterTooLarge

_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class AdapterMemory:
    """Memory in which engines keep packed adapters.

    dtype: float32, float16 or bfloat16.
    gpu_bytes: of each GPU of a replica; None: unknown.
    host_bytes: of a replica's host; None: unknown.
    gpus: number of a replica's GPUs that share each adapter, by base model; 1 if not named.
    """

    dtype: str
    gpu_bytes: int | None = None
    host_bytes: int | None = None
    gpus: Mapping[str, int] = field(default_factory=dict)

    def image_bytes(self, elements: int, gpus: int = 1) -> int:
        """Return the bytes that an adapter takes on each GPU of its replica.

        The host holds one part of this size for each GPU.
        elements: of the largest part.
        Raises AdapterTooLarge.
        """
        taken = elements * _ELEMENT_BYTES[self.dtype]
        self._check(taken, self.gpu_bytes, "on a GPU")
        self._check(gpus * taken, self.host_bytes, "on the host")
        return taken

    def _check(self, taken: int, room: int | None, where: str) -> None:
        if room is not None and taken > room:
            raise AdapterTooLarge(
                f"the adapter takes {taken} bytes as {self.dtype} {where} and the engines' memory "
                f"for adapters there holds {room}: train fewer modules or a smaller rank, or have "
                "the memory enlarged",
                field="gpu_bytes",
                gpu_bytes=taken,
                max_bytes=room,
            )


FLOAT32_MEMORY = AdapterMemory("float32")
"""Unlimited memory of engines on a CPU, the default."""
