"""Input of one forward pass: the tokens of a step and where their keys and values are."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lorikeet_engine.kernels.attention.protocol import PageTable
from lorikeet_engine.kernels.delta_net import Decodes, Prefills
from lorikeet_engine.kernels.lora.types import Segments

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StateRows:
    """States of delta nets (linear attention) or Mamba 2 that a step reads and updates; tensors on
    the device.

    decodes: sequences of which the step has one token; None: there are none.
    prefills: sequences of which the step has several tokens; None: there are none.
    fresh [sequences that begin] int64: slots (places in RecurrentStates) of states to set to zeros
        before the step.
    copies: pairs of slots, from which a state is copied and to which, one after the other before
        the step; a slot is read before it is written. On the host.
    """

    decodes: Decodes | None
    prefills: Prefills | None
    fresh: torch.Tensor
    copies: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens of several sequences, concatenated; sequences of one adapter are neighbours.

    On the device:
    token_ids [tokens] int64.
    positions [tokens] int64.
    kv_slots [groups of layers, tokens] int64: page · page_size + offset of each token's keys and
        values.
    logit_rows [rows] int64: indices of the tokens whose logits are computed.

    On the host:
    query_starts [sequences + 1]: index of each sequence's first token, then the number of tokens.
    kv_lengths [sequences]: tokens of each sequence's cache after this step's writes.
    page_tables: for each group of layers, the KV pages of each sequence that the group attends to.

    segments: LoRA work of the layers; None: no sequence has an adapter.
    head_segments: LoRA work of lm_head, over the rows of logit_rows; None: no adapter changes it.
    states: states of delta nets or Mamba 2 that the step uses; None for a model without either.
    ordered: whether logit_rows ascends.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_slots: torch.Tensor
    logit_rows: torch.Tensor
    query_starts: Int32s
    kv_lengths: Int32s
    page_tables: tuple[PageTable, ...]
    segments: Segments | None
    head_segments: Segments | None = None
    states: StateRows | None = None
    ordered: bool = True
