"""The Triton LoRA kernels against float32 sums written out here.

On CUDA the tests marked `gpu` run the compiled kernels in bfloat16. Without a GPU the same tests
run in Triton's interpreter, in a process that test_in_interpreter.py starts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch.nn import functional as F

from lorikeet_engine.errors import ShapeError
from lorikeet_engine.kernels.lora import reference, tuning
from lorikeet_engine.kernels.lora import tiles as tiles_module
from lorikeet_engine.kernels.lora.expand import expand
from lorikeet_engine.kernels.lora.expand_act import expand_act_and_mul
from lorikeet_engine.kernels.lora.gather import gather
from lorikeet_engine.kernels.lora.linear import (
    add_lora,
    begin_step,
    linear_with_lora,
    linear_with_lora_before_act,
)
from lorikeet_engine.kernels.lora.shrink import shrink
from lorikeet_engine.kernels.lora.tiles import Tiles, list_tiles
from lorikeet_engine.kernels.lora.tuning import (
    FEW_TOKENS,
    LaunchConfig,
    Regime,
    launch_config,
)
from lorikeet_engine.kernels.lora.types import LoraDelta, LoraGroup, LoraWeights, Segments
from tests.engine.interpreter import INTERPRETED, slow

Kind = tuple[str, torch.dtype]
if INTERPRETED:  # which is slow: bfloat16 is for a few
    FLOAT, BFLOAT = ("cpu", torch.float32), ("cpu", torch.bfloat16)
    kinds = pytest.mark.parametrize("kind", [FLOAT])
else:
    FLOAT = pytest.param(("cuda", torch.float32), marks=pytest.mark.gpu)
    BFLOAT = pytest.param(("cuda", torch.bfloat16), marks=pytest.mark.gpu)
    kinds = pytest.mark.parametrize("kind", [FLOAT, BFLOAT])
both_kinds = pytest.mark.parametrize("kind", [FLOAT, BFLOAT])


# Two tiles of a prefill and some tokens more.
PREFILL_TOKENS = 140 if INTERPRETED else tuning.PREFILL_TOKENS
LAYERS, LINEARS, LAYER = 3, 7, 1
QKV = LoraGroup((0, 1, 2), d_in=96, d_outs=(80, 16, 24))
WIDE = LoraGroup((4, 5), d_in=200, d_outs=(130, 67))
GATE_UP = LoraGroup((4, 5), d_in=96, d_outs=(130, 130))
GATE_UP_AS_ONE = LoraGroup((4,), d_in=96, d_outs=(260,))
DOWN = LoraGroup((6,), d_in=130, d_outs=(72,))
SMALL = LoraGroup((4, 5), d_in=40, d_outs=(36, 20))
EMBEDDINGS = LoraGroup((6,), d_in=50, d_outs=(72,))
NO_ROWS = LoraGroup((5,), d_in=72, d_outs=(3,))
LONG = LoraGroup((6,), d_in=1300, d_outs=(24,))
MIXED_RANKS = [4, 20 if INTERPRETED else 64, 12, 1, 16]
MIXED_RUNS = [(3, 2), (0, 16), (4, 17), (1, 1), (2, 35)]


@dataclass(frozen=True)
class Step:
    """Random adapters and the tokens that use them; every gap holds NaN."""

    weights: LoraWeights
    segments: Segments
    group: LoraGroup
    x: torch.Tensor
    a: dict[tuple[int, int], torch.Tensor]
    b: dict[tuple[int, int], torch.Tensor]
    owners: list[int]

    def tiles(self) -> Tiles:
        return list_tiles(self.segments, len(self.x))

    def shrunk(self) -> torch.Tensor:
        """The equation, in float32: NaN where nothing is computed."""
        v = torch.full((len(self.x), len(self.group.linears), self.segments.max_rank), torch.nan)
        for token, slot in enumerate(self.owners):
            for index, member in enumerate(self.group.linears):
                a = self.a[slot, member]
                v[token, index, : len(a)] = a @ self.x[token].float().cpu()
        return v

    def delta(self) -> torch.Tensor:
        """The equation, in float32: NaN for tokens without an adapter."""
        v, delta = self.shrunk(), torch.full((len(self.x), sum(self.group.d_outs)), torch.nan)
        for token, slot in enumerate(self.owners):
            parts = [
                v[token, index, : len(self.b[slot, member])] @ self.b[slot, member]
                for index, member in enumerate(self.group.linears)
            ]
            delta[token] = torch.cat(parts)
        return delta

    def sizes(self) -> torch.Tensor:
        """Delta of all absolute values, the scale of an element's rounding errors."""
        a = {key: matrix.abs() for key, matrix in self.a.items()}
        b = {key: matrix.abs() for key, matrix in self.b.items()}
        return replace(self, a=a, b=b, x=self.x.abs()).delta()


