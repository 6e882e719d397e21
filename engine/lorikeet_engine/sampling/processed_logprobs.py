"""Log probabilities of the distributions that tokens are drawn from (vLLM's processed_logprobs)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lorikeet_engine.device.async_copies import upload
from lorikeet_engine.kernels.sampling import kept_tokens
from lorikeet_engine.request import SamplingParams, TokenLogprobs
from lorikeet_engine.sampling.draws import LEAST_TEMPERATURE, SamplingRow, draws_of
from lorikeet_engine.sampling.logprob_readback import LogprobReadback

_PIECE_ROWS = 16  # with 128,256 tokens in the vocabulary, some 130 MB at once


@dataclass(frozen=True, slots=True)
class _Piece:
    rows: tuple[int, ...]
    logprobs: LogprobReadback


class ProcessedLogprobs:
    """Log probabilities of the distributions that tokens of a step were drawn from.

    counts: number of most likely tokens to return, by row of the step; other rows get no log
        probabilities.
    """

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
        """Compute the log probabilities of drawn tokens, and start their copy to the host.

        logits [n, vocab]: after penalties and biases, -inf at banned tokens.
        tokens [n] int64: tokens drawn from these logits.
        row_at: row of the step, by row of the logits; other rows of the logits are ignored.
        rows: sampling parameters of the step's rows.
        """
        wanted = [(at, row) for at, row in row_at.items() if row in self._counts]
        if plain := [(at, row) for at, row in wanted if not _has_filters(rows[row].params)]:
            counts = {at: self._counts[row] for at, row in plain}
            temperatures = [_temperature(rows[row].params) for _, row in plain]
            of = tuple(row for _, row in plain)
            self._add(of, LogprobReadback(logits, counts, temperatures), logits, tokens)
        filtered = [(at, row) for at, row in wanted if _has_filters(rows[row].params)]
        for begin in range(0, len(filtered), _PIECE_ROWS):
            places, of = zip(*filtered[begin : begin + _PIECE_ROWS], strict=True)
            at = upload(np.array(places, np.int64), logits.device)
            drawn_from = _filtered(logits[at].float(), [rows[row].params for row in of])
            counts = {i: self._counts[row] for i, row in enumerate(of)}
            self._add(of, LogprobReadback(drawn_from, counts), drawn_from, tokens[at])

    def _add(
        self, rows: tuple[int, ...], of: LogprobReadback, logits: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        of.download(logits, tokens)
        self._pieces.append(_Piece(rows, of))

    def read(self) -> dict[int, TokenLogprobs]:
        """Wait for the copies to the host, and return the log probabilities by row of the step."""
        return {
            row: logprobs
            for piece in self._pieces
            for row, logprobs in zip(piece.rows, piece.logprobs.read().values(), strict=True)
        }


def _filtered(x: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return logits divided by temperature, and -inf at tokens that top_k, top_p or min_p exclude.

    x [rows, vocab] float32: logits.
    """
    fields = {i: SamplingRow(p, 0, 0) for i, p in enumerate(params)}
    draws = upload(draws_of(fields, x.shape[-1]), x.device)
    ranked = any(p.top_k or p.top_p < 1.0 for p in params)
    kept = kept_tokens(x, draws, ranked=ranked)
    inverse = np.array([1.0 / _temperature(p) for p in params], np.float32)
    return (x * upload(inverse, x.device)[:, None]).masked_fill_(~kept, -torch.inf)


def _has_filters(params: SamplingParams) -> bool:
    """Return whether top_k, top_p or min_p may exclude tokens; False for temperature 0."""
    filters = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    return filters and params.temperature > 0.0


def _temperature(params: SamplingParams) -> float:
    """Return the divisor of logits: the temperature, but at least LEAST_TEMPERATURE; 1 for
    temperature 0.
    """
    return max(params.temperature, LEAST_TEMPERATURE) if params.temperature > 0.0 else 1.0
