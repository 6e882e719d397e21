"""The input of one forward pass: as numbers on the host, and as tensors on the device."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lorikeet_engine.device.async_copies import upload
from lorikeet_engine.kernels.attention import PageTable
from lorikeet_engine.kernels.lora.types import Segments

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens of several sequences, laid end to end; sequences of one adapter are neighbours.

    token_ids [tokens] int64, positions [tokens] int64.
    kv_slots [tokens] int64: where each token's key and value go, page * page_size + offset.
    logit_rows [rows] int64: the tokens whose logits are wanted.
    query_starts: sequences + 1 offsets into the tokens, on the host.
    kv_lengths: for each sequence, the tokens in its cache once this step has written its own.
    page_table: where those lie.
    segments: the LoRA work of the step, None when no sequence has an adapter.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_slots: torch.Tensor
    logit_rows: torch.Tensor
    query_starts: Int32s
    kv_lengths: Int32s
    page_table: PageTable
    segments: Segments | None


@dataclass(frozen=True, slots=True)
class StepInput:
    """The input of one step on the host: all that a process with the model's weights needs.

    Fields that Batch has too mean what they mean there. A token that the step before sampled may
    not be read yet: pending [tokens of this kind] int64 are the places of such tokens in token_ids,
    where 0 stands, and pending_rows [as many] int64 their rows in the step before.
    segments [3, segments] int32: slots, starts and lengths of Segments; none without adapters.
    max_rank: at least the rank of every adapter in the step.
    """

    token_ids: Int64s
    positions: Int64s
    kv_slots: Int64s
    logit_rows: Int64s
    pending: Int64s
    pending_rows: Int64s
    query_starts: Int32s
    kv_lengths: Int32s
    page_table: PageTable
    segments: Int32s
    max_rank: int

    def upload(self, device: torch.device, previous: torch.Tensor | None = None) -> Batch:
        """The step's tensors on the device; the host waits for nothing.

        previous: the tokens of the step before, which are there already, [rows] int64.
        """
        parts = (
            self.token_ids, self.positions, self.kv_slots, self.logit_rows,
            self.pending, self.pending_rows,
        )  # fmt: skip
        uploaded = upload(np.concatenate(parts), device)
        token_ids, positions, kv_slots, logit_rows, pending, pending_rows = torch.split(
            uploaded, [len(part) for part in parts]
        )
        if len(pending):
            assert previous is not None, "pending tokens of no step"
            token_ids.index_copy_(0, pending, previous[pending_rows])
        segments = None
        if self.segments.size:
            slots, starts, lengths = upload(self.segments, device).unbind()
            segments = Segments(slots, starts, lengths, self.max_rank)
        return Batch(
            token_ids=token_ids,
            positions=positions,
            kv_slots=kv_slots,
            logit_rows=logit_rows,
            query_starts=self.query_starts,
            kv_lengths=self.kv_lengths,
            page_table=self.page_table,
            segments=segments,
        )
