"""Log probabilities of sampled tokens, and of the most likely ones at each step."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from lorikeet_engine.device.async_copies import Download, upload
from lorikeet_engine.kernels.log_softmax import COUNT, FIELDS, ROW, SCALE, likeliest, set_given
from lorikeet_engine.request import TokenLogprobs


class LogprobReadback:
    """The log_softmax of some rows of logits, for the sampled and the most likely tokens.

    Made before sampling, which may change the logits of tokens that cannot be sampled; of what
    they were sampled from, afterwards (processed_logprobs.py).
    """

    def __init__(
        self,
        logits: torch.Tensor,
        counts: Mapping[int, int],
        temperatures: Sequence[float] | None = None,
    ) -> None:
        """Take logits [rows, vocab] of any dtype. counts: row → how many of its most likely tokens.

        Rows that are not in counts get no log probabilities. temperatures: by which these rows'
        logits are divided before; 1 without.
        """
        self._counts = {row: min(count, logits.shape[1]) for row, count in counts.items()}
        wanted = np.empty((len(counts), FIELDS), np.int64)
        wanted[:, ROW], wanted[:, COUNT] = list(self._counts), list(self._counts.values())
        scales = 1.0 / np.array(1.0 if temperatures is None else temperatures)
        wanted[:, SCALE] = scales.astype(np.float32).view(np.int32)
        self._wanted = upload(wanted, logits.device)
        self._found = likeliest(logits, self._wanted, max(self._counts.values()))

    def download(self, logits: torch.Tensor, sampled: torch.Tensor) -> None:
        """Start the copy to the host. sampled [rows] int64: the tokens sampled from the logits."""
        set_given(self._found, logits, self._wanted, sampled)
        self._download = Download(self._found.packed)

    def read(self) -> dict[int, TokenLogprobs]:
        """The log probabilities by row, once they are on the host."""
        packed, begin = self._download.wait(), 1 + self._found.most
        ids = packed[:, begin:].view(torch.int32).tolist()
        results = zip(self._counts.items(), packed[:, :begin].tolist(), ids, strict=True)
        return {
            row: TokenLogprobs(
                values[0], tuple(zip(ids[:count], values[1 : 1 + count], strict=True))
            )
            for (row, count), values, ids in results
        }
