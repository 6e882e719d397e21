"""Answers of mixed batches equal transformers' and PEFT's in float32, however steps are cut.

Adapters here are of every kind: linears at ranks 4 to 64, patterns, rsLoRA, DoRA, biases, activated
LoRA, lm_head, embeddings, trained tokens, and experts in each form that trainers save. The matrix
shows families, storages and features of requests; here, adapters meet batch modes, tied embeddings
and scaled rotary embeddings.
"""

import functools
import time
from typing import Any

import pytest
import torch

from loadtest.engine.random_adapters import empty_device
from lorikeet_engine.adapter import Composition, Residency
from lorikeet_engine.models.served_rows import ServedRows
from tests.engine.conftest import FAMILIES, MOE
from tests.engine.engine_driver import (
    PAGE,
    Answers,
    RecordingRunner,
    build,
    greedy,
    load_adapters,
    prompt,
)
from tests.engine.float32_reference import RecordingSampler
from tests.engine.matrix.storages import EXACT
from tests.engine.moe_adapters import PARAMETERS
from tests.engine.peft_world import MoeWorld, PeftWorld, ask, tokens_in_full_pages

pytestmark = pytest.mark.usefixtures("one_thread")
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LINEARS: dict[str, dict[str, Any]] = {
    "rank4_qv": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "rank8_all": {"r": 8, "lora_alpha": 16, "target_modules": ALL},
    "rank12_mlp": {"r": 12, "lora_alpha": 12, "target_modules": ["gate_proj", "down_proj"]},
    "rank16_rs": {"r": 16, "lora_alpha": 8, "target_modules": ALL, "use_rslora": True},
    "rank64_ko": {"r": 64, "lora_alpha": 64, "target_modules": ["k_proj", "o_proj"]},
    "patterns": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "k_proj", "up_proj", "down_proj"],
        "rank_pattern": {"q_proj": 32, r"layers\.1\.mlp\.down_proj": 4},
        "alpha_pattern": {"k_proj": 4, r"layers\.0\.mlp\.up_proj": 40},
    },
}
TRAINED = list(range(3, 90, 2))
# lm_head and embeddings: LoRA, trained tokens and whole modules.
OUTER: dict[str, dict[str, Any]] = {
    "head": {
        "r": 8,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "up_proj", "lm_head"],
        "rank_pattern": {"lm_head": 12},
        "alpha_pattern": {"lm_head": 5},
    },
    "head_alone": {"r": 3, "lora_alpha": 2, "use_rslora": True, "target_modules": ["lm_head"]},
    "embeddings": {
        "r": 8,
        "lora_alpha": 4,
        "target_modules": ["embed_tokens", "k_proj"],
        "rank_pattern": {"embed_tokens": 5},
    },
    "both": {"r": 7, "lora_alpha": 7, "target_modules": ["lm_head", "embed_tokens"]},
    "tied": {"r": 2, "target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "tokens": {
        "r": 4,
        "target_modules": ["q_proj", "down_proj"],
        "trainable_token_indices": TRAINED,
    },
    "tokens_of_both": {
        "r": 2,
        "target_modules": ["v_proj"],
        "trainable_token_indices": {"embed_tokens": TRAINED[::-1], "lm_head": TRAINED[::-1]},
    },
    "tokens_of_head": {
        "r": 3,
        "target_modules": ["v_proj"],
        "trainable_token_indices": {"lm_head": TRAINED[:9]},
    },
    "whole_head": {"r": 3, "target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    "whole_embeddings": {
        "r": 4,
        "target_modules": ["q_proj", "up_proj"],
        "modules_to_save": ["embed_tokens"],
    },
    "whole_both": {
        "r": 2,
        "target_modules": ["k_proj"],
        "modules_to_save": ["embed_tokens", "lm_head"],
    },
    "whole_tied": {
        "r": 2,
        "target_modules": ["o_proj"],
        "modules_to_save": ["embed_tokens"],
        "ensure_weight_tying": True,
    },
}
# DoRA and biases.
VECTORS: dict[str, dict[str, Any]] = {
    "dora": {"r": 8, "lora_alpha": 16, "target_modules": ALL, "use_dora": True},
    "dora_rs": {
        "r": 4,
        "lora_alpha": 9,
        "target_modules": ["k_proj", "o_proj", "down_proj"],
        "rank_pattern": {"o_proj": 40},
        "use_rslora": True,
        "use_dora": True,
        "bias": "all",
    },
    "biases": {
        "r": 6,
        "target_modules": ["q_proj", "o_proj", "gate_proj"],
        "lora_bias": True,
        "bias": "lora_only",
    },
}
# Activated LoRA, in prompts that invoke it.
ACTIVATED: dict[str, dict[str, Any]] = {
    "activated": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ALL,
        "alora_invocation_tokens": [7, 9, 7],
    },
    "activated_head": {
        "r": 5,
        "target_modules": ["k_proj", "down_proj", "lm_head"],
        "use_rslora": True,
        "alora_invocation_tokens": [11],
    },
    "activated_biases": {
        "r": 3,
        "target_modules": ["q_proj", "v_proj", "up_proj"],
        "lora_bias": True,
        "alora_invocation_tokens": [5, 6],
    },
}
ATTENTION = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
DENSE = {**LINEARS, **OUTER, **VECTORS, **ACTIVATED}
# PEFT takes the first adapter's rsLoRA for the sum's own scaling, so rsLoRA comes later.
COMPOSITIONS = {
    "two": {"rank4_qv": 0.6, "rank8_all": -1.5},
    "three": {"head": 1.25, "embeddings": 2.0, "rank16_rs": 0.5},
    "other_weights": {"rank4_qv": 0.5, "rank8_all": -1.5},
}
EXPERTS = {
    "attention": ATTENTION,
    "dora": ATTENTION | {"use_dora": True},
    "activated": ATTENTION | {"alora_invocation_tokens": [7, 9, 7]},
    **PARAMETERS,
}
TOKENS = 12
CHUNK = 13
# Share of the largest logit, of all tokens of the vocabulary.
TOLERANCE = EXACT.worst
MODES: dict[str, dict[str, Any]] = {
    "at_ease": {},
    "in_chunks": {"max_batch_tokens": CHUNK, "max_running": CHUNK},
    "preempted": {"kv_pages": 7, "max_context": 112},
    "few_adapters": {"max_batch_adapters": 2},
    "churn": {"max_batch_adapters": 2, "adapter_gpu_bytes": 200 << 10},
}
TIED = ("llama", "mistral", "qwen2", "qwen3", "granite", "smollm3")
# With windows in all layers, seven pages are enough for all requests.
WINDOWED = ("mistral", "tied mistral")
# Every prompt is longer than the original context of a scaled rotary embedding.
SCALED = ("longrope", "yarn")
WORLDS = (*FAMILIES, *(f"tied {family}" for family in TIED), *SCALED, *MOE)
# Granite's embeddings and logits have multipliers; longrope's model is Phi 3, with fused linears.
OFTEN = {
    "llama": ("in_chunks", "preempted", "churn"),
    "tied granite": ("at_ease",),
    "longrope": ("in_chunks",),
    "yarn": ("few_adapters",),
    "qwen3_moe": ("at_ease", "churn"),
    "mixtral": ("few_adapters",),
}
CASES = [
    pytest.param(world, mode, marks=[] if mode in OFTEN.get(world, ()) else pytest.mark.soak)
    for world in WORLDS
    for mode in MODES
]


