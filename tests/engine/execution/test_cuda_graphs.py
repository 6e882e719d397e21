"""Small steps give the same logits with and without graphs, at all sizes and with all adapters."""

from array import array
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from loadtest.engine.random_adapters import RandomBlobs
from loadtest.engine.random_model import random_model, write_config
from lorikeet_engine.adapter import Composition
from lorikeet_engine.adapter_format import BaseShape, decoder_config
from lorikeet_engine.engine import Engine, EngineSettings
from lorikeet_engine.execution import cuda_graphs
from lorikeet_engine.execution.cuda_graphs import CudaGraphs, StepLimits, _WholeGraph
from lorikeet_engine.kernels.attention.by_heads import CapturableByHeads
from lorikeet_engine.kernels.attention.paged_decode import query_rows
from lorikeet_engine.kernels.attention.protocol import PageTable
from lorikeet_engine.kernels.attention.sdpa import SdpaAttention
from lorikeet_engine.kernels.fp8_kv import FP8_KV
from lorikeet_engine.models.batch import Batch
from tests.engine.engine_driver import Answers, greedy
from tests.engine.given_costs import given_costs

PAGE = 16
SOAK = pytest.mark.soak
_EMPTY = torch.zeros(0, dtype=torch.int64)
CONFIG = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
WINDOWED = CONFIG | {  # three groups of layers
    "model_type": "ministral",
    "head_dim": 64,
    "sliding_window": 40,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
HYBRID = CONFIG | {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
    "partial_rotary_factor": 0.25,
}
MAMBA = {key: value for key, value in CONFIG.items() if key != "num_hidden_layers"} | {
    "model_type": "nemotron_h",
    "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"],
    "head_dim": 64,
    "mamba_head_dim": 32,
    "mamba_num_heads": 8,
    "moe_intermediate_size": 128,
    "moe_latent_size": 128,
    "moe_shared_expert_intermediate_size": 256,
    "n_groups": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "ssm_state_size": 32,
}
TWO_HEADS = CONFIG | {  # heads of two sizes
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "layer_types": [*["sliding_attention"] * 2, *["full_attention"] * 2],
    "head_dim": 64,
    "global_head_dim": 96,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 40,
}
HEADS_OF_512 = {"global_head_dim": 512}
WIDE = TWO_HEADS | HEADS_OF_512
LAYER_INPUTS = TWO_HEADS | {  # and layers that read other layers' keys
    "layer_types": [*["sliding_attention", "full_attention"] * 2],
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": CONFIG["vocab_size"],
}


class Rows:
    """CapturableAttention of torch, without a GPU: each query token is planned as its own row."""

    def __init__(self, scale=None):
        self._scale = scale

    def captured(self, tokens, pages):
        return Rows(self._scale)

    def plan(self, batch):
        rows, tables = np.arange(batch.query_starts[-1] + 1, dtype=np.int32), []
        for table in batch.page_tables:
            starts, lengths = query_rows(batch.query_starts, table)
            of_rows = [array("i", table.pages[start:]) for start in starts]
            tables.append(PageTable.of(of_rows, lengths, PAGE))
        self._rows = Batch(*[_EMPTY] * 4, rows, rows[1:], tuple(tables), segments=None)

    def attend(self, q, layer_kv, batch, scales=None, window=None, group=0, sinks=None):
        out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
        rows = len(self._rows.kv_lengths)
        out[:rows] = SdpaAttention(None, self._scale).attend(
            q[:rows], layer_kv, self._rows, scales, window, group, sinks
        )
        return out


class Replayed:
    """A graph without a GPU, which computes again the pass that it recorded."""

    def __init__(self, replay):
        self.replay = replay


def recorded(graphs, blank, attention):
    attention.plan(blank)
    hidden = graphs._run(blank, attention)
    again = Replayed(lambda: hidden.copy_(graphs._run(blank, attention)))
    return _WholeGraph(again, hidden, attention)


