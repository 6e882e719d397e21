"""Adapters with more or fewer tokens than their base model answer as PEFT does, in mixed batches.

PEFT saves such vocabularies in several forms, all of which are here.
"""

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from lorikeet_engine.adapter_format import AdapterLimits, BaseShape, read_config, read_spec
from lorikeet_engine.errors import AdapterRejected, InvalidRequest, SettingsError
from lorikeet_engine.models.llama import load_model
from tests.engine.engine_driver import Answers, build, greedy, load_adapters
from tests.engine.float32_reference import RecordingSampler
from tests.engine.matrix.storages import EXACT
from tests.engine.peft_adapters import save_adapter
from tests.engine.peft_world import PeftWorld, ask

pytestmark = pytest.mark.usefixtures("one_thread")
VOCABULARY, ADDED = 256, 8
SOME = ["q_proj", "down_proj"]
NEW = [VOCABULARY, VOCABULARY + 1, VOCABULARY + 2]
BOTH = ["embed_tokens", "lm_head"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "target_modules": SOME},
    "whole": {"r": 4, "target_modules": SOME, "modules_to_save": BOTH, "rows": 259},
    "untrained": {"r": 3, "target_modules": SOME, "rows": VOCABULARY + ADDED},
    "tokens": {"r": 2, "target_modules": SOME, "trainable_token_indices": NEW, "rows": 260},
    "fewer": {"r": 5, "target_modules": SOME, "modules_to_save": BOTH, "rows": 250},
}
EMBEDDINGS_ALONE = {"r": 4, "target_modules": SOME, "modules_to_save": BOTH[:1], "rows": 258}
WORLDS = ["llama", "tied llama", "gemma2"]  # Gemma scales embeddings, and caps logits
TOKENS, CHUNK = 8, 13
MODES: dict[str, dict[str, Any]] = {
    "at_ease": {},
    "in_chunks": {"max_batch_tokens": CHUNK, "max_running": CHUNK},
    "preempted": {"kv_pages": 7, "max_context": 112},
    "ranks": {"tensor_parallel": 2},
    "drafts": {"speculation": "lookup"},
}
OFTEN = {
    "llama": ("in_chunks", "ranks"),
    "tied llama": ("preempted", "drafts"),
    "gemma2": ("at_ease",),
}
CASES = [
    pytest.param(world, mode, marks=[] if mode in OFTEN[world] else pytest.mark.soak)
    for world in WORLDS
    for mode in MODES
]
LIMITS = AdapterLimits(64, 1 << 30)


