"""Heads score prompts as transformers' sequence classification with PEFT does, in any batch."""

import json
import shutil
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from lorikeet_engine.adapter import Composition, Head, Pooling, Problem
from lorikeet_engine.adapter_format import AdapterLimits, check_values, read_spec
from lorikeet_engine.errors import (
    AdapterOverflows,
    AdapterRejected,
    AdapterTooLarge,
    InvalidRequest,
)
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.request import Request, SamplingParams
from lorikeet_engine.residency.packed_image import PackedLayout
from tests.engine.blob_shelf import BlobShelf
from tests.engine.engine_driver import (
    PAGE,
    Answers,
    RecordingRunner,
    build,
    greedy,
    load_adapters,
    prompt,
)
from tests.engine.modes import IN_CHUNKS
from tests.engine.peft_adapters import classifier, save_adapter, save_head

pytestmark = pytest.mark.usefixtures("one_thread")
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
HEADS: dict[str, tuple[int, dict[str, Any]]] = {
    "reward": (1, {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}),
    "intents": (700, {"r": 4, "target_modules": ["q_proj", "o_proj"]}),
    "tone": (3, {"r": 12, "target_modules": ["o_proj"], "use_rslora": True, "use_dora": True}),
}
MODES: dict[str, dict[str, Any]] = {
    "at_ease": {},
    "in_chunks": IN_CHUNKS,
    "preempted": {"kv_pages": 9, "max_context": 112, **IN_CHUNKS},
    "churn": {"max_batch_adapters": 1},
}
# Delta nets, latent attention, experts, and caps of logits, which heads lack.
FAMILIES = ("llama", "qwen3", "gemma2", "qwen3_5_text", "deepseek_v3_whole_queries", "gpt_oss")
OFTEN = {"llama": ("at_ease", "preempted"), "qwen3": ("churn",), "qwen3_5_text": ("in_chunks",)}
CASES = [
    pytest.param(family, mode, marks=[] if mode in OFTEN.get(family, ()) else pytest.mark.soak)
    for family in FAMILIES
    for mode in MODES
]


@torch.inference_mode()
def expected(checkpoint, folder, labels, ids):
    """Return the scores that PEFT's classifier gives a prompt."""
    model = peft.PeftModel.from_pretrained(classifier(checkpoint, labels), folder).eval()
    return model(torch.tensor([ids])).logits[0]


