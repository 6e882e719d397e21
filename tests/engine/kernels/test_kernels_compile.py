"""Every Triton kernel compiles for a Hopper GPU, on a machine that has none.

Triton's interpreter, which runs the kernels on a CPU, takes Python that its compiler does not. Here
the operators themselves launch, on tensors without memory, and what they launch is compiled.
"""

import json
import re
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from lorikeet_engine.kernels.attention.merge import merge
from lorikeet_engine.kernels.attention.paged_decode import PagedDecode, workspace_bytes
from lorikeet_engine.kernels.attention.paged_prefill import PagedPrefill, Tiling
from lorikeet_engine.kernels.attention.protocol import AttentionShape
from lorikeet_engine.kernels.attention.sinks import add_sinks
from lorikeet_engine.kernels.delta_net import Decay, Decodes, Heads, Prefills, Ring
from lorikeet_engine.kernels.delta_net import fused as delta_net
from lorikeet_engine.kernels.fp8 import DTYPE, Fp8Rows, few_tokens
from lorikeet_engine.kernels.fp8 import fused as fp8_fused
from lorikeet_engine.kernels.fp8_kv import FP8_KV, KvScales
from lorikeet_engine.kernels.latents import AbsorbedWeight, LatentNorms
from lorikeet_engine.kernels.latents import fused as latents
from lorikeet_engine.kernels.log_softmax import FIELDS, MOST
from lorikeet_engine.kernels.log_softmax import fused as logprobs
from lorikeet_engine.kernels.lora import expert_rows, linear, tiles
from lorikeet_engine.kernels.lora.expand import expand
from lorikeet_engine.kernels.lora.expand_act import expand_act_and_mul
from lorikeet_engine.kernels.lora.experts import add_expert_lora, begin_experts
from lorikeet_engine.kernels.lora.gather import gather
from lorikeet_engine.kernels.lora.linear import linear_with_lora
from lorikeet_engine.kernels.lora.shrink import shrink
from lorikeet_engine.kernels.lora.token_rows import replace_logits
from lorikeet_engine.kernels.lora.tuning import PATH, LaunchConfig, Regime
from lorikeet_engine.kernels.lora.types import (
    ExpertStep,
    LoraDelta,
    LoraGroup,
    LoraStep,
    LoraWeights,
    Segments,
)
from lorikeet_engine.kernels.mamba import Scan
from lorikeet_engine.kernels.mamba import fused as mamba
from lorikeet_engine.kernels.masks.fused import forbid_others
from lorikeet_engine.kernels.moe import (
    Clamp,
    ClampedBiases,
    Mxfp4Experts,
    Sigmoids,
    grouped_mxfp4,
    mxfp4,
)
from lorikeet_engine.kernels.moe import fused as moe
from lorikeet_engine.kernels.moe.grouped import TileConfig
from lorikeet_engine.kernels.penalties import PENALTIES, PenaltyState
from lorikeet_engine.kernels.penalties.fused import penalise
from lorikeet_engine.kernels.pointwise import QkNorm, fused
from lorikeet_engine.kernels.routed_rows import RoutedRows
from lorikeet_engine.kernels.sampling import DRAW_FIELDS
from lorikeet_engine.kernels.sampling.fused import draw_tokens
from lorikeet_engine.kernels.split_k import ProductConfig
from lorikeet_engine.kernels.w4a16 import PackedWeight
from lorikeet_engine.kernels.w4a16 import fused as w4a16_fused
from lorikeet_engine.parallel.sums import RowExchange

MOST_SHARED = 227 << 10  # bytes of a Hopper multiprocessor's that one program may have
QKV, GATE_UP, DOWN, HEAD, EMBEDDINGS, HEAD_ROWS, EMBEDDING_ROWS = (
    LoraGroup((0, 1, 2), 4096, (4096, 1024, 1024)),
    LoraGroup((4, 5), 4096, (14336, 14336)),
    LoraGroup((6,), 14336, (4096,)),
    LoraGroup((7,), 4096, (128_256,)),
    LoraGroup((8,), 128_256, (4096,)),
    LoraGroup((9,), 4096, (3,)),
    LoraGroup((10,), 4096, (3,)),
)
EXPERT_DOWN = LoraGroup((7,), 768, (2048,))


class Hopper:
    """Driver with the methods that Triton needs to compile."""

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


@pytest.fixture
def ptx() -> dict[str, str]:
    """PTX of the kernels that the test's launches compiled, by name; of several, the last."""
    return {}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, ptx: dict[str, str]) -> set[str]:
    """The names of the kernels that the test's launches compiled."""
    names, run = set(), JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        options.pop("launch_pdl", None)
        made = run(kernel, *args, grid=grid, warmup=True, **options)
        assert made.metadata.shared <= MOST_SHARED, kernel.__name__
        names.add(kernel.__name__)
        ptx[kernel.__name__] = made.asm["ptx"]
        return made

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(tiles, "_is_hopper", lambda _: True)
    configs = json.loads(PATH.read_text())["NVIDIA H200"]
    monkeypatch.setattr(
        tiles, "launch_config", lambda regime, _: LaunchConfig.parse(configs[regime])
    )
    monkeypatch.setattr(driver, "_active", Hopper())
    return names


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def lora(tokens: int, segments: int, max_rank: int) -> tuple[LoraWeights, tiles.Tiles]:
    table, vectors = empty(300, 33, 11, 3, dtype=torch.int64), empty(300, 33, 11, dtype=torch.int64)
    members = empty(300, 8, dtype=torch.int32), empty(300, 8, dtype=torch.float32)
    weights = LoraWeights(empty(1 << 20), table, vectors, *members)
    runs = [empty(segments, dtype=torch.int32) for _ in range(3)]
    return weights, tiles.list_tiles(Segments(*runs, max_rank), tokens)


