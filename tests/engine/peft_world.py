"""Checkpoints with adapters, the answers of transformers and PEFT, and an engine's answers."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import peft
import torch

from lorikeet_engine.adapter import Adapter, AdapterRef, Composition
from lorikeet_engine.engine import Engine
from tests.engine.blob_shelf import BlobShelf
from tests.engine.engine_driver import PAGE, Answers, RecordingRunner, greedy, prompt
from tests.engine.moe_adapters import (
    save_linear_router,
    save_numbered,
    save_shared,
    shared_deltas,
)
from tests.engine.peft_adapters import activation, invoking, loaded, save_adapter

_NUMBERED_RANK, _SHARED_RANK, _SHARED_ALPHA = 3, 2, 8


class PeftWorld:
    """One checkpoint, and the greedy answers of transformers and PEFT by the adapter's name.

    The name None is the base model.
    """

    def __init__(
        self,
        checkpoint: Path,
        folder: Path,
        adapters: Mapping[str, dict[str, Any]],
        tokens: int,
        shortest: int = 9,
        longer: int = 8,
        compositions: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
    ) -> None:
        """Save the adapters, and generate every answer.

        adapters: arguments of save_adapter by name.
        compositions: weights of adapters, by the name of a composition.
        tokens: tokens of each answer.
        shortest: tokens of the base model's prompt.
        longer: tokens that each adapter's prompt has more than the prompt before.
        """
        self.checkpoint = checkpoint
        self.folder = folder
        self.tokens = tokens
        self.names = (None, *adapters, *compositions)
        self._compositions, self._adapters = compositions, adapters
        self.shelf = BlobShelf(folder / "blobs")
        self.refs: dict[str | None, Adapter | None] = {None: None}
        self.prompts = {
            name: invoking(
                prompt(shortest + longer * i),
                adapters.get(name or "", {}).get("alora_invocation_tokens", ()),
            )
            for i, name in enumerate(self.names)
        }
        self.model = cache(self._load)
        self.expected = {None: self.generated(self.model(None), self.prompts[None])}
        for seed, (name, lora) in enumerate(adapters.items()):
            save_adapter(checkpoint, folder / name, seed, **lora)
            self.refs[name] = self.shelf.add(folder / name, name)
            self.expected[name] = self.generated(self.model(name), self.prompts[name])
        for name, weights in compositions.items():
            self.refs[name] = composed(self.refs, weights)
            self.expected[name] = self.generated(self.model(name), self.prompts[name])
        self.logits = cache(self._logits)

    def _load(self, name: str | None) -> Any:
        """Load PEFT's model of an adapter or a composition from the adapters' folders."""
        model = loaded(self.checkpoint)
        if name in self._compositions:
            return peft_sum(model, self.folder, self._compositions[name])
        if (rows := self._adapters.get(name or "", {}).get("rows")) is not None:
            model.resize_token_embeddings(rows)
        return model if name is None else peft.PeftModel.from_pretrained(model, self.folder / name)

    def generated(self, model: Any, prompt: list[int]) -> list[int]:
        """Generate a model's greedy answer."""
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

    @torch.inference_mode()
    def _logits(self, name: str | None, model: str | None) -> torch.Tensor:
        """Compute the logits [tokens, vocab] of an adapter's expected answer.

        name: adapter of the answer.
        model: adapter of the model that computes the logits.
        """
        ids = self.prompts[name] + self.expected[name][:-1]
        loaded = self.model(model)
        activated = activation(loaded, self.prompts[name], len(ids))
        logits: torch.Tensor = loaded(torch.tensor([ids]), **activated).logits[0]
        return logits[-self.tokens :]


