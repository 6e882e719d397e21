"""Identity of adapters and of their compositions, and the tiers that hold their weights."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from itertools import pairwise

from lorikeet_engine.errors import InvalidRequest

MAX_MEMBERS = 8
"""Largest number of adapters that a composition adds up."""
MAX_WEIGHT = 2.0
"""Largest absolute weight of an adapter in a composition."""
MAX_LABELS = 1024
"""Largest number of labels of a classification head."""


class Problem(StrEnum):
    """Kind of a classification head's task; the values are those of problem_type in transformers'
    configs.
    """

    REGRESSION = "regression"
    SINGLE_LABEL = "single_label_classification"
    MULTI_LABEL = "multi_label_classification"


@dataclass(frozen=True, slots=True)
class Head:
    """Classification or reward head of an adapter: a row of weights for each label.

    labels: name of each label, in the order of the rows.
    problem: kind of the task; None: not stated.
    pad_token: id of the token that padded prompts in training. Prompts are pooled without such
        tokens at their end, as in transformers. None: the base model's own pad_token_id.
    """

    labels: tuple[str, ...]
    problem: Problem | None = None
    pad_token: int | None = None


class Pooling(StrEnum):
    """Way in which the hidden states of a prompt become one vector; the values are those of
    sentence-transformers.

    LAST: the last token's hidden state.
    MEAN: the mean over all tokens.
    """

    LAST = "lasttoken"
    MEAN = "mean"


@dataclass(frozen=True, slots=True)
class Embedder:
    """Way in which texts are embedded, from the files that sentence-transformers writes.

    normalizes: vectors are scaled to length 1.
    dimensions: numbers of first values to which vectors may be cut (Matryoshka); (): they must not
        be cut. None: any number.
    """

    pooling: Pooling = Pooling.LAST
    normalizes: bool = True
    dimensions: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, order=True)
class AdapterRef:
    """One immutable version of one adapter; the same value everywhere from the catalog to the GPU.

    digest: SHA-256 of the adapter's blob, the one file that stores it: 64 lower-case hex digits.
        Two refs with the same digest have the same weights, so caches are keyed by the digest
        alone.
    invocation_tokens: of an activated LoRA (aLoRA), the tokens from which on it changes a prompt;
        () for other adapters.
    head: classification or reward head; None for adapters that generate.
    embedder: the adapter's own way of embedding texts; None: the base model's.
    vocabulary: number of tokens of an adapter that has more than its base model; 0 for others.
    transient: whether the adapter is used for a moment only, such as a variant in a parity proof.
        Its packed image is not written to the disk, and Engine.forget drops it.
    """

    tenant: str
    name: str
    version: int
    digest: str
    invocation_tokens: tuple[int, ...] = field(default=(), compare=False)
    head: Head | None = field(default=None, compare=False)
    embedder: Embedder | None = field(default=None, compare=False)
    vocabulary: int = field(default=0, compare=False)
    transient: bool = field(default=False, compare=False)

    @property
    def members(self) -> "tuple[AdapterRef, ...]":
        """Adapters to add up: this one alone. A Composition has several."""
        return (self,)

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
class Composition:
    """Weighted sum of adapters: W·x + Σ weight · B·A·x, with each adapter's own scaling in B.

    Equals PEFT's add_weighted_adapter with combination_type="cat". Adapters are in the order of
    their digests, so that a composition is the same, and computed the same, in whichever order it
    was asked for.

    members, weights: the adapters, and the weight of each.
    digest: key for caches of what was computed with the composition, such as keys and values: the
        text weight*digest of each member, joined by +.
    """

    members: tuple[AdapterRef, ...]
    weights: tuple[float, ...]
    digest: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Raise InvalidRequest unless the adapters are 1 to MAX_MEMBERS different ones, none an
        activated LoRA or with a head, with weights of at most MAX_WEIGHT.
        """
        if not 1 <= len(self.members) <= MAX_MEMBERS:
            raise InvalidRequest(
                f"{len(self.members)} adapters: a request composes at most {MAX_MEMBERS}",
                param="adapters",
            )
        for ref, weight in zip(self.members, self.weights, strict=True):
            if ref.invocation_tokens:
                raise InvalidRequest(
                    f"{ref} is an activated LoRA, which changes only a part of the prompt: name it "
                    "alone, without a weight",
                    param="adapters",
                )
            if ref.head is not None:
                raise InvalidRequest(
                    f"{ref} has a classification head, which cannot be added to other adapters: "
                    "name it alone, without a weight",
                    param="adapters",
                )
            if not -MAX_WEIGHT <= weight <= MAX_WEIGHT:
                raise InvalidRequest(
                    f"the weight of {ref} is {weight}: want {-MAX_WEIGHT:g} to {MAX_WEIGHT:g}",
                    param="adapters",
                )
        pairs = sorted(zip(self.members, self.weights, strict=True), key=lambda p: p[0].digest)
        for (ref, _), (other, _) in pairwise(pairs):
            if ref.digest == other.digest:
                raise InvalidRequest(
                    f"{ref} and {other} have the same weights: name each adapter once",
                    param="adapters",
                )
        digest = "+".join(f"{weight!r}*{ref.digest}" for ref, weight in pairs)
        object.__setattr__(self, "members", tuple(ref for ref, _ in pairs))
        object.__setattr__(self, "weights", tuple(weight for _, weight in pairs))
        object.__setattr__(self, "digest", digest)

    def __str__(self) -> str:
        pairs = zip(self.weights, self.members, strict=True)
        return "+".join(str(ref) if weight == 1 else f"{weight:g}*{ref}" for weight, ref in pairs)

    def active_from(self, _: Sequence[int]) -> int:
        """Return 0: a composition changes every token of a prompt."""
        return 0


Adapter = AdapterRef | Composition
"""Adapter of a request: one, or several added up."""


def member_digests(digest: str) -> list[str]:
    """Return the digests of a composition's members, given its digest; [digest] for one adapter."""
    return [each.rpartition("*")[2] for each in digest.split("+")] if "*" in digest else [digest]


@dataclass(frozen=True, slots=True)
class TouchedModules:
    """Modules of the base model that an adapter changes.

    linears: names of the adapted linears in the model's order, which may include lm_head and
        embed_tokens.
    layers: number of decoder layers in which a linear is adapted.
    min_rank: smallest rank of an adapted linear.
    parameters: number of trained elements: of all A and B, DoRA's magnitudes, biases, rows of
        tokens and the classification head.
    tokens: number of tokens of which the adapter has trained rows of embeddings or lm_head.
    """

    linears: tuple[str, ...]
    layers: int
    min_rank: int
    parameters: int
    tokens: int = 0


class Residency(IntEnum):
    """Tier that holds an adapter's weights: remote store, disk, host memory or GPU.

    A larger value is nearer to the GPU.
    """

    REMOTE = 0
    DISK = 1
    HOST = 2
    GPU = 3

    def __str__(self) -> str:
        return self.name.lower()
