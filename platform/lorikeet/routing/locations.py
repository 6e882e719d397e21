"""Which replicas have what a request could use: its adapter, and its prompt's beginning."""

import sys
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import count, takewhile
from typing import TypeVar

from lorikeet.protocol.status_update import StatusUpdate
from lorikeet_engine.adapter import Residency

K = TypeVar("K")

BLOCK_TOKENS = 64
CHARACTERS_PER_TOKEN = 4
"""An estimate for English text; a gateway has no tokenizer."""
MAX_HASHED_BLOCKS = 64
"""The most blocks of a prompt that are hashed: 4,096 tokens."""
MAX_HASHED_CHARACTERS = MAX_HASHED_BLOCKS * BLOCK_TOKENS * CHARACTERS_PER_TOKEN
_MAX_BLOCKS_KEPT = 1 << 17
"""8 million tokens, more than the KV caches of a few replicas hold."""
_NOWHERE = Residency.REMOTE

PrefixHashes = tuple[int, ...]
"""A hash for each whole block at a prompt's beginning, over all tokens to the block's end."""


class AdapterLocations:
    """The replicas that hold or load each adapter: read by adapter, updated by replica."""

    def __init__(self) -> None:
        self._holders: dict[Residency, dict[str, tuple[str, ...]]] = {
            tier: {} for tier in Residency if tier is not _NOWHERE
        }
        self._held: dict[str, dict[str, Residency]] = {}
        self._unconfirmed: dict[str, set[str]] = {}  # while a replica sends a snapshot
        self._loading: dict[str, Counter[str]] = {}

    def at(self, tier: Residency, digest: str) -> tuple[str, ...]:
        """The replicas whose nearest copy is at this tier, which is not remote."""
        return self._holders[tier].get(digest, ())

    def tier(self, replica: str, digest: str) -> Residency:
        """The nearest tier at which a replica has the adapter."""
        held = self._held.get(replica)
        return held.get(digest, _NOWHERE) if held else _NOWHERE

    def apply(self, replica: str, update: StatusUpdate) -> None:
        """Apply a status update; what a whole snapshot does not name is held no more."""
        if update.begins_snapshot:
            self._unconfirmed[replica] = set(self._held.get(replica, ()))
        for digest, tier in update.moved.items():
            self.set_tier(replica, digest, tier)
        if replica in self._unconfirmed:
            self._unconfirmed[replica].difference_update(update.moved)
        if update.ends_snapshot:
            for digest in self._unconfirmed.pop(replica, ()):
                self.set_tier(replica, digest, _NOWHERE)

    def set_tier(self, replica: str, digest: str, tier: Residency) -> None:
        """Record that a replica has the adapter at this tier and no nearer."""
        held = self._held.setdefault(replica, {})
        before = held.get(digest, _NOWHERE)
        if before is tier:
            return
        digest = sys.intern(digest)  # one string for all replicas that hold it
        if before is not _NOWHERE:
            self._remove_holder(before, digest, replica)
        if tier is _NOWHERE:
            del held[digest]
        else:
            held[digest] = tier
            holders = self._holders[tier]
            holders[digest] = (*holders.get(digest, ()), replica)

    def loading_on(self, digest: str) -> Collection[str]:
        """The replicas where requests for the adapter wait: it is there, or being loaded."""
        return self._loading.get(digest, ())

    def on_gpu_or_loading(self, replica: str, digest: str) -> bool:
        """Whether the adapter is on that replica's GPU, or being loaded to it."""
        on_gpu = self.tier(replica, digest) is Residency.GPU
        return on_gpu or replica in self.loading_on(digest)

    def add_waiting(self, replica: str, digest: str) -> None:
        """Count one more request that waits there for the adapter."""
        self._loading.setdefault(digest, Counter())[replica] += 1

    def remove_waiting(self, replica: str, digest: str) -> None:
        """Count one request less that waits there for the adapter."""
        waiting = self._loading[digest]
        decrement(waiting, replica)
        if not waiting:
            del self._loading[digest]

    def remove_replica(self, replica: str) -> None:
        """Forget all that a replica holds."""
        self._unconfirmed.pop(replica, None)
        for digest, tier in self._held.pop(replica, {}).items():
            self._remove_holder(tier, digest, replica)

    def _remove_holder(self, tier: Residency, digest: str, replica: str) -> None:
        left = tuple(name for name in self._holders[tier][digest] if name != replica)
        if left:
            self._holders[tier][digest] = left
        else:
            del self._holders[tier][digest]


def prefix_hashes(prompt: str | Sequence[int], *salt: str | None) -> PrefixHashes:
    """The chain of a text or of token ids.

    salt: what keeps the caches of two requests apart however alike their prompts are. Hashes are
    those of this process.
    """
    size = BLOCK_TOKENS * (CHARACTERS_PER_TOKEN if isinstance(prompt, str) else 1)
    chain, value = [], hash(salt)
    for end in range(size, min(len(prompt), MAX_HASHED_BLOCKS * size) + 1, size):
        value = hash((value, prompt[end - size : end]))
        chain.append(value)
    return tuple(chain)


class PrefixIndex:
    """The replica that computed each block last; what was not seen for longest is forgotten."""

    def __init__(self, max_blocks: int = _MAX_BLOCKS_KEPT) -> None:
        self._max_blocks = max_blocks
        self._replica_of: dict[int, str] = {}  # in the order in which they were computed

    def add(self, chain: PrefixHashes, replica: str) -> None:
        """A replica computes this prompt."""
        for block in chain:
            self._replica_of.pop(block, None)
            self._replica_of[block] = replica
        while len(self._replica_of) > self._max_blocks:
            del self._replica_of[next(iter(self._replica_of))]

    def cached_tokens(self, chain: PrefixHashes) -> dict[str, int]:
        """How many tokens of a prompt each replica has computed, if it has any."""
        found = takewhile(lambda name: name is not None, map(self._replica_of.get, chain))
        # Who computed a block had all before it; somebody else may have computed those later.
        return {name: blocks * BLOCK_TOKENS for name, blocks in zip(found, count(1)) if name}


def decrement(counts: Counter[K], key: K) -> None:
    """Count one less of a key; a count of 0 is not kept."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