class ResizedWorld(PeftWorld):
    """World of adapters whose prompts have tokens that the base model lacks."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given, TOKENS, longer=3)
        shape = BaseShape.from_config(read_config(self.checkpoint))
        limits = replace(LIMITS, max_added_tokens=ADDED)
        for name, ref in self.refs.items():
            if name is not None:
                spec = read_spec(self.shelf.folder / ref.digest, shape, limits)
                self.refs[name] = replace(ref, vocabulary=spec.vocabulary)
        for name, ref in self.refs.items():
            if ref is not None and ref.vocabulary:
                new = [*range(VOCABULARY, ref.vocabulary)]
                self.prompts[name][1 : 1 + len(new)] = new
                self.expected[name] = self.generated(self.model(name), self.prompts[name])


@pytest.fixture(scope="module")
def worlds(tiny_checkpoints, tmp_path_factory):
    """Make the world of a name, once."""

    @functools.cache
    def make(name):
        alone = {"embeddings": EMBEDDINGS_ALONE} if "tied" not in name else {}
        folder = tmp_path_factory.mktemp("world")
        return ResizedWorld(tiny_checkpoints[name], folder, ADAPTERS | alone)

    return make


@pytest.fixture
def start(tmp_path, close_later):
    def start(world, **settings):
        sizes = {"max_batch_adapters": len(world.names), "adapter_gpu_bytes": 8 << 20}
        sizes |= {"adapter_host_bytes": 16 << 20, "max_added_tokens": ADDED, **settings}
        return close_later(build(world.checkpoint, world.shelf, tmp_path / "cache", **sizes))

    return start


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_resized_vocabularies_in_a_mixed_batch_answer_as_peft_does(name, mode, worlds, start):
    world = worlds(name)
    assert world.refs["whole"].vocabulary == 259
    assert world.refs["untrained"].vocabulary == VOCABULARY + ADDED
    assert world.refs["plain"].vocabulary == world.refs["fewer"].vocabulary == 0
    engine = start(world, **MODES[mode])
    draws, answers = RecordingSampler(engine), Answers(engine)
    load_adapters(answers, world.refs.values())
    assert ask(world, answers) == world.expected
    assert ask(world, answers) == world.expected, "with prefix hits"
    if mode == "drafts":
        return
    for seed, adapter in enumerate(world.names):
        got = torch.stack([draws.logits[seed, step] for step in range(TOKENS)])
        want = world.logits(adapter, adapter)
        count = want.shape[1]
        if count >= VOCABULARY:
            assert (got[:, count:] == -math.inf).all(), adapter
        # the base model's rows of tokens that training cut are no part of PEFT's sum
        error = (got[:, :count].log_softmax(-1) - want.log_softmax(-1)).abs().max()
        assert error <= EXACT.worst * want.abs().max(), adapter


def test_only_an_adapters_own_requests_may_name_its_tokens(worlds, start):
    world = worlds("llama")
    engine = start(world)
    answers = Answers(engine)
    for ref, last in ((None, 255), (world.refs["plain"], 255), (world.refs["whole"], 258)):
        answers.submit(greedy(f"good {last} {ref}", [3, last], adapter=ref, max_tokens=1))
        with pytest.raises(InvalidRequest, match=f"want 0 to {last}"):
            engine.submit(greedy(f"bad {ref}", [3, last + 1], adapter=ref, max_tokens=1))
    bias = {"logit_bias": ((258, 100.0),), "max_tokens": 1}
    answers.submit(greedy("biased", [3, 4], adapter=world.refs["whole"], **bias))
    answers.all()
    assert answers.of("biased") == [258]


def test_an_engine_takes_no_more_tokens_than_it_was_started_for(worlds, tmp_path):
    world = worlds("llama")
    shape = BaseShape.from_config(read_config(world.checkpoint))
    blob = world.shelf.folder / world.refs["whole"].digest
    for most in (0, 2):
        with pytest.raises(
            AdapterRejected, match=r"LORIKEET_MAX_ADDED_TOKENS, now .*to at least 3"
        ):
            read_spec(blob, shape, replace(LIMITS, max_added_tokens=most))
    assert read_spec(world.shelf.folder / world.refs["fewer"].digest, shape, LIMITS).token_rows
    lora = {"r": 2, "target_modules": ["q_proj", "embed_tokens"], "rows": 258}
    ref = world.shelf.add(save_adapter(world.checkpoint, tmp_path / "lora", **lora), "lora")
    with pytest.raises(AdapterRejected, match="LoRA of lm_head or embed_tokens with a resized"):
        read_spec(world.shelf.folder / ref.digest, shape, replace(LIMITS, max_added_tokens=8))


def test_tied_weights_stay_one_tensor(tiny_checkpoints):
    model = load_model(tiny_checkpoints["tied llama"], torch.device("cpu"), torch.float32)
    before = model._head.clone()
    model.add_tokens(ADDED)
    assert torch.equal(model._head, before)
    assert model._head.data_ptr() == model._embeddings.data_ptr()
    assert model._embeddings.shape[0] == VOCABULARY + ADDED


def test_embeddings_for_each_layer_take_no_more_tokens(tiny_checkpoints, shelf, tmp_path):
    with pytest.raises(SettingsError, match="LORIKEET_MAX_ADDED_TOKENS"):
        build(tiny_checkpoints["gemma4_e_text"], shelf, tmp_path / "cache", max_added_tokens=8)
