"""Identity of adapters, and the tiers that hold their weights."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum


@dataclass(frozen=True, slots=True, order=True)
class AdapterRef:
    """One immutable version of one adapter; the same value everywhere from the catalog to the GPU.

    digest: SHA-256 of the adapter's blob, 64 lower-case hex digits. Two refs with the same digest
        have the same weights, so caches are keyed by the digest alone.
    invocation_tokens: of an activated LoRA (aLoRA), the tokens from which on it changes a prompt;
        () for other adapters.
    """

    tenant: str
    name: str
    version: int
    digest: str
    invocation_tokens: tuple[int, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        return f"{self.tenant}/{self.name}@{self.version}"

    def active_from(self, prompt: Sequence[int]) -> int | None:
        """Return the position of the first token of a prompt that the adapter changes.

        An activated LoRA changes the last occurrence of its invocation tokens in the prompt and all
        that follows, as in PEFT. Other adapters change every token. None: the prompt does not have
        the invocation tokens, so that the base model alone computes prompt and answer.
        """
        if not self.invocation_tokens:
            return 0
        width = array("i").itemsize
        tokens, sought = (array("i", ids).tobytes() for ids in (prompt, self.invocation_tokens))
        at = tokens.rfind(sought)
        while at > 0 and at % width:  # between two tokens
            at = tokens.rfind(sought, 0, at + len(sought) - 1)
        return at // width if at >= 0 else None


@dataclass(frozen=True, slots=True)
class TouchedModules:
    """Modules of the base model that an adapter changes.

    linears: names of the adapted linears in the model's order, which may include lm_head and
        embed_tokens.
    layers: number of decoder layers in which a linear is adapted.
    min_rank: smallest rank of an adapted linear.
    parameters: number of elements of all A and B, and of the rows of trained tokens.
    tokens: number of trained tokens.
    """

    linears: tuple[str, ...]
    layers: int
    min_rank: int
    parameters: int
    tokens: int = 0


class Residency(IntEnum):
    """Tier that holds an adapter's weights; a larger value is nearer to the GPU."""

    REMOTE = 0
    DISK = 1
    HOST = 2
    GPU = 3

    def __str__(self) -> str:
        return self.name.lower()