@pytest.mark.parametrize("rank", [16, 64])
@pytest.mark.parametrize(("tokens", "segments"), [(16, 16), (64, 8), (2048, 8)], ids=list(Regime))
def test_lora(compiled: set[str], tokens: int, segments: int, rank: int) -> None:
    kinds = [*product((QKV, GATE_UP, DOWN, HEAD), (False,)), (GATE_UP, True)]
    for group, composed in kinds:
        weights, listed = lora(tokens, segments, rank)
        listed = replace(listed, composed=composed)
        shrunk = shrink(empty(tokens, group.d_in), weights, listed, 3, group)
        expand(shrunk, empty(tokens, sum(group.d_outs)))
        expand(shrunk, empty(tokens, sum(group.d_outs)), add=True)
        with_vectors = replace(shrunk, has_vectors=True)
        expand(with_vectors, empty(tokens, sum(group.d_outs)), add=True)
        if group is GATE_UP and listed.act_expands:
            expand_act_and_mul(empty(tokens, 2 * 14336), shrunk)
            expand_act_and_mul(empty(tokens, 2 * 14336), with_vectors)
    weights, listed = lora(tokens, segments, rank)
    ids, y = empty(tokens, dtype=torch.int64), empty(tokens, 4096)
    for composed in (False, True):
        listed = replace(listed, composed=composed)
        gather(ids, y, weights, listed, 32, EMBEDDINGS, EMBEDDING_ROWS)
    replace_logits(empty(tokens, 128_256), y, weights, listed, 128_256, 32, HEAD_ROWS)
    few = listed.regime == Regime.FEW
    assert compiled >= {
        "_gather",
        "_replace_logits",
        "_list_tiles",
        "_shrink",
        "_expand_few" if few else "_expand",
    }
    assert ("_expand_act_and_mul" in compiled) == (listed.regime == Regime.PREFILL)


@pytest.mark.usefixtures("compiled")
def test_a_decode_of_compositions_reads_as_widely_with_few_more_instructions(
    ptx: dict[str, str],
) -> None:
    lines = []
    for composed in (False, True):
        weights, listed = lora(8, 8, 32)
        listed = replace(listed, composed=composed)
        expand(shrink(empty(8, 4096), weights, listed, 3, QKV), empty(8, 6144))
        assert "v4.b32" in ptx["_expand_few"]
        lines.append(ptx["_expand_few"].count(";"))
    assert lines[1] < 1.2 * lines[0]


