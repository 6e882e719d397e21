"""Rendezvous hashing: every process that sees the same replicas orders them alike for a key."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b

CANDIDATES = 2
_CANDIDATES_REMEMBERED = 100_000
_ORDERS_REMEMBERED = 32_768  # of 64 replicas each: 20 MB, and 2 s of hashing


def by_preference(key: str, replicas: Iterable[str]) -> list[str]:
    """Replicas in the order in which `key` prefers them.

    Adding or removing a replica moves only the keys whose first choice it becomes or was.
    Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998.
    """
    return sorted(replicas, key=lambda replica: (_weight(key, replica), replica), reverse=True)


@lru_cache(_ORDERS_REMEMBERED)
def preferred(key: str, replicas: tuple[str, ...]) -> Sequence[str]:
    """All replicas by preference, remembered: from one plan to the next most are the same."""
    return by_preference(key, replicas)


@lru_cache(_CANDIDATES_REMEMBERED)
def rendezvous_candidates(key: str, replicas: tuple[str, ...]) -> Sequence[str]:
    """The first CANDIDATES by preference, remembered: finding them takes 1.5 µs a replica."""
    return by_preference(key, replicas)[:CANDIDATES]


def _weight(key: str, replica: str) -> bytes:
    return blake2b(f"{key}\0{replica}".encode(), digest_size=8).digest()
