"""Prompts are embedded as transformers and PEFT do it, in any batch: last token and mean."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from lorikeet_engine.adapter import Embedder, Pooling
from lorikeet_engine.adapter_format import read_embedder
from lorikeet_engine.errors import AdapterRejected, InvalidRequest, ModelError
from lorikeet_engine.request import Request, SamplingParams
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
from tests.engine.matrix.storages import STORAGES
from tests.engine.peft_adapters import classifier, embedder, loaded, save_adapter, save_embedder
from tests.engine.test_heads import MODES

pytestmark = pytest.mark.usefixtures("one_thread")
ADAPTERS = {
    "queries": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    "texts": {"r": 4, "target_modules": ["q_proj", "o_proj"], "use_dora": True},
    "pairs": {"r": 3, "target_modules": ["v_proj", "o_proj"]},
}
# Delta nets, whose states are cached, and latent attention.
FAMILIES = ("llama", "qwen3", "gemma2", "qwen3_5_text", "deepseek_v3_whole_queries")
OFTEN = {"llama": ("preempted",), "qwen3": ("churn",), "qwen3_5_text": ("in_chunks",)}
CASES = [
    pytest.param(family, mode, marks=[] if mode in OFTEN.get(family, ()) else pytest.mark.soak)
    for family in FAMILIES
    for mode in MODES
]


@torch.inference_mode()
def pooled(model, ids, pooling):
    """Return transformers' pooled hidden states of a prompt."""
    states = model(torch.tensor([ids])).last_hidden_state[0]
    return states[-1] if pooling is Pooling.LAST else states.mean(0)


def embedding(request_id, pooling, *prompts, adapter=None):
    """Return a request to embed prompts."""
    sampling, ids = SamplingParams(max_tokens=1, temperature=0.0), tuple(map(tuple, prompts))
    return Request(request_id, ids, sampling, adapter=adapter, pools=pooling)


def assert_same(got, want):
    torch.testing.assert_close(torch.tensor(got), want, rtol=0, atol=2e-5 * float(want.abs().max()))


class World:
    """A checkpoint, adapters for embeddings and one that generates, and what PEFT computes."""

    def __init__(self, checkpoint, folder):
        self.checkpoint, self.shelf = checkpoint, BlobShelf(folder / "blobs")
        self.prompts = {name: prompt(30 + 7 * i) for i, name in enumerate(ADAPTERS)}
        self.refs, self.expected = {}, {}
        for seed, (name, lora) in enumerate(ADAPTERS.items()):
            saved = save_embedder(checkpoint, folder / name, seed, **lora)
            self.refs[name] = self.shelf.add(saved, name)
            model = peft.PeftModel.from_pretrained(embedder(checkpoint), saved).eval()
            for pooling in Pooling:
                self.expected[name, pooling] = pooled(model, self.prompts[name], pooling)
        saved = save_adapter(checkpoint, folder / "plain", r=8, target_modules=["q_proj"])
        self.plain = self.shelf.add(saved, "plain")

    def check(self, answers):
        """Embed every prompt in both ways, among requests that generate; compare the vectors."""
        for seed, (name, ref) in enumerate(self.refs.items()):
            for pooling in Pooling:
                answers.submit(
                    embedding(f"{name} {pooling}", pooling, self.prompts[name], adapter=ref)
                )
            answers.submit(greedy(f"{name} base", prompt(21, seed), max_tokens=30))
            answers.submit(
                greedy(f"{name} plain", prompt(25, seed), adapter=self.plain, max_tokens=6)
            )
        answers.all()
        assert not answers.errors
        for (name, pooling), want in self.expected.items():
            assert_same(answers.pooled.pop((f"{name} {pooling}", 0)), want)


@pytest.fixture(scope="module")
def world_of(tiny_checkpoints, tmp_path_factory):
    worlds = {}

    def make(family):
        if family not in worlds:
            worlds[family] = World(tiny_checkpoints[family], tmp_path_factory.mktemp(family))
        return worlds[family]

    return make


@pytest.mark.parametrize(("family", "mode"), CASES)
def test_prompts_are_embedded_as_peft_does(family, mode, world_of, tmp_path, close_later):
    world = world_of(family)
    engine = close_later(build(world.checkpoint, world.shelf, tmp_path, **MODES[mode]))
    answers = Answers(engine)
    if mode != "churn":  # all requests begin together
        load_adapters(answers, [*world.refs.values(), world.plain])
    world.check(answers)
    if mode == "preempted" and family == "llama":
        assert engine.status().preemptions


