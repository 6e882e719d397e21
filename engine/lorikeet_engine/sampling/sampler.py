"""Sampler that draws the same token for the same logits, seed and step, in any batch.

This holds for every row of every batch and on every device, because kernels.sampling defines draws
to the last bit.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from lorikeet_engine.device.async_copies import upload
from lorikeet_engine.kernels.sampling import draw_tokens
from lorikeet_engine.sampling.draws import SamplingRow, draws_of
from lorikeet_engine.sampling.penalties import Penalties
from lorikeet_engine.sampling.processed_logprobs import ProcessedLogprobs

NOT_FINITE = -1
"""Result instead of a token id, for a row whose largest logit is not finite."""


class Sampler:
    """Sampler of one token for each row of logits, by temperature, top_k, top_p, min_p and a seed.

    The cumulative distribution is inverted at a number in [0, 1) that is a hash of the row's seed
    and step. Equal logits, seed and step give the same token.

    penalties: penalties and biases of the choices whose params change logits.
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
        """Sample a token for each row of logits, and count it in the row's slot of `penalties`.

        In this order:
        1. The repetition penalty, then biases and the other penalties, in float32 copies of the
           rows that have any.
        2. Banned tokens are set to -inf, in place.
        3. Temperature, top_k, top_p of the tokens that top_k keeps (the most likely tokens whose
           probabilities together reach top_p), min_p of the tokens that top_p keeps, as
           kernels.sampling defines them. Temperature 0 takes the first of the largest logits.

        logits [rows, vocab], any dtype
        rows: sampling parameters of each row
        processed: collects log probabilities of the distributions that tokens are drawn from; None:
            nobody needs them
        → tokens [rows] int64; NOT_FINITE if a row's largest logit is not finite

        The host does not wait for the device.
        """
        plain = {i: row for i, row in enumerate(rows) if row.slot is None}
        tokens = _choose(logits, plain)
        if processed is not None:
            processed.add(logits, tokens, {i: i for i in plain}, rows)
        counted = torch.empty_like(tokens)
        for changed in _by_depth(rows) if len(plain) < len(rows) else ():
            # uploaded apart: Triton compiles anew for a tensor that starts inside another
            at, slots = (
                upload(np.array(list(some), np.int64), logits.device)
                for some in (changed, changed.values())
            )
            copies = self.penalties.change(logits, at, slots)
            chosen = _choose(copies, dict(enumerate(rows[i] for i in changed)))
            if processed is not None:
                processed.add(copies, chosen, dict(enumerate(changed)), rows)
            tokens.index_copy_(0, at, chosen)
            drafted = [rows[i].drafted for i in changed]
            if drafted[0] is not None:  # tokens behind a rejected draft do not count
                accepted = counted[at - 1] == upload(np.array(drafted, np.int64), logits.device)
                chosen = torch.where(accepted, chosen, NOT_FINITE)
            counted.index_copy_(0, at, chosen)
            self.penalties.count(slots, chosen)
        return tokens


def _by_depth(rows: Sequence[SamplingRow]) -> list[dict[int, int]]:
    """Group the rows with penalties or biases so that each group is sampled after the one before.

    A row behind a drafted token is in a later group than the row that must sample this token, since
    the token counts for the later row's penalties. Returns the groups, each as {index of the row:
    index of its slot in Penalties}.
    """
    depths, depth = list[dict[int, int]](), 0
    for i, row in enumerate(rows):
        depth = 0 if row.drafted is None else depth + 1
        if row.slot is not None:
            if depth == len(depths):
                depths.append({})
            depths[depth][i] = row.slot.index
    return depths


def _choose(logits: torch.Tensor, rows: Mapping[int, SamplingRow]) -> torch.Tensor:
    """Ban tokens and draw a token for some rows of logits → [all rows of logits] int64.

    The result is undefined for all other rows.
    """
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
        # a tensor on the device: the host would wait for the copy of a number
        logits.index_put_((at, tokens), logits.new_full((), -torch.inf))
