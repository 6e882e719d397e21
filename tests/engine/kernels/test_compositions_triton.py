"""The Triton LoRA kernels add up the adapters of a composition, beside adapters alone.

On CUDA the tests marked `gpu` run the compiled kernels. Without a GPU the same tests run in
Triton's interpreter, in a process that test_in_interpreter.py starts.
"""

from dataclasses import replace

import pytest
import torch

from lorikeet_engine.adapter import MAX_MEMBERS
from lorikeet_engine.kernels.lora import reference
from lorikeet_engine.kernels.lora.expand import expand
from lorikeet_engine.kernels.lora.expand_act import expand_act_and_mul
from lorikeet_engine.kernels.lora.shrink import shrink
from lorikeet_engine.kernels.lora.tuning import Regime
from lorikeet_engine.kernels.lora.types import LoraGroup, LoraWeights
from tests.engine.interpreter import INTERPRETED, slow
from tests.engine.kernels.test_lora_triton import (
    DOWN,
    EMBEDDINGS,
    GATE_UP,
    LAYER,
    LONG,
    PREFILL_TOKENS,
    QKV,
    WIDE,
    Kind,
    Step,
    _nan_in_fresh_memory,  # noqa: F401
    _small_cuts,  # noqa: F401
    both_kinds,
    check,
    check_activation,
    check_delta,
    check_embeddings,
    check_sum,
    check_vectors,
    make_step,
    with_vectors,
)
from tests.engine.pairs import pairs

RANKS = [12, 0, 20 if INTERPRETED else 60, 4, 16]  # which the interpreter pads to a power of 2
# Weights are numbers of bfloat16, of both signs, and 0.
COMPOSITIONS = [
    [(0, 0.5), (2, -1.25)],
    [(4, 2.0)],
    [(3, 1.0), (1, 1.0), (4, 0.0), (0, -2.0)],
]
FIRST, SECOND, THIRD = (len(RANKS) + i for i in range(3))


def composed(
    kind: Kind, group: LoraGroup, runs: list[tuple[int, int]], *, base_tokens: int = 0
) -> Step:
    """Make a step in which slots from len(RANKS) on are those of COMPOSITIONS."""
    ranks = [*RANKS, *[0] * len(COMPOSITIONS)]
    most = max(sum(RANKS[slot] for slot, _ in members) for members in COMPOSITIONS)
    step = make_step(kind, group, ranks, runs, max_rank=most, base_tokens=base_tokens)
    step.weights.table[len(RANKS) :] = 0
    members = torch.full((len(ranks), MAX_MEMBERS), -1, dtype=torch.int32)
    weights = torch.full((len(ranks), MAX_MEMBERS), torch.nan)
    members[:, 0], weights[:, 0] = torch.arange(len(ranks)), 1.0
    for slot, parts in enumerate(COMPOSITIONS, len(RANKS)):
        members[slot, : len(parts)] = torch.tensor([member for member, _ in parts])
        weights[slot, : len(parts)] = torch.tensor([weight for _, weight in parts])
        for linear in group.linears:
            step.a[slot, linear] = torch.cat([w * step.a[each, linear] for each, w in parts])
            step.b[slot, linear] = torch.cat([step.b[each, linear] for each, _ in parts])
    on_device = members.to(kind[0]), weights.to(kind[0])
    return replace(
        step,
        weights=LoraWeights(step.weights.arena, step.weights.table, None, *on_device),
        segments=replace(step.segments, composed=True),
    )


@both_kinds
@pytest.mark.parametrize(
    ("group", "runs"),
    pairs(
        [DOWN, WIDE],
        [
            [(FIRST, 1), (0, 2), (THIRD, 1), (SECOND, 2)],
            [(2, 3), (THIRD, 17), (FIRST, 2 if INTERPRETED else 20), (1, 3)],
        ],
    ),
)
def test_adapters_are_added_up_beside_adapters_alone(
    kind: Kind, group: LoraGroup, runs: list[tuple[int, int]]
) -> None:
    check(composed(kind, group, runs, base_tokens=3))


