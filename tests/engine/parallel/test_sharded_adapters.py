"""Adapters of a model that ranks share give PEFT's logits, whatever they change and meet."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import peft
import pytest
import torch
import transformers

from lorikeet_engine.adapter_format import AdapterLimits, read_spec
from lorikeet_engine.kernels.lora.types import LoraWeights, Segments
from lorikeet_engine.models.llama import LlamaModel, load_model
from lorikeet_engine.parallel.rank_group import RankGroup
from lorikeet_engine.residency.blob_packing import pack
from lorikeet_engine.residency.packed_image import PackedImage, PackedLayout
from tests.engine.blob_shelf import BlobShelf
from tests.engine.conftest import EIGHT_HEADS, FAMILIES, PagedTokens, save_all
from tests.engine.models.test_models import Run, assert_equal, prompt_of
from tests.engine.peft_adapters import save_adapter
from tests.engine.ranks import CPU, run_ranks

LIMITS = AdapterLimits(max_rank=64, max_bytes=1 << 22)
CONFIGS: dict[str, dict[str, Any]] = {
    "biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "phi3": FAMILIES["phi3"],
    "glm4": FAMILIES["glm4"],
    "olmo2": FAMILIES["olmo2"],
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# One batch: ranks below, at and above the number of processes, odd, mixed, linears left out.
ADAPTERS: dict[str, dict[str, dict[str, Any]]] = {
    "biased": {
        "everywhere": {"r": 8, "lora_alpha": 16, "target_modules": ALL},
        "thin": {"r": 1, "lora_alpha": 3, "target_modules": ["k_proj", "o_proj"]},
        "mixed": {
            "r": 5,
            "lora_alpha": 7,
            "target_modules": ["q_proj", "up_proj", "down_proj"],
            "rank_pattern": {r"layers\.1\.mlp\.down_proj": 19},
        },
        "outer": {
            "r": 6,
            "lora_alpha": 6,
            "target_modules": ["v_proj", "lm_head", "embed_tokens"],
        },
    },
    "tied": {
        "everywhere": {"r": 3, "lora_alpha": 16, "target_modules": ALL},
        "tokens": {
            "r": 4,
            "lora_alpha": 4,
            "target_modules": ["v_proj", "down_proj"],
            "trainable_token_indices": [1, 100, 130, 255],
        },
    },
    # whose linears store several, and whose norm is of all heads
    "phi3": {
        "everywhere": {"r": 5, "lora_alpha": 16, "target_modules": "all-linear"},
        "fused": {"r": 8, "lora_alpha": 4, "target_modules": ["qkv_proj", "gate_up_proj"]},
    },
    "glm4": {"everywhere": {"r": 3, "lora_alpha": 16, "target_modules": "all-linear"}},
    "olmo2": {"everywhere": {"r": 3, "lora_alpha": 16, "target_modules": ALL}},
}
PROMPTS = {
    (name, adapter): [*prompt_of(7 + 9 * n, seed=5), 100, 130]
    for name, adapters in ADAPTERS.items()
    for n, adapter in enumerate([*adapters, None])
}


class Case(NamedTuple):
    """A checkpoint and its adapters' blobs, by name."""

    checkpoint: Path
    blobs: dict[str, Path]


def answers(
    cases: dict[str, Case], group: RankGroup | None, device: torch.device = CPU
) -> dict[str, torch.Tensor]:
    """Logits of one batch of all adapters and the base model, by model, on the CPU."""
    logits = {}
    for name, case in cases.items():
        model = load_model(case.checkpoint, device, torch.float32, ranks=group)
        weights, layouts = packed(model, case.blobs, group)
        run = Run(case.checkpoint, PagedTokens(str(device)), lora=weights, model=model)
        prompts = {adapter: PROMPTS[name, adapter] for adapter in (*case.blobs, None)}
        parts = [slice(0, -3), slice(-3, -2), slice(-2, -1), slice(-1, None)]
        steps = [{key: tokens[part] for key, tokens in prompts.items()} for part in parts]
        logits[name] = torch.cat([step(run, chunks, layouts) for chunks in steps]).cpu()
    return logits


def answers_of_rank(group: RankGroup, cases: dict[str, Case]) -> dict[str, torch.Tensor]:
    return answers(cases, group)


def answers_of_gpu(group: RankGroup, cases: dict[str, Case]) -> dict[str, torch.Tensor]:
    return answers(cases, group, torch.device("cuda", group.rank))


