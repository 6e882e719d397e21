"""Log probabilities of the distribution that tokens are drawn from (vLLM's processed_logprobs)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from lorikeet_engine.device.async_copies import upload
from lorikeet_engine.kernels.sampling.reference import kept_tokens
from lorikeet_engine.request import SamplingParams, TokenLogprobs
from lorikeet_engine.sampling.draws import LEAST_TEMPERATURE, SamplingRow, draws_of
from lorikeet_engine.sampling.logprobs import Logprobs

_PIECE_ROWS = 16  # with 128,256 tokens in the vocabulary, some 130 MB at once


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some rows of a step, and their log probabilities in this order."""

    rows: tuple[int, ...]
    logprobs: Logprobs


class ProcessedLogprobs:
    """What a step's sampler says of some of its rows. counts: row → how many of its likeliest."""

    def __init__(self, counts: Mapping[int, int]) -> None:
        self._counts = counts
        self._pieces: list[_Piece] = []

    def add(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        row_at: Mapping[int, int],
        rows: Sequence[SamplingRow],
    ) -> None:
        """Launch what gives those of tokens just drawn, and the copy to the host.

        logits [n, vocab]: with penalties and biases, -inf at what is banned. tokens [n] int64.
        row_at: the step's row of each of the n that counts. rows: the step's.
        """
        wanted = [(at, row) for at, row in row_at.items() if row in self._counts]
        for begin in range(0, len(wanted), _PIECE_ROWS):
            places, of = zip(*wanted[begin : begin + _PIECE_ROWS], strict=True)
            at = upload(np.array(places, np.int64), logits.device)
            drawn_from = _filtered(logits[at].float(), [rows[row].params for row in of])
            counts = {i: self._counts[row] for i, row in enumerate(of)}
            logprobs = Logprobs(drawn_from, counts)
            logprobs.download(drawn_from, tokens[at])
            self._pieces.append(_Piece(of, logprobs))

    def read(self) -> dict[int, TokenLogprobs]:
        """Return the log probabilities by row, once they are on the host."""
        return {
            row: told
            for piece in self._pieces
            for row, told in zip(piece.rows, piece.logprobs.read().values(), strict=True)
        }


def _filtered(x: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return logits x [rows, vocab] float32 by temperature, -inf where the filters keep none."""
    params = [_as_drawn(p) for p in params]
    fields = {i: SamplingRow(p, 0, 0) for i, p in enumerate(params)}
    draws = upload(draws_of(fields, x.shape[-1]), x.device)
    ranked = any(p.top_k or p.top_p < 1.0 for p in params)
    kept = kept_tokens(x, draws, ranked=ranked)
    inverse = np.array([1.0 / max(p.temperature, LEAST_TEMPERATURE) for p in params], np.float32)
    return (x * upload(inverse, x.device)[:, None]).masked_fill_(~kept, -torch.inf)


def _as_drawn(params: SamplingParams) -> SamplingParams:
    """Return the params with temperature 1 and no filters where they are greedy."""
    if params.temperature > 0.0:
        return params
    return replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
