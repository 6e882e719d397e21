"""Log probabilities of sampled tokens, and of the most likely ones at each step."""

from collections.abc import Mapping

import numpy as np
import torch
from torch.nn import functional as F

from lorikeet_engine.device.async_copies import Download, upload
from lorikeet_engine.request import TokenLogprobs

_GROUP = 64  # neighbouring tokens


class Logprobs:
    """The log_softmax of some rows of logits, for the sampled and the most likely tokens.

    Made before sampling, which may change the logits of tokens that cannot be sampled; of what
    they were sampled from, afterwards (processed_logprobs.py).
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

    A group of neighbours has one of the k only if its own largest is among the k largest of the
    groups, of equals the first again: so each value is looked at once, and few are ordered.
    """
    vocab = logits.shape[-1]
    k = min(k, vocab)
    padded = F.pad(logits, (0, -vocab % _GROUP), value=-torch.inf)
    groups = padded.view(len(logits), -1, _GROUP)
    ids = torch.arange(groups[0].numel(), device=logits.device).view_as(groups[0])
    chosen = _first(groups.amax(-1), ids[:, 0], min(k, len(ids)))  # [rows, groups that have them]
    values = groups.gather(1, chosen.unsqueeze(-1).expand(-1, -1, _GROUP)).flatten(1)
    candidates = ids[chosen].flatten(1)
    top = candidates.gather(1, _first(values, candidates, k))
    return top.clamp(max=vocab - 1)  # among values that are no numbers, padding may be the largest


def _first(values: torch.Tensor, ids: torch.Tensor, k: int) -> torch.Tensor:
    """Where in values [rows, n] float32 the k largest are, of equals those of the lowest ids.

    One key orders both, since topk takes any of equals: a float's bits are ordered like an integer,
    but for the sign.
    """
    bits = values.view(torch.int32).long()
    keys = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 32) - ids
    return keys.topk(k, dim=-1).indices
