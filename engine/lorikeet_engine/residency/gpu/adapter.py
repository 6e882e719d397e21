"""An adapter on the GPU, and the right to use it."""

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import torch

from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.residency.packing import PackedLayout


@dataclass(slots=True, eq=False)
class GpuAdapter:
    """One adapter on the GPU.

    guarded_until_s: while a request waits to lease it. copying: nobody can lease it yet.
    reads: DeviceArena's, of the steps that may have read it; None until its first lease has ended.
    """

    ref: AdapterRef
    slot: int
    layout: PackedLayout
    last_used_s: float
    score: float
    leases: int = 0
    guarded_until_s: float | None = None
    copying: bool = False
    loaded_at_s: float = 0.0
    reads: torch.cuda.Event | None = None

    def held_at(self, now_s: float) -> bool:
        """Whether the adapter is in use or about to be, and must stay."""
        guarded = self.guarded_until_s is not None and self.guarded_until_s > now_s
        return bool(self.leases) or self.copying or guarded


class Lease:
    """While it lasts, the adapter stays on the GPU, in this slot of the table.

    rank: the adapter's largest. Use as a context manager, or release once done.
    """

    __slots__ = ("_adapter", "_ended", "_on_release", "rank", "slot")

    def __init__(
        self,
        adapter: GpuAdapter,
        ended: Callable[[GpuAdapter], None],
        on_release: Callable[[], None],
    ) -> None:
        """ended, on_release: called, in this order, when the lease is released."""
        adapter.leases += 1
        self._adapter: GpuAdapter | None = adapter
        self._ended, self._on_release = ended, on_release
        self.slot = adapter.slot
        self.rank = adapter.layout.max_rank

    def release(self) -> None:
        """End the lease; doing so again changes nothing."""
        adapter, self._adapter = self._adapter, None
        if adapter is not None:
            self._ended(adapter)
            self._on_release()

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