class Piecewise:
    """PiecewiseGraphs without a GPU: static tensors, but attention for the step's own tokens."""

    def __init__(self, graphs, blank, buffers):
        self._graphs, self._blank, self._buffers = graphs, blank, buffers

    def forward(self, batch):
        self._batch = batch
        return self._graphs._run(self._blank, self)

    def attend(self, q, layer_kv, _, scales=None, window=None, group=0, sinks=None):
        rows = len(self._batch.token_ids)
        _, outputs = self._buffers.of(len(q), q.shape[1:])
        outputs.fill_(torch.nan)
        torchs = SdpaAttention(None, self._graphs._model.config.attention_scale)
        got = torchs.attend(q[:rows], layer_kv, self._batch, scales, window, group, sinks)
        outputs[:rows] = got
        return outputs


def recorded_piecewise(graphs, blank, attention, buffers):
    return Piecewise(graphs, blank, buffers)


def tolerance(runner, dtype):
    """Return the largest difference between two equal ways, as a share of the largest logit.

    In FP8 a key or value between two numbers may be rounded to either, 6% from the other.
    """
    if runner.kv.dtype == FP8_KV:
        return 0.1 if dtype == torch.bfloat16 else 0.01
    return (8 if dtype == torch.bfloat16 else 64) * torch.finfo(dtype).eps


class Twice:
    """Runner that computes steps that fit a graph with and without it, and compares both."""

    def __init__(self, runner):
        self.runner, self.kv_windows, self.model = runner, runner.kv_windows, runner.model
        self.state_slots = runner.state_slots
        self.compared = []

    def share(self, *_arguments):
        pass

    def forward(self, batch, scores):
        graphs = self.runner._graphs
        if not graphs.fit(batch):
            return self.runner.forward(batch, scores)
        before = self._states()
        got = self.runner.forward(batch, scores).clone()
        after = self._states()
        for states, old in zip(self._states(copy=False), before, strict=True):
            states.copy_(old)
        want = self.runner.forward_eager(batch)
        self._compare(got, want)
        for states, ours in zip(self._states(copy=False), after, strict=True):
            atol = tolerance(self.runner, self.runner.model.dtype) * states.abs().max().item()
            torch.testing.assert_close(ours, states, rtol=0, atol=atol)
        segments = len(batch.segments) if batch.segments else 0
        self.compared.append((len(batch.token_ids), len(want), segments))
        return got

    def _states(self, copy=True):
        states = self.runner._states
        tensors = [] if states is None else states.tensors
        return [each.clone() for each in tensors] if copy else tensors

    def _compare(self, got, want):
        assert got.shape == want.shape
        if not len(want):  # a chunk: faulty keys would show in the tokens after it
            return
        atol = tolerance(self.runner, want.dtype) * want.abs().max().item()
        torch.testing.assert_close(got, want, rtol=0, atol=atol)
        top = want.topk(2).values
        clear = top[:, 0] - top[:, 1] > 2 * atol
        assert torch.equal(got.argmax(-1)[clear], want.argmax(-1)[clear])


ON_CPU = [
    ("cpu", "auto", CONFIG),
    ("cpu", "fp8", CONFIG),
    ("cpu", "auto", WINDOWED),
    ("cpu", "auto", HYBRID),
    ("cpu", "auto", MAMBA),
    ("cpu", "auto", TWO_HEADS),
    ("cpu", "fp8", TWO_HEADS),
    ("cpu", "auto", LAYER_INPUTS),
]
ON_GPU = [
    pytest.param(engine, marks=pytest.mark.gpu)
    for engine in [
        ("cuda", "auto", CONFIG),
        ("cuda", "fp8", CONFIG),
        ("cuda", "auto", WINDOWED),
        ("cuda", "fp8", WINDOWED),
        ("cuda", "auto", HYBRID),
        ("cuda", "auto", MAMBA),
        ("cuda", "auto", WIDE),
        ("cuda", "fp8", WIDE),
        ("cuda", "auto", LAYER_INPUTS | HEADS_OF_512),
        ("cuda", "fp8", LAYER_INPUTS | HEADS_OF_512),
    ]
]


def name_of(param):
    return "-".join((*param[:2], decoder_config(param[2])["model_type"]))


def on(*often):
    """Run a test on the GPU's engines and all of the CPU's, of which `make test` takes some."""
    on_cpu = [pytest.param(e, marks=[] if e in often else SOAK) for e in ON_CPU]
    return pytest.mark.parametrize("engine", [*on_cpu, *ON_GPU], ids=name_of, indirect=True)


