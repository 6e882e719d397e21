"""Decode benchmark: its steps on a tiny engine, and its reading of a profiler's trace."""

import ast
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.engine import decode, harness, random_model
from loadtest.engine.gpu_time import Span, gpu_time, read_trace
from loadtest.engine.offline import Work
from loadtest.engine.random_adapters import Targets
from loadtest.engine.random_engine import random_engine
from lorikeet_engine import kernels
from lorikeet_engine.kernels.fp8_kv import FP8_KV
from tests.engine.tiny_engine import CONFIG, SETTINGS, tiny_engine


def event(name, begin_us, length_us, cat="kernel"):
    return {"ph": "X", "cat": cat, "name": name, "ts": begin_us, "dur": length_us, "args": {}}


@pytest.fixture
def trace(tmp_path):
    """Return two steps of 500 µs, the second 100 µs late; kernels follow, overlap and enclose."""
    step = [
        event("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNT", 0, 300),
        event("_shrink", 50, 20),
        event("_add_rms_norm", 290, 60),
        event("void flashinfer::BatchPrefillWithPagedKVCacheKernel<cutlass>(Params)", 352, 98),
        event("Memcpy DtoH (Device -> Pinned)", 450, 10, "gpu_memcpy"),
        event("something_new", 460, 40),
    ]
    later = [{**e, "ts": e["ts"] + 600} for e in step]
    host = [event("cudaGraphLaunch", 0, 900, "cuda_runtime"), {"ph": "M", "name": "labels"}]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [*host, *later, *step]}))
    return path


def test_busy_gpu_time_is_the_union_of_spans(trace):
    time = gpu_time(read_trace(trace), steps=2)
    assert time.total_ms == pytest.approx(0.55)
    assert time.busy_ms == pytest.approx(0.498)
    assert time.idle == pytest.approx(1 - 498 / 550)
    assert time.waiting_ms == pytest.approx(0.05)


def test_gpu_time_is_split_by_kind(trace):
    time = gpu_time(read_trace(trace), steps=2)
    assert time.by_kind == pytest.approx(
        {
            "products": 0.3,
            "shrink": 0.02,
            "norms, rotary, KV write, SiLU": 0.06,
            "attention": 0.098,
            "copies": 0.01,
            "unknown": 0.04,
        }
    )
    assert time.unknown == pytest.approx({"something_new": 0.04})


def launched_kernels():
    """Return the names of Triton's kernels that the engine launches, by their modules' folders."""
    names = {}
    for path in Path(kernels.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        jitted = {f.name for f in tree.body if isinstance(f, ast.FunctionDef) and f.decorator_list}
        launches = (n.func for n in ast.walk(tree) if isinstance(n, ast.Call))
        grids = (f.value for f in launches if isinstance(f, ast.Subscript))
        used = {name.id for name in grids if isinstance(name, ast.Name)} & jitted
        names.setdefault(path.parent.name, set()).update(used)
    return names


def test_every_kernel_of_the_engine_has_a_kind():
    names = launched_kernels()
    spans = [Span(name, i, i + 1) for i, name in enumerate(sorted(set().union(*names.values())))]
    assert gpu_time(spans, steps=1).unknown == {}


def test_kernels_of_delta_nets_and_no_others_are_of_their_kind():
    names = launched_kernels()
    assert len(names["delta_net"]) == 6
    for folder in filter(names.get, names):
        kinds = gpu_time([Span(name, i, i + 1) for i, name in enumerate(names[folder])], 1).by_kind
        assert (set(kinds) == {"delta nets"}) == (folder == "delta_net")
        assert folder == "delta_net" or "delta nets" not in kinds


def test_a_trace_without_a_gpu_is_an_error():
    with pytest.raises(ValueError, match="no kernel"):
        gpu_time([], steps=1)


def test_steps_are_checked_and_timed_and_the_engine_is_left_empty(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(decode, "STEPS", 5)
    engine = tiny_engine(tmp_path, adapters=2, room=2, others={Targets.LINEARS_AND_HEAD: 2})
    alone, several = Work("alone", 5, 24, requests=1), Work("2 adapters", 9, 24, 2, requests=4)
    works = [alone, several, replace(several, on=Targets.LINEARS_AND_HEAD), alone]
    rows = decode.measure_all(engine, works)
    assert [row.work for row in rows] == works
    assert all(row.step_ms > 0 and row.shortfall < 1e-4 for row in rows)
    assert [row.layer_ms for row in rows] == [row.step_ms / 2 for row in rows]
    assert engine.status().live.running == engine.status().live.kv_pages_used == 0
    assert "2 adapters" in capsys.readouterr().out
    engine.close()


def test_experts_shared_by_two_ranks_are_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "STEPS", 5)
    config = CONFIG | {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    engine = random_engine(tmp_path, config=config, settings=replace(SETTINGS, tensor_parallel=2))
    works = [Work("alone", 5, 24, requests=1), Work("four", 9, 24, requests=4)]
    rows = decode.measure_all(engine, works)
    assert [row.work for row in rows] == works
    assert all(row.step_ms > 0 for row in rows)
    engine.close()


def test_works_too_short_to_be_profiled_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "STEPS", 5)
    engine = tiny_engine(tmp_path)
    with pytest.raises(AssertionError):
        decode.measure(engine, Work("short", 9, 4, requests=4))
    engine.close()


def test_an_fp8_kv_cache_can_be_chosen(tmp_path, monkeypatch):
    def tiny(folder, *, config, settings, **arguments):
        assert config is random_model.QWEN3_8B
        settings = replace(SETTINGS, kv_dtype=settings.kv_dtype)
        return tiny_engine(folder, settings=settings, **arguments)

    monkeypatch.setattr(harness, "random_engine", tiny)
    out = tmp_path / "out.json"
    asked = ["--config", "qwen3-8b", "--kv-dtype", "fp8"]
    monkeypatch.setattr(sys, "argv", ["decode", "--json", str(out), *asked])

    def measure_all(engine, works):
        assert engine._runner.kv.dtype == FP8_KV
        harness.check(engine, works[0])
        return [1]

    harness.run(decode.__doc__, "decode", [Work("base", 9, 4, requests=2)], measure_all)
    written = json.loads(out.read_text())
    assert (written["config"], written["kv_dtype"]) == ("qwen3-8b", "fp8")
    assert written["decode"] == [1]
