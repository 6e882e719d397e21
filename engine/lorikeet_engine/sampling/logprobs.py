"""Log probabilities of sampled tokens, and of the most likely ones at each step."""

from collections.abc import Mapping

import numpy as np
import torch

from lorikeet_engine.device.async_copies import Download, upload
from lorikeet_engine.request import TokenLogprobs


class Logprobs:
    """The log_softmax of some rows of logits, for the sampled and the most likely tokens.

    Made before sampling, which may change the logits of tokens that cannot be sampled.
    """

    def __init__(self, logits: torch.Tensor, counts: Mapping[int, int]) -> None:
        """Take logits [rows, vocab] of any dtype. counts: row → how many of its most likely tokens.

        Rows that are not in counts get no log probabilities.
        """
        self._counts = counts
        self._rows = upload(np.array(list(counts), np.int64), logits.device)
        chosen = logits[self._rows].float()
        self._norm = chosen.logsumexp(dim=-1, keepdim=True)
        self._top_ids = _top_ids(chosen, max(counts.values()))
        self._top_logits = chosen.gather(1, self._top_ids)

    def download(self, logits: torch.Tensor, sampled: torch.Tensor) -> None:
        """Start the copy to the host. sampled [rows] int64: the tokens sampled from the logits."""
        tokens = sampled[self._rows].clamp(min=0).unsqueeze(1)
        values = torch.cat((logits[self._rows].gather(1, tokens).float(), self._top_logits), dim=1)
        # [rows of counts, 1 + 2 · k]: the sampled token's, the most likely tokens', their ids
        result = torch.cat(((values - self._norm).double(), self._top_ids.double()), dim=1)
        self._download = Download(result)

    def read(self) -> dict[int, TokenLogprobs]:
        """The log probabilities by row, once they are on the host."""
        k = self._top_ids.shape[1]
        results = zip(self._counts.items(), self._download.wait().tolist(), strict=True)
        return {
            row: TokenLogprobs(
                values[0],
                tuple((int(values[1 + k + i]), values[1 + i]) for i in range(min(count, k))),
            )
            for (row, count), values in results
        }


def _top_ids(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Ids [rows, k] of the largest of logits [rows, vocab] float32; of equals, the lowest id first.

    One key orders both, since topk takes any of equals: a float's bits are ordered like an integer,
    but for the sign.
    """
    bits = logits.view(torch.int32).long()
    ids = torch.arange(logits.shape[-1], device=logits.device)
    keys = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 32) - ids
    return keys.topk(min(k, logits.shape[-1]), dim=-1).indices