@pytest.fixture(scope="module")
def worlds(tiny_checkpoints, tmp_path_factory):
    """Make the world of a name, once."""

    @functools.cache
    def make(name):
        checkpoint, folder = tiny_checkpoints[name], tmp_path_factory.mktemp("world")
        if name in MOE:
            return MoeWorld(checkpoint, folder, EXPERTS, TOKENS)
        if name in SCALED:
            return PeftWorld(checkpoint, folder, LINEARS, TOKENS, longer=3)
        return PeftWorld(checkpoint, folder, DENSE, TOKENS, longer=3, compositions=COMPOSITIONS)

    return make


@pytest.fixture
def start(tmp_path, close_later):
    """Start an engine of a world's checkpoint."""

    def start(world, **settings):
        room = {"adapter_gpu_bytes": 8 << 20, "adapter_host_bytes": 16 << 20}
        settings = {"max_batch_adapters": len(world.names), **room, **settings}
        return close_later(build(world.checkpoint, world.shelf, tmp_path / "cache", **settings))

    return start


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_every_adapter_in_a_mixed_batch_answers_as_peft_does(name, mode, worlds, start):
    world = worlds(name)
    engine = start(world, **MODES[mode])
    draws, witness, answers = RecordingSampler(engine), RecordingRunner(engine), Answers(engine)
    if mode != "churn":
        load_adapters(answers, world.refs.values())
    assert ask(world, answers) == world.expected
    first = witness.tokens
    assert ask(world, answers) == world.expected, "with prefix hits"
    for seed, adapter in enumerate(world.names):
        got = torch.stack([draws.logits[seed, step] for step in range(TOKENS)])
        want = world.logits(adapter, adapter)
        error = (got - want.log_softmax(-1)).abs().max()
        assert error <= TOLERANCE * want.abs().max(), adapter
    if mode != "preempted":
        assert witness.tokens == 2 * first - tokens_in_full_pages(world)
    batches = witness.batches
    segments = max(len(batch.segments or ()) for batch in batches)
    match mode:
        case "at_ease":
            assert segments == len(world.names) - 1
            heads = max(len(batch.head_segments or ()) for batch in batches)
            assert heads == (0 if name in MOE else 12 if name.startswith("tied ") else 9)
        case "in_chunks":
            assert max(len(batch.token_ids) for batch in batches) == CHUNK
        case "preempted" if name not in WINDOWED:
            assert engine.status().preemptions > 0
        case "few_adapters":
            assert segments == 2
        case "churn":
            assert engine.status().tiers[Residency.GPU].evictions > 0


