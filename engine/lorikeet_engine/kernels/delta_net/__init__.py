"""Gated delta net: the linear attention of Qwen 3.5, with a causal convolution before it.

The convolution is depthwise and causal, with SiLU: y[t] = silu(Σ_j w[j] · x[t − width + 1 + j]),
before Mamba 2 (kernels/mamba) with a bias.

The gated delta rule keeps a state S [value_dim, key_dim] for each value head. A token with query q,
key k and value v, both q and k divided by their length, computes
    S ← exp(g) · S
    S ← S + β (v − S k) kᵀ
    o = S q / √key_dim
where g = −exp(a_log) · softplus(a + dt_bias) and β = sigmoid(b). This is the rule of Gated Delta
Networks (arXiv 2412.06464, section 3.1); prompts compute it in chunks of CHUNK tokens (section
3.3), to the same result. Each key head serves value_heads / key_heads neighbouring value heads.

A decode computes one token of each sequence, a prefill several; a step may have both, and calls the
two operators with the same `out`. Both update the sequences' states in place, in a pool that has a
slot for each sequence. Before a sequence's first token, the caller must set its slot to zeros or to
a copied state. No two sequences of a step may share a slot.

A decode with a ring reads the state, but writes it only in each (entries + 1)-th step: the tokens
since then are in the ring. With the ring's tokens i of keys k[i], corrections u[i] = β (v − S k)
and decays g[i], and D[i] = exp(the sum of g of the tokens after i, up to the current one), the
state before the current token's correction, and the current token's correction and output, are
    exp(g) S = exp(Σ g) S₀ + Σ D[i] u[i] k[i]ᵀ      S₀: the state in the pool
    u = β (v − exp(g) S k)
    o = (exp(g) S q + u (k · q)) / √key_dim
so neither S nor a new state is computed until the ring is full.

`reference` holds the equations in torch and runs on the CPU; `fused` holds Triton kernels with the
same signatures, from `convolution` and `delta_rule`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch

from lorikeet_engine.kernels.by_device import by_device
from lorikeet_engine.kernels.lora.types import LoraDelta

_operators = by_device(__name__)

CHUNK = 64
"""Number of a sequence's tokens that a prefill computes together, by matrix products."""
NORM_EPS = 1e-6
"""Number added to the squared length of a query or key before this is divided by its length.

The same as in flash-linear-attention.
"""


@dataclass(frozen=True, slots=True)
class Heads:
    """Numbers and sizes of the heads of a gated delta net.

    key_heads: number of key heads, and of query heads.
    value_heads: number of value heads, a multiple of key_heads; each value head has a state.
    key_dim, value_dim: size of a key (and query) head and of a value head; on CUDA powers of two,
        at least 16.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """key_heads, value_heads, key_dim and value_dim, as kernels take them."""
        return self.key_heads, self.value_heads, self.key_dim, self.value_dim

    @property
    def widths(self) -> tuple[int, int, int]:
        """Widths of all queries, all keys and all values of a token."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class Decay:
    """Trained weights that determine g, the logarithm of the factor by which a state decays.

    a_log [value_heads], dt_bias [value_heads]: float32
    """

    a_log: torch.Tensor
    dt_bias: torch.Tensor


class Decodes(NamedTuple):
    """Sequences of which a step computes one token.

    slots [sequences] int32: slot of each sequence in the pools of states; −1: no sequence, and
      nothing is read or written for it
    tokens [sequences] int32: index of each sequence's token; None: sequence i has token i

    All tensors are contiguous, on the device that runs the step.
    """

    slots: torch.Tensor
    tokens: torch.Tensor | None = None