def make_step(
    kind: Kind,
    group: LoraGroup,
    ranks: list[int],
    runs: list[tuple[int, int]],
    *,
    base_tokens: int = 0,
    max_rank: int | None = None,
    padding: int = 0,
) -> Step:
    """ranks: of each slot; 0 touches nothing. runs: (slot, length), one after the other.

    padding: segments of length 0 behind them. base_tokens: tokens without an adapter at the end.
    """
    device, dtype = kind
    torch.manual_seed(sum(length for _, length in runs) + sum(ranks))
    table = torch.zeros(len(ranks), LAYERS, LINEARS, 3, dtype=torch.int64)
    pieces, a, b, used = [], {}, {}, 0
    for slot, rank in enumerate(ranks):
        for linear_index, d_out in zip(group.linears, group.d_outs, strict=True):
            key, places = (slot, linear_index), []
            a[key] = (torch.randn(rank, group.d_in) / group.d_in**0.5).to(dtype).float()
            b[key] = torch.randn(rank, d_out).to(dtype).float()
            for matrix in (a[key], b[key]):
                gap = torch.full((16 + -used % 16,), torch.nan)
                places.append(used + len(gap))
                pieces += [gap, matrix.flatten()]
                used = places[-1] + matrix.numel()
            table[slot, LAYER, linear_index] = torch.tensor([*places, rank])
    arena = torch.cat([*pieces, torch.full((7,), torch.nan)]).to(dtype)
    owners = [slot for slot, length in runs for _ in range(length)]
    x = torch.full((len(owners) + base_tokens, group.d_in), torch.nan)
    x[: len(owners)] = torch.randn(len(owners), group.d_in)
    starts = [sum(length for _, length in runs[:i]) for i in range(len(runs))]
    rows = [(slot, start, length) for (slot, length), start in zip(runs, starts, strict=True)]
    columns = torch.tensor([*rows, *[(0, 0, 0)] * padding], dtype=torch.int32).reshape(-1, 3)
    slots, starts_, lengths = columns.T.contiguous().to(device)
    return Step(
        LoraWeights(arena.to(device), table.to(device)),
        Segments(slots, starts_, lengths, max(ranks) if max_rank is None else max_rank),
        group,
        x.to(device, dtype),
        a,
        b,
        owners,
    )


@pytest.fixture(autouse=True)
def _small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter pays for every element of a block, used or not."""
    if not INTERPRETED:
        return

    def small(regime: Regime, device: torch.device) -> LaunchConfig:
        config = launch_config(regime, device)
        shrunk = replace(config.shrink, block_in=64)
        return replace(config, shrink=shrunk, expand=replace(config.expand, columns=32))

    monkeypatch.setattr(tiles_module, "launch_config", small)
    monkeypatch.setattr(tuning, "PREFILL_TOKENS", PREFILL_TOKENS)


@pytest.fixture(autouse=True)
def _nan_in_fresh_memory() -> Iterator[None]:
    """Fill what torch.empty returns with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def check(step: Step) -> None:
    """Both kernels agree with the equation, and write nothing else."""
    shrunk = shrink(step.x, step.weights, step.tiles(), LAYER, step.group)
    assert shrunk.v.dtype == torch.float32
    check_shrunk(step, shrunk.v)
    delta = step.x.new_full((len(step.x), sum(step.group.d_outs)), torch.nan)
    expand(shrunk, delta)
    check_delta(step, delta)


