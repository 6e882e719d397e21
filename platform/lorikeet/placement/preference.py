"""Which replicas an adapter prefers, remembered from one plan to the next."""

from collections.abc import Sequence
from functools import lru_cache

from lorikeet.rendezvous import by_preference

_ORDERS = 32_768  # of 64 replicas each: 20 MB, and 2 s of hashing that the next plan need not do


@lru_cache(_ORDERS)
def preferred(digest: str, replicas: tuple[str, ...]) -> Sequence[str]:
    """The replicas in rendezvous order of this adapter."""
    return by_preference(digest, replicas)
