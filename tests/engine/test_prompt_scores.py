"""Scores of prompts: each token once, with PEFT's log probability, however the work is split."""

from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
import transformers

from lorikeet_engine.adapter import Residency
from lorikeet_engine.errors import InvalidRequest, NotFinite
from lorikeet_engine.execution import batch_builder
from lorikeet_engine.request import FinishReason, Request, SamplingParams
from lorikeet_engine.scheduling import step_budget
from lorikeet_engine.scheduling.kv_cache import KVCache
from tests.engine import hash_model
from tests.engine.blob_shelf import BlobShelf
from tests.engine.blobs import Shelf
from tests.engine.engine_driver import PAGE, Answers, RecordingRunner, build, greedy, prompt
from tests.engine.hash_model import predict, predict_scores
from tests.engine.modes import IN_CHUNKS
from tests.engine.peft_adapters import save_adapter

pytestmark = pytest.mark.usefixtures("one_thread")
QV = ["q_proj", "v_proj", "in_proj_qkv", "in_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "rank8_qv": {"r": 8, "lora_alpha": 16, "target_modules": QV},
    "rank4_mlp": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["gate_proj", "down_proj", "out_proj", "in_proj_a"],
    },
}
# By family, the largest error of a log probability. That of transformers itself in float32, against
# its own float64, is 7e-6 and 1.1e-4.
FAMILIES = {"qwen3": 1e-4, "qwen3_5_text": 4e-4, "granite_rope": 4e-4}
NAMES = (None, *ADAPTERS)
MODES: dict[str, dict[str, Any]] = {
    "at_ease": {},
    "in_chunks": IN_CHUNKS,
    "preempted": {"kv_pages": 9, "max_context": 112, **IN_CHUNKS},
    "few_rows_at_once": {"max_running": 3, "overlap": False},
}


