"""Norms and biases of a base model's rows with the values that are served, for DoRA and biases."""

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cached_property

import torch

from lorikeet_engine.kernels.fp8 import Fp8Rows, PartlyFp8
from lorikeet_engine.kernels.lora.linear import FusedWeight
from lorikeet_engine.kernels.w4a16 import PackedWeight, StackedWeight
from lorikeet_engine.models.linears import LoraLinear
from lorikeet_engine.models.llama import LlamaModel
from lorikeet_engine.residency.base_rows import RowFacts

_ELEMENTS_AT_ONCE = 1 << 22  # 16 MiB in float32; one more tensor of its size is alive


class ServedRows:
    """Reader of the weights' rows, one for each output, of the linears in this process's part of
    the base model. Thread-safe.

    A thread that loads adapters computes on a stream of its own, some megabytes of a weight at a
    time, so that steps go on.
    """

    def __init__(self, model: LlamaModel) -> None:
        self._model, self._lock = model, threading.Lock()
        self._squares: dict[tuple[int, int], torch.Tensor] = {}  # ‖w‖², by (layer, linear)
        self._stream: torch.cuda.Stream | None = None

    @torch.no_grad()
    def facts(
        self, layer: int, linear: int, a: torch.Tensor | None = None, b: torch.Tensor | None = None
    ) -> RowFacts:
        """Return RowFacts (sums of squares and biases) of the rows that this process keeps of a
        linear, on the CPU.

        In float32, ‖w + Aᵀ·b‖² = ‖w‖² + 2·bᵀ·(A·w) + bᵀ·(A·Aᵀ)·b for a row w of W and the row b of
        B. Each ‖w‖² is computed once, and kept on the CPU.

        layer: index of the layer; BaseShape.outer_layer for linears outside the layers.
        linear: index of the linear in BaseShape.modules.
        a, b: this process's parts of A [LoRA rank, d_in] and of scaled, transposed B [LoRA rank,
            d_out]; None if the squares are not needed.
        """
        found, begin, d_out = self._places[layer, linear]
        with self._lock, self._on_own_stream():
            bias = None if found.bias is None else found.bias[begin : begin + d_out].float().cpu()
            if a is None or b is None:
                return RowFacts(None, bias)
            a, b = (each.to(self._model.device).float() for each in (a, b))
            rows = begin, begin + d_out
            if (layer, linear) not in self._squares:
                squares = [some.square().sum(1) for some in _rows(found.weight, *rows)]
                self._squares[layer, linear] = torch.cat(squares).cpu()
            shrunk = torch.cat([some @ a.t() for some in _rows(found.weight, *rows)]).t()
            added = (b * (2 * shrunk + (a @ a.t()) @ b)).sum(0).cpu()
            return RowFacts((self._squares[layer, linear] + added).clamp_(min=0), bias)

    @cached_property
    def _places(self) -> dict[tuple[int, int], tuple[LoraLinear, int, int]]:
        """Place of each linear in the fused linears, by (layer, linear's number).

        A place is the fused linear that contains the linear, the index of the linear's first output
        in it, and the linear's number of outputs.
        """
        return {
            (linear.layer, number): (linear, sum(linear.group.d_outs[:at]), linear.group.d_outs[at])
            for linear in self._model.linears()
            for at, number in enumerate(linear.group.linears)
        }

    def _on_own_stream(self) -> torch.cuda.StreamContext | nullcontext[None]:
        device = self._model.device
        if device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._stream)


def _rows(weight: FusedWeight, begin: int, end: int) -> Iterator[torch.Tensor]:
    """Yield the rows `begin` to `end` of a weight in float32, some at a time: [rows, d_in]."""
    if isinstance(weight, PartlyFp8 | StackedWeight):
        parts = weight.parts if isinstance(weight, StackedWeight) else (weight.first, weight.others)
        first = 0
        for part in parts:
            height = _height(part)
            low, high = max(begin, first), min(end, first + height)
            if low < high:
                yield from _rows(part, low - first, high - first)
            first += height
        return
    width = weight.d_in if isinstance(weight, PackedWeight) else _matrix(weight).shape[1]
    grain = weight.block[0] if isinstance(weight, Fp8Rows) and weight.block else 1
    each = max(1, _ELEMENTS_AT_ONCE // width // grain) * grain
    for low in range(begin, end, each):
        high = min(low + each, end)
        if isinstance(weight, PackedWeight):
            yield weight.part(range(low, high), range(width)).floats()
        elif isinstance(weight, Fp8Rows):
            scales = slice(low // grain, -(-high // grain))
            yield Fp8Rows(weight.rows[low:high], weight.scales[scales], weight.block).floats()
        else:
            yield weight[low:high].float()


def _matrix(weight: torch.Tensor | Fp8Rows) -> torch.Tensor:
    return weight.rows if isinstance(weight, Fp8Rows) else weight


def _height(weight: torch.Tensor | Fp8Rows | PackedWeight) -> int:
    return weight.d_out if isinstance(weight, PackedWeight) else len(_matrix(weight))
