"""Adapters on q, k and v of a delta net change in_proj_qkv by what each changes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lorikeet_engine.adapter_format import (
    AdapterLimits,
    BaseShape,
    read_config,
    read_spec,
    write_blob,
)
from lorikeet_engine.errors import AdapterRejected, AdapterTooLarge
from tests.corpus.served import packed_deltas

NET = "model.layers.0.linear_attn"
WIDTHS = {"q": 24, "k": 24, "v": 80}
LIMITS = AdapterLimits(max_rank=64, max_bytes=1 << 24)


@pytest.fixture
def shape(tiny_checkpoints: dict[str, Path]) -> BaseShape:
    return BaseShape.from_config(read_config(tiny_checkpoints["qwen3_5_text"]))


def pairs(ranks: dict[str, int]) -> dict[str, torch.Tensor]:
    """Return random A and B of parts of layer 0's in_proj_qkv, by PEFT's names."""
    generator, tensors = torch.Generator().manual_seed(3), {}
    for part, rank in ranks.items():
        for side, size in (("A", (rank, 64)), ("B", (WIDTHS[part], rank))):
            name = f"base_model.model.{NET}.in_proj_{part}.lora_{side}.weight"
            tensors[name] = torch.randn(size, generator=generator)
    return tensors


def blob(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    """Make the blob of a folder with these tensors."""
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = [f"in_proj_{part}" for part in WIDTHS]
    common = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "layers_to_transform": [0]}
    common["target_modules"] = targets
    (folder / "adapter_config.json").write_text(json.dumps(common | config))
    write_blob(folder, folder / "blob")
    return folder / "blob"


@pytest.mark.parametrize("is_rs", [False, True])
def test_parts_of_several_ranks_and_one_scaling_change_their_own_rows(tmp_path, shape, is_rs):
    ranks = {"q": 4, "k": 1, "v": 16}
    alphas = {"k": 4, "v": 16} if is_rs else {"k": 2, "v": 32}
    made = blob(
        tmp_path,
        pairs(ranks),
        use_rslora=is_rs,
        rank_pattern={f"in_proj_{part}": ranks[part] for part in "kv"},
        alpha_pattern={f"in_proj_{part}": alpha for part, alpha in alphas.items()},
    )
    assert read_spec(made, shape, LIMITS).max_rank == 21
    (delta,) = packed_deltas(made, shape).values()
    rows = delta.split([*WIDTHS.values()])
    for part, got in zip(WIDTHS, rows, strict=True):
        a, b = (
            pairs(ranks)[f"base_model.model.{NET}.in_proj_{part}.lora_{s}.weight"] for s in "AB"
        )
        torch.testing.assert_close(got, 8 / (2 if is_rs else 4) * b @ a)


def test_parts_whose_ranks_together_exceed_the_limit_are_refused_with_their_sum(tmp_path, shape):
    made = blob(tmp_path, pairs(dict.fromkeys("qkv", 32)), r=32)
    says = "in_proj_qkv has rank 96, the sum of those of q, k and v .*: the limit is 64$"
    with pytest.raises(AdapterTooLarge, match=says) as refused:
        read_spec(made, shape, LIMITS)
    assert refused.value.fields["max_rank"] == 64
    assert read_spec(made, shape, replace(LIMITS, max_rank=96)).max_rank == 96


FOUR = dict.fromkeys("qkv", 4)


@pytest.mark.parametrize(
    ("tensors", "config", "says"),
    [
        (
            pairs({"q": 4, "k": 4}),
            {"target_modules": ["in_proj_q", "in_proj_k"]},
            "train all three",
        ),
        (pairs({"q": 4, "k": 4}), {}, "selects .*in_proj_v, but no weight is for it"),
        (pairs(FOUR), {"alpha_pattern": {"in_proj_v": 9}}, "in_proj_v has another scaling"),
        (
            {n: t.bfloat16() if "in_proj_k" in n else t for n, t in pairs(FOUR).items()},
            {},
            "in_proj_k has another dtype",
        ),
        (
            {n: t.bfloat16() if "v.lora_B" in n else t for n, t in pairs(FOUR).items()},
            {},
            "in_proj_v has another dtype",
        ),
        (
            {n: t[:, :60].contiguous() if "q.lora_A" in n else t for n, t in pairs(FOUR).items()},
            {},
            "another width of inputs",
        ),
        (
            pairs(FOUR)
            | {n.replace("_q.", "_qkv."): t for n, t in pairs(FOUR).items() if "_q." in n},
            {"target_modules": [*(f"in_proj_{part}" for part in WIDTHS), "in_proj_qkv"]},
            "in_proj_qkv is in the file in two forms",
        ),
        (
            {n: t[:20] if "k.lora_B" in n else t for n, t in pairs(FOUR).items()},
            {},
            "maps 64 to 124 and the base model's 64 to 128",
        ),
    ],
    ids=["v untrained", "v lost", "scaling", "dtype", "dtype of B", "width", "both", "rows"],
)
def test_parts_that_cannot_be_joined_are_refused_by_name(tmp_path, shape, tensors, config, says):
    with pytest.raises(AdapterRejected, match=says):
        read_spec(blob(tmp_path, tensors, **config), shape, LIMITS)
