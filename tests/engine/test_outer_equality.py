"""Adapters of lm_head, embeddings and trained tokens, mixed with others, say what PEFT says."""

import pytest
import torch

from lorikeet_engine.adapter import Residency
from tests.engine.conftest import FAMILIES
from tests.engine.engine_driver import Answers, RecordingRunner, build, greedy
from tests.engine.peft_world import PeftWorld, ask, bring_all

TIED = ("llama", "mistral", "qwen2", "qwen3", "granite", "smollm3")
TOKENS = list(range(3, 90, 2))
ADAPTERS = {
    "plain": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"]},
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
    "other_plain": {"r": 4, "lora_alpha": 8, "target_modules": ["o_proj"]},
    "tokens": {
        "r": 4,
        "target_modules": ["q_proj", "down_proj"],
        "trainable_token_indices": TOKENS,
    },
    "tokens_of_both": {
        "r": 2,
        "target_modules": ["v_proj"],
        "trainable_token_indices": {"embed_tokens": TOKENS[::-1], "lm_head": TOKENS[::-1]},
    },
    "tokens_of_head": {
        "r": 3,
        "target_modules": ["v_proj"],
        "trainable_token_indices": {"lm_head": TOKENS[:9]},
    },
}
LORA = ("head", "head_alone", "embeddings", "both", "tied")
ROWS = ("tokens", "tokens_of_both", "tokens_of_head")
MODES = {
    "at_ease": {},
    "in_chunks": {"max_batch_tokens": 7, "max_running": 7},
    "preempted": {"kv_pages": 8, "max_context": 112},
    "churn": {"max_batch_adapters": 2, "adapter_gpu_bytes": 60 << 10},
}


WORLDS = [*((family, False) for family in FAMILIES), *((family, True) for family in TIED)]
# Granite's embeddings and logits have multipliers. The matrix has the others.
OFTEN = (("llama", False), ("granite", True))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(world, marks=[] if world in OFTEN else pytest.mark.soak) for world in WORLDS
    ],
)
def world(request, tiny_checkpoints, tied_checkpoints, tmp_path_factory):
    family, tied = request.param
    checkpoint = (tied_checkpoints if tied else tiny_checkpoints)[family]
    return PeftWorld(checkpoint, tmp_path_factory.mktemp(family), ADAPTERS, tokens=16)


@pytest.fixture
def engine(world, tmp_path, request, close_later):
    return close_later(build(world.checkpoint, world.shelf, tmp_path / "cache", **request.param))


@pytest.mark.parametrize("engine", MODES.values(), ids=MODES, indirect=True)
def test_every_adapter_answers_as_peft_does(engine, world, request):
    witness, answers = RecordingRunner(engine), Answers(engine)
    mode = request.node.callspec.id.partition("-")[2]
    if mode != "churn":
        bring_all(world, answers)
    assert ask(world, answers) == world.expected
    assert ask(world, answers) == world.expected, "with prefix hits"
    heads = [len(batch.head_segments or ()) for batch in witness.batches]
    match mode:
        case "at_ease":
            assert max(heads) in (5, 7)  # an adapter that is tied has both where embeddings are
            assert max(len(batch.segments or ()) for batch in witness.batches) == len(ADAPTERS)
        case "preempted":
            once = sum(len(ids) + world.tokens - 1 for ids in world.prompts.values())
            assert witness.tokens > 2 * once - sum(map(len, world.prompts.values()))
        case "churn":
            assert engine.status().tiers[Residency.GPU].evictions > 0


class LogitsRunner(RecordingRunner):
    """A runner that keeps the logits of the first row of each batch."""

    def forward(self, batch, scores=None):
        logits = super().forward(batch, scores)
        self.batches[-1] = logits[0].clone()
        return logits


@pytest.mark.parametrize("engine", [{}], ids=[""], indirect=True)
@pytest.mark.parametrize("name", [*LORA, *ROWS])
def test_logits_are_those_of_peft(engine, world, name):
    witness, answers = LogitsRunner(engine), Answers(engine)
    ids = world.prompts[name]
    answers.submit(greedy("x", ids, adapter=world.refs[name], max_tokens=1))
    answers.all()
    with torch.inference_mode():
        want = world.model(name)(input_ids=torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(witness.batches[0], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("engine", [{}], ids=[""], indirect=True)
def test_a_step_whose_adapters_leave_the_head_alone_has_no_work_for_it(engine, world):
    witness, answers = RecordingRunner(engine), Answers(engine)
    for name in (None, "plain", "other_plain"):
        answers.submit(greedy(str(name), world.prompts[name], adapter=world.refs[name]))
    answers.all()
    assert all(batch.head_segments is None for batch in witness.batches)
