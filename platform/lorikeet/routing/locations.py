"""Locations of state that a request can reuse: its adapter, and its prompt's cached prefix."""

import sys
from collections import Counter
from collections.abc import Collection
from itertools import count, takewhile
from typing import TypeVar

from lorikeet.protocol.messages import TokenIds
from lorikeet.protocol.status_update import PrefixRoom, StatusUpdate
from lorikeet_engine.adapter import Adapter, Residency, member_digests

K = TypeVar("K")

BLOCK_TOKENS = 64
"""Tokens that one prefix hash covers."""
MAX_HASHED_BLOCKS = 64
"""Maximum number of a prompt's blocks that are hashed: 4,096 tokens."""
_MAX_BLOCKS_KEPT = 1 << 17
"""Maximum number of blocks that a PrefixIndex keeps: 8 million tokens, more than the KV caches of a
few replicas.
"""
_NOWHERE = Residency.REMOTE

PrefixHashes = tuple[int, ...]
"""One hash for each full block of a prompt's prefix, over all tokens up to the block's end."""


class AdapterLocations:
    """Index of the replicas that hold or load each adapter, updated by replica, read by adapter.

    A composition (several adapters applied together) is at the tier of its farthest adapter, and is
    loading where each of its adapters is loading or on the GPU. `set_tier` and a StatusUpdate's
    `moved` take digests of single adapters; the other methods take those of compositions too.
    """

    def __init__(self) -> None:
        self._holders: dict[Residency, dict[str, tuple[str, ...]]] = {
            tier: {} for tier in Residency if tier is not _NOWHERE
        }
        self._held: dict[str, dict[str, Residency]] = {}
        self._unconfirmed: dict[str, set[str]] = {}  # not named yet by the snapshot under way
        self._loading: dict[str, Counter[str]] = {}

    def at(self, tier: Residency, digest: str) -> tuple[str, ...]:
        """Return the replicas whose nearest copy of an adapter is at `tier`, which must not be
        REMOTE.
        """
        if "*" not in digest:
            return self._holders[tier].get(digest, ())
        return tuple(name for name in self.partly_at(digest) if self.tier(name, digest) is tier)

    def partly_at(self, digest: str) -> tuple[str, ...]:
        """Return the replicas that have any adapter of a composition, those with the most first."""
        members = member_digests(digest)
        having = Counter(
            name
            for member in members
            for holders in self._holders.values()
            for name in holders.get(member, ())
        )
        return tuple(name for name, _ in having.most_common())

    def tier(self, replica: str, digest: str) -> Residency:
        """Return the nearest tier at which a replica has the adapter; REMOTE if the replica has no
        copy.
        """
        held = self._held.get(replica)
        if held is None:
            return _NOWHERE
        if "*" not in digest:
            return held.get(digest, _NOWHERE)
        return min(held.get(member, _NOWHERE) for member in member_digests(digest))

    def apply(self, replica: str, update: StatusUpdate) -> None:
        """Apply a status update.

        Updates may form a snapshot, which names every adapter of the replica. The end of a snapshot
        drops all adapters that the snapshot did not name.
        """
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
        """Record the tier nearest to the GPU at which a replica has a copy of an adapter."""
        held = self._held.setdefault(replica, {})
        before = held.get(digest, _NOWHERE)
        if before is tier:
            return
        digest = sys.intern(digest)  # share one string among all replicas
        if before is not _NOWHERE:
            self._remove_holder(before, digest, replica)
        if tier is _NOWHERE:
            del held[digest]
        else:
            held[digest] = tier
            holders = self._holders[tier]
            holders[digest] = (*holders.get(digest, ()), replica)

    def loading_on(self, digest: str) -> Collection[str]:
        """Return the replicas where requests wait for the adapter, whether it is still being loaded
        or on the GPU already.

        For a composition: where requests wait for one of its adapters at least, and each is being
        loaded or on the GPU.
        """
        if "*" not in digest:
            return self._loading.get(digest, ())
        members = member_digests(digest)
        names = {name for member in members for name in self._loading.get(member, ())}
        return [n for n in names if all(self.on_gpu_or_loading(n, each) for each in members)]

    def on_gpu_or_loading(self, replica: str, digest: str) -> bool:
        """Whether the adapter is on the replica's GPU or being loaded to it."""
        on_gpu = self.tier(replica, digest) is Residency.GPU
        return on_gpu or replica in self.loading_on(digest)

    def new_share(self, replica: str, digest: str) -> float:
        """Return the share of a composition's adapters that are neither on the replica's GPU nor
        being loaded to it; 1.0 for a single adapter.
        """
        if "*" not in digest:
            return 1.0
        members = member_digests(digest)
        new = [each for each in members if not self.on_gpu_or_loading(replica, each)]
        return len(new) / len(members)

    def add_waiting(self, replica: str, digest: str) -> None:
        """Add one to the requests without a first token that wait for the adapter at a replica."""
        for member in member_digests(digest):
            self._loading.setdefault(member, Counter())[replica] += 1

    def remove_waiting(self, replica: str, digest: str) -> None:
        """Subtract one from the requests that wait for the adapter at a replica."""
        for member in member_digests(digest):
            waiting = self._loading[member]
            decrement(waiting, replica)
            if not waiting:
                del self._loading[member]

    def remove_replica(self, replica: str) -> None:
        """Drop everything known of a replica's adapters."""
        self._unconfirmed.pop(replica, None)
        for digest, tier in self._held.pop(replica, {}).items():
            self._remove_holder(tier, digest, replica)

    def _remove_holder(self, tier: Residency, digest: str, replica: str) -> None:
        left = tuple(name for name in self._holders[tier][digest] if name != replica)
        if left:
            self._holders[tier][digest] = left
        else:
            del self._holders[tier][digest]