def packed(
    model: LlamaModel, blobs: dict[str, Path], group: RankGroup | None
) -> tuple[LoraWeights, list[PackedLayout]]:
    """This rank's spans of all images, side by side in an arena, and the images' layouts."""
    rank, world = (0, 1) if group is None else (group.rank, group.world)
    layouts, spans, rows, end = [], [], [], 0
    for blob in blobs.values():
        spec = read_spec(blob, model.config.shape, LIMITS)
        layout = PackedLayout.of(spec, model.config.shape, world)
        elements = torch.full((layout.image_elements,), torch.nan)
        image = PackedImage(layout, elements, pack(blob, spec, layout, elements))
        layouts.append(layout)
        spans.append(image.span(rank))
        rows.append(layout.rows_at(end))
        end += layout.elements
    arena, table = torch.cat(spans), torch.stack(rows)
    return LoraWeights(arena.to(model.device), table.to(model.device)), layouts


def step(
    run: Run, chunks: dict[str | None, list[int]], layouts: list[PackedLayout]
) -> torch.Tensor:
    """The logits of a step whose first chunks have these adapters, in this order."""
    batch = run.tokens.batch(chunks)
    starts = torch.tensor(batch.query_starts[: len(layouts) + 1])
    device = batch.token_ids.device
    segments = Segments(
        torch.arange(len(layouts), dtype=torch.int32, device=device),
        starts[:-1].to(device),
        starts.diff().to(device),
        max_rank=max(layout.max_rank for layout in layouts),
    )
    of_head = replace(
        segments,
        max_rank=max(layout.head_rank for layout in layouts),
        max_rows=max(layout.head_rows for layout in layouts),
    )
    return run.runner.forward(replace(batch, segments=segments, head_segments=of_head))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def cases(folder):
    return made_cases(CONFIGS, folder)


def made_cases(configs: dict[str, dict[str, Any]], folder: Path) -> dict[str, Case]:
    checkpoints = save_all(configs, folder)
    shelf = BlobShelf(folder / "blobs")
    made = {}
    for name, adapters in ADAPTERS.items():
        blobs = {}
        for seed, (adapter, lora) in enumerate(adapters.items()):
            saved = save_adapter(checkpoints[name], folder / f"{name}-{adapter}", seed, **lora)
            blobs[adapter] = shelf.folder / shelf.add(saved, f"{name}-{adapter}").digest
        made[name] = Case(checkpoints[name], blobs)
    return made


@pytest.fixture(scope="module", params=[2, 4])
def shared(request, cases, tmp_path_factory):
    """Results of each rank, by rank and model."""
    return run_ranks(request.param, answers_of_rank, tmp_path_factory.mktemp("ranks"), cases)


@pytest.fixture(scope="module")
def alone(cases):
    return answers(cases, None)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_leaders_logits_under_adapters_equal_one_process(alone, shared, name):
    leader, *followers = (rank[name] for rank in shared)
    assert_equal(leader, alone[name])
    assert all(len(logits) == 0 for logits in followers)


@pytest.mark.soak
def test_eight_ranks_have_the_logits_of_one_process_under_adapters(tmp_path):
    configs = {name: config | EIGHT_HEADS for name, config in CONFIGS.items()}
    cases = made_cases(configs, tmp_path)
    alone = answers(cases, None)
    leader, *followers = run_ranks(8, answers_of_rank, tmp_path, cases)
    for name in CONFIGS:
        assert_equal(leader[name], alone[name])
        assert all(len(rank[name]) == 0 for rank in followers)


@pytest.mark.parametrize(
    ("name", "adapter"),
    [(name, adapter) for name, adapters in ADAPTERS.items() for adapter in (*adapters, None)],
)
def test_the_leaders_logits_are_pefts(cases, folder, shared, name, adapter):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        cases[name].checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, folder / f"{name}-{adapter}")
    with torch.inference_mode():
        want = model(torch.tensor([PROMPTS[name, adapter]])).logits[0]
    assert_equal(of(shared[0][name], name, adapter), want)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_the_logits_of_one(cases, tmp_path):
    leader, follower = run_ranks(2, answers_of_gpu, tmp_path, cases, device="cuda")
    for name, want in answers(cases, None, torch.device("cuda", 0)).items():
        # products of Triton's kernels are of TF32, and otherwise cut
        torch.testing.assert_close(leader[name], want, rtol=0, atol=0.01 * want.abs().max().item())
        assert len(follower[name]) == 0


def of(logits: torch.Tensor, name: str, adapter: str | None) -> torch.Tensor:
    """One sequence's logits of what `answers` gives: a prompt's and those of three more tokens."""
    order = [*ADAPTERS[name], None]
    lengths = [len(PROMPTS[name, each]) - 3 for each in order]
    first, *rest = logits.split([sum(lengths), *[len(order)] * 3])
    at = order.index(adapter)
    return torch.cat([first.split(lengths)[at], *(part[at : at + 1] for part in rest)])