class Reference:
    """Checkpoint with adapters, and the log probabilities that transformers and PEFT compute in
    float64.
    """

    def __init__(self, checkpoint, folder, tolerance):
        self.checkpoint, self.shelf = checkpoint, BlobShelf(folder / "blobs")
        self.tolerance = tolerance
        self.refs, self._models = {None: None}, {None: self._load()}
        for seed, (name, lora) in enumerate(ADAPTERS.items()):
            saved = save_adapter(checkpoint, folder / name, seed, **lora)
            self.refs[name] = self.shelf.add(saved, name)
            adapted = peft.PeftModel.from_pretrained(self._load(), saved)
            self._models[name] = adapted.double()

    def _load(self):
        return transformers.AutoModelForCausalLM.from_pretrained(
            self.checkpoint, dtype=torch.float64
        )

    @torch.inference_mode()
    def logprobs(self, name, tokens):
        """Return log probabilities [tokens, vocab] of the next token after each token."""
        return self._models[name](input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request, tiny_checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    return Reference(tiny_checkpoints[request.param], folder, FAMILIES[request.param])


@pytest.fixture
def engine(reference, tmp_path, request):
    more = getattr(request, "param", {})
    engine = build(reference.checkpoint, reference.shelf, tmp_path / "cache", **more)
    answers = Answers(engine)
    for ref in filter(None, reference.refs.values()):
        engine.pin(ref)
        answers.until(lambda ref=ref: engine.residency(ref) is Residency.GPU)
    yield engine
    engine.close()


def check(reference, name, ids, scores, alternatives):
    want, tolerance = reference.logprobs(name, ids)[:-1], reference.tolerance
    assert len(scores) == len(want)
    for token, score, row in zip(ids[1:], scores, want, strict=True):
        assert score.logprob == pytest.approx(row[token].item(), abs=tolerance)
        before = (row > row[token] + tolerance).sum(), (row > row[token] - tolerance).sum()
        assert before[0] < score.rank <= before[1]
        assert [x for _, x in score.top] == pytest.approx(
            row.topk(alternatives).values.tolist(), abs=tolerance
        )
        told = [token for token, _ in score.top]
        assert row[told].tolist() == pytest.approx([x for _, x in score.top], abs=tolerance)


@pytest.mark.parametrize(
    ("reference", "engine"),
    [
        pytest.param(
            family,
            settings,
            id=f"{family}-{mode}",
            marks=[] if family == "qwen3" or mode == "preempted" else pytest.mark.soak,
        )
        for family in FAMILIES
        for mode, settings in MODES.items()
    ],
    indirect=True,
)
def test_prompts_are_scored_as_peft_scores_them(engine, reference, request):
    answers, asked = Answers(engine), {}
    for i in range(9):
        name, ids = NAMES[i % 3], prompt(9 + 9 * i)
        wanted = None if i == 4 else (0, 3, 20)[i % 3 - i // 3]
        way = {"prompt_logprobs": wanted, "logprobs": 1 if i % 2 else None, "max_tokens": 18}
        call = greedy(f"{i}", ids, adapter=reference.refs[name], n=1 + i % 2, **way)
        asked[call.request_id] = name, ids, wanted
        answers.submit(call)
    answers.all()
    assert not answers.errors
    for request_id, (name, ids, wanted) in asked.items():
        if wanted is not None:
            check(reference, name, ids, answers.scores.pop((request_id, 0)), wanted)
    assert answers.scores == {}, "one is scored unasked, or for two choices"
    if request.node.callspec.id.endswith("preempted"):
        assert engine.status().preemptions > 0


@pytest.mark.parametrize("names", [("plain", "scored", "again"), ("scored", "again")])
def test_a_scored_prompt_is_computed_despite_the_cache_and_cached_afterwards(
    engine, reference, names
):
    witness, answers, ids = RecordingRunner(engine), Answers(engine), prompt(5 * PAGE + 2)
    # states of delta nets are cached behind multiples of 64 tokens
    rest = 2 if engine.status().states is None else 5 * PAGE + 2 - 64
    for name in names:
        before = witness.tokens
        wanted = 1 if name == "scored" else None
        answers.submit(greedy(name, ids, max_tokens=1, n=2, prompt_logprobs=wanted))
        answers.all()
        first = rest if name == "again" else len(ids)
        assert witness.tokens - before == first + rest
    check(reference, None, ids, answers.scores["scored", 0], 1)


@pytest.mark.parametrize("states", [False, True])
def test_tokens_scored_before_a_preemption_are_not_scored_again(tmp_path, monkeypatch, states):
    """A preempted prompt finds its own pages and state again, up to the last scored token."""
    monkeypatch.setattr(KVCache, "state_piece", hash_model.PAGE)  # states behind every page
    monkeypatch.setattr(batch_builder, "CHUNK", hash_model.PAGE)
    sizes = {"kv_pages": 200, "max_batch_tokens": 256}
    engine, model = hash_model.build(tmp_path, Shelf(tmp_path), states=states, **sizes)
    answers, ids = Answers(engine), tuple(range(3, 43))
    answers.submit(Request("r", (ids,), SamplingParams(4, ignore_eos=True, prompt_logprobs=0)))
    for _ in range(2):
        answers.step()
    (sequence,) = engine._scheduler.running
    engine._scheduler._preempt(sequence)
    answers.all()
    assert len(answers.scores["r", 0]) == 39
    assert model.tokens < 40 + 4 + 2 * hash_model.PAGE
    engine.close()


def test_a_prompt_of_one_token_has_no_scores(engine):
    answers = Answers(engine)
    answers.submit(greedy("r", [5], prompt_logprobs=2, max_tokens=2))
    answers.all()
    assert answers.scores == {}
    assert len(answers.of("r")) == 2


def test_a_step_scores_up_to_its_limit_and_computes_other_prompts_beside(
    engine, reference, monkeypatch
):
    monkeypatch.setattr(step_budget, "_SCORES", 12)
    witness, answers, ids = RecordingRunner(engine), Answers(engine), prompt(20)
    answers.submit(greedy("scored", ids, prompt_logprobs=3, max_tokens=1))
    answers.submit(greedy("plain", prompt(30), max_tokens=1))
    answers.all()
    assert [len(batch.token_ids) for batch in witness.batches] == [3 + 30, 3, 3, 3, 3, 3, 2]
    check(reference, None, ids, answers.scores["scored", 0], 3)


def test_scoring_makes_at_most_max_running_rows_of_logits_at_once(tmp_path):
    engine, model = hash_model.build(
        tmp_path, Shelf(tmp_path), kv_pages=200, max_running=6, max_batch_tokens=64
    )
    rows, logits = [], model.logits
    model.logits = lambda hidden, *lora: rows.append(len(hidden)) or logits(hidden, *lora)
    answers, sampling = Answers(engine), SamplingParams(1, prompt_logprobs=0)
    answers.submit(Request("r", (tuple(range(3, 43)), (4, 5, 6)), sampling))
    answers.all()
    assert [n for n in rows if n] == [6] * 6 + [39 + 2 - 36, 2]
    assert [len(answers.scores["r", prompt]) for prompt in (0, 1)] == [39, 2]
    engine.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_whose_logits_are_not_finite_fails_alone(tmp_path, overlap):
    engine, model = hash_model.build(tmp_path, Shelf(tmp_path), kv_pages=200, overlap=overlap)
    logits, answers, bad = model.logits, Answers(engine), hash_of(9, 8)
    model.logits = lambda h, *lora: logits(h, *lora) * torch.where(h == bad, torch.nan, 1.0)
    sampling = SamplingParams(3, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
    prompts = {"bad": (9, 8, 4, 6), "good": (9, 5, 4, 6)}
    for name, ids in prompts.items():
        answers.submit(Request(name, (ids,), sampling))
    answers.all()
    assert isinstance(answers.errors.pop("bad"), NotFinite)
    assert not answers.errors
    told = [score.logprob for score in answers.scores["good", 0]]
    assert told == pytest.approx(predict_scores(prompts["good"]), abs=1e-5)
    assert answers.of("good") == predict(prompts["good"], sampling, 0, 800)[0]
    engine.close()


def hash_of(*tokens):
    """Return the hidden state of a hash model after these tokens: the likeliest next token."""
    return predict(tokens, SamplingParams(1, temperature=0.0, ignore_eos=True), 0, 800)[0][0]


def test_a_stop_token_is_returned_if_requested(tmp_path):
    engine, _ = hash_model.build(tmp_path, Shelf(tmp_path), kv_pages=200)
    answers = Answers(engine)
    plain = SamplingParams(9, temperature=0.0, logprobs=0, ignore_eos=True)
    (first, *_), _ = predict((9, 8), plain, 0, 800)
    stopping = replace(plain, stop_token_ids=(first,))
    for keep in (True, False):
        answers.submit(Request(f"{keep}", ((9, 8),), replace(stopping, keep_stop_token=keep)))
    answers.all()
    assert answers.of("True") == [first]
    assert answers.of("False") == []
    assert set(answers.finish.values()) == {FinishReason.STOP}


def test_too_many_logprobs_are_refused_by_field_name():
    for name, most in (("logprobs", 20), ("prompt_logprobs", 100)):
        value = rf"{name}={most + 1}: want .* 0 to {most}"
        with pytest.raises(InvalidRequest, match=value) as raised:
            SamplingParams(**{name: most + 1})
        assert raised.value.param == name
