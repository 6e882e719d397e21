"""Mixtures of experts: how checkpoints store them, and what of them is refused by name."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lorikeet_engine.adapter_format import Quantization
from lorikeet_engine.errors import ModelError
from lorikeet_engine.execution.memory_plan import step_bytes
from lorikeet_engine.kernels.attention.sdpa import SdpaAttention
from lorikeet_engine.kernels.lora.types import LoraStep, Segments
from lorikeet_engine.models import staging
from lorikeet_engine.models.checkpoint import Checkpoint
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.experts import Experts
from lorikeet_engine.models.llama import load_model, rehearse_load
from lorikeet_engine.parallel.shard import Shard
from lorikeet_engine.settings import EngineSettings
from tests.engine.conftest import MOE, PagedTokens
from tests.engine.models.quantized_checkpoints import AWQ, GPTQ, NF4, write_fp8

CPU = torch.device("cpu")
EXPERT = re.compile(r"\.experts\.(\d+)\.(\w+)\.weight")
OF_WHOLE = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def as_whole(folder, target):
    """A copy whose experts are two tensors of a layer, as transformers holds them in memory."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    by_layer = {}
    for name in [name for name in tensors if EXPERT.search(name)]:
        found = EXPERT.search(name)
        by_layer.setdefault(name[: found.start()], {})[found[2], int(found[1])] = tensors.pop(name)
    for layer, linears in by_layer.items():
        count = 1 + max(expert for _, expert in linears)
        for whole, parts in OF_WHOLE.items():
            stacked = [torch.cat([linears[part, e] for part in parts]) for e in range(count)]
            tensors[f"{layer}.experts.{whole}"] = torch.stack(stacked)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def logits(folder, rounding=None):
    model, tokens = load_model(folder, CPU, torch.float32, rounding=rounding), PagedTokens()
    shape = model.config.shape
    size = (shape.layers, 2, tokens.pages, tokens.page_size, shape.kv_heads, shape.head_dim)
    batch = tokens.batch({"one": list(range(1, 20))})
    with torch.inference_mode():
        hidden = model.forward(batch, torch.zeros(size), None, SdpaAttention())
        return model.logits(hidden, None, None)


def test_experts_that_are_stored_as_one_tensor_are_the_same(tiny_checkpoints, tmp_path):
    folder = tiny_checkpoints["qwen3_moe"]
    whole = as_whole(folder, tmp_path / "whole")
    assert torch.equal(logits(whole), logits(folder))


@pytest.mark.parametrize(
    ("family", "stored"), [("qwen3_moe", "apart"), ("qwen3_moe", "as one"), ("mixtral", "apart")]
)
def test_a_process_reads_its_part_of_every_expert(
    family, stored, tiny_checkpoints, tmp_path, monkeypatch
):
    folder = tiny_checkpoints[family]
    if stored == "as one":
        folder = as_whole(folder, tmp_path / "whole")
    whole, *parts = whole_and_halves(folder, monkeypatch)
    assert torch.equal(joined([part.gate_up for part in parts]), whole.gate_up)
    assert torch.equal(torch.cat([part.down for part in parts], dim=2), whole.down)


@pytest.mark.parametrize(
    ("family", "kind", "stored"),
    [
        *(
            (family, kind, "apart")
            for family in MOE
            for kind in ("dynamic", "static", "blocks")
            if family != "gemma4_moe_text"  # its experts are always stored as one
        ),
        ("gemma4_moe_text", "blocks", "as one"),
        ("qwen3_moe", "blocks", "as one"),
        ("qwen3_5_moe_text", "blocks", "as one"),  # a block has rows of gate and of up
    ],
)
def test_a_process_reads_its_part_of_every_expert_in_fp8(
    family, kind, stored, tiny_checkpoints, tmp_path, monkeypatch
):
    plain = tiny_checkpoints[family]
    are_one = stored == "apart" or family == "gemma4_moe_text"
    folder = plain if are_one else as_whole(plain, tmp_path / "whole")
    folder, _ = write_fp8(folder, tmp_path, kind)
    whole, *parts = whole_and_halves(folder, monkeypatch)
    gate_up = joined([part.gate_up.floats() for part in parts])
    assert torch.equal(gate_up, whole.gate_up.floats())
    down, want = torch.cat([part.down.floats() for part in parts], dim=2), whole.down.floats()
    if kind == "blocks":  # 24 and 20 columns are too few for a scale: rounded to scales of rows
        assert (down - want).abs().max() <= 2**-3 * want.abs().max()
    else:
        assert torch.equal(down, want)


def whole_and_halves(folder, monkeypatch):
    """The experts of a process alone and of each of two."""
    monkeypatch.setattr(staging, "STAGING_BYTES", 1 << 10)  # a few rows at a time
    return [experts(folder, Shard(i, n)) for i, n in ((0, 1), (0, 2), (1, 2))]


