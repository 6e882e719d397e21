"""Activated LoRA computes as PEFT does, over pages and states that it shares with the base model.

test_peft_equality.py has activated LoRA in mixed batches, and the matrix has it with every family
and storage.
"""

from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft.tuners.lora.variants import calculate_alora_offsets

from lorikeet_engine.adapter import AdapterRef, Composition, Residency
from lorikeet_engine.adapter_format import (
    AdapterLimits,
    BaseShape,
    read_config,
    read_spec,
    write_blob,
)
from lorikeet_engine.errors import AdapterRejected, InvalidRequest
from tests.engine.adapter_format.peft_folder import edit_config
from tests.engine.blob_shelf import BlobShelf
from tests.engine.conftest import FAMILIES
from tests.engine.engine_driver import (
    PAGE,
    Answers,
    RecordingRunner,
    build,
    greedy,
    load_adapters,
    nothing_is_held,
    prompt,
)
from tests.engine.matrix.storages import EXACT
from tests.engine.moe_adapters import save_numbered
from tests.engine.peft_adapters import activation, loaded, save_adapter

pytestmark = pytest.mark.usefixtures("one_thread")
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OF_HYBRIDS = [*ALL, "in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj"]
INVOCATION = (7, 9, 7)
TOKENS = 5


class World:
    """Base model, and two adapters with one invocation; None names the base model."""

    def __init__(self, checkpoint: Path, folder: Path, **lora: Any) -> None:
        self.checkpoint, self.shelf, self._folder = checkpoint, BlobShelf(folder / "blobs"), folder
        self.refs: dict[str | None, AdapterRef | None] = {None: None}
        for seed, name in enumerate(("one", "other")):
            options = {"r": 8, "alora_invocation_tokens": list(INVOCATION), **lora}
            saved = save_adapter(checkpoint, folder / name, seed, **options)
            self.refs[name] = self.shelf.add(saved, name)
        self.model, self._said = cache(self._model), cache(self._generated)

    def _model(self, name: str | None) -> Any:
        model = loaded(self.checkpoint)
        return model if name is None else peft.PeftModel.from_pretrained(model, self._folder / name)

    @torch.inference_mode()
    def logits(self, name: str | None, ids: list[int], said: list[int]) -> torch.Tensor:
        """Return PEFT's logits of a prompt and an answer."""
        model, tokens = self.model(name), ids + said
        activated = activation(model, ids, len(tokens))
        logits: torch.Tensor = model(torch.tensor([tokens]), **activated).logits[0]
        return logits

    def said(self, name: str | None, ids: list[int], tokens: int = TOKENS) -> list[int]:
        """Return PEFT's greedy answer."""
        return list(self._said(name, tuple(ids), tokens))

    def _generated(self, name: str | None, ids: tuple[int, ...], tokens: int) -> list[int]:
        made = self.model(name).generate(
            input_ids=(asked := torch.tensor([ids])),
            attention_mask=torch.ones_like(asked),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        said: list[int] = made[0, len(ids) :].tolist()
        return said


@pytest.fixture(scope="module")
def world(tiny_checkpoints, tmp_path_factory):
    return World(tiny_checkpoints["llama"], tmp_path_factory.mktemp("world"), target_modules=ALL)


@pytest.fixture
def start(tmp_path, close_later):
    def start(world, **settings):
        engine = close_later(build(world.checkpoint, world.shelf, tmp_path / "cache", **settings))
        answers = Answers(engine)
        load_adapters(answers, world.refs.values())
        return answers

    return start


def ask(answers: Answers, world: World, name: str | None, ids: list[int], **more: Any) -> int:
    """Check an answer against PEFT's; return how many of the prompt's tokens were cached."""
    answers.submit(greedy("a", ids, adapter=world.refs[name], max_tokens=TOKENS, **more))
    answers.all()
    assert answers.of("a") == world.said(name, ids)
    timings = answers.outputs["a", 0][-1].timings
    assert timings is not None
    return timings.cached_tokens


def invoked_at(*places: int, length: int = 70) -> list[int]:
    ids = prompt(length)
    for at in places:
        ids[at : at + len(INVOCATION)] = INVOCATION
    return ids


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
)
def test_the_last_invocation_in_the_prompt_counts_as_in_peft(ids, invocation):
    config = peft.LoraConfig(alora_invocation_tokens=invocation)
    (offset,) = calculate_alora_offsets({"a": config}, "a", torch.tensor([ids]))
    ref = AdapterRef("acme", "a", 1, "d", tuple(invocation))
    assert ref.active_from(ids) == (None if offset is None else len(ids) - offset)


def test_tokens_are_not_found_across_their_borders():
    ref = AdapterRef("acme", "a", 1, "d", (1,))
    assert ref.active_from([1 << 8, 0]) is None
    assert ref.active_from([1, 1 << 8, 1 << 16, 5]) == 0


