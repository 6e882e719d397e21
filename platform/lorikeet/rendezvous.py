"""Rendezvous hashing: every process that sees the same replicas picks the same home."""

from collections.abc import Iterable
from hashlib import blake2b


def by_preference(key: str, replicas: Iterable[str]) -> list[str]:
    """Replicas in the order in which `key` prefers them; the first is its home.

    Adding or removing a replica moves only the keys whose home it becomes or was.
    Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998.
    """
    return sorted(replicas, key=lambda replica: (_weight(key, replica), replica), reverse=True)


def _weight(key: str, replica: str) -> bytes:
    return blake2b(f"{key}\0{replica}".encode(), digest_size=8).digest()
