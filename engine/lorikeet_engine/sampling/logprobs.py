"""Log probabilities of the tokens that are drawn, and of the likeliest beside them."""

from collections.abc import Mapping

import numpy as np
import torch

from lorikeet_engine.device.copies import Download, upload
from lorikeet_engine.request import TokenLogprobs


class Logprobs:
    """log_softmax of some rows of logits, as far as it will be told.

    Made before the draw, which may spoil logits that cannot be drawn.
    """

    def __init__(self, logits: torch.Tensor, wanted: Mapping[int, int]) -> None:
        """Of logits [rows, vocab] of any dtype. wanted: rows, and how many likeliest of each."""
        self._wanted = wanted
        self._at = upload(np.array(list(wanted), np.int64), logits.device)
        asking = logits[self._at].float()
        self._norm = asking.logsumexp(dim=-1, keepdim=True)
        self._tokens = _likeliest(asking, max(wanted.values()))
        self._values = asking.gather(1, self._tokens)

    def send(self, logits: torch.Tensor, drawn: torch.Tensor) -> None:
        """Let all go to the host: drawn [rows] int64 are the tokens drawn from the logits."""
        tokens = drawn[self._at].clamp(min=0).unsqueeze(1)
        values = torch.cat((logits[self._at].gather(1, tokens).float(), self._values), dim=1)
        # [asking rows, 1 + 2 · most]: the drawn token's, the likeliest tokens', their ids
        told = torch.cat(((values - self._norm).double(), self._tokens.double()), dim=1)
        self._download = Download(told)

    def read(self) -> dict[int, TokenLogprobs]:
        """By row, once it is there."""
        most = self._tokens.shape[1]
        told = zip(self._wanted.items(), self._download.wait().tolist(), strict=True)
        return {
            row: TokenLogprobs(
                values[0],
                tuple((int(values[1 + most + i]), values[1 + i]) for i in range(min(count, most))),
            )
            for (row, count), values in told
        }


def _likeliest(logits: torch.Tensor, most: int) -> torch.Tensor:
    """Ids [rows, most] of the largest of logits [rows, vocab] float32; of equals, the lowest first.

    One key orders both, since topk takes any of equals: a float's bits are ordered like an integer,
    but for the sign.
    """
    bits = logits.view(torch.int32).long()
    ids = torch.arange(logits.shape[-1], device=logits.device)
    keys = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 32) - ids
    return keys.topk(min(most, logits.shape[-1]), dim=-1).indices