def check_shrunk(step: Step, v: torch.Tensor) -> None:
    """Products are exact, so only the order of d_in float32 sums differs from the equation."""
    truth = step.shrunk()
    got = v.sum(1)[:, :, : step.segments.max_rank].cpu()
    scale = max(1.0, truth.nan_to_num().abs().max().item()) if truth.numel() else 1.0
    atol = step.group.d_in * torch.finfo(torch.float32).eps * scale
    torch.testing.assert_close(got, truth, rtol=0, atol=atol, equal_nan=True)


def check_delta(step: Step, delta: torch.Tensor) -> None:
    """Delta is rounded once; v may be rounded to the adapters' dtype before."""
    truth, dtype = step.delta(), step.x.dtype
    got = delta.float().cpu()
    assert torch.equal(torch.isnan(got), torch.isnan(truth))
    eps = torch.finfo(dtype).eps
    slack = eps * truth.abs() + eps * step.sizes() + 1e-5
    assert ((got - truth).abs() <= slack)[~torch.isnan(truth)].all()


def check_sum(step: Step, product: torch.Tensor, y: torch.Tensor) -> None:
    """The delta was added to the product: y, which is rounded once.

    Rows without an adapter, or of slot 1, which has rank 0, are as they were to the bit.
    """
    owned = torch.tensor([slot != 1 for slot in step.owners] + [False] * 4)
    assert torch.equal(y[~owned], product[~owned])
    eps = torch.finfo(product.dtype).eps
    slack = eps * (step.sizes() + product.float().abs().cpu()) + 1e-5
    error = (y.float().cpu() - product.float().cpu() - step.delta()).abs()
    assert (error <= slack)[owned].all()


def check_activation(
    got: torch.Tensor, sums: torch.Tensor, off: torch.Tensor, *, gelu: bool = False
) -> None:
    """Compare an activation of sums [tokens, gates then values], each of which may be off by `off`.

    The slope of either activation is below 1.13.
    """
    (gates, values), (gates_off, values_off) = sums.chunk(2, dim=1), off.chunk(2, dim=1)
    want = (F.gelu(gates, approximate="tanh") if gelu else F.silu(gates)) * values
    slack = 1.13 * gates_off * values.abs() + gates.abs() * values_off + gates_off * values_off
    eps = torch.finfo(got.dtype).eps
    assert ((got.float().cpu() - want).abs() <= slack + eps * want.abs() + 1e-5).all()


