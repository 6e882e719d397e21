"""A replica embeds texts as sentence-transformers and PEFT do, with base models and adapters."""

import asyncio
import json
import shutil
from dataclasses import replace

import peft
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from lorikeet.apis.pooling.request import with_pooling
from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.store.object_store import open_store
from lorikeet.gateway.admin.blob_validation import validate_blob
from lorikeet.gateway.services import ServedModel, read_base_models
from lorikeet.protocol.messages import Call, Endpoint, FinalUsage, Refusal
from lorikeet.replica.replica import Replica
from lorikeet.settings import Settings
from lorikeet.text.prompts import PromptEncoder, encode_call
from lorikeet_engine.adapter_format import AdapterLimits, write_blob
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.request import SamplingParams
from tests.engine.peft_adapters import embedder, save_embedder
from tests.serving.local_gateway import answer_of

DEMO, BASE = "lorikeet-demo", "embedding"
TEXTS = ("hello there, how are you", "no", "parcels to Lyon " * 9)


def write_pipeline(folder, pooling_mode, *, normalize):
    """Write sentence-transformers' files to a folder."""
    kinds = ["Transformer", "Pooling", *["Normalize"] * normalize]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": paths[i], "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for path in paths[1 : len(kinds)]:
        (folder / path).mkdir(exist_ok=True)
    config = ModelConfig.from_folder(folder) if (folder / "config.json").exists() else None
    width = {} if config is None else {"word_embedding_dimension": config.shape.hidden}
    modes = {f"pooling_mode_{name}": False for name in ("cls_token", "mean_tokens", "lasttoken")}
    modes[f"pooling_mode_{pooling_mode}"] = True
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(width | modes))


def embedding_base(demo, folder):
    """Save a checkpoint as Qwen3-Embedding's: a decoder alone, whose tokenizer appends a token."""
    embedder(demo).save_pretrained(folder)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (demo / name).exists():
            shutil.copy(demo / name, folder)
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    end = 2  # the padding token, as Qwen3-Embedding's
    name = tokenizer.id_to_token(end)
    tokenizer.post_processor = TemplateProcessing(single=f"$A {name}", special_tokens=[(name, end)])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_pipeline(folder, "lasttoken", normalize=True)
    return end


class World:
    """A base model for embeddings, an adapter that pools by the mean, and a replica of them."""

    def __init__(self, folder):
        self.folder = folder
        demo = Settings.from_env({}).base_models[DEMO]
        (folder / BASE).mkdir()
        self.end = embedding_base(demo, folder / BASE)
        lora = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
        self.adapter = save_embedder(folder / BASE, folder / "adapter", **lora)
        write_pipeline(self.adapter, "mean_tokens", normalize=False)
        self.settings = Settings.from_env(
            {
                "LORIKEET_CATALOG": str(folder / "catalog"),
                "LORIKEET_CACHE_DIR": str(folder / "cache"),
                "LORIKEET_BASE_MODELS": f"{BASE}={folder / BASE}",
            }
        )
        self.served = read_base_models(self.settings)[BASE]
        write_blob(self.adapter, folder / "blob")
        limits = AdapterLimits(64, 1 << 30)
        known = {BASE: ServedModel(self.served.shape)}
        facts = validate_blob(folder / "blob", known, limits, BASE)
        catalog = AdapterCatalog.init(open_store(self.settings.catalog))
        catalog.create_tenant("acme", actor="test")
        catalog.register("acme", "mean", folder / "blob", facts, actor="test")
        self.ref = facts.ref("acme", "mean", 1)

    def call(self, **fields):
        call = Call(
            request_id="r",
            endpoint=Endpoint.EMBEDDINGS,
            created=0,
            tenant="acme",
            model="any",
            adapter=None,
            prompts=TEXTS,
            max_tokens=0,
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
        )
        return with_pooling(
            replace(call, **fields),
            self.served.head,
            self.served.embedder,
            self.served.shape.hidden,
        )

    def ask(self, *calls):
        """Return the items of each answer."""

        async def ask():
            replica = Replica("r0", BASE, self.settings)
            try:
                return [[item async for item in answer_of(replica, each)] for each in calls]
            finally:
                replica.close()

        return asyncio.run(ask())


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("embeddings"))


