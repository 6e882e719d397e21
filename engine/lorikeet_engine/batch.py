"""The input of one forward pass: flat tensors, built once a step from what the scheduler chose."""

from dataclasses import dataclass

import torch

from lorikeet_engine.kernels.lora.types import Segments


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens of several sequences, laid end to end; sequences of one adapter are neighbours.

    token_ids [tokens] int64, positions [tokens] int64.
    kv_slots [tokens] int64: where each token's key and value go, page * page_size + offset.
    query_starts: sequences + 1 offsets into the tokens.
    kv_lengths: for each sequence, the tokens in its cache once this step has written its own.
    page_tables [sequences, pages] int32, on the CPU: each sequence's KV pages in order, padded
    with 0.
    logit_rows [rows] int64: the tokens whose logits are wanted.
    segments: the LoRA work of the step, None when no sequence has an adapter.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_slots: torch.Tensor
    query_starts: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    page_tables: torch.Tensor
    logit_rows: torch.Tensor
    segments: Segments | None
