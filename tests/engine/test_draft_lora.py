"""Drafts of a draft LoRA, which run beside tenants' adapters, change no answer."""

import shutil

import pytest
from safetensors.torch import load_file, save_file

from lorikeet_engine.adapter import Pooling, Residency
from lorikeet_engine.errors import SettingsError
from lorikeet_engine.request import DraftSource, Request, SamplingParams
from lorikeet_engine.scheduling import draft_budget
from lorikeet_engine.scheduling.draft_budget import DraftBudget, Drafts
from lorikeet_engine.scheduling.prompt_lookup import PromptLookup
from tests.engine.descending_grammar import DescendingGrammars
from tests.engine.engine_driver import (
    Answers,
    RecordingRunner,
    build,
    greedy,
    load_adapters,
    nothing_is_held,
    prompt,
)
from tests.engine.peft_adapters import save_adapter
from tests.engine.sampling.draws import assert_drawn_alike
from tests.engine.test_embeddings import embedding
from tests.engine.test_speculation import WAYS, sampling

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS = 40


@pytest.fixture
def repeating(tiny_checkpoints, tmp_path):
    """Return a function that copies a family's checkpoint and lets it mostly repeat a few tokens,
    whatever came before, so that a draft is often right.
    """

    def repeating(family):
        folder = tmp_path / family
        if not folder.exists():
            shutil.copytree(tiny_checkpoints[family], folder)
            tensors = load_file(folder / "model.safetensors")
            embeddings = tensors["model.embed_tokens.weight"]
            if "lm_head.weight" not in tensors:
                pytest.skip("tied embeddings")
            embeddings.copy_(embeddings[7] * 4 + 0.5 * embeddings)
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return repeating


@pytest.fixture
def alone(monkeypatch):
    """Let the draft LoRA alone draft, at any cost."""
    monkeypatch.setattr(draft_budget, "_LEAST_GAIN", 0.0)
    monkeypatch.setattr(draft_budget, "_LEAST_ACCEPTANCE", 0.0)
    monkeypatch.setattr(PromptLookup, "predict", lambda *_: [])


@pytest.fixture
def make(repeating, shelf, tmp_path, close_later):
    """Engines with a draft LoRA, in place before they take requests."""

    def make(family="llama", **settings):
        settings = {"max_batch_tokens": 256, "max_running": 64, "speculation": "draft", **settings}
        folder, linears = repeating(family), ["q_proj", "o_proj"]
        if not (tmp_path / "draft").exists():
            save_adapter(folder, tmp_path / "draft", 9, r=4, lora_alpha=1, target_modules=linears)
        answers = Answers(
            close_later(build(folder, shelf, tmp_path / "cache", **settings)), within_s=240.0
        )
        draft = shelf.add(tmp_path / "draft", "draft")
        answers.engine.pin(draft, draft=True)
        answers.until(lambda: answers.engine.residency(draft) is Residency.GPU)
        return answers, draft

    return make


def counts(engine):
    drafts = {each.source: (each.drafted, each.accepted) for each in engine.status().drafts}
    return drafts[DraftSource.DRAFT]


@pytest.mark.parametrize(
    ("family", "overlap", "more"),
    [
        ("llama", True, {}),
        *(
            pytest.param(family, overlap, more, marks=pytest.mark.soak)
            for family in ("llama", "mistral", "qwen3_moe", "glm4_moe_lite")
            for overlap in (True, False)
            for more in ({}, {"kv_dtype": "fp8"})
        ),
    ],
)
def test_answers_are_the_same_with_and_without_the_draft(
    family, overlap, more, make, alone, repeating, shelf, tmp_path
):
    """A tenant's adapter changes half of them."""
    folder = save_adapter(repeating(family), tmp_path / "a", 1, r=6, target_modules=["o_proj"])
    ref, told = shelf.add(folder, "a"), []
    for speculation in ("off", "draft"):
        answers, draft = make(
            family,
            speculation=speculation,
            overlap=overlap,
            grammars=DescendingGrammars(),
            **more,
        )
        load_adapters(answers, [ref])
        for at, way in enumerate(WAYS):
            adapter = ref if at % 2 else None
            answers.submit(Request(way, (tuple(prompt(9 + 4 * at)),), sampling(way), 1, adapter))
        for name, adapter in (("plain", None), ("adapted", ref), ("drafted", draft)):
            ids = prompt(20), prompt(21)
            answers.submit(greedy(name, *ids, max_tokens=TOKENS, adapter=adapter))
        answers.all()
        turns = [*prompt(20), *answers.of("adapted"), 5]
        answers.submit(greedy("next", turns, max_tokens=TOKENS, adapter=ref))
        answers.all()
        assert not answers.errors
        answers.engine.unpin(draft.digest)
        answers.step()
        assert nothing_is_held(answers.engine)
        told.append(answers)
    off, on = told
    assert on.tokens == off.tokens
    assert on.finish == off.finish
    drafted, accepted = counts(on.engine)
    assert 20 < accepted < drafted - 20
    timings = [outputs[-1].timings for outputs in on.outputs.values()]
    assert sum(each.accepted_tokens for each in timings) == accepted