def test_an_adapter_begins_with_the_pages_that_the_base_model_has_computed(world, start):
    answers, ids = start(world), invoked_at(10, 50)
    assert ask(answers, world, None, ids) == 0
    assert ask(answers, world, "one", ids) == 50 // PAGE * PAGE
    assert ask(answers, world, "other", ids) == 50 // PAGE * PAGE
    assert ask(answers, world, "one", ids) == 69 // PAGE * PAGE, "its own pages, too"
    assert ask(answers, world, None, ids) == 69 // PAGE * PAGE, "the base model's alone"


def test_the_base_model_and_other_adapters_begin_with_the_pages_before_an_invocation(world, start):
    answers, ids = start(world), invoked_at(48)
    assert ask(answers, world, "one", ids) == 0
    assert ask(answers, world, "other", ids) == 48, "the page that begins the invocation differs"
    assert ask(answers, world, None, ids) == 48


def test_equal_tokens_behind_different_invocations_share_no_page(world, start):
    first = invoked_at(29, length=50)
    later = [*first[:32], *INVOCATION[1:], *first[34:]]  # invoked at 31, in the same page
    assert world.refs["one"].active_from(later) == 31
    answers = start(world)
    assert ask(answers, world, "one", first) == 0
    assert ask(answers, world, "one", later) == 16
    again = [*first, *INVOCATION]  # whose pages are the base model's up to its end
    assert ask(answers, world, "one", again) == 16


def test_tenants_share_no_pages_before_an_invocation(world, start):
    answers, ids = start(world), invoked_at(50)
    ask(answers, world, None, ids, salt="acme")
    assert ask(answers, world, "one", ids, salt="globex") == 0
    assert ask(answers, world, "one", ids, salt="acme") == 48


def test_a_prompt_without_the_invocation_is_computed_by_the_base_model_alone(
    world, tmp_path, close_later
):
    engine = close_later(build(world.checkpoint, world.shelf, tmp_path / "cache"))
    answers, ids = Answers(engine), prompt(70)
    assert ask(answers, world, "one", ids) == 0
    assert world.said("one", ids) == world.said(None, ids)
    assert engine.residency(world.refs["one"]) is Residency.REMOTE, "never loaded"
    assert ask(answers, world, None, ids) == 64
    assert ask(answers, world, "one", ids) == 64


def test_an_invocation_that_the_answer_contains_activates_nothing(world, tmp_path, start):
    ids = prompt(30)
    first = world.said(None, ids)[0]
    own = World(
        world.checkpoint, tmp_path / "own", target_modules=ALL, alora_invocation_tokens=[first]
    )
    assert first not in ids
    assert own.said("one", ids) == own.said(None, ids)
    ask(start(own), own, "one", ids)


@pytest.mark.parametrize(
    ("at", "chunk"),
    [
        # chunks of 16 end where pages do; make test takes half of the others
        pytest.param(at, chunk, marks=[] if chunk == 16 or (i + j) % 2 else [pytest.mark.soak])
        for i, at in enumerate((0, 1, 15, 16, 17, 67))
        for j, chunk in enumerate((1, 16, 7, 24))
    ],
)
def test_chunks_may_end_anywhere_around_the_invocation(world, start, at, chunk):
    answers = start(world, max_batch_tokens=chunk, max_running=min(chunk, 8))
    ids = invoked_at(at)
    assert ask(answers, world, "one", ids) == 0
    assert ask(answers, world, None, ids) == at // PAGE * PAGE


def test_an_invocation_behind_cached_pages_takes_one_step(world, start):
    answers, ids = start(world), invoked_at(60)
    ask(answers, world, None, ids)
    witness = RecordingRunner(answers.engine)
    assert ask(answers, world, "one", ids) == 48
    first = witness.batches[0]
    assert len(witness.batches) == TOKENS
    assert first.query_starts.tolist() == [0, 10, 22]
    assert first.segments is not None
    assert first.segments.lengths.tolist() == [10]


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "deepseek_v3"])
def test_windows_sinks_and_latents_meet_an_invocation(family, tiny_checkpoints, tmp_path, start):
    targets = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
    targets = targets if family == "deepseek_v3" else ["q_proj", "k_proj", "v_proj", "o_proj"]
    world = World(tiny_checkpoints[family], tmp_path / "world", target_modules=targets)
    answers, ids = start(world, max_batch_tokens=33, max_running=8), invoked_at(50)
    ask(answers, world, None, ids)
    assert ask(answers, world, "one", ids) == 48
    assert ask(answers, world, "other", invoked_at(51)) == 48


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h"])
def test_a_hybrid_begins_with_a_state_of_the_base_model(family, tiny_checkpoints, tmp_path, start):
    targets = OF_HYBRIDS if family == "qwen3_5_text" else ["q_proj", "v_proj", "in_proj"]
    world = World(tiny_checkpoints[family], tmp_path / "world", target_modules=targets)
    settings = {"max_batch_tokens": 128, "max_running": 8, "state_bytes": 4 << 20}
    answers, ids = start(world, **settings), invoked_at(150, length=170)
    assert ask(answers, world, "one", ids) == 0
    assert ask(answers, world, "other", ids) == 128, "the last state before the invocation"
    assert ask(answers, world, None, ids) == 128
    answers, ids = start(world, **settings), invoked_at(100, length=110)
    witness = RecordingRunner(answers.engine)
    assert ask(answers, world, None, ids[:90]) == 0
    witness.batches.clear()
    assert ask(answers, world, "one", ids) == 64
    assert ask(answers, world, "one", invoked_at(100, length=111)) == 0
    chunks = [len(batch.token_ids) for batch in witness.batches if len(batch.token_ids) > 1]
    assert chunks == [100 - 64, 10, 100, 11]


