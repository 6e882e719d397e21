"""The Triton LoRA kernels against float32 sums written out here.

On CUDA the tests marked `gpu` run the compiled kernels in bfloat16. Without a GPU the same tests
run in Triton's interpreter; it must be chosen before Triton is first imported, so one test starts
this file again in a process of its own.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from lorikeet_engine.errors import ShapeError
from lorikeet_engine.kernels.lora import reference
from lorikeet_engine.kernels.lora.expand import expand
from lorikeet_engine.kernels.lora.shrink import shrink
from lorikeet_engine.kernels.lora.types import LoraGroup, LoraWeights, Segments

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
on_gpu = [pytest.mark.gpu, needs_cuda]
DEVICES = (
    [("cpu", torch.float32), ("cpu", torch.float16), ("cpu", torch.bfloat16)]
    if INTERPRETED
    else [
        pytest.param(("cuda", torch.bfloat16), marks=on_gpu),
        pytest.param(("cuda", torch.float32), marks=on_gpu),
    ]
)
LAYERS, LINEARS, LAYER = 3, 7, 1
QKV = LoraGroup((0, 1, 2), d_in=96, d_outs=(80, 16, 24))
WIDE = LoraGroup((4, 5), d_in=200, d_outs=(130, 67))
DOWN = LoraGroup((6,), d_in=130, d_outs=(72,))
LONG = LoraGroup((6,), d_in=2500, d_outs=(24,))
MIXED_RANKS = [4, 64, 12, 1, 16]
MIXED_RUNS = [(3, 2, 1), (0, 3, 40), (4, 50, 17), (1, 67, 1), (2, 70, 63)]


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the compiled kernels are tested")
def test_every_case_holds_in_tritons_interpreter() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 0, run.stdout + run.stderr


@dataclass(frozen=True)
class Step:
    """Random adapters and the tokens that use them; every gap holds NaN."""

    weights: LoraWeights
    segments: Segments
    group: LoraGroup
    x: torch.Tensor
    a: dict[tuple[int, int], torch.Tensor]
    b: dict[tuple[int, int], torch.Tensor]
    runs: list[tuple[int, int, int]]

    def shrunk(self) -> torch.Tensor:
        """The equation, in float32."""
        v = torch.zeros(len(self.x), len(self.group.linears), self.segments.max_rank)
        for slot, start, length in self.runs:
            rows = self.x[start : start + length].float().cpu()
            for index, linear in enumerate(self.group.linears):
                a = self.a[slot, linear]
                v[start : start + length, index, : len(a)] = torch.einsum("th,rh->tr", rows, a)
        return v

    def expanded(self, y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The equation, in float32; y and v are left as they are."""
        y = y.float().cpu().clone()
        for slot, start, length in self.runs:
            rows, column = slice(start, start + length), 0
            for index, linear in enumerate(self.group.linears):
                b = self.b[slot, linear]
                delta = torch.einsum("tr,or->to", v[rows, index, : b.shape[1]], b)
                y[rows, column : column + len(b)] += delta
                column += self.group.d_outs[index]
        return y


def make_step(
    device: str,
    dtype: torch.dtype,
    group: LoraGroup,
    ranks: list[int],
    runs: list[tuple[int, int, int]],
    tokens: int,
    max_rank: int | None = None,
    padding: int = 0,
) -> Step:
    """runs: (slot, start, length). ranks: of each slot; rank 0 touches nothing."""
    torch.manual_seed(tokens + sum(ranks))
    table = torch.zeros(len(ranks), LAYERS, LINEARS, 3, dtype=torch.int64)
    pieces, a, b, used = [], {}, {}, 0
    for slot, rank in enumerate(ranks):
        for linear, d_out in zip(group.linears, group.d_outs, strict=True):
            gap = torch.full((5 + slot,), torch.nan)
            a[slot, linear] = (torch.randn(rank, group.d_in) / group.d_in**0.5).to(dtype).float()
            b[slot, linear] = torch.randn(d_out, rank).to(dtype).float()
            at_a = used + len(gap)
            at_b = at_a + rank * group.d_in + len(gap)
            table[slot, LAYER, linear] = torch.tensor([at_a, at_b, rank])
            pieces += [gap, a[slot, linear].flatten(), gap, b[slot, linear].flatten()]
            used = at_b + d_out * rank
    arena = torch.cat([*pieces, torch.full((7,), torch.nan)]).to(dtype)
    x = torch.full((tokens, group.d_in), torch.nan)
    for _, start, length in runs:
        x[start : start + length] = torch.randn(length, group.d_in)
    columns = torch.tensor([*runs, *[(0, 0, 0)] * padding], dtype=torch.int32).T.contiguous()
    slots, starts, lengths = columns.to(device)
    return Step(
        LoraWeights(arena.to(device), table.to(device)),
        Segments(slots, starts, lengths, max(ranks) if max_rank is None else max_rank),
        group,
        x.to(device, dtype),
        a,
        b,
        runs,
    )