# Which graph computes a step depends on its size, not on the model.
FEW = on(ON_CPU[0])
WITH_STATES = on(ON_CPU[0], ("cpu", "auto", HYBRID), ON_CPU[-1])


@pytest.fixture(params=[*ON_CPU, *ON_GPU], ids=name_of)
def engine(request, tmp_path, monkeypatch):
    device, kv_dtype, config = request.param
    shape = BaseShape.from_config(decoder_config(config))
    shelf = RandomBlobs(tmp_path / "blobs", shape, count=5, rank=12)
    engine = build(config, shelf, device, kv_dtype, tmp_path, monkeypatch)
    engine.refs = shelf.refs
    yield engine
    engine.close()


def build(config, shelf, device, kv_dtype, tmp_path, monkeypatch):
    settings = EngineSettings(
        model=write_config(tmp_path / "model", config),
        cache_dir=tmp_path / "cache",
        device=device,
        dtype="bfloat16" if device == "cuda" else "float32",
        kv_dtype=kv_dtype,
        adapter_dtype="bfloat16" if device == "cuda" else "float32",
        max_running=12,
        max_batch_adapters=5,
        max_rank=16,
        max_batch_tokens=512,
        page_size=PAGE,
        kv_bytes=16 << 20,
    )
    torch.set_num_threads(1)  # two would mostly wait for each other
    with given_costs() if device == "cpu" else nullcontext():
        engine = Engine(settings, shelf, random_model)
    if device == "cpu":
        monkeypatch.setattr(cuda_graphs, "_WHOLE_SIZES", (1, 4, 16, 64, 128))
        monkeypatch.setattr(cuda_graphs, "_PIECEWISE_SIZES", (32, 200, 350))
        monkeypatch.setattr(CudaGraphs, "_record", recorded)
        monkeypatch.setattr(CudaGraphs, "_record_piecewise", recorded_piecewise)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
        add_graphs(engine._runner, settings)
    return engine


def add_graphs(runner, settings):
    limits = StepLimits(settings.max_batch_tokens, settings.max_running, 5, 16, runner.kv.shape[2])
    config = runner.model.config
    attention, groups = Rows(config.attention_scale), len(config.kv_groups.windows)
    if config.shape.full is not None:  # heads of two sizes have two back ends
        both = ((range(1), attention), (range(1, groups), Rows(config.attention_scale)))
        attention = CapturableByHeads(both)
    runner._graphs = CudaGraphs(
        runner.model, attention, runner.weights, runner.kv, limits, runner._states
    )


def test_a_graph_gives_the_logits_of_the_plain_pass(engine):
    engine._runner = twice = Twice(engine._runner)
    answers = Answers(engine)
    for i in range(14):
        adapter = engine.refs[i % 5] if i % 3 else None
        prompt = [(7 * i + j) % 512 for j in range(1 + 9 * i)]
        answers.submit(greedy(f"r{i}", prompt, adapter=adapter, max_tokens=4 + i))
        answers.step()
    answers.all()
    assert not answers.errors
    tokens, rows, segments = zip(*twice.compared, strict=True)
    assert set(rows) >= {1, 3, 7}
    assert set(segments) >= {1, 4, 5}
    assert max(tokens) > 100, "prompts and decodes share graphs too"


@FEW
def test_base_requests_alone_use_a_graph_without_adapters(engine):
    engine._runner = twice = Twice(engine._runner)
    answers = Answers(engine)
    answers.submit(greedy("r", [5, 6, 7], max_tokens=20))
    answers.all()
    assert twice.compared == [(3, 1, 0)] + [(1, 1, 0)] * 19


@WITH_STATES
def test_graphs_compute_prompts_in_chunks_and_behind_a_cached_prefix(engine):
    engine._runner = twice = Twice(engine._runner)
    long = [i % 512 for i in range(300)]
    engine._scheduler._limits = replace(engine._scheduler._limits, tokens=64)
    answers = Answers(engine)
    for name, prompt in (("chunks", long), ("prefix", [*long[:280], 7, 8, 9])):
        answers.submit(greedy(name, prompt, adapter=engine.refs[0], max_tokens=3))
        answers.all()
    sizes = [(tokens, rows) for tokens, rows, _ in twice.compared]
    assert sizes[:5] == [(64, 0)] * 4 + [(44, 1)]
    assert sizes[7][0] < 32, "the prefix was computed anew"


