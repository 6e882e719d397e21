"""Prefetches: loads ahead of requests, in memory and time that requests and pins do not need."""

from collections import deque
from dataclasses import dataclass

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.residency.gpu.adapters import GpuAdapters, LoadReason, PlaceOnGpu
from lorikeet_engine.residency.host_arena import HostArena
from lorikeet_engine.residency.loader import Loader, LoadResult

# When more prefetches wait than this, the oldest is forgotten.
_MAX_WAITING = 64
# Concurrent loads for prefetches: requests' loads need threads, too.
_LOADS = 2


@dataclass(frozen=True, slots=True)
class _Prefetch:
    ref: AdapterRef
    tier: Residency
    uses: float


class Prefetches:
    """Prefetches of adapters. Each is tried once, when no load for requests or pins is pending.

    An adapter is loaded, then placed on the GPU or forgotten. For the engine's thread only, except
    `add`.
    """

    def __init__(
        self, gpu: GpuAdapters, host: HostArena, loader: Loader, place: PlaceOnGpu
    ) -> None:
        self._gpu, self._host = gpu, host
        self._loader, self._place = loader, place
        self._waiting: deque[_Prefetch] = deque(maxlen=_MAX_WAITING)
        self._loading: dict[str, _Prefetch] = {}
        self._loaded: list[_Prefetch] = []

    def add(self, ref: AdapterRef, tier: Residency, uses: float) -> None:
        """Queue an adapter to be loaded to this tier when no load for requests or pins is pending.

        uses: number of the adapter's recent uses on other replicas that this replica could serve
            instead.
        """
        self._waiting.append(_Prefetch(ref, tier, uses))

    def on_result(self, result: LoadResult) -> None:
        """Note a load that has ended. If it was a prefetch that reached the host, `advance` goes on
        with it.
        """
        prefetch = self._loading.pop(result.ref.digest, None)
        if prefetch is not None and result.residency is Residency.HOST:
            self._loaded.append(prefetch)

    def advance(self, *, may_load: bool, may_place: bool) -> None:
        """Place prefetched adapters that were loaded, and begin to load further ones.

        may_load: whether to begin loads. False while adapters are loaded for requests or pins.
        may_place: whether to place adapters on the GPU. False while requests wait for GPU memory.
        """
        while self._loaded:
            self._promote(self._loaded.pop(), may_place)
        while may_load and self._waiting and len(self._loading) < _LOADS:
            prefetch = self._waiting.popleft()
            if not self._promote(prefetch, may_place):
                self._loading[prefetch.ref.digest] = prefetch
                self._loader.load(prefetch.ref, min(prefetch.tier, Residency.HOST), urgent=False)

    def _promote(self, prefetch: _Prefetch, may_place: bool) -> bool:
        """Place a prefetched adapter on the GPU, if it is on the host and is wanted on the GPU.

        Returns False if the adapter is neither on the host nor on the GPU, so that it must be
        loaded first.
        """
        digest = prefetch.ref.digest
        if self._gpu.placed(digest):
            return True
        held = self._host.hold(digest)
        if held is None:
            return False
        try:
            if prefetch.tier is Residency.GPU and may_place:
                self._place(prefetch.ref, held, LoadReason.PREFETCH, prefetch.uses)
        finally:
            self._host.release(digest)
        return True