def test_noise_is_computed_with_the_draft_lora_beside_the_tenant_s_adapter(
    make, alone, shelf, repeating, tmp_path
):
    folder = save_adapter(repeating("llama"), tmp_path / "a", 1, r=6, target_modules=["o_proj"])
    ref = shelf.add(folder, "a")
    answers, _ = make()
    load_adapters(answers, [ref])
    witness = RecordingRunner(answers.engine)
    answers.submit(greedy("a", prompt(9), max_tokens=TOKENS, adapter=ref))
    answers.all()
    lease = answers.engine._parts.draft_budget.adapter
    noisy = [batch for batch in witness.batches if len(batch.segments) == 2]
    assert noisy
    for batch in noisy:
        order = batch.segments.slots.tolist()
        ends = batch.kv_lengths.tolist()
        noise = order.index(lease.slot)
        length = batch.segments.lengths.tolist()[noise]
        assert ends[noise] == ends[1 - noise] + length  # behind the sequence's last token
        rows = batch.logit_rows.tolist()
        first = batch.segments.starts.tolist()[noise]
        assert rows[-length:] == [*range(first, first + length)]
        assert len(rows) == len(batch.token_ids)
    steps = answers.outputs["a", 0][-1].timings.steps
    assert steps < TOKENS


def test_without_the_draft_lora_on_the_gpu_nothing_is_drafted(make, alone):
    answers, draft = make()
    answers.engine.unpin(draft.digest)
    answers.submit(greedy("a", prompt(9), max_tokens=TOKENS))
    answers.all()
    assert counts(answers.engine) == (0, 0)
    answers.engine.pin(draft, draft=True)
    answers.submit(greedy("b", prompt(9), max_tokens=TOKENS))
    answers.all()
    assert counts(answers.engine)[1] > 0
    assert answers.of("a") == answers.of("b")


def test_of_two_pinned_draft_loras_the_last_one_drafts(make, shelf, repeating, tmp_path):
    answers, first = make()
    folder = save_adapter(repeating("llama"), tmp_path / "b", 8, r=6, target_modules=["o_proj"])
    second, engine = shelf.add(folder, "second"), answers.engine

    def leased():
        answers.step()
        return [row.digest for row in engine.adapters() if row.leases]

    engine.pin(second, draft=True)
    answers.until(lambda: leased() == [second.digest])
    engine.unpin(second.digest)
    assert leased() == [first.digest]


@pytest.mark.parametrize("pooling", Pooling)
def test_prompts_are_pooled_beside_noise(pooling, make, alone, monkeypatch):
    """A prompt's last token, computed in a step of its own, decodes like other sequences."""
    answers, _ = make(max_running=16, max_batch_tokens=16)
    prompts = [prompt(16, at) for at in range(6)]
    answers.submit(embedding("alone", pooling, *prompts))
    answers.all()
    monkeypatch.setattr(DraftBudget, "choose", lambda *_, **__: Drafts({}))  # noise in each step
    witness = RecordingRunner(answers.engine)
    answers.submit(greedy("decodes", prompt(9), max_tokens=100))
    for at, ids in enumerate(prompts):
        answers.submit(embedding(f"{at}", pooling, ids))
        answers.until(lambda at=at: (f"{at}", 0) in answers.pooled)
    assert any(len(batch.query_starts) == 4 for batch in witness.batches)  # the third is noise
    for at in range(6):
        beside, alone = answers.pooled[f"{at}", 0], answers.pooled["alone", at]
        assert beside == pytest.approx(alone, rel=0, abs=2e-5 * max(map(abs, alone)))


@pytest.mark.parametrize("draws", [512, pytest.param(100_000, marks=pytest.mark.soak)])
def test_drawn_tokens_follow_the_same_distribution(draws, make, alone):
    """With and without drafts, the tokens are drawn by other seeds."""
    told = []
    for speculation in ("off", "draft"):
        answers, _ = make(speculation=speculation, max_running=256, max_batch_tokens=1024)
        for at in range(-(-draws // 64)):
            params = SamplingParams(
                6, temperature=1.0, top_k=3, seed=1000 * at + 500 * len(told), ignore_eos=True
            )
            answers.submit(Request(f"{at}", (tuple(prompt(9)),), params, 64))
            answers.all()
        told.append([tuple(tokens[3:]) for tokens in answers.tokens.values()])
    assert_drawn_alike(*told)
    drafted, accepted = counts(answers.engine)
    assert 50 < accepted < drafted - 50


def test_a_hybrid_refuses_a_draft_lora_by_name(tiny_checkpoints, shelf, tmp_path):
    with pytest.raises(SettingsError, match="speculation=draft: a draft LoRA is served by"):
        build(tiny_checkpoints["qwen3_5_text"], shelf, tmp_path / "c", speculation="draft")


@pytest.mark.soak
def test_ranks_of_several_processes_draft_alike(make, alone):
    told = []
    for ranks in (1, 2):
        answers, _ = make(tensor_parallel=ranks)
        for at, way in enumerate(WAYS):
            if way != "grammar":
                answers.submit(Request(way, (tuple(prompt(9 + at)),), sampling(way)))
        answers.submit(greedy("plain", *(prompt(20 + at) for at in range(4)), max_tokens=TOKENS))
        answers.all()
        assert counts(answers.engine)[1] > 20
        told.append(answers.tokens)
        answers.engine.close()
    assert told[0] == told[1]
