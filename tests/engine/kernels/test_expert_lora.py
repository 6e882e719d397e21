"""LoRA of experts against float32 sums written out here, at odd counts.

On CUDA the tests marked `gpu` run the compiled kernels in bfloat16, too. Without a GPU the same
tests run in Triton's interpreter, in a process that test_in_interpreter.py starts, and here with
the reference.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lorikeet_engine.kernels.lora import expert_rows, reference
from lorikeet_engine.kernels.lora.types import (
    ExpertStep,
    LoraGroup,
    LoraStep,
    LoraWeights,
    Segments,
)
from lorikeet_engine.kernels.moe import route
from lorikeet_engine.kernels.routed_rows import RoutedRows
from tests.engine.interpreter import INTERPRETED, slow

if INTERPRETED:
    KINDS = [("cpu", torch.float32)]
else:
    KINDS = [
        pytest.param(("cuda", dtype), marks=pytest.mark.gpu)
        for dtype in (torch.float32, torch.bfloat16)
    ]
kinds = pytest.mark.parametrize("kind", KINDS)

LAYERS, LINEARS, LAYER = 2, 8, 1
GATE_UP = LoraGroup((5, 6), d_in=72, d_outs=(40, 40))
DOWN = LoraGroup((7,), d_in=40, d_outs=(72,))
LONG = LoraGroup((7,), d_in=1300, d_outs=(530,))
groups = pytest.mark.parametrize("group", [GATE_UP, DOWN], ids=["gate_up", "down"])


@dataclass(frozen=True)
class Case:
    """A case: the runs' slots with their ranks, and each token's experts."""

    runs: tuple[tuple[int, int], ...]  # slot, tokens
    ranks: tuple[int, ...]  # of each slot; 0: leaves experts alone
    tokens: int
    experts: int
    per_token: int
    favourite: int | None = None  # an expert of all tokens
    padding: int = 0  # segments of length 0
    outer: tuple[int, ...] = ()  # slots whose experts share A of gate and up, and B of down
    one_a: tuple[int, ...] = ()  # slots whose up has gate's A


RUN = 21 if INTERPRETED else 40  # tokens of a long run
LARGE = 17 if INTERPRETED else 33  # a rank that does not fit one block of 16
CASES = {
    "a_token": Case(((1, 1),), (3, 4), 1, 5, 2),
    "more_experts_than_rows": Case(((0, 1), (2, 2)), (4, 1, 16), 4, 37, 2),
    "an_expert_with_all": Case(((0, 2), (1, 3)), (5, 16), 7, 5, 3, favourite=4),
    "mixed_ranks_and_none": Case(((2, 2), (0, 5), (1, 1)), (LARGE, 0, 7), 11, 5, 3),
    "many_rows_of_one": Case(((0, 150),), (12,), 157, 2, 2),
    "padded_segments": Case(((1, 5), (0, 2)), (4, 8), 9, 3, 1, padding=140),
    "shared_outer_beside_others": Case(
        ((2, 2), (0, 3), (3, 2), (1, 1)), (LARGE, 7, 4, 16), 9, 4, 2, outer=(0, 2), one_a=(2, 3)
    )
    if INTERPRETED
    else Case(
        ((2, 5), (0, 7), (3, 2), (1, 4)), (LARGE, 7, 4, 16), 20, 5, 3, outer=(0, 2), one_a=(2, 3)
    ),
    "long_runs_of_shared_outer": Case(
        ((1, RUN), (0, RUN * 3 // 2)), (12, 17), RUN * 5 // 2 + 1, 3, 2, outer=(0, 1), one_a=(1,)
    ),
}


@dataclass(frozen=True)
class Made:
    step: LoraStep
    routed: RoutedRows
    group: LoraGroup
    x: torch.Tensor  # [tokens, d_in]
    y: torch.Tensor  # [rows, sum(d_outs)]
    want: torch.Tensor  # y with the delta, in float32, of x[token] for each row

    def rows_of_x(self) -> torch.Tensor:
        return self.x[self.routed.pairs.long() // self.routed.per_token]


def make(
    case: Case, group: LoraGroup, kind: tuple[str, torch.dtype], *, copied: bool = False
) -> Made:
    """Random adapters whose gaps hold NaN, and the equation row by row.

    A that gate and up share are in the arena once, as are matrices that all experts share.

    copied: whether the arena has a copy of the latter for each expert instead.
    """
    device, dtype = kind
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.3).to(dtype)

    table = torch.zeros(len(case.ranks), LAYERS, LINEARS, 3, dtype=torch.int64)
    stored, end = [], 0
    a, b = {}, {}
    for slot, rank in enumerate(case.ranks):
        for s, linear in enumerate(group.linears if rank else ()):
            has_gates_a = s > 0 and slot in case.one_a
            own = rank if has_gates_a else rank + s  # gate and up may have ranks of their own
            for side, width in enumerate((group.d_in, group.d_outs[s])):
                once = slot in case.outer and side == (group is not GATE_UP)
                matrix = random(1 if once else case.experts, own, width)
                if side == 0 and has_gates_a:
                    a[slot, s] = a[slot, s - 1]
                    table[slot, LAYER, linear, 0] = table[slot, LAYER, linear - 1, 0]
                    continue
                (a, b)[side][slot, s] = matrix.expand(case.experts, own, width)
                if copied:
                    once, matrix = False, (a, b)[side][slot, s]
                table[slot, LAYER, linear, side] = end + once
                gap = -matrix.numel() % 16 + 16
                stored += [matrix.flatten(), torch.full((gap,), torch.nan, dtype=dtype)]
                end += matrix.numel() + gap
            table[slot, LAYER, linear, 2] = own
    logits = torch.randn(case.tokens, case.experts, generator=generator)
    if case.favourite is not None:
        logits[:, case.favourite] = 99.0
    routed = route(logits, case.per_token, normalised=True)
    x = random(case.tokens, group.d_in)
    y = random(len(routed.pairs), sum(group.d_outs))
    want = y.float().clone()
    owners = [slot for slot, length in case.runs for _ in range(length)]
    bounds = routed.starts.tolist()
    for row, pair in enumerate(routed.pairs.tolist()):
        token = pair // case.per_token
        expert = sum(bound <= row for bound in bounds[1:])
        if token >= len(owners) or not case.ranks[owners[token]]:
            continue
        delta = [
            a[owners[token], s][expert].float()
            @ x[token].float()
            @ b[owners[token], s][expert].float()
            for s in range(len(group.linears))
        ]
        want[row] += torch.cat(delta)
    lengths = torch.tensor([length for _, length in case.runs] + [0] * case.padding)
    slots = torch.tensor([slot for slot, _ in case.runs] + [0] * case.padding)
    segments = Segments(
        slots.int().to(device),
        (lengths.cumsum(0) - lengths).int().to(device),
        lengths.int().to(device),
        max_rank=max(case.ranks) + 1,
    )
    arena = torch.cat(stored).to(device)
    moved = RoutedRows(*(getattr(routed, f).to(device) for f in RoutedRows.__slots__))
    step = LoraStep(LoraWeights(arena, table.to(device)), segments, None)
    return Made(step, moved, group, x.to(device), y.to(device), want.to(device))


def check(made: Made, module: object, *, gathered: bool) -> None:
    owners = module.list_owners(made.step.segments, made.routed)
    assert torch.equal(owners, reference.list_owners(made.step.segments, made.routed))
    x = made.x if gathered else made.rows_of_x().contiguous()
    experts = ExpertStep(made.step, made.routed, owners)
    torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
    try:
        module.add_expert_lora(made.y, x, experts, LAYER, made.group, gathered=gathered)
    finally:
        torch.use_deterministic_algorithms(False)
    rtol, atol = (1e-4, 1e-5) if made.y.dtype == torch.float32 else (2e-2, 3e-2)
    torch.testing.assert_close(made.y.float(), made.want, rtol=rtol, atol=atol)


WAYS = {"tiles": 0, "singles": 10**6}  # rows of a run from which tiles are used


@pytest.fixture(params=WAYS)
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernels of tiles, or those of single rows, however long the runs are."""
    monkeypatch.setattr(expert_rows, "_TILED_FROM", WAYS[request.param])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@groups