def test_the_scores_of_a_prompt_change_behind_the_invocation(world, start):
    answers = start(world, max_batch_tokens=24, max_running=8)
    ids, beside = invoked_at(50), invoked_at(20, length=40)
    for name, asked in (("one", ids), ("other", beside)):
        request = greedy(name, asked, adapter=world.refs[name], max_tokens=1, prompt_logprobs=0)
        answers.submit(request)
    answers.submit(greedy("unscored", invoked_at(9), adapter=world.refs["one"]))
    answers.all()
    for name, asked in (("one", ids), ("other", beside)):
        logits = world.logits(name, asked, [])
        want = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(asked[1:])[:, None])[:, 0]
        got = torch.tensor([score.logprob for score in answers.scores[name, 0]])
        assert (got - want).abs().max() <= 2 * EXACT.worst * logits.abs().max()


def test_choices_and_preempted_sequences_keep_their_invocation(world, start):
    answers = start(world, kv_pages=7, max_context=112, max_running=8)
    prompts = {(name, at): invoked_at(at, length=15 + at) for name in world.refs for at in (3, 9)}
    for (name, at), ids in prompts.items():
        request = greedy(f"{name} {at}", ids, adapter=world.refs[name], max_tokens=25, n=2)
        answers.submit(request)
    answers.all()
    for (name, at), ids in prompts.items():
        want = world.said(name, ids, tokens=25)
        assert [answers.of(f"{name} {at}", choice) for choice in range(2)] == [want, want]
    assert answers.engine.status().preemptions > 0
    assert nothing_is_held(answers.engine)


def test_a_damaged_adapter_takes_only_its_own_pages_from_the_cache(world, start):
    answers, ids = start(world), invoked_at(50)
    ask(answers, world, "one", ids)
    answers.engine._cache.forget_adapter(world.refs["one"].digest)
    assert ask(answers, world, "one", ids) == 48


@pytest.mark.parametrize(
    ("family", "lora", "says"),
    [
        ("qwen2", {"target_modules": ["o_proj"], "bias": "all"}, r"q_proj\.bias cannot be"),
        ("deepseek_v3", {"target_modules": ["kv_b_proj"]}, "kv_b_proj cannot be"),
        (
            "llama",
            {"target_modules": ["o_proj"], "trainable_token_indices": [5]},
            "embed_tokens cannot be trained by activated LoRA",
        ),
        ("llama", {"target_modules": ["o_proj"], "alora_invocation_tokens": [5, 256]}, "token 256"),
    ],
)
def test_what_changes_tokens_before_the_invocation_is_refused_by_name(
    family, lora, says, tiny_checkpoints, tmp_path
):
    checkpoint = tiny_checkpoints[family]
    save_adapter(checkpoint, tmp_path, **{"alora_invocation_tokens": [5], **lora})
    write_blob(tmp_path, tmp_path / "blob")
    shape = BaseShape.from_config(read_config(checkpoint))
    with pytest.raises(AdapterRejected, match=says):
        read_spec(tmp_path / "blob", shape, AdapterLimits(64, 1 << 30))


def test_an_activated_lora_of_experts_is_refused_by_name(tiny_checkpoints, tmp_path):
    checkpoint = tiny_checkpoints["qwen3_moe"]
    save_numbered(checkpoint, folder := tmp_path / "saved", 2)
    edit_config(folder, alora_invocation_tokens=[5])
    write_blob(folder, tmp_path / "blob")
    shape = BaseShape.from_config(read_config(checkpoint))
    with pytest.raises(
        AdapterRejected, match=r"gate_proj cannot be trained by activated LoRA, .* experts"
    ):
        read_spec(tmp_path / "blob", shape, AdapterLimits(64, 1 << 30))


@pytest.mark.parametrize("beside", [(), (AdapterRef("acme", "plain", 1, "d2"),)])
def test_a_composition_with_an_activated_lora_is_refused_by_name(beside):
    ref = AdapterRef("acme", "check", 1, "d1", (5,))
    with pytest.raises(InvalidRequest, match="acme/check@1 is an activated LoRA"):
        Composition((ref, *beside), (1.0,) * (1 + len(beside)))


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_shares_the_base_models_pages(family, tiny_checkpoints, tmp_path, start):
    world = World(tiny_checkpoints[family], tmp_path / "world", target_modules=ALL)
    answers, ids = start(world), invoked_at(50)
    ask(answers, world, None, ids)
    assert ask(answers, world, "one", ids) == 48