def test_a_step_with_tiles_runs_lora_on_the_side_stream(
    compiled: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, listed = lora(16, 16, 16)
    segments = Segments(*[empty(16, dtype=torch.int32) for _ in range(3)], 16)
    monkeypatch.setattr(linear, "linear_and_lora", lambda x, *_: (x, None))
    x = empty(16, DOWN.d_in)
    y, delta = linear_with_lora(
        x, empty(4096, DOWN.d_in), None, LoraStep(weights, segments, listed), 3, DOWN
    )
    assert y is x
    assert delta is not None
    assert delta.tokens is listed.tokens


@pytest.mark.parametrize("adapters", [True, False])
def test_pointwise_operators(compiled: set[str], adapters: bool) -> None:
    def delta(width: int) -> LoraDelta | None:
        return LoraDelta(empty(8, width), empty(1, dtype=torch.int32)) if adapters else None

    angles = empty(8, 64, dtype=torch.float32)
    fused.add_rms_norm(empty(8, 4096), empty(8, 4096), empty(4096), 1e-5, delta(4096))
    fused.add_rms_norm(empty(8, 4096), empty(8, 4096), empty(4096), 1e-5, delta(4096), fp8=True)
    for gelu in (False, True):
        fused.act_and_mul(empty(8, 2 * 14336), delta(2 * 14336), gelu=gelu)
        fused.act_and_mul(empty(8, 2 * 14336), delta(2 * 14336), gelu=gelu, fp8=True)
    slots = empty(8, dtype=torch.int64)
    kv = empty(2, 100, 16, 8, 128)
    fused.rotary_and_store_kv(empty(8, 48, 128), angles, angles, kv, slots, delta(48 * 128))
    for columns in (48, 0):
        some = empty(8, columns, dtype=torch.float32)
        fused.rotary_and_store_kv(empty(8, 48, 128), some, some, kv, slots, delta(48 * 128))
    fused.add_rms_norm(empty(8, 4096), empty(8, 4096), empty(4096), 1e-5, delta(4096), 0.22)
    row = empty(4096)
    fused.add_rms_norm(empty(8, 4096), empty(8, 4096), row, 1e-5, delta(4096), 1.0, row)
    fused.add_rms_norm(empty(8, 4096), empty(8, 4096), None, 1e-5, delta(4096), 1.0, row)
    whole = QkNorm(empty(32 * 128), empty(8 * 128), 1e-6)
    qkv, added = empty(8, 48, 128), delta(48 * 128)
    fused.rotary_and_store_kv(qkv, angles, angles, kv, slots, added, whole, interleaved=True)
    squares = fused.mean_squares(qkv, 8, 2, added)
    shared = replace(whole, mean_squares=squares)
    fused.rotary_and_store_kv(qkv, angles, angles, kv, slots, added, shared)
    gain = empty(8, dtype=torch.float32)
    fused.rotary_and_store_kv(qkv, angles, angles, kv, slots, added, query_gain=gain)
    norm = QkNorm(empty(128), empty(128), 1e-6)
    fused.rotary_and_store_kv(empty(8, 48, 128), angles, angles, kv, slots, delta(48 * 128), norm)
    fused.rms_norm(empty(8, 2816), empty(2816, dtype=torch.float32), 1e-6, 2816**-0.5)
    own = QkNorm(empty(512), empty(512), 1e-6, values=True)
    fused.rotary_and_store_kv(
        empty(8, 36, 512), angles, angles, empty(2, 100, 16, 4, 512), slots, delta(36 * 512), own,
        spans_head=True, keys_are_values=True,
    )  # fmt: skip
    fused.rotary_and_store_kv(
        empty(8, 8, 512), angles, angles, None, slots, delta(8 * 512), own, spans_head=True
    )
    fused.add_rms_norm(empty(8, 4096), empty(8, 4096), row, 1e-5, delta(4096), 1.0, row, None, 0.9)
    fp8 = empty(2, 100, 16, 8, 128, dtype=FP8_KV)
    fused.rotary_and_store_kv(
        empty(8, 48, 128), angles, angles, fp8, slots, delta(48 * 128), norm, KvScales(0.1, 0.2)
    )
    assert compiled >= {"_add_rms_norm", "_act_and_mul", "_act_and_mul_fp8", "_mean_squares"}


@pytest.mark.parametrize("adapters", [False, True])
def test_gates_of_heads(compiled: set[str], adapters: bool) -> None:
    for heads, dim in ((16, 256), (32, 128)):
        x, gate = empty(8, heads, dim), empty(8, heads, 2 * dim)[..., dim:]
        delta = LoraDelta(gate, empty(1, dtype=torch.int32)) if adapters else None
        fused.sigmoid_gate(x, gate, delta)
        fused.gated_rms_norm(x, gate, empty(dim, dtype=torch.float32), 1e-6, delta)
    assert compiled == {"_gate"}


@pytest.mark.parametrize(
    ("heads", "dtype", "state_dtype", "adapters", "entries"),
    [
        (Heads(16, 32, 128, 128), torch.bfloat16, torch.float32, True, None),
        (Heads(16, 32, 128, 128), torch.bfloat16, torch.bfloat16, False, None),
        (Heads(16, 32, 128, 128), torch.float32, torch.float32, True, None),
        (Heads(16, 32, 128, 128), torch.bfloat16, torch.float32, True, 7),
        (Heads(2, 6, 16, 64), torch.bfloat16, torch.float32, False, None),
        (Heads(2, 6, 16, 64), torch.bfloat16, torch.bfloat16, False, 3),
    ],
)
def test_gated_delta_net(
    compiled: set[str],
    heads: Heads,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    adapters: bool,
    entries: int | None,
) -> None:
    floats, integers = (partial(empty, dtype=each) for each in (torch.float32, torch.int32))
    channels = sum(heads.widths)
    qkv, ba = empty(300, channels, dtype=dtype), empty(300, 2 * heads.value_heads, dtype=dtype)
    weight, inputs = empty(channels, 4, dtype=dtype), empty(9, 3, channels, dtype=dtype)
    decay = Decay(floats(heads.value_heads), floats(heads.value_heads))
    states = empty(9, heads.value_heads, heads.value_dim, heads.key_dim, dtype=state_dtype)
    deltas = [LoraDelta(each, integers(1)) if adapters else None for each in (qkv, ba)]
    prefills = Prefills(*(integers(4) for _ in range(3)), integers(8, 2), integers(5), integers(8))
    ring = None
    if entries is not None:
        ring = Ring.empty([9], heads, entries, torch.float32, torch.device("meta"))
    for convolve, apply, where in (
        (delta_net.decode_convolution, delta_net.decode_delta_rule, Decodes(integers(300))),
        (delta_net.decode_convolution, delta_net.decode_delta_rule, Decodes(*integers(2, 300))),
        (delta_net.prefill_convolution, delta_net.prefill_delta_rule, prefills),
    ):
        assert convolve(qkv, weight, inputs, where, deltas[0]).shape == qkv.shape
        o = apply(qkv, ba, decay, states, where, heads, deltas[1], ring=ring)
        assert o.shape == (300, heads.value_heads, heads.value_dim)
    rules = {
        "_decode_with_ring" if entries else "_decode_delta_rule",
        "_solve_chunks",
        "_scan_chunks",
    }
    assert compiled == {"_decode_convolution", "_prefill_convolution", *rules}


@pytest.mark.parametrize(
    ("heads", "dtype", "state_dtype", "adapters", "entries"),
    [
        (Heads(8, 64, 128, 64), torch.bfloat16, torch.float32, True, 3),
        (Heads(8, 64, 128, 64), torch.bfloat16, torch.bfloat16, False, None),
        (Heads(1, 128, 128, 64), torch.bfloat16, torch.float32, False, 3),
        (Heads(1, 64, 128, 64), torch.float32, torch.float32, True, None),
        (Heads(8, 128, 128, 80), torch.bfloat16, torch.float32, False, 3),
    ],
    ids=["Nano", "Nano, rounded states", "Granite small", "floats", "Nano 2"],
)
def test_mamba(
    compiled: set[str],
    heads: Heads,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    adapters: bool,
    entries: int | None,
) -> None:
    floats, integers = (partial(empty, dtype=each) for each in (torch.float32, torch.int32))
    channels, count = sum(heads.widths), heads.value_heads
    wider = empty(300, channels + count, dtype=dtype)
    xbc, dt = wider[:, :channels], wider[:, channels:]
    weight, inputs = empty(channels, 4, dtype=dtype), empty(9, 3, channels, dtype=dtype)
    bias, scan = empty(channels, dtype=dtype), Scan(*(floats(count) for _ in "adD"), (0.0, inf))
    states = empty(9, count, heads.value_dim, heads.key_dim, dtype=state_dtype)
    deltas = [LoraDelta(each, integers(1)) if adapters else None for each in (xbc, dt)]
    prefills = Prefills(*(integers(4) for _ in range(3)), integers(8, 2), integers(5), integers(8))
    ring = None
    if entries is not None:
        ring = Ring.empty([9], heads, entries, torch.float32, torch.device("meta"))
    for convolve, apply, where in (
        (delta_net.decode_convolution, mamba.decode_scan, Decodes(integers(300))),
        (delta_net.decode_convolution, mamba.decode_scan, Decodes(*integers(2, 300))),
        (delta_net.prefill_convolution, mamba.prefill_scan, prefills),
    ):
        y = convolve(xbc, weight, inputs, where, deltas[0], None, bias)
        o = apply(y, dt, scan, states, where, heads, deltas[1], ring=ring)
        assert o.shape == (300, count, heads.value_dim)
    width = count * heads.value_dim // heads.key_heads
    o, gate = o.view(300, -1, width), wider[:, : count * heads.value_dim].view(300, -1, width)
    delta, gains = (
        LoraDelta(gate, integers(1)) if adapters else None,
        empty(count * heads.value_dim),
    )
    fused.gated_group_norm(o, gate, gains, 1e-5, delta)
    means = fused.gated_mean_squares(o, gate, delta)
    fused.gated_group_norm(o, gate, gains, 1e-5, delta, means)
    scans = {"_decode_scan", "_prefill_scan", "_gate_group"}
    assert compiled == {"_decode_convolution", "_prefill_convolution", *scans}


def test_the_experts_of_one_token_without_gates(compiled: set[str]) -> None:
    floats = partial(empty, dtype=torch.float32)
    y = moe.experts_of_one(
        empty(1, 2688), empty(128, 1856, 2688), empty(128, 2688, 1856), floats(1, 128), None, 6,
        normalised=True, gelu=False, sigmoids=Sigmoids(floats(128), 2.5), squared_relu=True,
    )  # fmt: skip
    assert y.shape == (1, 2688)
    assert compiled == {"choose", "_gate_up", "_down"}


def test_squared_relu(compiled: set[str]) -> None:
    x = empty(8, 1856)
    fused.squared_relu(x, LoraDelta(x, empty(1, dtype=torch.int32)))
    fused.squared_relu(x, fp8=True)
    assert compiled >= {"_squared_relu"}


def test_adding_lora_to_a_product(compiled: set[str]) -> None:
    fused.add_delta(empty(8, 4096), LoraDelta(empty(8, 4096), empty(1, dtype=torch.int32)))
    assert compiled >= {"_add_delta"}


@pytest.mark.parametrize("width", [100, 4096, 16384])
@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize("adapters", [True, False])
def test_sums_over_ranks(compiled: set[str], world: int, width: int, adapters: bool) -> None:
    received = empty(2, world, 32, width, dtype=torch.int32)
    addresses, epochs = empty(world, dtype=torch.int64), empty(32, dtype=torch.int32)
    exchange = RowExchange(1, received, addresses, epochs)
    delta = LoraDelta(empty(8, width), empty(1, dtype=torch.int32)) if adapters else None
    rows, row = empty(8, width), empty(width)
    fused.add_rms_norm(rows, rows, row, 1e-5, delta, exchange=exchange)
    fused.add_rms_norm(rows, rows, None, 1e-5, delta, 0.22, row, exchange)
    fused.add_rms_norm(rows, rows, row, 1e-5, delta, 1.0, row, exchange, fp8=True)
    assert compiled == {"_add_rms_norm"}


@pytest.mark.parametrize("group", [1, 4, 7])
def test_merging_parts_of_attention(compiled: set[str], group: int) -> None:
    out, parts = empty(8, 4 * group, 128), empty(24 * group, 4, 128)
    lse, parts_lse = (empty(*part.shape[:2], dtype=torch.float32) for part in (out, parts))
    merge(out, lse, parts, parts_lse, empty(8, 3, dtype=torch.int32), out)
    assert compiled == {"_merge"}


@pytest.mark.parametrize("tokens", [1, 32, 256, 2048])
@pytest.mark.parametrize(("experts", "per_token", "inner"), [(128, 8, 768), (8, 2, 14336)])
def test_mixture_of_experts(
    compiled: set[str], tokens: int, experts: int, per_token: int, inner: int
) -> None:
    for lora in (None, LoraDelta(empty(tokens, experts), empty(1, dtype=torch.int32))):
        routed = moe.route(empty(tokens, experts), per_token, lora, normalised=True)
    x, gate_up = empty(tokens, 2048), empty(experts, 2 * inner, 2048)
    y = moe.expert_products(x, gate_up, routed, gathered=True)
    assert y.shape == (tokens * per_token, 2 * inner)
    down = moe.expert_products(y[:, :inner], empty(experts, 2048, inner), routed)
    assert moe.combine(down, routed).shape == (tokens, 2048)
    assert compiled == {"choose", "sort_by_expert", "_products", "sum_weighed"}


@pytest.mark.parametrize("stored", ["floats", "fp8", "blocks"])
def test_the_experts_of_one_token(compiled: set[str], stored: str) -> None:
    weights: list[Any] = [empty(128, 1536, 2048), empty(128, 2048, 768)]
    if stored != "floats":
        block = (128, 128) if stored == "blocks" else None
        weights = [fp8_weight(*weight.shape, block=block) for weight in weights]
    y = moe.experts_of_one(
        empty(1, 2048), *weights, empty(1, 128), None, 8, normalised=True, gelu=False
    )
    assert y.shape == (1, 2048)
    assert compiled == {"choose", "_gate_up", "_down"}


@pytest.mark.parametrize("changes_experts", [False, True])
def test_experts_that_adapters_leave_alone_cost_no_launch(
    compiled: set[str], changes_experts: bool
) -> None:
    routed = moe.route(empty(16, 128), 8, None, normalised=True)
    weights, listed = lora(16, 4, 16)
    runs = [empty(4, dtype=torch.int32) for _ in range(3)]
    segments = Segments(*runs, max_rank=16, changes_experts=changes_experts)
    before = set(compiled)
    adapted = begin_experts(LoraStep(weights, segments, listed), routed)
    add_expert_lora(empty(16 * 8, 2048), empty(16 * 8, 768), adapted, 3, EXPERT_DOWN)
    launched = {"_list_owners", "_shrink", "_expand"} if changes_experts else set()
    assert compiled - before == launched


def fp8_weight(*shape: int, block: tuple[int, int] | None = None) -> Fp8Rows:
    """A weight, or one of each expert; block: which has a scale, if rows have not."""
    *experts, d_out, d_in = shape
    counts = (d_out,) if block is None else (-(-d_out // block[0]), -(-d_in // block[1]))
    scales = empty(*experts, *counts, dtype=torch.float32)
    return Fp8Rows(empty(*shape, dtype=DTYPE), scales, block)


@pytest.mark.parametrize("tokens", [1, 256, 2048, 8192])
@pytest.mark.parametrize(("experts", "per_token", "inner", "block"), [
    (128, 8, 768, None), (128, 8, 768, (128, 128)), (8, 2, 14336, None), (8, 2, 14336, (128, 128)),
    (128, 8, 96, (32, 32)),  # of eight ranks
])  # fmt: skip
def test_fp8_experts(
    compiled: set[str],
    tokens: int,
    experts: int,
    per_token: int,
    inner: int,
    block: tuple[int, int] | None,
) -> None:
    routed = moe.route(empty(tokens, experts), per_token, None, normalised=True)
    gate_up = fp8_weight(experts, 2 * inner, 2048, block=block)
    down = fp8_weight(experts, 2048, inner, block=block)
    y = moe.expert_products(empty(tokens, 2048), gate_up, routed, gathered=True)
    y = moe.expert_products(fused.act_and_mul(y, fp8=True), down, routed)
    assert y.shape == (tokens * per_token, 2048)
    of_fp8 = {"_quantize_rows", "_act_and_mul_fp8", "_products_fp8"}
    assert compiled == {"choose", "sort_by_expert", *of_fp8}


@pytest.mark.parametrize(("d_in", "block"), [(768, (128, 128)), (96, (32, 32))])
@pytest.mark.usefixtures("compiled")
def test_scales_of_blocks_of_experts_come_ahead_of_their_turn(
    monkeypatch: pytest.MonkeyPatch, d_in: int, block: tuple[int, int]
) -> None:
    made, run = [], JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda *a, **k: made.append(run(*a, **k)))
    routed = moe.route(empty(1, 128), 8, None, normalised=True)
    moe.expert_products(empty(8, d_in), fp8_weight(128, 2048, d_in, block=block), routed)
    loop = made[-1].asm["ttgir"].partition("scf.for")[2].partition("scf.yield")[0]
    assert "warp_group_dot" in loop
    assert "tt.load" not in loop


@pytest.mark.parametrize("tokens", [1, 256])
def test_attention_of_small_steps(compiled: set[str], tokens: int) -> None:
    shape = AttentionShape(32, 8, 128, 16, torch.bfloat16)
    workspace = empty(workspace_bytes(shape, tokens), dtype=torch.uint8)
    attention = PagedDecode(shape, tokens, empty(2, 4096, dtype=torch.int32), workspace)
    q, size = empty(tokens, 48, 128)[:, :32], (2, 100, 16, 8, 128)
    attention.attend(q, empty(*size), None)
    attention.attend(q, empty(*size, dtype=FP8_KV), None, KvScales(0.1, 0.2))
    capped = replace(shape, windows=(4096, None), soft_cap=50.0)
    PagedDecode(capped, tokens, empty(2, 4096, dtype=torch.int32), workspace).attend(
        q, empty(*size), None, window=4096
    )
    attention.attend(q, empty(*size), None, sinks=empty(32, dtype=torch.float32))
    assert compiled == {"_decode"}
    add_sinks(empty(tokens, 64, 64), empty(tokens, 64), empty(64, dtype=torch.float32))
    assert compiled == {"_decode", "_add_sinks"}


@pytest.mark.parametrize("tiling", [Tiling.of(232_448), Tiling.of(166_912), Tiling.of(0)])
def test_attention_of_wide_heads(compiled: set[str], tiling: Tiling) -> None:
    shape = AttentionShape(32, 4, 512, 16, torch.bfloat16, scale=1.0)
    prefill = PagedPrefill(shape, torch.device("cpu"))
    prefill._tiling, prefill._rows = tiling, tiling.rows
    prefill._tiles = dict.fromkeys((None, 1024), empty(8, 4, dtype=torch.int32))
    prefill._pages = empty(1, 100, dtype=torch.int32)
    q, size, out = empty(64, 36, 512)[:, :32], (2, 100, 16, 4, 512), empty(64, 32, 512)
    prefill.attend(q, empty(*size), out)
    prefill.attend(q, empty(*size), out, window=1024)
    prefill.attend(q, empty(*size, dtype=FP8_KV), out, KvScales(0.1, 0.2))
    assert compiled == {"_prefill"}
    for tokens in (1, 1024):
        workspace = empty(workspace_bytes(shape, tokens), dtype=torch.uint8)
        pages = empty(1, 4096, dtype=torch.int32)
        decode = PagedDecode(shape, tokens, pages, workspace)
        decode.attend(empty(tokens, 36, 512)[:, :32], empty(*size), None)
        decode.attend(
            empty(tokens, 36, 512)[:, :32], empty(*size, dtype=FP8_KV), None, KvScales(0.1, 0.2)
        )
    assert compiled == {"_prefill", "_decode"}


@pytest.mark.parametrize("heads", [20, 16])
def test_latent_attention(compiled: set[str], heads: int) -> None:
    shape = AttentionShape(heads, 1, 576, 16, torch.bfloat16, scale=1 / 16, latent=512)
    prefill = PagedPrefill(shape, torch.device("cpu"))
    prefill._tiling = Tiling.of(232_448)
    prefill._rows = prefill._tiling.rows
    prefill._tiles, prefill._pages = {None: empty(8, 4, dtype=torch.int32)}, empty(1, 100).int()
    q, size, out = empty(64, heads, 576), (1, 100, 16, 1, 576), empty(64, heads, 512)
    eighths, scales = empty(*size, dtype=FP8_KV), KvScales(0.1, 0.1)
    prefill.attend(q, empty(*size), out)
    prefill.attend(q, eighths, out, scales)
    workspace = empty(workspace_bytes(shape, 64), dtype=torch.uint8)
    decode = PagedDecode(shape, 64, empty(1, 4096, dtype=torch.int32), workspace)
    decode.attend(q, empty(*size), None)
    decode.attend(q, eighths, None, scales)
    assert compiled == {"_prefill", "_decode"}


@pytest.mark.parametrize(("tokens", "segments"), [(16, 16), (64, 8), (2048, 8)], ids=list(Regime))
@pytest.mark.parametrize("plain", [192, 128])
def test_operators_of_latent_attention(
    compiled: set[str], tokens: int, segments: int, plain: int
) -> None:
    weights, listed = lora(tokens, segments, 64)
    listed = replace(listed, composed=plain == 192)
    step, count = LoraStep(weights, listed, listed), empty(1, dtype=torch.int32)
    width = 20 * (plain + 256)
    weight = AbsorbedWeight(empty(20, plain + 256, 512), plain, 3, LoraGroup((3,), 512, (width,)))
    cos, sin = empty(2, tokens, 32, dtype=torch.float32)
    norms, slots = LatentNorms(empty(768), empty(512), 1e-6), empty(tokens, dtype=torch.int64)
    for delta, pages, scales in (
        (None, empty(1, 100, 16, 1, 576), None),
        (LoraDelta(empty(tokens, 1344), count), empty(1, 100, 16, 1, 576).to(FP8_KV), KvScales()),
    ):
        queries = latents.store_latents(
            empty(tokens, 1344), cos, sin, pages, slots, norms, delta, scales, interleaved=True
        )
        assert queries.shape == (tokens, 768)
    of_keys, pages = replace(norms, queries=None), empty(1, 100, 16, 1, 576)
    latents.store_latents(empty(tokens, 576), cos, sin, pages, slots, of_keys, interleaved=True)
    q = empty(tokens, 20, plain + 64)
    absorbed = latents.absorb_queries(
        q, cos, sin, weight, LoraDelta(q, count), step, interleaved=True
    )
    outputs = latents.expand_outputs(empty(tokens, 20, 512), weight, step)
    assert (absorbed.shape, outputs.shape) == ((tokens, 20, 576), (tokens, 20, 256))
    assert compiled == {"_list_tiles", "_store_latents", "_turn_queries", "_add_low_rank"}


def test_experts_of_groups(compiled: set[str]) -> None:
    sigmoids = Sigmoids(empty(256, dtype=torch.float32), 2.5, 8, 4)
    moe.route(empty(8, 256), 8, None, normalised=True, sigmoids=sigmoids)
    assert compiled == {"choose", "sort_by_expert"}


def test_experts_whose_weights_have_factors(compiled: set[str]) -> None:
    factors = empty(128, dtype=torch.float32)
    moe.route(empty(8, 128), 8, None, normalised=True, factors=factors)
    assert compiled == {"choose", "sort_by_expert"}


@pytest.mark.parametrize("tokens", [1, 256])
def test_experts_with_biases_and_clamps(compiled: set[str], tokens: int) -> None:
    routed = moe.route(empty(tokens, 32), 4, None, normalised=True)
    gate_up = empty(tokens * 4, 5760)
    y = moe.clamped_swiglu(gate_up, empty(32, 5760), routed, Clamp(1.702, 7.0))
    assert moe.combine(y, routed, empty(32, 2880)).shape == (tokens, 2880)
    assert compiled == {"choose", "sort_by_expert", "gate_clamped", "sum_weighed"}


def test_a_product_of_one_row(compiled: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert linear.linear(empty(1, 4096), empty(6144, 4096)).shape == (1, 6144)
    assert compiled == {"_gemv"}
    blocks = fp8_weight(28672, 4096, block=(128, 128))
    for weight in (empty(28672, 4096), fp8_weight(28672, 4096), blocks):
        for gelu in (False, True):
            gated = linear.linear_act_and_mul(empty(1, 4096), weight, None, gelu=gelu)
            assert gated.shape == (1, 14336)
    assert compiled == {"_gemv"}, "nothing else is launched"


@pytest.mark.parametrize(("d_out", "d_in"), [(6144, 4096), (4096, 14336), (8192, 28672)])
def test_products_of_fp8(compiled: set[str], d_out: int, d_in: int) -> None:
    weight = fp8_weight(d_out, d_in)
    for tokens, kernel in ((1, "_gemv"), (17, "_quantize_rows")):
        for bias in (None, empty(d_out)):
            assert fp8_fused.linear(empty(tokens, d_in), weight, bias).shape == (tokens, d_out)
        assert kernel in compiled


@pytest.mark.parametrize("tokens", few_tokens.TOKENS)
def test_fp8_products_of_few_tokens(compiled: set[str], tokens: int) -> None:
    for name, configs in json.loads(few_tokens.PATH.read_text())["NVIDIA H200"].items():
        config, (d_out, d_in) = configs[str(tokens)], map(int, name.split("x"))
        x, weight = fp8_weight(tokens, d_in), fp8_weight(d_out, d_in)
        if config is not None:
            config = ProductConfig(**config)
            y = few_tokens.multiply(x, weight, empty(d_out), torch.bfloat16, config)
            assert y.shape == (tokens, d_out)
    assert compiled == {"_multiply"}


@pytest.mark.parametrize("tokens", [16, 128, 8192])
def test_fp8_products_of_blocks(compiled: set[str], tokens: int) -> None:
    x, weight = fp8_weight(tokens, 4096), fp8_weight(6144, 4096, block=(128, 128))
    y = few_tokens.multiply(x, weight, empty(6144), torch.bfloat16, few_tokens.UNTUNED)
    assert y.shape == (tokens, 6144)
    assert compiled == {"_multiply"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sampling(compiled: set[str], dtype: torch.dtype) -> None:
    draws = empty(8, DRAW_FIELDS, dtype=torch.int64)
    best, tokens = empty(8, dtype=dtype), empty(8, dtype=torch.int64)
    draw_tokens(empty(8, 128256, dtype=dtype), best, tokens, draws)
    assert compiled == {"_sum_chunks", "_draw"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_log_probabilities(compiled: set[str], dtype: torch.dtype) -> None:
    logits, wanted = empty(8, 128256, dtype=dtype), empty(3, FIELDS, dtype=torch.int64)
    found = logprobs.likeliest(logits, wanted, MOST)
    logprobs.set_given(found, logits, wanted, empty(8, dtype=torch.int64))
    logprobs.set_rank(found, logits, wanted, empty(8, dtype=torch.int64))
    assert compiled == {"_sum_chunks_of_exp", "_find_likeliest", "_set_given", "_set_rank"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_penalties(compiled: set[str], dtype: torch.dtype) -> None:
    seen, biases = empty(8, 128256, dtype=torch.int32), empty(8, 128256, dtype=torch.float32)
    state = PenaltyState(seen, biases, empty(8, PENALTIES, dtype=torch.float32))
    indices = empty(5, dtype=torch.int64)
    penalise(empty(8, 128256, dtype=dtype), indices, indices, state)
    assert compiled == {"_penalise"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masks(compiled: set[str], dtype: torch.dtype) -> None:
    rows, allowed = empty(5, dtype=torch.int64), empty(5, 16032, dtype=torch.uint8)
    forbid_others(empty(8, 128256, dtype=dtype), rows, allowed)
    assert compiled == {"_forbid_others"}


@pytest.mark.parametrize(
    "name", re.findall(r'_cuda\("([\w.]+)"\)', Path(linear.__file__).read_text())
)
def test_the_modules_of_triton_kernels_that_linears_name_are_there(name):
    assert find_spec(f"lorikeet_engine.kernels.{name}")


@pytest.mark.parametrize("rank", [16, 64])
@pytest.mark.parametrize(("tokens", "segments"), [(1, 1), (256, 128), (2048, 1)])
def test_lora_of_experts(compiled: set[str], tokens: int, segments: int, rank: int) -> None:
    rows = tokens * 8
    integers = partial(empty, dtype=torch.int32)
    pairs = integers(tokens, 8)
    routed = RoutedRows(empty(tokens, 8), integers(rows), pairs, pairs, integers(129))
    weights, _ = lora(tokens, segments, rank)
    runs = [integers(segments) for _ in range(3)]
    step = LoraStep(weights, Segments(*runs, rank), None)
    made = ExpertStep(step, routed, expert_rows.list_owners(step.segments, routed))
    for d_in, group in ((2048, LoraGroup((5, 6), 2048, (768, 768))), (768, EXPERT_DOWN)):
        x, y = empty(rows, d_in), empty(rows, sum(group.d_outs))
        expert_rows.add_expert_lora(y, x, made, 3, group, gathered=d_in == 2048)
    assert compiled >= {"_list_owners", "_shrink", "_expand"}


def packed_weight(stored: str, d_out: int, d_in: int) -> PackedWeight:
    """A weight of 4 bits on the meta device."""
    group = {"whole": d_in, "nf4": 64, "small groups": 32}.get(stored, 128)
    scales = empty(d_out, d_in // group, dtype=torch.float16)
    zeros = empty(d_out, d_in // group, dtype=torch.uint8)
    codes = empty(d_in // 128, d_out, 32, dtype=torch.int16)
    if stored == "nf4":
        levels = empty(16, dtype=torch.float32)
        return PackedWeight(codes, scales.float(), None, 64, d_in, None, levels, torch.bfloat16)
    order = empty(d_in, dtype=torch.int32) if stored == "act-order" else None
    return PackedWeight(codes, scales, None if stored == "whole" else zeros, group, d_in, order)


@pytest.mark.parametrize("tokens", [1, 33, 256])
@pytest.mark.parametrize("stored", ["groups", "small groups", "whole", "act-order", "nf4"])
def test_products_of_4_bits(compiled: set[str], stored: str, tokens: int) -> None:
    weight = packed_weight(stored, 6144, 4096)
    for bias in (None, empty(6144)):
        assert w4a16_fused.linear(empty(tokens, 4096), weight, bias).shape == (tokens, 6144)
    assert compiled == {"_multiply"}


@pytest.mark.usefixtures("compiled")
def test_decoded_weights_are_operands_of_tensor_cores_without_passing_shared_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, run = [], JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda *a, **k: made.append(run(*a, **k)))
    w4a16_fused.linear(empty(16, 4096), packed_weight("groups", 6144, 4096))
    loop = made[-1].asm["ttgir"].partition("scf.for")[2].partition("scf.yield")[0]
    assert loop.count("warp_group_dot ") == 4
    assert "convert_layout" not in loop
    assert "async_copy_global_to_local" in loop


def mxfp4_experts(d_out: int) -> Mxfp4Experts:
    """gpt-oss-20b's experts in MXFP4, on the meta device."""
    codes = empty(32, d_out, 1440, dtype=torch.uint8)
    return mxfp4.pack(codes, empty(32, d_out, 90, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        *((config, torch.bfloat16) for _, config in grouped_mxfp4.TILES),
        (None, torch.float16),
        (None, torch.float32),
    ],
)
def test_experts_in_mxfp4(
    compiled: set[str], config: TileConfig | None, dtype: torch.dtype
) -> None:
    routed, x = moe.route(empty(64, 32), 4, None, normalised=True), empty(64, 2880, dtype=dtype)
    y = grouped_mxfp4.products(x, mxfp4_experts(5760), routed, config, gathered=True)
    assert y.shape == (256, 5760)
    assert moe.expert_products(y[:, :2880], mxfp4_experts(2880), routed).shape == (256, 2880)
    assert compiled == {"choose", "sort_by_expert", "_products_mxfp4"}


@pytest.mark.parametrize("stored", ["floats", "mxfp4"])
def test_the_experts_of_one_token_with_biases_and_clamps(compiled: set[str], stored: str) -> None:
    sizes = 5760, 2880
    weights = [
        mxfp4_experts(size) if stored == "mxfp4" else empty(32, size, 2880) for size in sizes
    ]
    biases = ClampedBiases(Clamp(1.702, 7.0), *(empty(32, size) for size in sizes))
    given = empty(1, 2880), *weights, empty(1, 32), None, 4
    y = moe.experts_of_one(*given, normalised=True, gelu=False, biases=biases)
    assert y.shape == (1, 2880)
    names = ("_gate_up", "_down") if stored == "floats" else ("_gate_up_mxfp4", "_down_mxfp4")
    assert compiled == {"choose", *names}


@pytest.mark.usefixtures("compiled")
def test_decoded_experts_are_operands_of_tensor_cores_without_passing_shared_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, run = [], JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda *a, **k: made.append(run(*a, **k)))
    routed = moe.route(empty(4, 32), 4, None, normalised=True)
    moe.expert_products(empty(4, 2880), mxfp4_experts(5760), routed, gathered=True)
    loop = made[-1].asm["ttgir"].partition("scf.for")[2].partition("scf.yield")[0]
    assert loop.count("warp_group_dot ") == 4
    assert "convert_layout" not in loop
    assert "tt.load" not in loop, "scales come ahead of their turn, as weights do"
    assert loop.count("async_copy_global_to_local") == 6


@pytest.mark.parametrize("stored", ["groups", "whole", "nf4"])
def test_decoding_of_4_bits(compiled: set[str], stored: str) -> None:
    w4a16_fused.decode(packed_weight(stored, 6144, 4096), 0, empty(1024, 4096))
    assert compiled == {"_decode_weight"}
