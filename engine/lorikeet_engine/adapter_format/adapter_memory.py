"""What an adapter takes on an engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lorikeet_engine.errors import AdapterTooLarge

_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class AdapterMemory:
    """Where engines keep packed adapters.

    dtype: float32, float16 or bfloat16. gpu_bytes, host_bytes: of a replica's each GPU and of its
    host; None: not known. gpus: how many of a replica have a part of each adapter, by base model; 1
    of one that is not named.
    """

    dtype: str
    gpu_bytes: int | None = None
    host_bytes: int | None = None
    gpus: Mapping[str, int] = field(default_factory=dict)

    def image_bytes(self, elements: int, gpus: int = 1) -> int:
        """What an adapter takes on each of its replica's GPUs.

        elements: of the largest part. On the host there is one as large for each GPU. Raises
        AdapterTooLarge.
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
"""The memory of engines on a CPU, unless they are told otherwise, without a bound."""