def joined(parts):
    """The rows of gate and up, of which each part has some."""
    return torch.cat([part.unflatten(1, (2, -1)) for part in parts], dim=2).flatten(1, 2)


def test_rows_of_experts_that_others_keep_are_not_read(tiny_checkpoints, tmp_path, monkeypatch):
    read, read_piece = [], staging.read_bytes

    def count(file, begin, out):
        read.append(out.nbytes)
        read_piece(file, begin, out)

    monkeypatch.setattr(staging, "read_bytes", count)
    for folder in (
        tiny_checkpoints["qwen3_moe"],
        as_whole(tiny_checkpoints["qwen3_moe"], tmp_path / "whole"),
    ):
        read.clear()
        part = experts(folder, Shard(1, 4))
        assert sum(read) == part.gate_up.nbytes + 4 * part.down.nbytes  # columns are cut afterwards


@pytest.mark.parametrize(
    ("tokens", "adapts", "at_once"),
    [(1, None, True), (1, False, True), (1, True, False), (2, None, False)],
)
def test_a_single_tokens_experts_are_computed_at_once_on_cuda_where_no_adapter_changes_them(
    tiny_checkpoints, monkeypatch, tokens, adapts, at_once
):
    layer, module = (
        experts(tiny_checkpoints["qwen3_moe"], Shard(0, 1)),
        "lorikeet_engine.models.experts",
    )
    x, logits = torch.randn(tokens, layer.gate_up.shape[2]), torch.randn(tokens, len(layer.gate_up))
    calls = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(f"{module}.begin_experts", lambda *_: None)
    monkeypatch.setattr(f"{module}.experts_of_one", lambda x, *_, **__: calls.append(x) or x)
    runs = [torch.zeros(1, dtype=torch.int32)] * 3
    segments = None if adapts is None else Segments(*runs, 8, changes_experts=adapts)
    y = layer(x, logits, None, segments and LoraStep(None, segments, None))
    assert y.shape == x.shape
    assert bool(calls) == at_once


def experts(folder, shard):
    config = ModelConfig.from_folder(folder)
    stored = config.quantized_linears
    with Checkpoint(folder, CPU, torch.float32, stored, shard=shard) as checkpoint:
        return Experts(config, checkpoint, layer=1)


@pytest.mark.parametrize("family", MOE)
def test_a_rehearsal_knows_the_bytes_of_all_experts(tiny_checkpoints, family):
    _, nbytes = rehearse_load(tiny_checkpoints[family], torch.float32)
    stored = load_file(tiny_checkpoints[family] / "model.safetensors")
    kept = [tensor for name, tensor in stored.items() if not name.endswith(".layer_scalar")]
    assert nbytes == sum(tensor.nbytes for tensor in kept)


def test_steps_have_room_for_a_row_of_each_of_a_tokens_experts(tiny_checkpoints):
    settings = EngineSettings(model=Path(), cache_dir=Path(), device="cpu", dtype="float32")
    three = ModelConfig.from_folder(tiny_checkpoints["qwen3_moe"])
    two = replace(three, experts_per_token=2)
    row = 2 * three.shape.hidden + 3 * three.shape.intermediate  # in, gate and up, gated, out
    assert step_bytes(three, three.shape, settings) - step_bytes(two, two.shape, settings) == (
        settings.max_batch_tokens * row * 4
    )


@pytest.mark.parametrize(
    ("family", "changes", "field"),
    [
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts"),
        (
            "mixtral",
            {"quantization_config": AWQ},
            "quantization_config",
        ),
        ("qwen3_5_moe_text", {"quantization_config": GPTQ}, "quantization_config"),
        ("qwen3_next", {"quantization_config": NF4}, "quantization_config"),
    ],
)
def test_a_feature_that_is_not_computed_is_refused_by_name(edited, family, changes, field):
    with pytest.raises(ModelError) as refused:
        load_model(edited(family, **changes), CPU, torch.float32)
    assert refused.value.field == field


def test_experts_that_are_stored_as_one_tensor_are_rounded_alike(tiny_checkpoints, tmp_path):
    folder = tiny_checkpoints["qwen3_moe"]
    whole = as_whole(folder, tmp_path / "whole")
    got, want = (logits(each, Quantization.FP8) for each in (whole, folder))
    assert torch.equal(got, want)
    assert not torch.equal(got, logits(folder))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_5_moe_text"])
def test_experts_are_not_rounded_to_nf4(tiny_checkpoints, family):
    with pytest.raises(ModelError, match="want auto or fp8") as refused:
        rehearse_load(tiny_checkpoints[family], torch.float32, rounding=Quantization.NF4)
    assert refused.value.field == "weight_dtype"


def test_a_missing_expert_is_named(tiny_checkpoints, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoints["mixtral"], folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.experts\.3\.down_proj"):
        load_model(folder, CPU, torch.float32)
