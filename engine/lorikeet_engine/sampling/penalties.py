"""Logit biases and repetition penalties, as OpenAI defines them."""

from collections.abc import Sequence

import numpy as np
import torch

from lorikeet_engine.device.async_copies import upload
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
    outputs: Sequence[Sequence[int]],
    pending_rows: Sequence[int | None],
    previous: torch.Tensor | None,
) -> None:
    """logits[t] −= frequency_penalty · count(t) + presence_penalty · [count(t) > 0], in place.

    logits [rows, vocab] float32. outputs: the output tokens of each row that the host has.
    pending_rows: where one more was sampled and not read yet, its row in `previous`, the tokens of
    the step before on the device, [rows] int64.
    """
    penalised = [i for i, p in enumerate(params) if p.has_penalties]
    if not penalised:
        return
    vocab, device = logits.shape[-1], logits.device
    longest = max(len(outputs[i]) for i in penalised)
    padded = np.full((len(penalised), longest + 1), vocab, np.int64)
    for row, i in zip(padded, penalised, strict=True):
        row[: len(outputs[i])] = outputs[i]
    tokens = upload(padded, device)
    pending = [(at, j) for at, i in enumerate(penalised) if (j := pending_rows[i]) is not None]
    if pending:
        assert previous is not None, "pending tokens of no step"
        at, sampled_in = upload(np.array(pending, np.int64).T.copy(), device)
        tokens[:, -1].index_copy_(0, at, previous[sampled_in])
    # Counted on the device, as whole numbers: the order of the additions cannot matter.
    counts = logits.new_zeros(len(penalised), vocab + 1)
    counts = counts.scatter_add_(1, tokens, torch.ones_like(tokens, dtype=counts.dtype))[:, :vocab]
    penalties = [(params[i].frequency_penalty, params[i].presence_penalty) for i in penalised]
    frequency, presence = upload(np.array(penalties, np.float32).T.copy(), device).unsqueeze(-1)
    rows = upload(np.array(penalised, np.int64), device)
    penalty = counts * frequency + counts.clamp(max=1) * presence
    logits.index_add_(0, rows, penalty, alpha=-1)