class MoeWorld(PeftWorld):
    """World of a mixture of experts, with three adapters more that PEFT does not save today.

    numbered: matrices for each expert.
    shared: one matrix for all experts, for some linears.
    linear_router: LoRA of a router that is a linear.
    """

    def __init__(
        self, checkpoint: Path, folder: Path, adapters: Mapping[str, dict[str, Any]], tokens: int
    ) -> None:
        super().__init__(checkpoint, folder, adapters, tokens)
        config = json.loads((checkpoint / "config.json").read_text())
        is_old = config["model_type"] == "mixtral"
        save_numbered(checkpoint, folder / "numbered", _NUMBERED_RANK, old_names=is_old)
        save_shared(checkpoint, folder / "shared", _SHARED_RANK)
        self._router_deltas = save_linear_router(checkpoint, folder / "linear_router")
        for name in ("numbered", "shared", "linear_router"):
            self.refs[name] = self.shelf.add(folder / name, name)
            self.prompts[name] = self.prompts[None]
            self.expected[name] = self.generated(self.model(name), self.prompts[name])
            self.names = (*self.names, name)

    def _load(self, name: str | None) -> Any:
        """Load the model of an adapter: PEFT's, or a merged one if PEFT cannot read the adapter."""
        if name == "shared":
            return self._merged_with_shared()
        if name != "linear_router":
            return super()._load(name)
        model = super()._load(None)
        for parameter, delta in self._router_deltas.items():
            model.get_parameter(parameter).data += delta
        return model

    def _merged_with_shared(self) -> Any:
        model = super()._load(None)
        deltas = shared_deltas(self.folder / "shared", _SHARED_ALPHA / _SHARED_RANK)
        for path, delta in deltas.items():
            experts, _, linear = path.removeprefix("base_model.model.").rpartition(".")
            parameter = "down_proj" if linear == "w2" else "gate_up_proj"
            weight = model.get_parameter(f"{experts}.{parameter}").data
            gate_and_up = weight.chunk(2, dim=1)
            {"w1": gate_and_up[0], "w2": weight, "w3": gate_and_up[1]}[linear].add_(delta)
        return model


def composed(
    refs: Mapping[str | None, Adapter | None], weights: Mapping[str, float]
) -> Composition:
    """Compose adapters. weights: the weight of each adapter by its name in `refs`."""
    members = [ref for name in weights if isinstance(ref := refs[name], AdapterRef)]
    return Composition(tuple(members), tuple(weights.values()))


def peft_sum(model: Any, folder: Path, weights: Mapping[str, float]) -> Any:
    """Add adapters up as PEFT does with combination_type="cat".

    folder: folder with each adapter's folder.
    weights: the weight of each adapter by its name.
    """
    first, *others = weights
    adapted = peft.PeftModel.from_pretrained(model, folder / first, adapter_name=first)
    for name in others:
        adapted.load_adapter(folder / name, adapter_name=name)
    adapted.add_weighted_adapter([*weights], [*weights.values()], "sum", combination_type="cat")
    adapted.set_adapter("sum")
    return adapted.eval()


def ask(world: PeftWorld, answers: Answers) -> dict[str | None, list[int]]:
    """Submit every prompt with its adapter at once, and return the answers.

    The seed of a request is the position of its name in `world.names`.
    """
    for seed, name in enumerate(world.names):
        request = greedy(
            str(name),
            world.prompts[name],
            adapter=world.refs[name],
            max_tokens=world.tokens,
            seed=seed,
        )
        answers.submit(request)
    answers.all()
    return {name: answers.of(str(name)) for name in world.names}


def check_prefix_hits(world: PeftWorld, engine: Engine) -> None:
    """Ask twice; check that the second answers are equal and no full page is computed again."""
    witness, answers = RecordingRunner(engine), Answers(engine)
    ask(world, answers)
    first = witness.tokens
    assert ask(world, answers) == world.expected
    assert witness.tokens - first == first - tokens_in_full_pages(world)


def tokens_in_full_pages(world: PeftWorld) -> int:
    """Return the prompts' tokens that a prefix cache can save: full pages before the last token."""
    return sum((len(ids) - 1) // PAGE * PAGE for ids in world.prompts.values())
