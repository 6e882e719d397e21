"""Memory that engines have for adapters, and the check that an adapter fits into it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lorikeet_engine.errors import AdapterTooLarge

_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class AdapterMemory:
    """Memory in which engines keep packed adapters.

    dtype: dtype of packed adapters: float32, float16 or bfloat16.
    gpu_bytes: bytes for adapters on each GPU of a replica; None if unknown.
    host_bytes: bytes for adapters in the host memory of a replica; None if unknown.
    gpus: by base model, the number of a replica's GPUs among which each adapter is divided; 1 for
        base models that are not listed.
    """

    dtype: str
    gpu_bytes: int | None = None
    host_bytes: int | None = None
    gpus: Mapping[str, int] = field(default_factory=dict)

    def image_bytes(self, elements: int, gpus: int = 1) -> int:
        """Return the bytes that an adapter takes on each GPU of its replica.

        The host holds one part of this size for each GPU.

        elements: number of elements of the adapter's image, its packed weights, on one GPU; the
            largest part if several GPUs share the adapter.
        gpus: number of GPUs that share the adapter.

        Raises AdapterTooLarge if the adapter does not fit on a GPU or on the host.
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
"""Memory of engines on a CPU: float32 and unlimited. The default."""