@both_kinds
def test_an_input_so_wide_that_several_programs_share_it(kind: Kind) -> None:
    check(composed(kind, LONG, [(FIRST, 1), (THIRD, 9)]))


@both_kinds
def test_a_prefill(kind: Kind) -> None:
    step = composed(kind, QKV, [(FIRST, PREFILL_TOKENS), (THIRD, 90), (0, 5)])
    assert step.tiles().regime == Regime.PREFILL
    check(step)


@both_kinds
@pytest.mark.parametrize("runs", [[(FIRST, 1), (1, 2), (2, 1)], [(THIRD, 17), (0, 4), (1, 3)]])
def test_a_delta_can_be_added_to_its_product(kind: Kind, runs: list[tuple[int, int]]) -> None:
    step = composed(kind, DOWN, runs, base_tokens=4)
    product = torch.randn(len(step.x), 72).to(*kind)
    y = product.clone()
    expand(shrink(step.x, step.weights, step.tiles(), LAYER, DOWN), y, add=True)
    check_sum(step, product, y)


@both_kinds
@pytest.mark.parametrize("gelu", [False, *slow(True)])
def test_the_activation_of_a_prefill_adds_them_up(kind: Kind, gelu: bool) -> None:
    tokens = PREFILL_TOKENS // 2
    step = composed(kind, GATE_UP, [(FIRST, tokens), (0, tokens), (THIRD, 9)], base_tokens=70)
    step.x[-70:] = 1.0
    product = torch.randn(len(step.x), 2 * 130).to(*kind)
    shrunk = shrink(step.x, step.weights, step.tiles(), LAYER, GATE_UP)
    floats = product.float().cpu()
    off = torch.finfo(kind[1]).eps * (floats.abs() + step.sizes().nan_to_num()) + 1e-5
    got = expand_act_and_mul(product, shrunk, gelu=gelu)
    check_activation(got, floats + step.delta().nan_to_num(), off, gelu=gelu)


@both_kinds
@pytest.mark.parametrize("runs", [[(FIRST, 1), (1, 2), (2, 1)], [(THIRD, 17), (0, 4), (1, 3)]])
def test_adapters_of_embeddings_are_added_up(kind: Kind, runs: list[tuple[int, int]]) -> None:
    check_embeddings(kind, composed(kind, EMBEDDINGS, runs, base_tokens=4))


@both_kinds
@pytest.mark.parametrize("runs", [[(FIRST, 1), (1, 2), (3, 1)], [(THIRD, 17), (0, 4), (3, 9)]])
def test_compositions_share_a_step_with_vectors(kind: Kind, runs: list[tuple[int, int]]) -> None:
    step = composed(kind, QKV, runs, base_tokens=2)
    members = step.weights.members, step.weights.member_weights
    own = {(slot, n) for slot in range(len(RANKS), len(RANKS) + 3) for n in QKV.linears}
    step, (gain, bias) = with_vectors(step, own)
    step = replace(
        step,
        weights=replace(step.weights, members=members[0], member_weights=members[1]),
    )
    check_vectors(step, torch.randn(len(step.x), sum(QKV.d_outs)).to(*kind), gain, bias)


@both_kinds
def test_the_reference_adds_adapters_up_as_the_kernels_do(kind: Kind) -> None:
    step = composed(kind, WIDE, [(FIRST, 1), (1, 2), (THIRD, 17)])
    product = torch.zeros(len(step.x), sum(WIDE.d_outs)).to(*kind).cpu()
    on_cpu = [
        None if each is None else each.cpu()
        for each in (
            step.weights.arena,
            step.weights.table,
            None,
            step.weights.members,
            step.weights.member_weights,
        )
    ]
    s = step.segments
    segments = replace(s, slots=s.slots.cpu(), starts=s.starts.cpu(), lengths=s.lengths.cpu())
    reference.add_lora(product, step.x.cpu(), LoraWeights(*on_cpu), segments, LAYER, WIDE)
    check_delta(step, product)
