"""Whatever the batch, every request says what PEFT says under the same adapter, token for token."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from lorikeet_engine.adapter import AdapterRef, Residency
from tests.engine.engine_driver import PAGE, Answers, RecordingRunner, build, greedy, prompt
from tests.engine.peft_adapters import BlobShelf, save_adapter

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
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
NAMES = (None, *ADAPTERS)
TOKENS = 40
# However the work is cut, the same tokens must come out.
MODES: dict[str, dict[str, Any]] = {
    "at_ease": {},
    "in_chunks": {"max_batch_tokens": 13, "max_running": 13},
    "preempted": {"kv_pages": 10, "max_context": 112},
    "few_adapters": {"max_batch_adapters": 2},
}


class World:
    """One family's checkpoint, adapters, and what transformers and PEFT answer."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        self.checkpoint = checkpoint
        self.folder = folder
        self.shelf = BlobShelf(folder / "blobs")
        self.refs: dict[str | None, AdapterRef | None] = {None: None}
        self.prompts = {name: prompt(9 + 8 * i) for i, name in enumerate(NAMES)}
        self.expected = {None: self._generate(None)}
        for seed, (name, lora) in enumerate(ADAPTERS.items()):
            peft_folder = save_adapter(checkpoint, folder / name, seed, **lora)
            self.refs[name] = self.shelf.add(peft_folder, name)
            self.expected[name] = self._generate(name, peft_folder)

    def _generate(self, name: str | None, peft_folder: Path | None = None) -> list[int]:
        model = transformers.AutoModelForCausalLM.from_pretrained(self.checkpoint)
        if peft_folder is not None:
            model = peft.PeftModel.from_pretrained(model, peft_folder)
        ids = torch.tensor([self.prompts[name]])
        made = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens: list[int] = made[0, ids.shape[1] :].tolist()
        return tokens


@pytest.fixture(scope="module", params=FAMILIES)
def world(request, tiny_checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return World(tiny_checkpoints[request.param], folder)


@pytest.fixture
def engine(world, tmp_path, request):
    engine = build(world.checkpoint, world.shelf, tmp_path / "cache", **request.param)
    yield engine
    engine.close()


def bring_all(world: World, answers: Answers) -> None:
    """Wait until every adapter is on the GPU, so that they meet in one batch."""
    refs = [ref for ref in world.refs.values() if ref is not None]
    for ref in refs:
        answers.engine.pin(ref)
    answers.until(lambda: all(answers.engine.residency(r) is Residency.GPU for r in refs))


def ask(world: World, answers: Answers) -> dict[str | None, list[int]]:
    """Every prompt under its adapter, all at once; what came out."""
    for name in NAMES:
        adapter = world.refs[name]
        answers.submit(greedy(str(name), world.prompts[name], adapter=adapter, max_tokens=TOKENS))
    answers.all()
    return {name: answers.of(str(name)) for name in NAMES}


@pytest.mark.parametrize("engine", MODES.values(), ids=MODES, indirect=True)
def test_every_adapter_in_a_mixed_batch_answers_as_peft_does(engine, world, request):
    witness, answers = RecordingRunner(engine), Answers(engine)
    bring_all(world, answers)
    assert ask(world, answers) == world.expected
    batches = witness.batches
    match request.node.callspec.id.partition("-")[2]:
        case "at_ease":
            assert max(len(batch.segments or ()) for batch in batches) == len(ADAPTERS)
        case "in_chunks":
            assert max(len(batch.token_ids) for batch in batches) == 13
        case "preempted":
            once = sum(len(ids) + TOKENS - 1 for ids in world.prompts.values())
            assert witness.tokens > once, "somebody was computed twice"
        case "few_adapters":
            assert max(len(batch.segments or ()) for batch in batches) == 2


@pytest.mark.parametrize("engine", [{}], ids=[""], indirect=True)
def test_prefix_hits_answer_as_peft_does(engine, world):
    witness, answers = RecordingRunner(engine), Answers(engine)
    ask(world, answers)
    first = witness.tokens
    assert ask(world, answers) == world.expected
    saved = sum((len(p) - 1) // PAGE * PAGE for p in world.prompts.values())
    assert witness.tokens - first == first - saved


def test_the_adapters_change_what_the_model_says(world):
    plain = Answers(build(world.checkpoint, world.shelf, world.folder / "cache"))
    for name in ADAPTERS:
        plain.submit(greedy(name, world.prompts[name], max_tokens=TOKENS))
    plain.all()
    plain.engine.close()
    assert all(plain.of(name) != world.expected[name] for name in ADAPTERS)
