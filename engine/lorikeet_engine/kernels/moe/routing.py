"""Triton kernels before and after the experts' products in a mixture of experts.

They choose experts, sort pairs of a token and an expert, and compute the weighted sum. No kernel
adds with atomics, so the same step always gives the same rows and sums.
"""

import torch
import triton
import triton.language as tl

from lorikeet_engine.kernels.lora.types import LoraDelta
from lorikeet_engine.kernels.moe import Sigmoids
from lorikeet_engine.kernels.pointwise.lora_operands import lora_at, operands


def choose_experts(
    logits: torch.Tensor,
    lora: LoraDelta | None,
    per_token: int,
    *,
    normalised: bool,
    sigmoids: Sigmoids | None = None,
    factors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's experts, in one launch: see kernels.moe.route.

    → experts [tokens, per_token] int32, weights [tokens, per_token] float32
    """
    tokens, experts = logits.shape
    size, device = (tokens, per_token), logits.device
    chosen = torch.empty(size, dtype=torch.int32, device=device)
    weights = torch.empty(size, dtype=torch.float32, device=device)
    bias, scale = (None, 1.0) if sigmoids is None else (sigmoids.bias, sigmoids.scale)
    groups = (1, 1) if sigmoids is None else (sigmoids.groups, sigmoids.kept_groups)
    choose[(tokens,)](
        logits, *operands(lora), bias, factors, chosen, weights, scale, experts, per_token,
        normalised, *groups, triton.next_power_of_2(experts), triton.next_power_of_2(per_token),
        num_warps=1,
    )  # fmt: skip
    return chosen, weights


@triton.jit  # type: ignore[untyped-decorator]
def choose(
    logits: tl.tensor,
    lora: tl.tensor,
    adapted: tl.tensor,
    bias: tl.tensor,
    factors: tl.tensor,
    chosen: tl.tensor,
    weights: tl.tensor,
    scale: tl.tensor,
    experts: tl.constexpr,
    per_token: tl.constexpr,
    normalised: tl.constexpr,
    groups: tl.constexpr,
    kept_groups: tl.constexpr,
    block: tl.constexpr,
    pair_block: tl.constexpr,
) -> None:
    """Choose one token's experts, and compute the weight of each.

    logits [tokens, experts]. factors: last factor of each expert's weight; None: 1.
    normalised: whether the chosen experts' weights are divided by their sum.
    chosen, weights [tokens, per_token]: experts of each token and their weights, written here.
    lora, adapted: the logits' LoRA delta, and its number of rows; None: no delta.
    bias, scale, groups, kept_groups: fields of Sigmoids; bias None: weights are of a softmax, scale
        is 1, and there is one group.
    block, pair_block: `experts` and `per_token`, rounded up to powers of two.
    """
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, block)
    inside = expert < experts
    at = token * experts + expert
    scores = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32)
    if lora is not None:
        scores += lora_at(lora, adapted, token, at, inside)
    if bias is None:
        scores = tl.where(inside, scores, -float("inf"))
        left = tl.exp(scores - tl.max(scores, 0))
        left = left / tl.sum(left, 0)
    else:
        sigmoids = tl.sigmoid(scores)
        left = sigmoids + tl.load(bias + expert, mask=inside, other=0.0)
        left = tl.where(inside, left, -float("inf"))
    if groups != kept_groups:
        left = _of_kept_groups(left, expert, experts // groups, groups, kept_groups)
    pair = tl.arange(0, pair_block)
    indices = tl.zeros((pair_block,), tl.int32)
    shares = tl.zeros((pair_block,), tl.float32)
    for j in tl.static_range(per_token):
        best = tl.max(left, 0)
        # bounded, as no expert equals the best if a logit is NaN
        index = tl.minimum(tl.min(tl.where(left == best, expert, block), 0), experts - 1)
        indices = tl.where(pair == j, index, indices)
        if bias is not None:
            best = tl.sum(tl.where(expert == index, sigmoids, 0.0), 0)
        shares = tl.where(pair == j, best, shares)
        left = tl.where(expert == index, -float("inf"), left)
    if normalised:
        shares = shares / tl.sum(shares, 0)
    if bias is not None:
        shares *= scale
    if factors is not None:
        shares *= tl.load(factors + indices, mask=pair < per_token, other=0.0)
    first = token * per_token
    tl.store(chosen + first + pair, indices, mask=pair < per_token)
    tl.store(weights + first + pair, shares, mask=pair < per_token)


@triton.jit  # type: ignore[untyped-decorator]
def _of_kept_groups(
    left: tl.tensor,
    expert: tl.tensor,
    size: tl.constexpr,
    groups: tl.constexpr,
    kept_groups: tl.constexpr,
) -> tl.tensor:
    """Return `left`, by which experts are chosen, with −∞ for experts of groups that are not kept.

    expert: index of each expert.
    size: number of experts of a group.
    groups: number of groups.
    kept_groups: number of groups that are kept.
    """
    owner = expert // size
    of_own = tl.full(left.shape, -float("inf"), tl.float32)  # sum of the own group's two likeliest
    for group in tl.static_range(groups):
        own = tl.where(owner == group, left, -float("inf"))
        best = tl.max(own, 0)
        first = tl.min(tl.where(own == best, expert, size * groups), 0)
        second = tl.max(tl.where(expert == first, -float("inf"), own), 0)
        of_own = tl.where(owner == group, best + second, of_own)
    kept = owner < 0
    for _ in tl.static_range(kept_groups):
        best = tl.max(tl.where(kept, -float("inf"), of_own), 0)
        group = tl.min(tl.where((of_own == best) & ~kept, owner, groups), 0)
        kept = kept | (owner == group)
    return tl.where(kept, left, -float("inf"))


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def sort_by_expert(
    chosen: tl.tensor,
    pairs: tl.tensor,
    rows: tl.tensor,
    starts: tl.tensor,
    count: tl.tensor,
    experts: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """List the rows of one expert, after those of all experts with lower indices.

    A row is a pair of a token and an expert chosen for the token. An expert's pairs stay in order.

    chosen [tokens, per_token]: result of `choose`.
    pairs, rows, starts: pair of each row, row of each pair, and first row of each expert
        (RoutedRows); written here.
    count: number of pairs. block: number of pairs read at once.
    """
    expert = tl.program_id(0)
    start = 0
    for first in range(0, count, block):
        pair = first + tl.arange(0, block)
        of = tl.load(chosen + pair, mask=pair < count, other=experts)
        start += tl.sum((of < expert).to(tl.int32), 0)
    tl.store(starts + expert, start)
    for first in range(0, count, block):
        pair = first + tl.arange(0, block)
        mine = tl.load(chosen + pair, mask=pair < count, other=experts) == expert
        row = start + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(pairs + row, pair, mask=mine)
        tl.store(rows + pair, row, mask=mine)
        start += tl.sum(mine.to(tl.int32), 0)
    if expert == experts - 1:
        tl.store(starts + experts, start)


@triton.jit  # type: ignore[untyped-decorator]
def sum_weighed(
    y: tl.tensor,
    rows: tl.tensor,
    weights: tl.tensor,
    biases: tl.tensor,
    experts: tl.tensor,
    out: tl.tensor,
    width: tl.constexpr,
    per_token: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Compute a block of columns of the weighted sum of one token's expert outputs.

    y: output of each row's expert. biases: added to each expert's outputs; None: no biases.
    out: the sums [tokens, width].
    rows, weights, experts [tokens, per_token]: row, weight and expert of each of a token's pairs.
    width: columns of y.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    total = tl.zeros((block,), tl.float32)
    for j in tl.static_range(per_token):
        row = tl.load(rows + token * per_token + j).to(tl.int64)
        share = tl.load(weights + token * per_token + j)
        output = tl.load(y + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        if biases is not None:
            expert = tl.load(experts + token * per_token + j).to(tl.int64)
            output += tl.load(biases + expert * width + columns, mask=inside, other=0.0)
        total += share * output
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)