@FEW
def test_a_step_that_sees_too_much_for_one_graph_is_computed_in_pieces(engine, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "SEEN_IN_PIECES", 100)
    pieces = engine._runner._graphs._piecewise
    used = spied(pieces)
    engine._runner = twice = Twice(engine._runner)
    answers = Answers(engine)
    answers.submit(greedy("r", list(range(20)), max_tokens=3))
    answers.all()
    assert twice.compared == [(20, 1, 0)] + [(1, 1, 0)] * 2
    assert used == [(min(pieces), (0, False, False, False))]


def spied(ladder):
    """Record the tokens and adapters of each pass in the returned list."""
    used = []
    for size, by_adapters in ladder.items():
        for held, captured in by_adapters.items():
            by_adapters[held] = Spied(captured, used, (size, held))
    return used


MOE_CONFIG = CONFIG | {
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


class Either:
    """AdapterSource made of several sources."""

    def __init__(self, *sources):
        self._sources = {ref.digest: source for source in sources for ref in source.refs}

    def fetch(self, ref, path):
        self._sources[ref.digest].fetch(ref, path)


def test_adapters_that_leave_experts_alone_have_graphs_of_their_own(tmp_path, monkeypatch):
    shape = BaseShape.from_config(MOE_CONFIG)
    of_attention = RandomBlobs(tmp_path / "attention", shape, 1, 12, ["q_proj", "o_proj"])
    of_all = RandomBlobs(tmp_path / "all", shape, 1, 12)
    source = Either(of_attention, of_all)
    engine = build(MOE_CONFIG, source, "cpu", "auto", tmp_path, monkeypatch)
    answers, attention, every = Answers(engine), of_attention.refs[0], of_all.refs[0]
    try:
        for adapter in (attention, every):  # neither request waits below for the other's adapter
            answers.submit(greedy(adapter.digest, [1], adapter=adapter, max_tokens=1))
        answers.all()
        used = spied(engine._runner._graphs._whole)
        engine._runner = twice = Twice(engine._runner)
        for adapters, held in (
            ([None], (0, False, False, False)),
            ([None, attention], (2, False, False, False)),
            ([every], (2, True, False, False)),
            ([attention, None, every], (2, True, False, False)),
        ):
            for i, adapter in enumerate(adapters):
                name = f"{i} of {len(adapters)}, {held}"
                answers.submit(greedy(name, [3, 1, 4 + i], adapter=adapter, max_tokens=3))
            answers.all()
            assert {adapters for _, adapters in used} == {held}
            used.clear()
        assert len(twice.compared) == 4 * 3
    finally:
        engine.close()


def test_the_first_step_with_dora_or_compositions_captures_its_graph(tmp_path, monkeypatch):
    """A capture changes no key: else the answer that is under way meanwhile would differ."""
    shape = BaseShape.from_config(CONFIG)
    plain = RandomBlobs(tmp_path / "plain", shape, 2, rank=8)
    scaled = RandomBlobs(tmp_path / "dora", shape, 1, 8, dora=True)
    engine = build(CONFIG, Either(plain, scaled), "cpu", "auto", tmp_path, monkeypatch)
    answers, (lora, other), (dora,) = Answers(engine), plain.refs, scaled.refs
    both = Composition((lora, other), (1.5, -0.5))
    runner, graphs = engine._runner, engine._runner._graphs
    rounds = [
        ([lora], set()),
        ([lora, None, dora], {(True, False)}),
        ([lora, both, None], {(False, True)}),
        ([dora, both], {(True, True)}),
        ([lora, None, dora], set()),
    ]
    try:
        runner._graphs = None
        for adapter in (both, dora):
            answers.submit(greedy(adapter.digest, [1], adapter=adapter, max_tokens=1))
        answers.all()
        answers.submit(greedy("undisturbed", [2, 7], adapter=lora, max_tokens=40))
        answers.all()
        runner._graphs, captured = graphs, captured_passes(graphs._whole)
        assert not any(held.vectors or held.composed for _, held in captured)
        engine._runner = Twice(runner)
        answers.submit(greedy("meanwhile", [2, 7], adapter=lora, max_tokens=40, salt="another"))
        for turn, (adapters, kinds) in enumerate(rounds):
            for i, adapter in enumerate(adapters):
                answers.submit(greedy(f"{i} of {turn}", [3, 1], adapter=adapter, max_tokens=3))
            while len(answers.pending) > 1:
                answers.step()
            new = captured_passes(graphs._whole) - captured
            assert {(held.vectors, held.composed) for _, held in new} == kinds
            captured |= new
        answers.all()
        assert answers.of("meanwhile") == answers.of("undisturbed")
    finally:
        engine.close()


def captured_passes(ladder):
    return {(size, held) for size, by_adapters in ladder.items() for held in by_adapters}


class Spied:
    def __init__(self, captured, used, key):
        self._captured, self._used, self._key = captured, used, key

    def forward(self, batch):
        self._used.append(self._key)
        return self._captured.forward(batch)


@WITH_STATES
def test_piecewise_graphs_compute_prompts_of_many_adapters(engine, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "SEEN_IN_PIECES", 1)
    answers = Answers(engine)
    for i, adapter in enumerate(engine.refs):  # no prompt below waits for its adapter
        answers.submit(greedy(f"load{i}", [1], adapter=adapter, max_tokens=1))
    answers.all()
    engine._runner = twice = Twice(engine._runner)
    for i in range(7):
        adapter = engine.refs[i % 5] if i % 4 else None
        prompt = [(11 * i + j) % 512 for j in range(20 + 25 * i % 40)]
        answers.submit(greedy(f"r{i}", prompt, adapter=adapter, max_tokens=6))
    answers.all()
    assert not answers.errors
    assert twice.compared[0] == (265, 7, 4)


@FEW
def test_prompts_are_scored_from_the_hidden_states_of_graphs(engine):
    answers, graphs = Answers(engine), engine._runner._graphs
    way = {"prompt_logprobs": 2, "max_tokens": 3}
    for name in ("graphs", "none"):
        if name == "none":
            engine._runner._graphs = None
        for i, prompt in enumerate((range(5, 70), range(40, 49), [3, 1, 4])):
            adapter = engine.refs[i] if i else None
            answers.submit(greedy(f"{name}{i}", list(prompt), adapter=adapter, **way))
        answers.all()
    assert graphs is not None
    for i, count in enumerate((64, 8, 2)):
        captured, eager = (answers.scores[f"{name}{i}", 0] for name in ("graphs", "none"))
        assert len(captured) == len(eager) == count
        told, want = ([score.logprob for score in scores] for scores in (captured, eager))
        exact = (engine._settings.dtype, engine._settings.kv_dtype) == ("float32", "auto")
        assert told == pytest.approx(want, abs=1e-4 if exact else 0.1)


@FEW
def test_a_step_beyond_all_graphs_is_launched_kernel_by_kernel(engine, monkeypatch):
    graphs = engine._runner._graphs
    monkeypatch.setattr(graphs, "_piecewise", {4: graphs._piecewise[min(graphs._piecewise)]})
    monkeypatch.setattr(graphs, "_whole", {2: graphs._whole[min(graphs._whole)]})
    engine._runner = twice = Twice(engine._runner)
    answers = Answers(engine)
    answers.submit(greedy("r", list(range(20)), max_tokens=2))
    answers.all()
    assert twice.compared == [(1, 1, 0)]


@pytest.mark.parametrize("record", [CudaGraphs._record, CudaGraphs._record_piecewise])
def test_a_capture_that_fails_is_ended(record, monkeypatch):
    calls = Counter()

    class Graph:
        def capture_begin(self, *_, **__):
            calls["begun"] += 1

        def capture_end(self):
            calls["ended"] += 1

    def run(*_):
        if calls["begun"]:
            raise torch.OutOfMemoryError("a test")

    stand_ins = {"CUDAGraph": Graph, "stream": lambda _: nullcontext(), "synchronize": lambda: None}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    graphs = SimpleNamespace(_run=run, _pool=None, _stream=None)
    attention = SimpleNamespace(plan=lambda _: None)
    with pytest.raises(torch.OutOfMemoryError):
        record(graphs, None, attention, *[None] * (record is CudaGraphs._record_piecewise))
    assert calls == {"begun": 1, "ended": 1}
