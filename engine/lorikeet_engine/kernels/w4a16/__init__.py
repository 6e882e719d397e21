"""Linear layers with weights of 4 bits, decoded in the kernels that multiply by them ("W4A16").

The weights' values are exactly those of the checkpoint's format: integers with a scale and a zero
point for each group of inputs (AWQ, GPTQ, compressed-tensors), or NF4. Activations are not rounded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

import torch
from torch.nn import functional as F

from lorikeet_engine.errors import SettingsError
from lorikeet_engine.kernels.by_device import by_device

FIRST_WITH_BFLOAT16 = (8, 0)
"""Lowest CUDA compute capability with products of bfloat16: 8.0, Ampere."""
GRAIN = 32
"""A group's inputs, and those of a part of a weight, are a multiple of this many."""
SPAN = 4 * GRAIN
"""Number of inputs whose codes lie side by side: 64 bytes of each output."""
MIDDLE = 8
"""Zero point of integers without stored zero points."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Weight W [d_out, d_in] of 4-bit codes q, in groups of inputs that share a scale.

    All tensors are contiguous.

    Integers: W[r, order[c]] = scales[r, c // group] · (q[r, c] − zeros[r, c // group])
    NF4:      W[r, order[c]] = scales[r, c // group] · levels[q[r, c]], rounded to `rounded`

    codes [spans, d_out, 32] int16: the codes of an output and of a span of 128 inputs lie in 64
        bytes; bits 4·i to 4·i + 3 of element j hold input 32·i + j of the span. So one instruction
        takes two neighbouring inputs out of a register, and all codes that a product takes out of a
        span at once meet inputs that lie side by side. The last span is filled up with zeros.
    scales [d_out, groups]: for integers in the checkpoint's dtype, for NF4 float32. Loads of a
        group's scale bring those of the output's next groups into the multiprocessor's cache.
    zeros [d_out, groups] uint8; None: 8 everywhere, or NF4.
    group: number of inputs that share a scale, a multiple of 32.
    d_in: number of inputs.
    order [d_in] int32: the input that each column of codes multiplies; None: its own.
    levels [16] float32: values of NF4's codes; None: integers.
    rounded: dtype that NF4's values are rounded to.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group: int
    d_in: int
    order: torch.Tensor | None = None
    levels: torch.Tensor | None = None
    rounded: torch.dtype = torch.float32

    @property
    def d_out(self) -> int:
        """Number of outputs."""
        return self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and of all that decodes them."""
        tensors = self.codes, self.scales, self.zeros, self.order, self.levels
        return sum(each.nbytes for each in tensors if each is not None)

    def integers(self) -> torch.Tensor:
        """Return the codes, in the order of columns: [d_out, d_in] uint8."""
        parts = torch.stack([self.codes >> 4 * i & 15 for i in range(4)], 2).byte()
        q = parts.flatten(2).transpose(0, 1).reshape(self.d_out, -1)
        return q[:, : self.d_in]

    def floats(self) -> torch.Tensor:
        """Return the values [d_out, d_in] in float32, exact for scales of 16 bits and for NF4."""
        q, scales = self.integers(), self._wide(self.scales).float()
        if self.levels is None:
            zeros = MIDDLE if self.zeros is None else self._wide(self.zeros).float()
            values = (q.float() - zeros) * scales
        else:
            values = (self.levels[q.int()] * scales).to(self.rounded).float()
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(1, self.order.long(), values)

    def part(self, rows: range, columns: range) -> "PackedWeight":
        """Return the outputs `rows` and the inputs `columns` of the weight.

        Raises ValueError if `columns` does not begin and end at multiples of 32 inputs, or if only
        some of the inputs are kept and the weight has an order.
        """
        some, first, last = slice(rows.start, rows.stop), columns.start, columns.stop
        part = replace(
            self,
            codes=self.codes[:, some].contiguous(),
            scales=self.scales[some],
            zeros=None if self.zeros is None else self.zeros[some],
        )
        if len(columns) == self.d_in:
            return part
        if self.order is not None:
            raise ValueError("its inputs are ordered by act-order (desc_act)")
        if first % GRAIN or last % GRAIN:
            raise ValueError(f"inputs {first} to {last} are no multiples of {GRAIN}")
        if first // self.group == (last - 1) // self.group:
            repeated, group = 1, len(columns)
            groups = slice(first // self.group, first // self.group + 1)
        else:
            group = gcd(self.group, first, last)
            groups, repeated = slice(first // group, last // group), self.group // group

        def of(each: torch.Tensor) -> torch.Tensor:
            return each.repeat_interleave(repeated, 1)[:, groups].contiguous()

        return replace(
            part,
            codes=_packed(part.integers()[:, first:last]),
            scales=of(part.scales),
            zeros=None if part.zeros is None else of(part.zeros),
            group=group,
            d_in=len(columns),
        )

    def goes_with(self, other: "PackedWeight") -> bool:
        """Return whether two weights can be stacked by outputs to one weight: they have the same
        groups and order of inputs, and the same kind of codes and scales.
        """
        return (
            (self.group, self.d_in, self.scales.dtype, self.rounded)
            == (other.group, other.d_in, other.scales.dtype, other.rounded)
            and (self.zeros is None) == (other.zeros is None)
            and _are_equal(self.order, other.order)
            and _are_equal(self.levels, other.levels)
        )

    def _wide(self, of_groups: torch.Tensor) -> torch.Tensor:
        return of_groups.repeat_interleave(self.group, 1)


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """Weight of fused linears in several parts, stacked by outputs: packed ones and floats."""

    parts: tuple[torch.Tensor | PackedWeight, ...]

    @property
    def heights(self) -> list[int]:
        """Number of outputs of each part."""
        return [p.d_out if isinstance(p, PackedWeight) else len(p) for p in self.parts]


def pack(
    q: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group_of: torch.Tensor | None = None,
    *,
    levels: torch.Tensor | None = None,
    rounded: torch.dtype = torch.float32,
) -> PackedWeight:
    """Pack codes q [d_out, d_in] uint8, one for each weight.

    scales [d_out, groups]: factor of each group of inputs.
    zeros [d_out, groups]: zero point of each group; None: 8 everywhere, or NF4.

    group_of [d_in]: group of each input; None: groups of neighbours.
    levels [16] float32: values of NF4's codes; None: codes are integers.
    rounded: dtype that NF4's values are rounded to.

    Raises ValueError if groups are of different sizes or not of a multiple of 32 inputs.
    """
    d_in, groups = q.shape[1], scales.shape[1]
    group, order = d_in // groups, None
    if d_in % groups or group % GRAIN:
        raise ValueError(f"{d_in} inputs in {groups} groups are no multiples of {GRAIN} each")
    if group_of is not None and not group_of.is_meta:
        sorted_groups, by_group = group_of.sort(stable=True)
        own = torch.arange(d_in, device=q.device)
        if not torch.equal(sorted_groups, own // group):
            raise ValueError("groups of inputs have different sizes")
        if not torch.equal(by_group, own):
            q, order = q[:, by_group], by_group.int()
    zeros = None if zeros is None else zeros.contiguous()
    scales = scales.contiguous()
    return PackedWeight(_packed(q), scales, zeros, group, d_in, order, levels, rounded)


def stack(parts: Sequence[PackedWeight]) -> PackedWeight:
    """Stack weights by outputs to one.

    All must have the same groups and order of inputs, and the same kind of codes and scales.
    """
    first = parts[0]
    return replace(
        first,
        codes=torch.cat([part.codes for part in parts], 1),
        scales=torch.cat([part.scales for part in parts]),
        zeros=None
        if first.zeros is None
        else torch.cat([part.zeros for part in parts if part.zeros is not None]),
    )


@by_device
def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute x·Wᵀ + b.

    x [tokens, d_in], each token contiguous
    weight: W [d_out, d_in]
    bias: b [d_out]
    → [tokens, d_out] like x

    Sums are float32.
    """
    return F.linear(x.float(), weight.floats(), None if bias is None else bias.float()).to(x.dtype)


def check_device(device: torch.device) -> None:
    """Raise SettingsError unless the device can multiply by weights of 4 bits."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < FIRST_WITH_BFLOAT16:
        raise SettingsError(
            f"weight_dtype=packed needs a GPU of compute capability 8.0 or above (Ampere), {device}"
            f" has {'.'.join(map(str, capability))}: want weight_dtype=auto"
        )


def _packed(q: torch.Tensor) -> torch.Tensor:
    """Pack codes q [d_out, d_in] uint8 to the layout of PackedWeight.codes, four in each int16."""
    filled = F.pad(q, (0, -q.shape[1] % SPAN)).view(len(q), -1, 4, GRAIN).transpose(0, 1)
    codes = filled[:, :, 0].short()
    for i in range(1, 4):
        codes |= filled[:, :, i].short() << 4 * i
    return codes.contiguous()


def _are_equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.is_meta or torch.equal(one, other)
