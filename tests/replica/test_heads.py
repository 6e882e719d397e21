"""A replica answers requests to classify with the scores that PEFT's model computes."""

import asyncio
import json
from dataclasses import replace

import peft
import pytest
import torch

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.store.object_store import open_store
from lorikeet.gateway.admin.blob_validation import validate_blob
from lorikeet.gateway.services import ServedModel
from lorikeet.protocol.messages import Call, Endpoint, FinalUsage
from lorikeet.replica.replica import Replica
from lorikeet.settings import Settings
from lorikeet.text.prompts import PromptEncoder, encode_call
from lorikeet_engine.adapter_format import AdapterLimits, write_blob
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.request import SamplingParams
from tests.engine.peft_adapters import classifier, save_head
from tests.serving.local_gateway import answer_of

BASE, LABELS = "lorikeet-demo", 3


def test_a_replica_classifies_as_peft_does(tmp_path):
    given = {"LORIKEET_CATALOG": str(tmp_path / "catalog"), "LORIKEET_CACHE_DIR": str(tmp_path)}
    settings = Settings.from_env(given)
    model = settings.base_models[BASE]
    lora = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
    folder = save_head(model, tmp_path / "adapter", LABELS, **lora)
    write_blob(folder, tmp_path / "blob")
    served = ServedModel(ModelConfig.from_folder(model).shape)
    limits = AdapterLimits(64, 1 << 30)
    facts = validate_blob(tmp_path / "blob", {BASE: served}, limits, BASE)
    catalog = AdapterCatalog.init(open_store(settings.catalog))
    catalog.create_tenant("acme", actor="test")
    catalog.register("acme", "tone", tmp_path / "blob", facts, actor="test")
    call = Call(
        request_id="r",
        endpoint=Endpoint.CLASSIFY,
        created=0,
        tenant="acme",
        model="acme/tone",
        adapter=facts.ref("acme", "tone", 1),
        prompts=("hello there, how are you", "no"),
        max_tokens=0,
        head=facts.head,
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
    )
    encoder = PromptEncoder(model)

    async def ask():
        replica = Replica("r0", BASE, settings)
        try:
            calls = [call, replace(call, request_id="raw", raw_scores=True)]
            return [[item async for item in answer_of(replica, each)] for each in calls]
        finally:
            replica.close()

    answers = asyncio.run(ask())
    prompts = encode_call(call, encoder, 4096).prompts
    adapted = peft.PeftModel.from_pretrained(classifier(model, LABELS), folder).eval()
    for items, shown in zip(answers, (torch.nn.Softmax(-1), torch.nn.Identity()), strict=True):
        (usage,) = [item for item in items if isinstance(item, FinalUsage)]
        assert (usage.prompt_tokens, usage.completion_tokens) == (sum(map(len, prompts)), 0)
        data = json.loads(items[-1])["data"]
        for ids, found in zip(prompts, data, strict=True):
            with torch.inference_mode():
                want = shown(adapted(torch.tensor([ids])).logits[0]).tolist()
            assert found["probs"] == pytest.approx(want, abs=1e-4)
            assert found["label"] == f"LABEL_{want.index(max(want))}"
