"""Logits after biases and penalties, as OpenAI defines them."""

from collections.abc import Sequence

import numpy as np
import torch

from lorikeet_engine.copies import upload
from lorikeet_engine.request import SamplingParams
from lorikeet_engine.unknown import filled_in


def add_biases(logits: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Add each row's logit_bias to logits [rows, vocab] float32, in place."""
    biases = [(row, *bias) for row, p in enumerate(params) for bias in p.logit_bias]
    if biases:
        columns = upload(np.array(biases, np.float64).T.copy(), logits.device)
        at, tokens = columns[:2].long()
        logits.index_put_((at, tokens), columns[2].float(), accumulate=True)


def subtract_penalties(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    made: Sequence[Sequence[int]],
    drawn: torch.Tensor | None,
) -> None:
    """logits[t] −= frequency_penalty · count(t) + presence_penalty · [count(t) > 0], in place.

    logits [rows, vocab] float32. made: what each row's choice has made, its prompt apart; a
    negative token −1−i is not known to the host yet and stands for drawn[i], int64.
    """
    penalised = [i for i, p in enumerate(params) if p.penalises and made[i]]
    if not penalised:
        return
    vocab, device = logits.shape[-1], logits.device
    longest = max(len(made[i]) for i in penalised)
    padded = np.full((len(penalised), longest), vocab, np.int64)
    for row, i in zip(padded, penalised, strict=True):
        row[: len(made[i])] = made[i]
    tokens = upload(padded, device)
    if (padded < 0).any():
        assert drawn is not None, "tokens of no step"
        tokens = filled_in(tokens, drawn)
    # Counted on the device, as whole numbers: the order of the additions cannot matter.
    counts = logits.new_zeros(len(penalised), vocab + 1)
    counts = counts.scatter_add_(1, tokens, torch.ones_like(tokens, dtype=counts.dtype))[:, :vocab]
    penalties = [(params[i].frequency_penalty, params[i].presence_penalty) for i in penalised]
    frequency, presence = upload(np.array(penalties, np.float32).T.copy(), device).unsqueeze(-1)
    at = upload(np.array(penalised, np.int64), device)
    penalty = counts * frequency + counts.clamp(max=1) * presence
    logits.index_add_(0, at, penalty, alpha=-1)