def check_vectors(
    step: Step, product: torch.Tensor, gain: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Add the step's LoRA delta to a product of QKV, with gains and biases, and compare the sum."""
    y = product.clone()
    shrunk = shrink(step.x, step.weights, step.tiles(), LAYER, QKV)
    expand(replace(shrunk, has_vectors=True), y, add=True)
    held = step.delta().nan_to_num() + product.float().cpu()
    want = held + gain * held + bias
    sizes = product.float().cpu().abs() + step.sizes().nan_to_num()
    slack = torch.finfo(y.dtype).eps * (want.abs() + (1 + gain.abs()) * sizes) + 1e-5
    assert ((y.float().cpu() - want).abs() <= slack).all()
    return y


def check_embeddings(kind: Kind, step: Step) -> None:
    """Compare the LoRA delta of random token ids with that of a linear on unit vectors."""
    ids = torch.randint(0, 50, (len(step.x),))
    step = replace(step, x=F.one_hot(ids, 50).to(*kind))
    for slot, (at, _, rank) in enumerate(step.weights.table[:, LAYER, 6].tolist()):
        if rank:
            step.weights.arena[at : at + rank * 50] = step.a[slot, 6].T.flatten().to(kind[1])
    product = torch.randn(len(step.x), 72).to(*kind)
    y, ids = product.clone(), ids.to(kind[0])
    expand(gather(ids, y, step.weights, step.tiles(), LAYER, EMBEDDINGS, NO_ROWS), y, add=True)
    check_sum(step, product, y)


def cut_into(tokens: int, runs: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Expected tiles of runs: (slot, start, length) of every tile."""
    wanted, start = [], 0
    for slot, length in runs:
        for done in range(0, length, tokens):
            wanted.append((slot, start + done, min(tokens, length - done)))
        start += length
    return wanted


@kinds
@pytest.mark.parametrize("rank", [1, 4, 8, 12, 16, 24, 64, *slow(128, 256)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_one_adapter_of_any_rank(kind: Kind, rank: int, tokens: int) -> None:
    check(make_step(kind, DOWN, [rank], [(0, tokens)]))


@kinds
@pytest.mark.parametrize("tokens", [1, 2, 63, *slow(133)])
@pytest.mark.parametrize("group", [QKV, WIDE, DOWN])
def test_any_number_of_tokens_of_one_adapter(kind: Kind, tokens: int, group: LoraGroup) -> None:
    check(make_step(kind, group, [8], [(0, tokens)]))


@both_kinds
def test_adapters_of_mixed_rank_before_base_tokens(kind: Kind) -> None:
    check(make_step(kind, WIDE, MIXED_RANKS, MIXED_RUNS, base_tokens=10))


@kinds
@pytest.mark.parametrize("ranks", [[8], [4, 64, 12]])
def test_a_prefill(kind: Kind, ranks: list[int]) -> None:
    """Too long to be written out token by token in the interpreter, but for its ends."""
    tokens = PREFILL_TOKENS // len(ranks) + 70
    step = make_step(kind, QKV, ranks, [(slot, tokens) for slot in range(len(ranks))])
    assert step.tiles().regime == Regime.PREFILL
    check(step)


@both_kinds
@pytest.mark.parametrize("ranks", [[8], *slow([64, 4])])
def test_many_adapters_of_a_token_or_two_each(kind: Kind, ranks: list[int]) -> None:
    runs = [(slot, 1 + slot % FEW_TOKENS) for slot in reversed(range(5))]
    step = make_step(kind, SMALL, (ranks * 5)[:5], runs)
    assert step.tiles().regime == Regime.FEW
    check(step)


@kinds
def test_an_input_so_wide_that_several_programs_share_it(kind: Kind) -> None:
    check(make_step(kind, LONG, [12, 64], [(0, 1), (1, 9)]))


@kinds
@pytest.mark.parametrize("tokens", [1, 20])
def test_rank_0_adds_zero(kind: Kind, tokens: int) -> None:
    check(make_step(kind, DOWN, [0, 8], [(0, tokens), (1, tokens)]))


@kinds
def test_a_maximum_rank_above_every_adapters_changes_nothing(kind: Kind) -> None:
    check(make_step(kind, QKV, [8, 12], [(0, 3), (1, 1)], max_rank=100))


@kinds
def test_empty_segments_pad_a_step(kind: Kind) -> None:
    check(make_step(kind, DOWN, [8, 4], [(1, 5)], base_tokens=3, padding=3))


@kinds
def test_a_step_without_any_adapter_touches_nothing(kind: Kind) -> None:
    check(make_step(kind, DOWN, [8], [], base_tokens=4, padding=2))


@kinds
@pytest.mark.parametrize(
    "runs",
    [
        [(0, 1)],
        [(2, 1), (0, 2), (1, 1)],
        [(1, 5), (0, 40), (2, 17)],
        [(slot, 1 + slot % 5) for slot in range(140)],
        [(0, 700), (1, 1), (2, 64)],
    ],
)
def test_tiles_cover_exactly_the_segments(kind: Kind, runs: list[tuple[int, int]]) -> None:
    step = make_step(kind, DOWN, [1] * len(runs), runs, base_tokens=3, padding=2)
    tiles = step.tiles()
    wanted = cut_into(tiles.config.tokens, [*runs, (-1, 3)])
    assert [tuple(row) for row in tiles.rows.tolist() if row[2]] == wanted
    assert tiles.tokens.item() == len(step.owners)


@kinds
def test_rows_of_a_wider_tensor_are_taken_as_they_lie(kind: Kind) -> None:
    step = make_step(kind, DOWN, [8], [(0, 5)])
    wide = torch.full((5, 200), torch.nan, dtype=kind[1], device=kind[0])
    wide[:, 40:170] = step.x
    dense = shrink(step.x, step.weights, step.tiles(), LAYER, step.group).v
    strided = shrink(wide[:, 40:170], step.weights, step.tiles(), LAYER, step.group).v
    assert torch.equal(dense[..., :8], strided[..., :8])


@kinds
def test_the_same_step_twice_is_the_same_to_the_bit(kind: Kind) -> None:
    step = make_step(kind, LONG, [4, 12], [(0, 1), (1, 9)])
    deltas = []
    for _ in range(2):
        delta = step.x.new_zeros(len(step.x), 24)
        expand(shrink(step.x, step.weights, step.tiles(), LAYER, step.group), delta)
        deltas.append(delta)
    assert torch.equal(*deltas)


@kinds
def test_an_arena_in_another_dtype_than_the_model(kind: Kind) -> None:
    step = make_step(kind, DOWN, [8], [(0, 5)])
    shrunk = shrink(step.x.float(), step.weights, step.tiles(), LAYER, step.group)
    check_shrunk(step, shrunk.v)


@kinds
@pytest.mark.parametrize(
    "group",
    [
        LoraGroup((6,), d_in=131, d_outs=(72,)),
        LoraGroup((0, 2), d_in=130, d_outs=(8, 8)),
        LoraGroup((6, 7), d_in=130, d_outs=(8, 8)),
        LoraGroup((5, 6), d_in=130, d_outs=(8,)),
    ],
)
def test_operands_that_do_not_fit_are_refused(kind: Kind, group: LoraGroup) -> None:
    step = make_step(kind, DOWN, [8], [(0, 5)])
    with pytest.raises(ShapeError):
        shrink(step.x, step.weights, step.tiles(), LAYER, group)


@kinds
def test_a_delta_of_another_shape_is_refused(kind: Kind) -> None:
    step = make_step(kind, DOWN, [8], [(0, 5)])
    shrunk = shrink(step.x, step.weights, step.tiles(), LAYER, step.group)
    for shape in ((4, 72), (5, 71)):
        with pytest.raises(ShapeError):
            expand(shrunk, torch.zeros(shape, dtype=kind[1], device=kind[0]))


@both_kinds
@pytest.mark.parametrize(
    ("ranks", "gelu"),
    [
        ([8], False),
        ([4, 0, 12], True),
        *slow(([8], True), ([4, 0, 12], False), ([4, 0, 100], False), ([4, 0, 100], True)),
    ],
)
def test_the_activation_of_a_prefill_expands_the_lora_delta(
    kind: Kind, ranks: list[int], gelu: bool
) -> None:
    tokens = PREFILL_TOKENS // len(ranks)
    runs = [(slot, tokens) for slot in range(len(ranks))]
    step = make_step(kind, GATE_UP, ranks, runs, base_tokens=70)
    step.x[-70:] = 1.0
    product = torch.randn(len(step.x), 2 * 130).to(*kind)
    shrunk = shrink(step.x, step.weights, step.tiles(), LAYER, GATE_UP)
    floats = product.float().cpu()
    off = torch.finfo(kind[1]).eps * (floats.abs() + step.sizes().nan_to_num()) + 1e-5
    got = expand_act_and_mul(product, shrunk, gelu=gelu)
    check_activation(got, floats + step.delta().nan_to_num(), off, gelu=gelu)


@pytest.mark.skipif(INTERPRETED, reason="streams are CUDA's")
@kinds
@pytest.mark.parametrize("runs", [[(0, 1)], MIXED_RUNS, [(1, 400), (0, 300)]])
def test_a_product_and_its_delta_in_and_out_of_a_graph(
    kind: Kind, runs: list[tuple[int, int]]
) -> None:
    step = make_step(kind, WIDE, MIXED_RANKS, runs)
    weight = torch.randn(sum(WIDE.d_outs), WIDE.d_in).to(kind[0], kind[1])
    want = step.x @ weight.T

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        lora = begin_step(step.weights, step.segments, len(step.x))
        y, delta = linear_with_lora(step.x, weight, None, lora, LAYER, WIDE)
        assert delta is not None
        return y, delta.rows

    plain = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    captured[1].fill_(torch.nan)
    graph.replay()
    for y, delta in (plain, captured):
        torch.testing.assert_close(y, want, rtol=2**-6, atol=2**-6)
        check_delta(step, delta)


@pytest.mark.skipif(INTERPRETED, reason="streams are CUDA's")
@kinds
def test_a_prefills_silu_is_handed_the_delta_of_one_linear_that_stores_both(kind: Kind) -> None:
    step = make_step(kind, GATE_UP_AS_ONE, [8, 12], [(0, PREFILL_TOKENS), (1, 30)])
    lora = begin_step(step.weights, step.segments, len(step.x))
    weight = torch.zeros(260, 96).to(kind[0], kind[1])
    _, delta = linear_with_lora_before_act(step.x, weight, None, lora, LAYER, GATE_UP_AS_ONE)
    assert isinstance(delta, LoraDelta)
    check_delta(step, delta.rows)


@both_kinds
@pytest.mark.parametrize("runs", [[(0, 1), (1, 2), (2, 1)], [(2, 17), (0, 40), (1, 3)]])
def test_a_delta_can_be_added_to_its_product(kind: Kind, runs: list[tuple[int, int]]) -> None:
    step = make_step(kind, DOWN, [12, 0, 40], runs, base_tokens=4, padding=2)
    product = torch.randn(len(step.x), 72).to(*kind)
    y = product.clone()
    expand(shrink(step.x, step.weights, step.tiles(), LAYER, DOWN), y, add=True)
    check_sum(step, product, y)


def with_vectors(step: Step, without: set[tuple[int, int]]) -> tuple[Step, torch.Tensor]:
    """Give each slot's linears random vectors, except those in `without`: (slot, linear).

    Returns the step, and the gain and bias of each token's outputs: [2, tokens, sum(d_outs)].
    """
    arena, table, used = step.weights.arena, step.weights.table, step.weights.arena.numel()
    places = torch.full(table.shape[:3], -1, dtype=torch.int64)
    of_tokens = torch.zeros(2, len(step.x), sum(step.group.d_outs))
    pieces, column = [arena.cpu()], 0
    for linear_index, d_out in zip(step.group.linears, step.group.d_outs, strict=True):
        for slot in range(len(table)):
            if (slot, linear_index) in without:
                continue
            gap = torch.full((16 + -used % 16,), torch.nan).to(arena.dtype)
            vectors = torch.randn(2, d_out).to(arena.dtype)
            places[slot, LAYER, linear_index] = used + len(gap)
            pieces += [gap, vectors.flatten()]
            used += len(gap) + vectors.numel()
            tokens = [token for token, owner in enumerate(step.owners) if owner == slot]
            of_tokens[:, tokens, column : column + d_out] = vectors.float()[:, None]
        column += d_out
    weights = LoraWeights(torch.cat(pieces).to(arena.device), table, places.to(arena.device))
    return replace(step, weights=weights), of_tokens


@both_kinds
@pytest.mark.parametrize(
    "runs",
    [
        [(0, 1), (1, 2), (2, 1), (3, 2)],
        [(3, 5), (2, 17), (0, 40), (1, 3)],
        *slow([(2, 500), (0, 40), (1, 3), (3, 30)]),
    ],
)
def test_vectors_scale_the_product_with_its_delta_and_add_a_bias(
    kind: Kind, runs: list[tuple[int, int]]
) -> None:
    step = make_step(kind, QKV, [12, 0, 40, 4], runs, base_tokens=4, padding=2)
    without = {(0, 0), (1, 2), *((3, linear) for linear in QKV.linears)}
    step, (gain, bias) = with_vectors(step, without)
    product = torch.randn(len(step.x), sum(QKV.d_outs)).to(*kind)
    y = check_vectors(step, product, gain, bias)
    assert torch.equal(y[len(step.owners) :], product[len(step.owners) :])


@both_kinds
def test_the_reference_applies_vectors_as_the_kernels_do(kind: Kind) -> None:
    runs = [(0, 1), (1, 2), (2, 17)]
    step, _ = with_vectors(make_step(kind, WIDE, [12, 0, 40], runs, base_tokens=2), {(0, 4)})
    product = torch.randn(len(step.x), sum(WIDE.d_outs)).to(*kind)
    y, want = product.clone(), product.cpu()
    shrunk = shrink(step.x, step.weights, step.tiles(), LAYER, WIDE)
    expand(replace(shrunk, has_vectors=True), y, add=True)
    weights, places = step.weights, step.weights.vectors
    assert places is not None
    on_cpu = LoraWeights(weights.arena.cpu(), weights.table.cpu(), places.cpu())
    segments = replace(
        step.segments,
        slots=step.segments.slots.cpu(),
        starts=step.segments.starts.cpu(),
        lengths=step.segments.lengths.cpu(),
        has_vectors=True,
    )
    reference.add_lora(want, step.x.cpu(), on_cpu, segments, LAYER, WIDE)
    off = torch.finfo(kind[1]).eps * 8
    torch.testing.assert_close(y.cpu(), want, rtol=off, atol=off * 40)


@both_kinds
def test_the_activation_of_a_prefill_applies_vectors(kind: Kind) -> None:
    runs = [(slot, PREFILL_TOKENS // 2) for slot in range(3)]
    step = make_step(kind, GATE_UP, [12, 0, 40], runs, base_tokens=40)
    step, (gain, bias) = with_vectors(step, {(2, 4), (0, 5)})
    step.x[-40:] = 1.0
    product = torch.randn(len(step.x), 2 * 130).to(*kind)
    shrunk = shrink(step.x, step.weights, step.tiles(), LAYER, GATE_UP)
    sums = product.float().cpu() + step.delta().nan_to_num()
    sizes = product.float().cpu().abs() + step.sizes().nan_to_num()
    off = torch.finfo(kind[1]).eps * (1 + gain.abs()) * sizes + 1e-5
    got = expand_act_and_mul(product, replace(shrunk, has_vectors=True))
    check_activation(got, sums + gain * sums + bias, off)


@pytest.mark.skipif(INTERPRETED, reason="streams are CUDA's")
@kinds
@pytest.mark.parametrize("runs", [[(0, 1)], MIXED_RUNS, [(1, 400), (0, 300)]])
def test_a_product_with_vectors_in_and_out_of_a_graph(
    kind: Kind, runs: list[tuple[int, int]]
) -> None:
    step, (gain, bias) = with_vectors(make_step(kind, WIDE, MIXED_RANKS, runs), {(0, 4), (2, 5)})
    segments = replace(step.segments, has_vectors=True)
    weight = torch.randn(sum(WIDE.d_outs), WIDE.d_in).to(kind[0], kind[1])
    held = (step.x @ weight.T).float().cpu() + step.delta()
    want = held + gain * held + bias

    def run() -> torch.Tensor:
        lora = begin_step(step.weights, segments, len(step.x))
        y, delta = linear_with_lora(step.x, weight, None, lora, LAYER, WIDE)
        assert delta is None
        return y

    plain = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    captured.fill_(torch.nan)
    graph.replay()
    for y in (plain, captured):
        torch.testing.assert_close(y.float().cpu(), want, rtol=2**-5, atol=2**-3)


@pytest.mark.skipif(INTERPRETED, reason="on a CPU the reference is taken")
@kinds
def test_lora_can_be_added_outside_of_a_forward_pass(kind: Kind) -> None:
    step = make_step(kind, WIDE, MIXED_RANKS, MIXED_RUNS, base_tokens=3)
    y = torch.zeros(len(step.x), sum(WIDE.d_outs)).to(*kind)
    add_lora(y, step.x, step.weights, step.segments, LAYER, WIDE)
    assert not y[-3:].any()
    y[-3:] = torch.nan
    check_delta(step, y)


@both_kinds
@pytest.mark.parametrize(
    "runs", [[(0, 1), (1, 2), (2, 1)], [(2, 17), (0, 40), (1, 3)], *slow([(2, 500), (0, 40)])]
)
def test_lora_of_embeddings_equals_lora_of_a_linear_on_unit_vectors(
    kind: Kind, runs: list[tuple[int, int]]
) -> None:
    step = make_step(kind, EMBEDDINGS, [12, 0, 40], runs, base_tokens=4, padding=2)
    check_embeddings(kind, step)