def pooling(request_id, *prompts, adapter=None):
    """Return a request to pool prompts."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    return Request(
        request_id, tuple(map(tuple, prompts)), sampling, adapter=adapter, pools=Pooling.LAST
    )


class World:
    """A checkpoint, adapters with heads and one that generates, and what PEFT computes."""

    def __init__(self, checkpoint, folder):
        self.checkpoint, self.shelf = checkpoint, BlobShelf(folder / "blobs")
        self.prompts = {name: prompt(30 + 7 * i) for i, name in enumerate(HEADS)}
        self.refs, self.expected = {}, {}
        for seed, (name, (labels, lora)) in enumerate(HEADS.items()):
            saved = save_head(checkpoint, folder / name, labels, seed, **lora)
            self.refs[name] = self.shelf.add(saved, name)
            self.expected[name] = expected(checkpoint, saved, labels, self.prompts[name])
        saved = save_adapter(checkpoint, folder / "plain", r=8, target_modules=["q_proj"])
        self.plain = self.shelf.add(saved, "plain")

    def check(self, answers):
        """Pool every prompt with its head, among requests that generate; compare the scores."""
        for seed, (name, ref) in enumerate(self.refs.items()):
            answers.submit(pooling(name, self.prompts[name], adapter=ref))
            answers.submit(greedy(f"{name} base", prompt(21, seed), max_tokens=30))
            answers.submit(
                greedy(f"{name} plain", prompt(25, seed), adapter=self.plain, max_tokens=6)
            )
        answers.all()
        assert not answers.errors
        for name in self.refs:
            want = self.expected[name]
            got = torch.tensor(answers.pooled.pop((name, 0)))
            torch.testing.assert_close(got, want, rtol=0, atol=2e-5 * float(want.abs().max()))


@pytest.fixture(scope="module")
def world_of(tiny_checkpoints, tmp_path_factory):
    worlds = {}

    def make(family):
        if family not in worlds:
            worlds[family] = World(tiny_checkpoints[family], tmp_path_factory.mktemp(family))
        return worlds[family]

    return make


@pytest.mark.parametrize(("family", "mode"), CASES)
def test_heads_score_prompts_as_peft_does(family, mode, world_of, tmp_path, close_later):
    world = world_of(family)
    engine = close_later(build(world.checkpoint, world.shelf, tmp_path, **MODES[mode]))
    answers = Answers(engine)
    if mode != "churn":  # all requests begin together
        load_adapters(answers, [*world.refs.values(), world.plain])
    world.check(answers)
    if mode == "preempted" and family == "llama":
        assert engine.status().preemptions


def test_a_prompt_is_pooled_again_from_its_cached_prefix(world_of, tmp_path, close_later):
    world = world_of("llama")
    engine = close_later(build(world.checkpoint, world.shelf, tmp_path))
    witness, answers = RecordingRunner(engine), Answers(engine)
    pooled = []
    for _ in range(2):
        answers.submit(pooling("r", world.prompts["tone"], adapter=world.refs["tone"]))
        answers.all()
        pooled.append(torch.tensor(answers.pooled.pop(("r", 0))))
        answers.finish.clear()
    cached = (len(world.prompts["tone"]) - 1) // PAGE * PAGE
    assert witness.tokens == 2 * len(world.prompts["tone"]) - cached
    torch.testing.assert_close(pooled[0], pooled[1])


@pytest.mark.usefixtures("forked_followers")
def test_two_ranks_score_prompts_as_one_does(world_of, tmp_path, close_later):
    world = world_of("llama")
    settings = {"tensor_parallel": 2, "max_batch_tokens": 13, "max_running": 13}
    engine = close_later(build(world.checkpoint, world.shelf, tmp_path, **settings))
    world.check(Answers(engine))


def test_a_prompt_without_a_head_gets_its_last_hidden_state(world_of, tmp_path, close_later):
    world = world_of("qwen3")
    engine = close_later(build(world.checkpoint, world.shelf, tmp_path))
    answers, ids = Answers(engine), prompt(40)
    answers.submit(pooling("r", ids, ids[:17]))
    answers.all()
    model = classifier(world.checkpoint, 1).model
    for choice, some in enumerate((ids, ids[:17])):
        with torch.inference_mode():
            want = model(torch.tensor([some])).last_hidden_state[0, -1]
        got = torch.tensor(answers.pooled["r", choice])
        torch.testing.assert_close(got, want, rtol=0, atol=2e-5 * float(want.abs().max()))


def test_biases_of_a_head_are_added(tiny_checkpoints, tmp_path, close_later):
    checkpoint, shelf = tiny_checkpoints["llama"], BlobShelf(tmp_path / "blobs")
    lora = {"r": 2, "target_modules": ["q_proj"]}
    plain = save_head(checkpoint, tmp_path / "plain", 2, **lora)
    tensors = load_file(plain / "adapter_model.safetensors")
    biases = torch.tensor([0.5, -3.0])
    refs = [shelf.add(plain, "plain")]
    save_file(
        tensors | {"base_model.model.score.bias": biases}, plain / "adapter_model.safetensors"
    )
    refs.append(shelf.add(plain, "biased"))
    engine = close_later(build(checkpoint, shelf, tmp_path / "cache"))
    answers = Answers(engine)
    for ref in refs:
        answers.submit(pooling(ref.name, prompt(20), adapter=ref))
    answers.all()
    got, want = (torch.tensor(answers.pooled[ref.name, 0]) for ref in refs[::-1])
    torch.testing.assert_close(got, want + biases)
    shape = ModelConfig.from_folder(checkpoint).shape
    plain_spec, spec = (
        read_spec(shelf.folder / ref.digest, shape, AdapterLimits(64, 1 << 30)) for ref in refs
    )
    assert spec.touches.parameters == plain_spec.touches.parameters + len(biases)


def test_a_head_that_overflows_fails_its_own_request_alone(world_of, tmp_path, close_later):
    world, shelf = world_of("llama"), BlobShelf(tmp_path / "blobs")
    folder = shutil.copytree(world.shelf.folder.parent / "reward", tmp_path / "large")
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors["base_model.model.score.weight"].fill_(3e38)
    save_file(tensors, folder / "adapter_model.safetensors")
    large = shelf.add(folder, "large")
    engine = close_later(build(world.checkpoint, shelf, tmp_path / "cache"))
    answers = Answers(engine)
    answers.submit(pooling("bad", prompt(20), adapter=large))
    answers.submit(greedy("good", prompt(20), max_tokens=3))
    answers.all()
    assert isinstance(answers.errors["bad"], AdapterOverflows)
    assert len(answers.of("good")) == 3


def test_the_memory_of_a_head_is_known_from_its_header(world_of):
    world = world_of("llama")
    shape = ModelConfig.from_folder(world.checkpoint).shape
    blob = world.shelf.folder / world.refs["intents"].digest
    spec = read_spec(blob, shape, AdapterLimits(64, 1 << 30))
    elements = PackedLayout.of(spec, shape).elements
    assert spec.packed_elements(shape.dims) == elements > 700 * shape.hidden
    check_values(blob, spec, "float32")


def test_labels_problem_and_padding_are_those_of_the_folder(world_of, tmp_path):
    folder = shutil.copytree(world_of("llama").shelf.folder.parent / "tone", tmp_path / "tone")
    assert BlobShelf(tmp_path).add(folder, "a").head == Head(("LABEL_0", "LABEL_1", "LABEL_2"))
    (folder / "tokenizer_config.json").write_text('{"pad_token": {"content": "<pad>"}}')
    (folder / "tokenizer.json").write_text('{"added_tokens": [{"id": 7, "content": "<pad>"}]}')
    assert BlobShelf(tmp_path).add(folder, "b").head.pad_token == 7
    for odd in (5, [5], {"id": 7}, [{"content": "<pad>"}]):
        (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": odd}))
        assert BlobShelf(tmp_path).add(folder, "odd").head.pad_token is None
    labels = {"id2label": {"0": "calm", "1": "warm", "2": "wild"}, "pad_token_id": 3}
    config = {**labels, "problem_type": "multi_label_classification"}
    (folder / "config.json").write_text(json.dumps(config))
    head = Head(("calm", "warm", "wild"), Problem.MULTI_LABEL, 3)
    assert BlobShelf(tmp_path).add(folder, "c").head == head
    (folder / "config.json").write_text(json.dumps({"id2label": {"0": "calm"}}))
    with pytest.raises(AdapterRejected, match="does not name the 3 labels"):
        BlobShelf(tmp_path).add(folder, "d")
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(AdapterRejected, match=r"config\.json is not JSON"):
        BlobShelf(tmp_path).add(folder, "e")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"task_type": "TOKEN_CLS"}, "heads are served for whole texts alone"),
        ({"modules_to_save": ["score", "norm"]}, "whole modules cannot be served"),
    ],
)
def test_other_heads_are_refused_by_name(config, message, world_of, tmp_path):
    folder = shutil.copytree(world_of("llama").shelf.folder.parent / "tone", tmp_path / "tone")
    raw = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(raw | config))
    with pytest.raises(AdapterRejected, match=message):
        BlobShelf(tmp_path).add(folder, "tone")


def test_a_head_that_is_named_but_not_saved_is_refused(world_of, tmp_path):
    folder = shutil.copytree(world_of("llama").shelf.folder.parent / "tone", tmp_path / "tone")
    tensors = load_file(folder / "adapter_model.safetensors")
    weights = tensors.pop("base_model.model.score.weight")
    for others in ({}, {"base_model.model.score.weight_orig": weights}):
        save_file(tensors | others, folder / "adapter_model.safetensors")
        with pytest.raises(AdapterRejected, match="weights of score are not in the file"):
            BlobShelf(tmp_path).add(folder, "tone")


def test_a_head_of_another_width_or_with_too_many_labels_is_refused(world_of, tmp_path):
    world = world_of("llama")
    shape = ModelConfig.from_folder(world.checkpoint).shape
    folder = shutil.copytree(world.shelf.folder.parent / "tone", tmp_path / "tone")
    tensors, shelf = load_file(folder / "adapter_model.safetensors"), BlobShelf(tmp_path)

    def read(rows, columns):
        tensors["base_model.model.score.weight"] = torch.ones(rows, columns)
        save_file(tensors, folder / "adapter_model.safetensors")
        blob = tmp_path / shelf.add(folder, "tone").digest
        return read_spec(blob, shape, AdapterLimits(64, 1 << 30))

    assert read(2, shape.hidden).head.head.labels == ("LABEL_0", "LABEL_1")
    with pytest.raises(AdapterRejected, match="trained for another base model"):
        read(2, shape.hidden + 1)
    with pytest.raises(AdapterTooLarge, match="1025 labels"):
        read(1025, shape.hidden)


def test_an_adapter_with_a_head_is_not_added_to_others(world_of):
    world = world_of("llama")
    with pytest.raises(InvalidRequest, match="classification head"):
        Composition((world.plain, world.refs["tone"]), (1.0, 1.0))


def test_a_prompt_without_its_padding_scores_as_transformers_with_padding(world_of):
    world, ids = world_of("llama"), prompt(12)
    labels, pad = HEADS["tone"][0], 2
    folder = world.shelf.folder.parent / "tone"
    base = classifier(world.checkpoint, labels)
    base.config.pad_token_id = pad
    model = peft.PeftModel.from_pretrained(base, folder).eval()
    with torch.inference_mode():
        padded = model(torch.tensor([[*ids, pad, pad]])).logits[0]
    torch.testing.assert_close(padded, expected(world.checkpoint, folder, labels, ids))
