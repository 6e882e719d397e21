"""The adapters that this process has seen, wherever they are by now, and how large they are."""

import threading
from dataclasses import dataclass

from lorikeet_engine.adapter import AdapterRef

# The last ones requested, pinned or prefetched.
_MAX = 16_384


@dataclass(slots=True)
class _Seen:
    ref: AdapterRef
    elements: int | None = None


class SeenAdapters:
    """The adapters last asked for, and how large their images are. Thread-safe."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._lock = threading.Lock()

    def add(self, ref: AdapterRef) -> None:
        """Remember an adapter that is asked for."""
        with self._lock:
            seen = self._seen.pop(ref.digest, None)
            self._seen[ref.digest] = _Seen(ref, seen.elements if seen else None)
            if len(self._seen) > _MAX:
                del self._seen[next(iter(self._seen))]

    def measured(self, digest: str, elements: int) -> None:
        """Remember the size of an adapter's image."""
        with self._lock:
            if digest in self._seen:
                self._seen[digest].elements = elements

    def elements(self, digest: str) -> int | None:
        """The elements of an adapter's image; None while none was seen."""
        seen = self._seen.get(digest)
        return seen.elements if seen else None

    def refs(self) -> dict[str, AdapterRef]:
        """All seen adapters, by digest."""
        with self._lock:
            return {digest: seen.ref for digest, seen in self._seen.items()}