class Prefills(NamedTuple):
    """Sequences of which a step computes several tokens, in chunks.

    starts, ends [sequences] int32: first token of each sequence, and the token after its last
    slots [sequences] int32: slot of each sequence in the pools of states; −1: no sequence
    chunks [chunks, 2] int32: for each chunk, its sequence and its first token; sequence −1: no
      chunk. A sequence's first chunk begins at the sequence's first token; all its chunks but the
      last have CHUNK tokens
    first_chunks [sequences + 1] int32: first chunk of each sequence, and the number of all chunks
    saves [chunks] int32: slot to which the state after each chunk is copied; −1: none. Only chunks
      of CHUNK tokens may have such a slot, and no sequence of the step may use it

    All tensors are contiguous, on the device that runs the step.
    """

    starts: torch.Tensor
    ends: torch.Tensor
    slots: torch.Tensor
    chunks: torch.Tensor
    first_chunks: torch.Tensor
    saves: torch.Tensor

    @staticmethod
    def of(lengths: Sequence[int], slots: Sequence[int], device: torch.device) -> "Prefills":
        """Return the layout of sequences one after the other; no state is copied after a chunk.

        lengths: number of tokens of each sequence, at least 1.
        slots: slot of each sequence's state.
        """
        *starts, end = accumulate(lengths, initial=0)
        counts = [-(-length // CHUNK) for length in lengths]
        chunks = [
            (sequence, starts[sequence] + chunk * CHUNK)
            for sequence, count in enumerate(counts)
            for chunk in range(count)
        ]
        first_chunks, saves = list(accumulate(counts, initial=0)), [-1] * len(chunks)
        lists = (starts, [*starts[1:], end], list(slots), chunks, first_chunks, saves)
        return Prefills(*(torch.tensor(each, dtype=torch.int32, device=device) for each in lists))


class Ring(NamedTuple):
    """Last tokens of each slot's sequence, which are not yet added to the slot's state.

    keys [slots, key_heads, entries, key_dim] float32: keys, scaled to an L2 norm of 1
    corrections [slots, value_heads, entries, value_dim] float32: β (v − exp(g) S k) of each token,
      with the state S before it
    decays [slots, value_heads, entries] float32: g, the logarithm of each token's decay
    counts [slots, value_heads, value_dim] int8: number of the slot's tokens, 0 to entries. All
      values of a slot have the same count; each has its own copy, so that no two programs of a
      kernel share one

    The number of entries is 1 less than a power of 2. All tensors are contiguous.
    """

    keys: torch.Tensor
    corrections: torch.Tensor
    decays: torch.Tensor
    counts: torch.Tensor

    @staticmethod
    def empty(
        sizes: Sequence[int], heads: Heads, entries: int, dtype: torch.dtype, device: torch.device
    ) -> "Ring":
        """Return rings without tokens.

        sizes: leading dimensions of the tensors: (slots,) or (layers, slots).
        entries: number of tokens that a ring can hold.
        dtype: dtype of all tensors but the counts.
        """
        zeros = partial(torch.zeros, dtype=dtype, device=device)
        return Ring(
            zeros(*sizes, heads.key_heads, entries, heads.key_dim),
            zeros(*sizes, heads.value_heads, entries, heads.value_dim),
            zeros(*sizes, heads.value_heads, entries),
            zeros(*sizes, heads.value_heads, heads.value_dim, dtype=torch.int8),
        )

    def layer(self, index: int) -> "Ring":
        """Return the rings of one layer, of tensors whose first dimension is layers."""
        return Ring(*(each[index] for each in self))


def decode_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    states: torch.Tensor,
    decodes: Decodes,
    lora: LoraDelta | None = None,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the convolution of one token of each sequence, and update its state in place.

    The result of token t is silu(Σ_j w[j] · x[t − width + 1 + j] + bias), for each channel.

    x [tokens, channels], each token contiguous: output of a linear layer
    weight [channels, width], contiguous: w
    states [slots, width − 1, channels] like x, each slot contiguous: the sequence's last inputs, in
      order; zeros before its first token
    lora: LoRA delta of x, whose rows have x's strides; added to x, and the sum rounded to x's dtype
    out [tokens, channels] like x, contiguous: tensor to write the result to; None: a new tensor
    bias [channels], contiguous: added to each sum; None: no bias
    → out; rows of tokens that belong to no sequence of the call are not written

    Sums are float32, rounded once.
    """
    operator = _operators(x.device.type).decode_convolution
    y: torch.Tensor = operator(x, weight, states, decodes, lora, out, bias)
    return y


def prefill_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    states: torch.Tensor,
    prefills: Prefills,
    lora: LoraDelta | None = None,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the convolution of several tokens of each sequence, and update states in place.

    The result equals that of decode_convolution called token by token, even if a sequence's tokens
    are divided among several calls.

    prefills: tokens and state slot of each sequence
    All other arguments, and the result: as for decode_convolution
    """
    operator = _operators(x.device.type).prefill_convolution
    y: torch.Tensor = operator(x, weight, states, prefills, lora, out, bias)
    return y


def decode_delta_rule(
    qkv: torch.Tensor,
    ba: torch.Tensor,
    decay: Decay,
    states: torch.Tensor,
    decodes: Decodes,
    heads: Heads,
    lora: LoraDelta | None = None,
    out: torch.Tensor | None = None,
    ring: Ring | None = None,
) -> torch.Tensor:
    """Compute the gated delta rule of one token of each sequence, and update its state in place.

    For each value head, S becomes exp(g) S + β (v − exp(g) S k) kᵀ, and the result is S q, with k
    scaled to length 1 and q to length 1 / √key_dim.

    qkv [tokens, sum(heads.widths)], each token contiguous: queries, keys and values, as the
      convolution returns them
    ba [tokens, 2 · value_heads], each token contiguous: b of each value head, then a of each, with
      β = sigmoid(b) and g = −exp(a_log) · softplus(a + dt_bias)
    states [slots, value_heads, value_dim, key_dim], float32 or bfloat16, each slot contiguous: S of
      each value head, the transpose of the state that transformers and flash-linear-attention keep;
      zeros before the first token
    lora: LoRA delta of ba, whose rows have ba's strides; added to ba
    out [tokens, value_heads, value_dim] like qkv, contiguous: tensor to write the result to; None:
      a new tensor
    ring: last tokens of each slot, to which the token is added; a full ring's tokens are added to
      the state instead. None: each token is added to the state
    → out; rows of tokens that belong to no sequence of the call are not written

    Computed in float32, and rounded once.
    """
    operator = _operators(qkv.device.type).decode_delta_rule
    o: torch.Tensor = operator(qkv, ba, decay, states, decodes, heads, lora, out, ring)
    return o


def prefill_delta_rule(
    qkv: torch.Tensor,
    ba: torch.Tensor,
    decay: Decay,
    states: torch.Tensor,
    prefills: Prefills,
    heads: Heads,
    lora: LoraDelta | None = None,
    out: torch.Tensor | None = None,
    ring: Ring | None = None,
) -> torch.Tensor:
    """Compute the gated delta rule of several tokens of each sequence; update states in place.

    The result equals that of decode_delta_rule called token by token, apart from rounding. Sums are
    float32. On CUDA, factors of matrix products are rounded to qkv's dtype; so is the copy of the
    states that they read.

    ring: tokens of each slot that decode_delta_rule has not added to the state; the prefill adds
      them first, and leaves no tokens in the rings of its sequences and copied states. None: all
      tokens are added to the states
    All other arguments and the result: as for decode_delta_rule
    """
    operator = _operators(qkv.device.type).prefill_delta_rule
    o: torch.Tensor = operator(qkv, ba, decay, states, prefills, heads, lora, out, ring)
    return o
