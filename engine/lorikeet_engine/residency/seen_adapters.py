"""What this process has learnt about adapters, wherever they are by now."""

import threading
from dataclasses import dataclass

from lorikeet_engine.adapter import AdapterRef

# The last ones wanted, pinned or prefetched.
_MOST = 16_384


@dataclass(slots=True)
class _Fact:
    ref: AdapterRef
    elements: int | None = None


class SeenAdapters:
    """Adapters that were asked for, and how large their images are. Thread-safe."""

    def __init__(self) -> None:
        self._facts: dict[str, _Fact] = {}
        self._lock = threading.Lock()

    def add(self, ref: AdapterRef) -> None:
        """Somebody asks for it."""
        with self._lock:
            fact = self._facts.pop(ref.digest, None)
            self._facts[ref.digest] = _Fact(ref, fact.elements if fact else None)
            if len(self._facts) > _MOST:
                del self._facts[next(iter(self._facts))]

    def measured(self, digest: str, elements: int) -> None:
        """Its image has so many elements."""
        with self._lock:
            if digest in self._facts:
                self._facts[digest].elements = elements

    def elements(self, digest: str) -> int | None:
        """Its image's; None while none was seen."""
        fact = self._facts.get(digest)
        return fact.elements if fact else None

    def refs(self) -> dict[str, AdapterRef]:
        """All of them, by digest."""
        with self._lock:
            return {digest: fact.ref for digest, fact in self._facts.items()}
