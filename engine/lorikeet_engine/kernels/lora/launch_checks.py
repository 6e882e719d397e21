"""What the Triton wrappers check before a launch: a kernel itself trusts its operands."""

from functools import cache

import torch

from lorikeet_engine.errors import ShapeError
from lorikeet_engine.kernels.lora.tiles import Tiles
from lorikeet_engine.kernels.lora.tuning import Regime
from lorikeet_engine.kernels.lora.types import LoraGroup, LoraWeights


def check_rows(name: str, rows: torch.Tensor, width: int, weights: LoraWeights) -> None:
    """Raise ShapeError unless rows is [tokens, width], dense in a row, on the arena's device."""
    if rows.dim() != 2 or rows.shape[1] != width or rows.stride(1) != 1:
        raise ShapeError(
            f"{name} is {tuple(rows.shape)} with strides {rows.stride()}; "
            f"want [tokens, {width}] with neighbouring columns"
        )
    if rows.device != weights.arena.device:
        raise ShapeError(f"{name} is on {rows.device}, the adapters on {weights.arena.device}")


def check_group(weights: LoraWeights, group: LoraGroup) -> None:
    """Raise ShapeError unless the group's linears are neighbours in a dense table."""
    first, count = group.linears[0], len(group.linears)
    if group.linears != tuple(range(first, first + count)):
        raise ShapeError(f"a fused group's linears are neighbours in the table: {group.linears}")
    if len(group.d_outs) != count:
        raise ShapeError(f"{count} linears but {len(group.d_outs)} output widths")
    if first + count > weights.table.shape[2] or not weights.table.is_contiguous():
        raise ShapeError(f"linears {group.linears} in a table of {tuple(weights.table.shape)}")


def launches_early(tiles: Tiles, device: torch.device) -> bool:
    """Whether expand is launched before shrink is over, and waits for it inside.

    Hopper can. In a prefill it would hold the few multiprocessors that are left to LoRA, and
    shrink needs them.
    """
    return tiles.regime != Regime.PREFILL and _is_hopper(device)


@cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
