"""Log probabilities of sampled tokens and of the most likely ones, and their copy to the host."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from lorikeet_engine.device.async_copies import Download, upload
from lorikeet_engine.kernels.log_softmax import (
    COUNT,
    FIELDS,
    ROW,
    SCALE,
    likeliest,
    set_given,
    set_rank,
)
from lorikeet_engine.request import TokenLogprobs


class LogprobReadback:
    """Log probabilities of the sampled and the most likely tokens, for some rows of logits.

    For the model's own log probabilities, create it before sampling, which sets logits of banned
    tokens to -inf. For log probabilities of the distribution that tokens are drawn from, create it
    after sampling (processed_logprobs.py).
    """

    def __init__(
        self,
        logits: torch.Tensor,
        counts: Mapping[int, int],
        temperatures: Sequence[float] | None = None,
    ) -> None:
        """Launch the search for the most likely tokens.

        logits [rows, vocab], any dtype.
        counts: number of most likely tokens to find, by row; other rows get no log probabilities.
        temperatures: divisors of the logits of the rows in `counts`, in the same order; None: 1.
        """
        self._counts = {row: min(count, logits.shape[1]) for row, count in counts.items()}
        wanted = np.empty((len(counts), FIELDS), np.int64)
        wanted[:, ROW], wanted[:, COUNT] = list(self._counts), list(self._counts.values())
        scales = 1.0 / np.array(1.0 if temperatures is None else temperatures)
        wanted[:, SCALE] = scales.astype(np.float32).view(np.int32)
        self._wanted = upload(wanted, logits.device)
        self._found = likeliest(logits, self._wanted, max(self._counts.values()))

    def download(
        self, logits: torch.Tensor, sampled: torch.Tensor, *, ranked: bool = False
    ) -> None:
        """Compute the sampled tokens' log probabilities; start the copy of all results to the host.

        logits [rows, vocab]: must equal the constructor's logits at the sampled tokens; with
            `ranked`, at all tokens.
        sampled [rows] int64: tokens sampled from the logits.
        ranked: whether to compute the sampled tokens' ranks in addition.
        """
        set_given(self._found, logits, self._wanted, sampled)
        if ranked:
            set_rank(self._found, logits, self._wanted, sampled)
        self._ranked = ranked
        self._download = Download(self._found.packed)

    def read(self) -> dict[int, TokenLogprobs]:
        """Wait for the copy to the host, and return the log probabilities by row of the logits."""
        packed, begin = self._download.wait(), 2 + self._found.most
        bits = packed.view(torch.int32)
        ranks = bits[:, 1].tolist() if self._ranked else [None] * len(packed)
        ids = bits[:, begin:].tolist()
        results = zip(self._counts.items(), packed[:, :begin].tolist(), ranks, ids, strict=True)
        return {
            row: TokenLogprobs(
                values[0], tuple(zip(ids[:count], values[2 : 2 + count], strict=True)), rank
            )
            for (row, count), values, rank, ids in results
        }