def test_the_reference_adds_each_rows_adapter_of_its_expert(case: Case, group: LoraGroup) -> None:
    made = make(case, group, ("cpu", torch.float32))
    check(made, reference, gathered=group is GATE_UP)


def both_ways_of(names: Iterable[str]) -> list[Any]:
    """Pair cases with tiles and with single rows, to which runs of any length are alike."""
    pairs = [(way, name) for way in WAYS for name in names]
    alike = [("singles", name) for name in ("many_rows_of_one", "long_runs_of_shared_outer")]
    return [
        pair if pair not in alike else pytest.param(*pair, marks=pytest.mark.soak) for pair in pairs
    ]


@kinds
@pytest.mark.parametrize(("both_ways", "name"), both_ways_of(CASES), indirect=["both_ways"])
@pytest.mark.usefixtures("both_ways")
@groups
def test_the_kernels_add_each_rows_adapter_of_its_expert(
    name: str, group: LoraGroup, kind: tuple[str, torch.dtype]
) -> None:
    check(make(CASES[name], group, kind), expert_rows, gathered=group is GATE_UP)


@kinds
@pytest.mark.parametrize(
    ("both_ways", "name"),
    [
        ("singles", "shared_outer_beside_others"),
        ("tiles", "long_runs_of_shared_outer"),
        *slow(("tiles", "shared_outer_beside_others"), ("singles", "long_runs_of_shared_outer")),
    ],
    indirect=["both_ways"],
)
@pytest.mark.usefixtures("both_ways")
@groups
def test_a_shared_matrix_adds_exactly_what_its_copies_add(
    name: str, group: LoraGroup, kind: tuple[str, torch.dtype]
) -> None:
    shared, copied = (make(CASES[name], group, kind, copied=each) for each in (False, True))
    assert shared.step.weights.arena.numel() < copied.step.weights.arena.numel()
    for made in (shared, copied):
        check(made, expert_rows, gathered=group is GATE_UP)
    assert torch.equal(shared.y, copied.y)


@kinds
@pytest.mark.usefixtures("both_ways")
def test_a_wide_input_is_split_and_summed(kind: tuple[str, torch.dtype]) -> None:
    check(make(CASES["more_experts_than_rows"], LONG, kind), expert_rows, gathered=False)


@kinds
@pytest.mark.usefixtures("both_ways")
def test_rows_that_are_not_dense_are_read_by_their_strides(
    kind: tuple[str, torch.dtype],
) -> None:
    made = make(CASES["padded_segments"], GATE_UP, kind)
    wide = made.x.new_full((len(made.x), 2 * made.x.shape[1]), torch.nan)
    wide[:, : made.x.shape[1]] = made.x
    strided = Made(
        made.step, made.routed, made.group, wide[:, : made.x.shape[1]], made.y, made.want
    )
    check(strided, expert_rows, gathered=True)
