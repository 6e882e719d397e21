"""A step's page tables as one list, the form in which attention kernels want them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lorikeet_engine.kernels.attention.protocol import PagedSequences


@dataclass(frozen=True, slots=True)
class PageTable:
    """Page tables end to end: sequence i's are pages[starts[i] : starts[i + 1]], all int32.

    lengths: tokens of each sequence, in its last page too.
    """

    starts: npt.NDArray[np.int32]
    pages: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]

    @classmethod
    def of(cls, batch: PagedSequences, page_size: int) -> "PageTable":
        """Of a batch's sequences, in their order."""
        lengths = np.array(batch.kv_lengths, np.int32)
        counts = -(-lengths // page_size)
        starts = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        table = batch.page_tables.numpy()
        used = np.arange(table.shape[1]) < counts[:, None]
        return cls(starts, table[used], lengths)
