"""Samples the next token of each choice from its logits: temperature, top_k, top_p, min_p."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from lorikeet_engine.device.async_copies import upload
from lorikeet_engine.kernels.sampling import draw_tokens
from lorikeet_engine.sampling.draws import SamplingRow, draws_of
from lorikeet_engine.sampling.penalties import Penalties
from lorikeet_engine.sampling.processed_logprobs import ProcessedLogprobs

NOT_FINITE = -1
"""What stands for a token id where a row's logits are not finite."""


class Sampler:
    """Samples one token for each row.

    The cumulative distribution is inverted at a number in [0, 1) that is a hash of seed and step.
    So a row costs a few numbers whatever the vocabulary, and equal logits give the same token in
    every row of every batch and on every device. penalties: of the choices whose logits change.
    """

    def __init__(self, penalties: Penalties) -> None:
        self.penalties = penalties

    @torch.inference_mode()
    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
        processed: ProcessedLogprobs | None = None,
    ) -> torch.Tensor:
        """Tokens [rows] int64 for logits [rows, vocab] of any dtype, counted in the rows' slots.

        The repetition penalty comes first, then biases and the other penalties, in float32 copies
        of the rows that have any. What may not be sampled is set to -inf, in place. Then
        temperature, then top_k, then top_p of what top_k left (the most likely tokens whose
        probabilities together reach top_p), then min_p of what that left, as kernels.sampling
        defines it. Temperature 0 takes the first of the largest logits.
        NOT_FINITE where the largest is no number. The host waits for nothing. processed: takes the
        log probabilities of what was drawn from, for its rows.
        """
        changed = {i: row.slot.index for i, row in enumerate(rows) if row.slot is not None}
        plain = {i: row for i, row in enumerate(rows) if row.slot is None}
        tokens = _choose(logits, plain)
        if processed is not None:
            processed.add(logits, tokens, {i: i for i in plain}, rows)
        if changed:
            # apart: kernels are compiled anew for a tensor that begins in the middle of another
            at, slots = (
                upload(np.array(list(some), np.int64), logits.device)
                for some in (changed, changed.values())
            )
            copies = self.penalties.change(logits, at, slots)
            chosen = _choose(copies, dict(enumerate(rows[i] for i in changed)))
            if processed is not None:
                processed.add(copies, chosen, dict(enumerate(changed)), rows)
            self.penalties.count(slots, chosen)
            tokens.index_copy_(0, at, chosen)
        return tokens


def _choose(logits: torch.Tensor, rows: Mapping[int, SamplingRow]) -> torch.Tensor:
    """Tokens [all rows of logits] int64; arbitrary in those that are not among `rows`."""
    _mask_banned(logits, rows)
    best, tokens = logits.max(dim=-1)
    finite = best.isfinite()
    sampled = {i: row for i, row in rows.items() if row.params.temperature > 0.0}
    if sampled:
        draws = upload(draws_of(sampled, logits.shape[-1]), logits.device)
        draw_tokens(logits, best, tokens, draws)
    return tokens.masked_fill_(~finite, NOT_FINITE)


def _mask_banned(logits: torch.Tensor, rows: Mapping[int, SamplingRow]) -> None:
    bans = [(i, token) for i, row in rows.items() for token in row.banned]
    if bans:
        at, tokens = upload(np.array(bans, np.int64).T.copy(), logits.device)
        # on the device: the host would wait until a number of its own is copied there
        logits.index_put_((at, tokens), logits.new_full((), -torch.inf))