def test_a_mean_is_the_same_behind_a_cached_prefix_and_computes_all_tokens(
    world_of, tmp_path, close_later
):
    world = world_of("llama")
    engine = close_later(build(world.checkpoint, world.shelf, tmp_path, **MODES["in_chunks"]))
    witness, answers = RecordingRunner(engine), Answers(engine)
    ids, ref = world.prompts["texts"], world.refs["texts"]
    for pooling, again in ((Pooling.MEAN, len(ids)), (Pooling.LAST, len(ids) - PAGE)):
        for _ in range(2):
            before = witness.tokens
            answers.submit(embedding("r", pooling, ids, adapter=ref))
            answers.all()
            assert_same(answers.pooled.pop(("r", 0)), world.expected["texts", pooling])
            answers.finish.clear()
        assert witness.tokens - before <= again
        if pooling is Pooling.MEAN:
            assert witness.tokens - before == again


@pytest.mark.usefixtures("forked_followers")
def test_two_ranks_embed_prompts_as_one_does(world_of, tmp_path, close_later):
    world = world_of("llama")
    settings = {"tensor_parallel": 2, "max_batch_tokens": 13, "max_running": 13}
    engine = close_later(build(world.checkpoint, world.shelf, tmp_path, **settings))
    world.check(Answers(engine))


@pytest.mark.parametrize("storage", ["fp8_weights", "nf4_weights"])
def test_prompts_are_embedded_over_rounded_weights(storage, world_of, tmp_path, close_later):
    world, stored = world_of("llama"), STORAGES[storage]
    engine = close_later(build(world.checkpoint, world.shelf, tmp_path, **stored.settings))
    model = loaded(world.checkpoint)
    stored.imitate(model)
    answers, ids = Answers(engine), prompt(40)
    for pooling in Pooling:
        answers.submit(embedding(pooling, pooling, ids))
    answers.all()
    for pooling in Pooling:
        want = pooled(model.model, ids, pooling)
        error = (torch.tensor(answers.pooled[pooling, 0]) - want).abs().max()
        assert float(error / want.abs().max()) < stored.tolerance.worst


def test_an_activated_lora_changes_the_mean_from_its_invocation_on(
    tiny_checkpoints, tmp_path, close_later
):
    checkpoint, shelf, ids = tiny_checkpoints["llama"], BlobShelf(tmp_path / "blobs"), prompt(40)
    invocation = ids[20:22]
    lora = {"r": 4, "target_modules": ["q_proj", "o_proj"], "alora_invocation_tokens": invocation}
    saved = save_adapter(checkpoint, tmp_path / "activated", **lora)
    ref = shelf.add(saved, "activated")
    engine = close_later(build(checkpoint, shelf, tmp_path / "cache", **MODES["in_chunks"]))
    answers = Answers(engine)
    answers.submit(embedding("r", Pooling.MEAN, ids, adapter=ref))
    answers.all()
    model = peft.PeftModel.from_pretrained(loaded(checkpoint), saved).eval()
    with torch.inference_mode():
        offsets = [len(ids) - 20]
        states = model(torch.tensor([ids]), output_hidden_states=True, alora_offsets=offsets)
    assert_same(answers.pooled["r", 0], states.hidden_states[-1][0].mean(0))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_checkpoint_that_automodel_saved_embeds_and_does_not_generate(
    family, world_of, tmp_path, close_later
):
    world, folder = world_of(family), tmp_path / "bare"
    embedder(world.checkpoint).save_pretrained(folder)
    bare = {n.removeprefix("model."): t for n, t in load_file(folder / "model.safetensors").items()}
    assert {name.split(".")[0] for name in bare} == {"embed_tokens", "layers", "norm"}
    save_file(bare, folder / "model.safetensors", {"format": "pt"})
    engine = close_later(build(folder, world.shelf, tmp_path))
    assert not engine.info.generates
    answers = Answers(engine)
    for (name, pooling), want in world.expected.items():
        answers.submit(embedding("r", pooling, world.prompts[name], adapter=world.refs[name]))
        answers.all()
        assert_same(answers.pooled.pop(("r", 0)), want)
        answers.finish.clear()
    with pytest.raises(InvalidRequest, match="no lm_head and generates nothing"):
        engine.submit(greedy("chat", prompt(5), max_tokens=3))