@pytest.fixture(autouse=True)
def _nan_in_fresh_memory() -> Iterator[None]:
    """Fill what torch.empty returns with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def check(step: Step) -> None:
    """Both kernels agree with the equation."""
    v = shrink(step.x, step.weights, step.segments, LAYER, step.group)
    assert v.dtype == torch.float32
    check_shrunk(step, v)
    check_expand(step, v)


def check_shrunk(step: Step, v: torch.Tensor) -> None:
    """Products are exact, so only the order of d_in float32 sums differs from the equation."""
    truth = step.shrunk()
    scale = max(1.0, truth.abs().max().item())
    atol = step.group.d_in * torch.finfo(torch.float32).eps * scale
    torch.testing.assert_close(v.cpu(), truth, rtol=0, atol=atol)


def check_expand(step: Step, v: torch.Tensor) -> None:
    """With NaN wherever expand must not read, and where it must not write.

    y is rounded once; TF32 keeps v within 2^-10 where B has 16 bits.
    """
    v, dtype = v.clone(), step.x.dtype
    written = torch.zeros(len(step.x), sum(step.group.d_outs), dtype=torch.bool)
    for slot, start, length in step.runs:
        column = 0
        for index, (linear, d_out) in enumerate(
            zip(step.group.linears, step.group.d_outs, strict=True)
        ):
            rank = len(step.a[slot, linear])
            v[start : start + length, index, rank:] = torch.nan
            written[start : start + length, column : column + d_out] = rank > 0
            column += d_out
    y = torch.randn(written.shape)
    y[~written] = torch.nan
    y = y.to(v.device, dtype)
    truth = step.expanded(y, step.shrunk())
    expand(v, y, step.weights, step.segments, LAYER, step.group)
    got = y.float().cpu()
    assert torch.equal(torch.isnan(got), ~written)
    sizes = replace(step, b={key: b.abs() for key, b in step.b.items()})
    products = sizes.expanded(torch.zeros_like(got), step.shrunk().abs())
    per_product = 1e-5 if dtype == torch.float32 else 2**-10
    slack = 2 * torch.finfo(dtype).eps * truth.abs() + per_product * products + 1e-5
    assert ((got - truth).abs() <= slack)[written].all()


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("rank", [1, 4, 8, 12, 16, 24, 64, 128])
def test_one_adapter_of_any_rank(kind: tuple[str, torch.dtype], rank: int) -> None:
    check(make_step(*kind, DOWN, [rank], [(0, 0, 5)], tokens=5))


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("tokens", [1, 63, 133])
@pytest.mark.parametrize("group", [QKV, WIDE, DOWN])
def test_any_number_of_tokens_of_one_adapter(
    kind: tuple[str, torch.dtype], tokens: int, group: LoraGroup
) -> None:
    check(make_step(*kind, group, [8], [(0, 0, tokens)], tokens))


@pytest.mark.parametrize("kind", DEVICES)
def test_adapters_of_mixed_rank_with_base_tokens_between(kind: tuple[str, torch.dtype]) -> None:
    check(make_step(*kind, WIDE, MIXED_RANKS, MIXED_RUNS, tokens=133))


@pytest.mark.parametrize("kind", DEVICES)
def test_the_reference_holds_the_same_equation(kind: tuple[str, torch.dtype]) -> None:
    step = make_step(*kind, WIDE, MIXED_RANKS, MIXED_RUNS, tokens=133)
    check_shrunk(step, reference.shrink(step.x, step.weights, step.segments, LAYER, WIDE))


@pytest.mark.parametrize("kind", DEVICES)
def test_many_adapters_of_one_token_each(kind: tuple[str, torch.dtype]) -> None:
    runs = [(slot, token, 1) for token, slot in enumerate(reversed(range(33)))]
    check(make_step(*kind, QKV, [8] * 33, runs, tokens=33))


@pytest.mark.parametrize("kind", DEVICES)
def test_an_input_so_wide_that_several_programs_share_it(kind: tuple[str, torch.dtype]) -> None:
    check(make_step(*kind, LONG, MIXED_RANKS, MIXED_RUNS, tokens=133))


@pytest.mark.parametrize("kind", DEVICES)
def test_rank_0_leaves_its_rows_alone(kind: tuple[str, torch.dtype]) -> None:
    check(make_step(*kind, DOWN, [0, 8], [(0, 0, 3), (1, 3, 4)], tokens=7))


@pytest.mark.parametrize("kind", DEVICES)
def test_a_maximum_rank_above_every_adapters_changes_nothing(
    kind: tuple[str, torch.dtype],
) -> None:
    check(make_step(*kind, QKV, [8, 12], [(0, 0, 3), (1, 3, 1)], tokens=4, max_rank=100))


@pytest.mark.parametrize("kind", DEVICES)
def test_empty_segments_pad_a_step(kind: tuple[str, torch.dtype]) -> None:
    check(make_step(*kind, DOWN, [8, 4], [(1, 1, 5)], tokens=9, padding=3))


@pytest.mark.parametrize("kind", DEVICES)
def test_a_step_without_any_adapter_touches_nothing(kind: tuple[str, torch.dtype]) -> None:
    check(make_step(*kind, DOWN, [8], [], tokens=4, padding=2))


@pytest.mark.parametrize("kind", DEVICES)
def test_rows_of_a_wider_tensor_are_taken_as_they_lie(kind: tuple[str, torch.dtype]) -> None:
    step = make_step(*kind, DOWN, [8], [(0, 0, 5)], tokens=5)
    wide = torch.full((5, 200), torch.nan, dtype=kind[1], device=kind[0])
    wide[:, 40:170] = step.x
    dense = shrink(step.x, step.weights, step.segments, LAYER, step.group)
    strided = shrink(wide[:, 40:170], step.weights, step.segments, LAYER, step.group)
    assert torch.equal(dense, strided)


@pytest.mark.parametrize("kind", DEVICES)
def test_a_tokens_result_does_not_depend_on_its_neighbours(
    kind: tuple[str, torch.dtype],
) -> None:
    step = make_step(*kind, WIDE, [16, 8], [(0, 0, 70), (1, 70, 63)], tokens=133)
    together = shrink(step.x, step.weights, step.segments, LAYER, step.group)
    alone = make_step(*kind, WIDE, [16, 8], [(1, 0, 1)], tokens=1)
    last = shrink(step.x[-1:], step.weights, alone.segments, LAYER, step.group)
    torch.testing.assert_close(last[0], together[-1], rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", DEVICES)
def test_an_arena_in_another_dtype_than_the_model(kind: tuple[str, torch.dtype]) -> None:
    step = make_step(*kind, DOWN, [8], [(0, 0, 5)], tokens=5)
    v = shrink(step.x.float(), step.weights, step.segments, LAYER, step.group)
    check_shrunk(step, v)


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize(
    "group",
    [
        LoraGroup((6,), d_in=131, d_outs=(72,)),
        LoraGroup((0, 2), d_in=130, d_outs=(8, 8)),
        LoraGroup((6, 7), d_in=130, d_outs=(8, 8)),
        LoraGroup((5, 6), d_in=130, d_outs=(8,)),
    ],
)
def test_operands_that_do_not_fit_are_refused(
    kind: tuple[str, torch.dtype], group: LoraGroup
) -> None:
    step = make_step(*kind, DOWN, [8], [(0, 0, 5)], tokens=5)
    with pytest.raises(ShapeError):
        shrink(step.x, step.weights, step.segments, LAYER, group)


@pytest.mark.parametrize("kind", DEVICES)
def test_a_v_of_another_width_is_refused(kind: tuple[str, torch.dtype]) -> None:
    step = make_step(*kind, DOWN, [8], [(0, 0, 5)], tokens=5)
    y = torch.zeros(5, 72, dtype=kind[1], device=kind[0])
    with pytest.raises(ShapeError):
        expand(torch.zeros(5, 1, 9), y, step.weights, step.segments, LAYER, step.group)
