"""A checkpoint with adapters, what PEFT answers under each, and the same asked of an engine."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.engine import Engine
from tests.engine.engine_driver import PAGE, Answers, RecordingRunner, greedy, prompt
from tests.engine.peft_adapters import BlobShelf, save_adapter

# However the work is cut, the same tokens must come out.
MODES: dict[str, dict[str, Any]] = {
    "at_ease": {},
    "in_chunks": {"max_batch_tokens": 13, "max_running": 13},
    "preempted": {"kv_pages": 10, "max_context": 112},
    "few_adapters": {"max_batch_adapters": 2},
}


class PeftWorld:
    """One checkpoint and what transformers and PEFT answer greedily, by the adapter's name.

    adapters: LoraConfig's arguments. None is the base model, whose prompt has `shortest` tokens.
    """

    def __init__(
        self,
        checkpoint: Path,
        folder: Path,
        adapters: Mapping[str, dict[str, Any]],
        tokens: int,
        shortest: int = 9,
    ) -> None:
        self.checkpoint = checkpoint
        self.folder = folder
        self.tokens = tokens
        self.names = (None, *adapters)
        self.shelf = BlobShelf(folder / "blobs")
        self.refs: dict[str | None, AdapterRef | None] = {None: None}
        self.prompts = {name: prompt(shortest + 8 * i) for i, name in enumerate(self.names)}
        self.expected = {None: self.generated(self.model(None), self.prompts[None])}
        for seed, (name, lora) in enumerate(adapters.items()):
            save_adapter(checkpoint, folder / name, seed, **lora)
            self.refs[name] = self.shelf.add(folder / name, name)
            self.expected[name] = self.generated(self.model(name), self.prompts[name])

    def model(self, name: str | None) -> Any:
        """PEFT's model under an adapter, as its folder has it."""
        model = transformers.AutoModelForCausalLM.from_pretrained(self.checkpoint)
        return model if name is None else peft.PeftModel.from_pretrained(model, self.folder / name)

    def generated(self, model: Any, prompt: list[int]) -> list[int]:
        """What a model answers greedily."""
        ids = torch.tensor([prompt])
        made = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens: list[int] = made[0, ids.shape[1] :].tolist()
        return tokens


def bring_all(world: PeftWorld, answers: Answers) -> None:
    """Wait until every adapter is on the GPU, so that they meet in one batch."""
    refs = [ref for ref in world.refs.values() if ref is not None]
    for ref in refs:
        answers.engine.pin(ref)
    answers.until(lambda: all(answers.engine.residency(r) is Residency.GPU for r in refs))


def ask(world: PeftWorld, answers: Answers) -> dict[str | None, list[int]]:
    """Every prompt under its adapter, all at once; what came out."""
    for name in world.names:
        request = greedy(
            str(name), world.prompts[name], adapter=world.refs[name], max_tokens=world.tokens
        )
        answers.submit(request)
    answers.all()
    return {name: answers.of(str(name)) for name in world.names}


def check_prefix_hits(world: PeftWorld, engine: Engine) -> None:
    """What is asked again is answered alike, and whole pages of prompts are computed once."""
    witness, answers = RecordingRunner(engine), Answers(engine)
    ask(world, answers)
    first = witness.tokens
    assert ask(world, answers) == world.expected
    saved = sum((len(ids) - 1) // PAGE * PAGE for ids in world.prompts.values())
    assert witness.tokens - first == first - saved