def test_a_base_models_own_head_scores_prompts_as_transformers_does(
    world_of, tmp_path, close_later
):
    world, folder = world_of("llama"), tmp_path / "classifier"
    model = classifier(world.checkpoint, 3).eval()
    model.save_pretrained(folder)
    engine = close_later(build(folder, world.shelf, tmp_path))
    assert not engine.info.generates
    answers, ids = Answers(engine), prompt(40)
    answers.submit(embedding("base", Pooling.LAST, ids, ids[:9]))
    answers.submit(embedding("adapted", Pooling.LAST, ids, adapter=world.plain))
    answers.all()
    for choice, some in enumerate((ids, ids[:9])):
        with torch.inference_mode():
            assert_same(answers.pooled["base", choice], model(torch.tensor([some])).logits[0])
    adapted = peft.PeftModel.from_pretrained(
        loaded(world.checkpoint), world.shelf.folder.parent / "plain"
    ).eval()
    with torch.inference_mode():
        want = model.score(pooled(adapted.base_model.model.model, ids, Pooling.LAST))
    assert_same(answers.pooled["adapted", 0], want)


def test_a_base_models_head_must_have_the_labels_of_its_config(world_of, tmp_path):
    world, folder = world_of("llama"), tmp_path / "classifier"
    classifier(world.checkpoint, 3).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["id2label"] = {"0": "calm"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"score\.weight"):
        build(folder, world.shelf, tmp_path)


def pipeline(folder, *kinds, pooling=None, config=None):
    """Write the files of sentence-transformers to a folder."""
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    modules = [{"idx": i, "type": f"sentence_transformers.models.{k}"} for i, k in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling or {}))
    (folder / "config.json").write_text(json.dumps(config or {}))
    return folder


WHOLE, LAST = ("Transformer", "Pooling", "Normalize"), {"pooling_mode_lasttoken": True}


@pytest.mark.parametrize(
    ("kinds", "pooling", "config", "want"),
    [
        (WHOLE, LAST, {}, Embedder()),
        (WHOLE[:2], {"pooling_mode": "mean"}, {}, Embedder(Pooling.MEAN, normalizes=False)),
        (
            WHOLE,
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False},
            {"matryoshka_dimensions": [16, 32]},
            Embedder(Pooling.MEAN, dimensions=(16, 32)),
        ),
        (WHOLE, LAST, {"is_matryoshka": False}, Embedder(dimensions=())),
    ],
)
def test_the_files_of_sentence_transformers_are_read(kinds, pooling, config, want, tmp_path):
    assert read_embedder(pipeline(tmp_path, *kinds, pooling=pooling, config=config)) == want


@pytest.mark.parametrize(
    ("kinds", "pooling", "message"),
    [
        (WHOLE, {"pooling_mode_cls_token": True}, "first token of a causal model sees no other"),
        (WHOLE, {"pooling_mode": ["mean", "max"]}, "pooling mean, max is not served"),
        (WHOLE, {}, "pooling none is not served"),
        (("Transformer", "Pooling", "Dense"), LAST, "Dense: want Transformer, Pooling"),
    ],
)
def test_other_pipelines_are_refused_by_name(kinds, pooling, message, tmp_path):
    with pytest.raises(AdapterRejected, match=message):
        read_embedder(pipeline(tmp_path, *kinds, pooling=pooling))


@pytest.mark.parametrize("file", ["modules.json", "1_Pooling/config.json", "config.json"])
@pytest.mark.parametrize("text", ["{", "[" * 100_000], ids=["cut off", "lists in lists"])
def test_files_that_are_no_json_are_refused_by_name(file, text, tmp_path):
    (pipeline(tmp_path, *WHOLE, pooling=LAST) / file).write_text(text)
    with pytest.raises(AdapterRejected, match="no JSON") as caught:
        read_embedder(tmp_path)
    assert caught.value.field == file


def test_an_adapters_own_pipeline_is_part_of_its_blob(world_of, tmp_path):
    world, shelf = world_of("llama"), BlobShelf(tmp_path / "blobs")
    saved = world.shelf.folder.parent / "queries"
    pipeline(saved, *WHOLE, pooling={"pooling_mode_mean_tokens": True})
    ref = shelf.add(saved, "queries")
    assert ref.embedder == Embedder(Pooling.MEAN)
    assert ref.digest != world.refs["queries"].digest
    assert world.refs["queries"].embedder is None
    assert read_embedder(tmp_path) is None
