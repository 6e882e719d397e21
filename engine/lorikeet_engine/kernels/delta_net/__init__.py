"""Gated delta net: the linear attention of Qwen 3.5, with a causal convolution before it.

The convolution is depthwise and causal, with SiLU: y[t] = silu(Σ_j w[j] · x[t − width + 1 + j]).

The gated delta rule keeps a state S [value_dim, key_dim] for each value head. A token with query q,
key k and value v, both q and k divided by their length, computes
    S ← exp(g) · S
    S ← S + β (v − S k) kᵀ
    o = S q / √key_dim
where g = −exp(a_log) · softplus(a + dt_bias) and β = sigmoid(b). This is the rule of Gated Delta
Networks (arXiv 2412.06464, section 3.1); prompts compute it in chunks of CHUNK tokens (section
3.3), to the same result. Each key head serves value_heads / key_heads neighbouring value heads.

A decode computes one token of each sequence, a prefill several. Both update the sequences' states
in place, in a pool that has a slot for each sequence. Before a sequence's first token, the caller
must set its slot to zeros or to a copied state. No two sequences of a call may share a slot.

`reference` holds the equations in torch and runs on the CPU; `fused` holds Triton kernels with the
same signatures, from `convolution` and `delta_rule`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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


@dataclass(frozen=True, slots=True)
class Prefills:
    """Layout of a prefill's tokens: several sequences, one after the other.

    starts [sequences + 1] int32: first token of each sequence, and the number of all tokens
    slots [sequences] int32: slot of each sequence in the pools of states
    chunks [chunks, 2] int32: for each chunk, its sequence and its first token. A sequence's first
      chunk begins at the sequence's first token; all its chunks but the last have CHUNK tokens
    first_chunks [sequences + 1] int32: first chunk of each sequence, and the number of all chunks
    saves [chunks] int32: slot to which the state after each chunk is copied; −1: none. Only chunks
      of CHUNK tokens may have such a slot, and no sequence of the prefill may use it

    All tensors are contiguous, on the device that runs the step.
    """

    starts: torch.Tensor
    slots: torch.Tensor
    chunks: torch.Tensor
    first_chunks: torch.Tensor
    saves: torch.Tensor

    @staticmethod
    def of(lengths: Sequence[int], slots: Sequence[int], device: torch.device) -> "Prefills":
        """Return the layout of these sequences; no state is copied after a chunk.

        lengths: number of tokens of each sequence, at least 1.
        slots: slot of each sequence's state.
        """
        starts = list(accumulate(lengths, initial=0))
        counts = [-(-length // CHUNK) for length in lengths]
        chunks = [
            (sequence, starts[sequence] + chunk * CHUNK)
            for sequence, count in enumerate(counts)
            for chunk in range(count)
        ]
        first_chunks, saves = list(accumulate(counts, initial=0)), [-1] * len(chunks)
        lists = (starts, list(slots), chunks, first_chunks, saves)
        return Prefills(*(torch.tensor(each, dtype=torch.int32, device=device) for each in lists))


def decode_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    lora: LoraDelta | None = None,
) -> torch.Tensor:
    """Compute the convolution of one token of each sequence, and update its state in place.

    x [sequences, channels], each token contiguous: output of a linear layer
    weight [channels, width], contiguous: w
    states [slots, width − 1, channels] like x, each slot contiguous: the sequence's last inputs, in
      order; zeros before its first token
    slots [sequences] int32: slot of each sequence; −1: a padded row, whose result is undefined
    lora: LoRA delta of x, whose rows have x's strides; added to x, and the sum rounded to x's dtype
    → [sequences, channels] like x, contiguous

    Sums are float32, rounded once.
    """
    operator = _operators(x.device.type).decode_convolution
    y: torch.Tensor = operator(x, weight, states, slots, lora)
    return y


def prefill_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    states: torch.Tensor,
    prefills: Prefills,
    lora: LoraDelta | None = None,
) -> torch.Tensor:
    """Compute the convolution of several tokens of each sequence, and update states in place.

    The result equals that of decode_convolution called token by token, even if a sequence's tokens
    are divided among several calls.

    x [tokens, channels], each token contiguous
    weight, states, lora: as for decode_convolution
    → [tokens, channels] like x, contiguous
    """
    operator = _operators(x.device.type).prefill_convolution
    y: torch.Tensor = operator(x, weight, states, prefills, lora)
    return y


def decode_delta_rule(
    qkv: torch.Tensor,
    ba: torch.Tensor,
    decay: Decay,
    states: torch.Tensor,
    slots: torch.Tensor,
    heads: Heads,
    lora: LoraDelta | None = None,
) -> torch.Tensor:
    """Compute the gated delta rule of one token of each sequence, and update its state in place.

    qkv [sequences, sum(heads.widths)], each token contiguous: queries, keys and values, as the
      convolution returns them
    ba [sequences, 2 · value_heads], each token contiguous: b of each value head, then a of each
    states [slots, value_heads, value_dim, key_dim], float32 or bfloat16, each slot contiguous: S of
      each value head, the transpose of the state that transformers and flash-linear-attention keep;
      zeros before the first token
    slots [sequences] int32: slot of each sequence; −1: a padded row, whose result is undefined
    lora: LoRA delta of ba, whose rows have ba's strides; added to ba
    → [sequences, value_heads, value_dim] like qkv, contiguous

    Computed in float32, and rounded once.
    """
    operator = _operators(qkv.device.type).decode_delta_rule
    o: torch.Tensor = operator(qkv, ba, decay, states, slots, heads, lora)
    return o


def prefill_delta_rule(
    qkv: torch.Tensor,
    ba: torch.Tensor,
    decay: Decay,
    states: torch.Tensor,
    prefills: Prefills,
    heads: Heads,
    lora: LoraDelta | None = None,
) -> torch.Tensor:
    """Compute the gated delta rule of several tokens of each sequence; update states in place.

    The result equals that of decode_delta_rule called token by token, apart from rounding. Sums are
    float32. On CUDA, factors of matrix products are rounded to qkv's dtype; so is the copy of the
    states that they read.

    qkv [tokens, sum(heads.widths)], each token contiguous: queries, keys and values
    ba [tokens, 2 · value_heads], each token contiguous: b of each value head, then a
    decay, states, heads, lora: as for decode_delta_rule
    → [tokens, value_heads, value_dim] like qkv, contiguous
    """
    operator = _operators(qkv.device.type).prefill_delta_rule
    o: torch.Tensor = operator(qkv, ba, decay, states, prefills, heads, lora)
    return o