@pytest.fixture(scope="module")
def answers(world):
    chat = replace(world.call(), endpoint=Endpoint.COMPLETIONS, embedder=None, request_id="chat")
    short = world.call(dimensions=8, request_id="short")
    adapted = world.call(adapter=world.ref, request_id="adapted")
    names = ("base", "short", "adapted", "chat")
    return dict(zip(names, world.ask(world.call(), short, adapted, chat), strict=True))


def vectors(items):
    return torch.tensor([each["embedding"] for each in json.loads(items[-1])["data"]])


@torch.inference_mode()
def states(world, model):
    """Return transformers' last hidden states of each text."""
    encoder = PromptEncoder(world.folder / BASE)
    prompts = encode_call(world.call(), encoder, 4096).prompts
    assert all(ids[-1] == world.end for ids in prompts)
    return [model(torch.tensor([list(ids)])).last_hidden_state[0] for ids in prompts]


def test_a_replica_embeds_as_transformers_and_peft_do(world, answers):
    model = embedder(world.folder / BASE)
    last = torch.stack([each[-1] for each in states(world, model)])
    want = torch.nn.functional.normalize(last, dim=1)
    torch.testing.assert_close(vectors(answers["base"]), want, rtol=0, atol=1e-5)
    want = torch.nn.functional.normalize(last[:, :8], dim=1)
    torch.testing.assert_close(vectors(answers["short"]), want, rtol=0, atol=1e-5)
    adapted = peft.PeftModel.from_pretrained(model, world.adapter).eval()
    want = torch.stack([each.mean(0) for each in states(world, adapted)])
    atol = 1e-5 * float(want.abs().max())
    torch.testing.assert_close(vectors(answers["adapted"]), want, rtol=0, atol=atol)


def test_a_replica_embeds_as_sentence_transformers_does(world, answers):
    library = pytest.importorskip("sentence_transformers", reason="is not installed")
    model = library.SentenceTransformer(str(world.folder / BASE), device="cpu")
    want = model.encode(TEXTS, convert_to_tensor=True)
    torch.testing.assert_close(vectors(answers["base"]), want, rtol=0, atol=1e-5)
    # as sentence-transformers itself saves a trained adapter
    saved = world.folder / "saved"
    model.load_adapter(str(world.adapter))
    model[1] = type(model[1])(model[1].embedding_dimension, pooling_mode="mean")
    del model[2]
    model.save(str(saved))
    assert not (saved / "model.safetensors").exists()
    write_blob(saved, saved / "blob")
    limits, served = AdapterLimits(64, 1 << 30), {BASE: ServedModel(world.served.shape)}
    assert validate_blob(saved / "blob", served, limits, BASE).embedder == world.ref.embedder
    want = model.encode(TEXTS, convert_to_tensor=True)
    atol = 1e-5 * float(want.abs().max())
    torch.testing.assert_close(vectors(answers["adapted"]), want, rtol=0, atol=atol)


def test_the_usage_counts_prompts_alone(world, answers):
    (usage,) = [item for item in answers["adapted"] if isinstance(item, FinalUsage)]
    prompts = encode_call(world.call(), PromptEncoder(world.folder / BASE), 4096).prompts
    assert (usage.prompt_tokens, usage.completion_tokens) == (sum(map(len, prompts)), 0)
    assert usage.cached_tokens == 0


def test_a_base_model_without_lm_head_refuses_to_generate(answers):
    (refusal,) = [item for item in answers["chat"] if isinstance(item, Refusal)]
    assert refusal.param == "model"
    assert "no lm_head and generates nothing" in refusal.message
