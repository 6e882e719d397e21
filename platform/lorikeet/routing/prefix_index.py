"""An index of prompt prefixes: which replica computed one and may have it in its KV cache."""

from collections.abc import Sequence
from itertools import count, takewhile

BLOCK_TOKENS = 64
CHARACTERS_PER_TOKEN = 4
"""An estimate for English text; a gateway has no tokenizer."""
MOST_BLOCKS = 64
"""The most blocks of a prompt that are hashed: 4,096 tokens."""
_REMEMBERED = 1 << 17  # blocks: 8 million tokens, more than the KV caches of a few replicas hold

PrefixHashes = tuple[int, ...]
"""A hash for each whole block at a prompt's beginning, over all tokens to the block's end."""


def prefix_hashes(prompt: str | Sequence[int], *salt: str | None) -> PrefixHashes:
    """The chain of a text or of token ids.

    salt: what keeps the caches of two requests apart however alike their prompts are. Hashes are
    those of this process.
    """
    size = BLOCK_TOKENS * (CHARACTERS_PER_TOKEN if isinstance(prompt, str) else 1)
    chain, value = [], hash(salt)
    for end in range(size, min(len(prompt), MOST_BLOCKS * size) + 1, size):
        value = hash((value, prompt[end - size : end]))
        chain.append(value)
    return tuple(chain)


class PrefixIndex:
    """The replica that computed each block last; what was not seen for longest is forgotten."""

    def __init__(self, most_blocks: int = _REMEMBERED) -> None:
        self._most_blocks = most_blocks
        self._replica_of: dict[int, str] = {}  # in the order in which they were computed

    def add(self, chain: PrefixHashes, replica: str) -> None:
        """A replica computes this prompt."""
        for block in chain:
            self._replica_of.pop(block, None)
            self._replica_of[block] = replica
        while len(self._replica_of) > self._most_blocks:
            del self._replica_of[next(iter(self._replica_of))]

    def cached_tokens(self, chain: PrefixHashes) -> dict[str, int]:
        """How many tokens of a prompt each replica has computed, if it has any."""
        found = takewhile(lambda name: name is not None, map(self._replica_of.get, chain))
        # Who computed a block had all before it; somebody else may have computed those later.
        return {name: blocks * BLOCK_TOKENS for name, blocks in zip(found, count(1)) if name}
