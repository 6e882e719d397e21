"""Triton kernel that merges a query's attention results over separate parts of its keys."""

import torch
import triton
import triton.language as tl


def merge(
    own: torch.Tensor,
    own_lse: torch.Tensor,
    parts: torch.Tensor,
    parts_lse: torch.Tensor,
    places: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Merge attention results: out[t, h] = Σ w·o / Σ w, w = 2^lse, over the results o of token t.

    Token t has one result in `own`, and one in each of the parts that its keys are cut into.

    own [rows, heads, head_dim], contiguous: a row for each token
    own_lse [rows, heads] float32: log2 of the sum of exponentials
    parts [part rows, kv_heads, head_dim], contiguous: for each token of each part, a row for each
      of the query heads that share a key head
    parts_lse [part rows, kv_heads] float32: log2 of the sum of exponentials of each result in
        `parts`
    places [rows, 3] int32: for each token, the row in `parts` of its first query head in its first
      part; the number of rows from one of its parts to the next; the number of its parts
    out: overwritten entirely, and returned; may be `own`
    """
    rows, heads, head_dim = own.shape
    kv_heads = parts.shape[1]
    group = heads // kv_heads
    _merge[(rows, kv_heads)](
        own, own_lse, parts, parts_lse, places, out,
        kv_heads=kv_heads,
        group=group,
        members=triton.next_power_of_2(group),
        head_dim=head_dim,
        num_warps=1,
    )  # fmt: skip
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _merge(
    own: tl.tensor,
    own_lse: tl.tensor,
    parts: tl.tensor,
    parts_lse: tl.tensor,
    places: tl.tensor,
    out: tl.tensor,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    members: tl.constexpr,
    head_dim: tl.constexpr,
) -> None:
    """Merge the results of one token, for the query heads that share one key head.

    own, parts: results to merge. own_lse, parts_lse: log2 of their sums of exponentials.
    places: for each token, its first row in `parts`, the rows from part to part, the parts' number.
    out: the merged results.
    group: number of query heads that share a key head.
    members: `group` rounded up to a power of two.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(places + row * 3)
    apart = tl.load(places + row * 3 + 1)
    count = tl.load(places + row * 3 + 2)
    member = tl.arange(0, members)
    real = member < group
    column = tl.arange(0, head_dim)[None, :]
    at = (row.to(tl.int64) * kv_heads + head) * group + member
    best = tl.load(own_lse + at, mask=real, other=0.0)
    inside = at[:, None] * head_dim + column
    mixed = tl.load(own + inside, mask=real[:, None], other=0.0).to(tl.float32)
    total = tl.full([members], 1.0, tl.float32)
    for part in range(count):
        place = (first + part * apart + member).to(tl.int64) * kv_heads + head
        theirs = tl.load(parts_lse + place, mask=real, other=0.0)
        values = tl.load(
            parts + place[:, None] * head_dim + column, mask=real[:, None], other=0.0
        ).to(tl.float32)
        better = tl.maximum(best, theirs)
        kept, added = tl.exp2(best - better), tl.exp2(theirs - better)
        mixed = mixed * kept[:, None] + values * added[:, None]
        total = total * kept + added
        best = better
    mixed = mixed / total[:, None]
    tl.store(out + inside, mixed.to(out.dtype.element_ty), mask=real[:, None])
