"""Adapters that requests wait for: loaded to the host first, then placed on the GPU.

States of an adapter:

    request ──▶ loading ──▶ ready, its image held on the host ──▶ on the GPU
                   │                     ▲
                   └──▶ blocked ─────────┘   while the host has no free memory

If a copy to the GPU proves damaged, the requests that still wait request the adapter anew.
"""

import logging
import math
import time
from collections.abc import Callable
from typing import NamedTuple

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.errors import AdapterDamaged, AdapterError
from lorikeet_engine.residency.gpu.adapters import LoadReason, PlaceOnGpu
from lorikeet_engine.residency.gpu.slot_usage import SlotUser
from lorikeet_engine.residency.host_arena import HostArena
from lorikeet_engine.residency.loader import Loader, LoadResult
from lorikeet_engine.residency.stats import ResidencyStats

log = logging.getLogger(__name__)

# A failure older than this, which no request has taken, does not keep a new load from starting.
_FAILURE_LASTS_S = 30.0


class _Failure(NamedTuple):
    """Error of a failed load, and the monotonic time of the failure."""

    error: AdapterError
    at_s: float


class RequestedAdapters:
    """Adapters that queued requests are waiting for.

    Engine thread only, except `digests` and `in`, which any thread may use.
    """

    def __init__(
        self,
        host: HostArena,
        loader: Loader,
        stats: ResidencyStats,
        place: PlaceOnGpu,
        wake: Callable[[], None],
    ) -> None:
        """Start without requested adapters.

        stats: remembers the adapters, and the sizes of their images.
        place: copies an image to the GPU.
        wake: called when `advance` should be called although no load has ended.
        """
        self._host, self._loader = host, loader
        self._stats, self._place, self._wake = stats, place, wake
        self._waiting: dict[str, SlotUser] = {}  # not on the GPU yet; value: first user
        self._ready: dict[str, AdapterRef] = {}  # subset of _waiting, held on the host
        self._blocked: dict[str, int] = {}  # subset of _waiting, to its host.frees at that time
        self._failures: dict[str, _Failure] = {}
        self._damaged: set[str] = set()  # whose last copy to the GPU was damaged

    def __contains__(self, digest: str) -> bool:
        return digest in self._waiting

    def digests(self) -> list[str]:
        """Return the digests of adapters that requests wait for and that are not on the GPU."""
        return list(self._waiting)

    @property
    def loading(self) -> bool:
        """Whether a requested adapter is not on the host yet."""
        return len(self._waiting) > len(self._ready)

    @property
    def wait_for_gpu(self) -> bool:
        """Whether a requested adapter is on the host and waits for GPU memory."""
        return bool(self._ready)

    def request(self, ref: AdapterRef, tenant: str) -> None:
        """Begin to load an adapter that is not on the GPU, for a tenant's request.

        Does nothing if the adapter is being loaded for a request already, or if its load failed
        less than _FAILURE_LASTS_S seconds ago and no request has taken the error.
        """
        digest = ref.digest
        if digest in self._waiting:
            return
        failure = self._failures.get(digest)
        if failure is not None:
            if time.monotonic() - failure.at_s < _FAILURE_LASTS_S:
                return
            del self._failures[digest]
        self._stats.remember(ref)
        self._waiting[digest] = SlotUser(tenant, ref)
        self._load(ref)

    def take_failure(self, digest: str) -> AdapterError | None:
        """Return the error of an adapter's failed load, once only; None if there is no error."""
        failure = self._failures.pop(digest, None)
        return failure.error if failure is not None else None

    def on_result(self, result: LoadResult) -> None:
        """Take note of a load that has ended, whether or not it was for a request.

        A loaded adapter that no request waits for may be evicted from the host again.
        """
        ref, digest = result.ref, result.ref.digest
        if result.error is not None:
            log.warning("adapter_failed", extra={"adapter": str(ref), "error": str(result.error)})
            if self._waiting.pop(digest, None):
                self._fail(digest, result.error)
        elif result.residency is Residency.HOST:
            if digest in self._waiting and digest not in self._ready:
                self._ready[digest] = ref
            else:
                self._host.release(digest)
        elif digest in self._waiting:
            self._blocked[digest] = result.frees

    def advance(self) -> None:
        """Place ready adapters on the GPU, and retry loads that the host had no memory for."""
        refused: float = math.inf  # larger images will not fit in this step either
        for digest, ref in list(self._ready.items()):
            held = self._host.hold(digest)
            if held is None:  # its image was discarded while it waited
                del self._ready[digest]
                self._load(ref)
            elif held.layout.elements < refused and not self._place(ref, held, LoadReason.REQUEST):
                refused = held.layout.elements
            self._host.release(digest)
        for digest, frees in list(self._blocked.items()):
            if self._host.frees != frees:
                del self._blocked[digest]
                self._load(self._waiting[digest].ref)

    def on_copy(self, digest: str, damaged: AdapterDamaged | None) -> None:
        """Take note of a completed copy to the GPU, whether or not it was for a request.

        After an adapter's first damaged copy, the adapter is read from the disk again. After two in
        a row, the adapter's requests fail instead of waiting.

        damaged: error of a damaged copy; None if the copy is good.
        """
        if damaged is None:
            self._damaged.discard(digest)
        elif digest not in self._damaged:
            self._damaged.add(digest)
        else:
            self._damaged.remove(digest)
            self._fail(digest, damaged)

    def placed(self, digest: str) -> SlotUser | None:
        """Stop tracking an adapter that has been placed on the GPU.

        Returns the adapter and the tenant whose request was first to ask for it; None if no request
        did.
        """
        user = self._waiting.pop(digest, None)
        self._blocked.pop(digest, None)
        self._failures.pop(digest, None)  # of an earlier load that no request waits for any more
        if self._ready.pop(digest, None):
            self._host.release(digest)
        return user

    def _fail(self, digest: str, error: AdapterError) -> None:
        self._failures[digest] = _Failure(error, time.monotonic())

    def _load(self, ref: AdapterRef) -> None:
        held = self._host.hold(ref.digest)
        if held is not None:
            self._stats.remember_size(ref.digest, held.layout.elements)
            self._ready[ref.digest] = ref
            self._wake()  # no load will announce this work
        else:
            self._loader.load(ref, Residency.HOST, urgent=True)
