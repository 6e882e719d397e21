"""Writing a step's keys and values to their places in the pages, in Triton."""

import torch
import triton
import triton.language as tl


def write_kv(k: torch.Tensor, v: torch.Tensor, layer_kv: torch.Tensor, slots: torch.Tensor) -> None:
    """layer_kv[0] and [1] at slots[t] become k[t] and v[t]; a slot below 0 is no place.

    k, v [tokens, kv_heads, head_dim], dense in a token, in layer_kv's dtype;
    layer_kv [2, pages, page_size, kv_heads, head_dim], contiguous; slots [tokens] int64.
    """
    width = k.shape[1] * k.shape[2]
    _write_kv[(len(k),)](
        k, v, layer_kv, slots, k.stride(0), v.stride(0), layer_kv.stride(0),
        width, triton.next_power_of_2(width),
    )  # fmt: skip


@triton.jit(do_not_specialize=["plane"])  # type: ignore[untyped-decorator]
def _write_kv(
    k: tl.tensor,
    v: tl.tensor,
    layer_kv: tl.tensor,
    slots: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    plane: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One token: its key, and its value `plane` elements behind."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    columns = tl.arange(0, block)
    inside = columns < width
    out = layer_kv + slot * width + columns
    tl.store(out, tl.load(k + token * k_stride + columns, mask=inside), mask=inside)
    tl.store(out + plane, tl.load(v + token * v_stride + columns, mask=inside), mask=inside)