@pytest.mark.parametrize("name", OFTEN)
def test_every_adapter_changes_the_answer(name, worlds):
    world = worlds(name)
    for adapter in world.names[1:]:
        base, adapted = world.logits(adapter, None), world.logits(adapter, adapter)
        assert (adapted - base).abs().max() > base.abs().max() / 100, adapter


def test_only_equal_compositions_share_pages(worlds, start):
    world = worlds("llama")
    engine = start(world)
    answers, ids, two = Answers(engine), prompt(4 * PAGE + 1), world.refs["two"]
    assert isinstance(two, Composition)
    turned = Composition(two.members[::-1], two.weights[::-1])
    whole = [two.members[0], *(Composition((ref,), (0.6,)) for ref in two.members)]
    for number, ref in enumerate([None, two, world.refs["other_weights"], *whole, turned]):
        answers.submit(greedy(str(number), ids, adapter=ref))
        answers.all()
        (first, *_) = answers.outputs[str(number), 0]
        assert first.timings is not None
        assert first.timings.cached_tokens == (4 * PAGE if ref is turned else 0)
    assert answers.of("1") == answers.of("6")


def test_steps_whose_adapters_leave_the_head_alone_have_no_work_for_it(worlds, start):
    world = worlds("llama")
    engine = start(world)
    witness, answers = RecordingRunner(engine), Answers(engine)
    for name in (None, "rank4_qv", "rank64_ko"):
        answers.submit(greedy(str(name), world.prompts[name], adapter=world.refs[name]))
    answers.all()
    assert max(len(batch.segments or ()) for batch in witness.batches) == 2
    assert all(batch.head_segments is None for batch in witness.batches)


def test_the_rows_of_the_base_model_are_read_once_for_the_host_and_for_no_file(
    worlds, start, monkeypatch
):
    world, reads, facts = worlds("llama"), list[Any](), ServedRows.facts

    def counted(*arguments: Any) -> Any:
        reads.append(arguments)
        return facts(*arguments)

    monkeypatch.setattr(ServedRows, "facts", counted)
    engine = start(world)
    tiers, answers, plain = engine._tiers, Answers(engine), world.refs["rank4_qv"]
    said = []
    for turn in range(2):  # from its blob, then from the host
        request = greedy(str(turn), world.prompts["dora"], adapter=world.refs["dora"])
        answers.submit(request)
        answers.submit(greedy(f"plain {turn}", [1], adapter=plain))
        answers.all()
        said.append(answers.of(request.request_id))
        assert len(reads) == len(ALL) * engine._runner.model.shape.layers
        empty_device(tiers)
    assert said[0] == said[1]
    while not tiers._disk.has_image(plain.digest):
        time.sleep(0.01)
    assert not tiers._disk.has_image(world.refs["dora"].digest)