def prefix_hashes(
    prompt: TokenIds, tenant: str = "", adapter: Adapter | None = None
) -> PrefixHashes:
    """Return a prompt's prefix hashes, valid only in this process: one for each of its first
    MAX_HASHED_BLOCKS whole blocks of BLOCK_TOKENS tokens, which covers the blocks before it too.

    Blocks before the first token that the adapter changes have the hashes that they have for the
    base model.

    prompt: token ids.
    tenant: tenant of the request; tenants share no cached prefixes.
    adapter: None for the base model.
    """
    chain, value, size = [], hash(tenant), BLOCK_TOKENS * prompt.itemsize
    ids = prompt[: MAX_HASHED_BLOCKS * BLOCK_TOKENS].tobytes()
    active_from = None if adapter is None else adapter.active_from(prompt)
    changed = None if active_from is None else active_from // BLOCK_TOKENS * size
    for start in range(0, len(ids) - size + 1, size):
        if adapter is not None and start == changed:
            value = hash((value, adapter.digest, active_from))
        value = hash((value, ids[start : start + size]))
        chain.append(value)
    return tuple(chain)


class PrefixIndex:
    """Index that gives, for each block of BLOCK_TOKENS prompt tokens, the replica that computed it
    last, and whether its KV pages have left the GPU for the replica's host.

    A replica with known room (PrefixRoom) is assumed to move its least recently computed blocks,
    of a prompt the last ones first, from the GPU to the host, and to drop those for which the host
    has no room.

    max_blocks: maximum number of blocks to keep; the least recently computed is dropped first.
    """

    def __init__(self, max_blocks: int = _MAX_BLOCKS_KEPT) -> None:
        self._max_blocks = max_blocks
        # Least recently computed block first, in all three.
        self._replica_of: dict[int, str] = {}
        self._on_gpu: dict[str, dict[int, None]] = {}  # by replica with known room
        self._on_host: dict[str, dict[int, None]] = {}  # by replica with known room

    def add(self, chain: PrefixHashes, replica: str, room: PrefixRoom | None = None) -> None:
        """Record that a replica computes a prompt.

        chain: hashes of the prompt's blocks, from `prefix_hashes`.
        room: the replica's room for cached prefixes; None: unknown, assumed to be enough.
        """
        for block in reversed(chain):  # engines evict a prefix from its end
            self._replica_of.pop(block, None)
            self._replica_of[block] = replica
        if room is not None:
            self._evict(chain, replica, room)
        while len(self._replica_of) > self._max_blocks:
            del self._replica_of[next(iter(self._replica_of))]

    def remove_replica(self, replica: str) -> None:
        """Drop everything known of a replica's room."""
        self._on_gpu.pop(replica, None)
        self._on_host.pop(replica, None)

    def host_tokens(self, chain: PrefixHashes, replica: str, cached_tokens: int) -> int:
        """Return the number of a prompt's cached tokens that only the replica's host has.

        cached_tokens: the replica's number, from the method `cached_tokens`.
        """
        on_host = self._on_host.get(replica)
        if not on_host:
            return 0
        cached = chain[: cached_tokens // BLOCK_TOKENS]
        return BLOCK_TOKENS * sum(block in on_host for block in cached)

    def cached_tokens(self, chain: PrefixHashes) -> dict[str, int]:
        """Return, by replica, the number of a prompt's tokens that the replica has computed before.

        Replicas that have computed none are left out.

        chain: hashes of the prompt's blocks, from `prefix_hashes`.
        """
        found = takewhile(lambda name: name is not None, map(self._replica_of.get, chain))
        # The replica of a block has all blocks before it too, even if they name a later replica.
        return {name: blocks * BLOCK_TOKENS for name, blocks in zip(found, count(1)) if name}

    def _evict(self, chain: PrefixHashes, replica: str, room: PrefixRoom) -> None:
        on_gpu = self._on_gpu.setdefault(replica, {})
        on_host = self._on_host.setdefault(replica, {})
        for block in reversed(chain):
            on_gpu.pop(block, None)
            on_host.pop(block, None)
            on_gpu[block] = None
        while len(on_gpu) * BLOCK_TOKENS > room.gpu_tokens:
            block = next(iter(on_gpu))
            del on_gpu[block]
            on_host[block] = None
        while len(on_host) * BLOCK_TOKENS > room.host_tokens:
            block = next(iter(on_host))
            del on_host[block]
            if self._replica_of.get(block) == replica:
                del self._replica_of[block]


def decrement(counts: Counter[K], key: K) -> None:
    """Subtract one from a key's count, and delete the key at 0."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
