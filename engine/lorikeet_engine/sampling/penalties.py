"""Logits after biases and penalties, as OpenAI defines them."""

from collections.abc import Sequence

import numpy as np
import torch

from lorikeet_engine.device.copies import upload
from lorikeet_engine.request import SamplingParams


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
    pending: Sequence[int | None],
    drawn: torch.Tensor | None,
) -> None:
    """logits[t] −= frequency_penalty · count(t) + presence_penalty · [count(t) > 0], in place.

    logits [rows, vocab] float32. made: what each row's choice has made, its prompt apart. pending:
    where the host does not know the last token yet, it is this one of drawn, int64.
    """
    penalised = [i for i, p in enumerate(params) if p.penalises]
    if not penalised:
        return
    vocab, device = logits.shape[-1], logits.device
    longest = max(len(made[i]) for i in penalised)
    padded = np.full((len(penalised), longest + 1), vocab, np.int64)
    for row, i in zip(padded, penalised, strict=True):
        row[: len(made[i])] = made[i]
    tokens = upload(padded, device)
    last = [(at, of) for at, i in enumerate(penalised) if (of := pending[i]) is not None]
    if last:
        assert drawn is not None, "tokens of no step"
        at, drawn_in = upload(np.array(last, np.int64).T.copy(), device)
        tokens[:, -1].index_copy_(0, at, drawn[drawn_in])
    # Counted on the device, as whole numbers: the order of the additions cannot matter.
    counts = logits.new_zeros(len(penalised), vocab + 1)
    counts = counts.scatter_add_(1, tokens, torch.ones_like(tokens, dtype=counts.dtype))[:, :vocab]
    penalties = [(params[i].frequency_penalty, params[i].presence_penalty) for i in penalised]
    frequency, presence = upload(np.array(penalties, np.float32).T.copy(), device).unsqueeze(-1)
    rows = upload(np.array(penalised, np.int64), device)
    penalty = counts * frequency + counts.clamp(max=1) * presence
    logits.index_add_(0, rows, penalty, alpha=-1)
