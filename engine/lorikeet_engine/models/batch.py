"""The input of one forward pass, on the device."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lorikeet_engine.kernels.attention.protocol import PageTable
from lorikeet_engine.kernels.lora.types import Segments

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens of several sequences, laid end to end; sequences of one adapter are neighbours.

    token_ids [tokens] int64, positions [tokens] int64.
    kv_slots [groups of layers, tokens] int64: where each token's keys and values go, page *
    page_size + offset.
    logit_rows [rows] int64: the tokens whose logits are wanted.
    query_starts: sequences + 1 offsets into the tokens, on the host.
    kv_lengths: for each sequence, the tokens in its cache once this step has written its own.
    page_tables: where those lie, for each group of layers, as far as they see them.
    segments: the LoRA work of the layers, None when no sequence has an adapter. head_segments:
    lm_head's, over the rows of logit_rows; None when no adapter in these changes it.
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
