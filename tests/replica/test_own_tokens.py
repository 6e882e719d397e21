"""A replica answers with an adapter's own tokens as transformers and PEFT do with its folder."""

import asyncio
import json
from dataclasses import replace

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from lorikeet.catalog.catalog import blob_key
from lorikeet.catalog.store.object_store import open_store
from lorikeet.gateway.admin.adapter_defaults import DefaultsBody, checked_defaults
from lorikeet.gateway.call_encoders import CallEncoders
from lorikeet.protocol.messages import Call, Endpoint, Format
from lorikeet.replica.replica import Replica
from lorikeet.settings import Settings
from lorikeet.text.prompts import PromptEncoder, encode_call
from lorikeet.tokenizer_vocabulary import read_tokenizer
from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.adapter_format import write_blob
from lorikeet_engine.request import SamplingParams
from tests.engine.peft_adapters import save_adapter
from tests.serving.local_gateway import local_gateway

BASE = "lorikeet-demo"
FIRST, ROWS, TOKENS = 262, 265, 6  # the demo has 262 tokens
PROMPT = "say <|turn|>lorikeet"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder of an adapter with two tokens of its own and a row without a token."""
    base = Settings.from_env({}).base_models[BASE]
    folder = tmp_path_factory.mktemp("trained") / "adapter"
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"], "rows": ROWS}
    save_adapter(base, folder, modules_to_save=["embed_tokens", "lm_head"], **lora)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    tokenizer.add_tokens(["<|turn|>"], special_tokens=True)
    tokenizer.add_tokens(["lorikeet"])
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def answers(trained, tmp_path_factory):
    """Run a replica; return the JSON answers to completions by PROMPT and fields of Call."""
    root = tmp_path_factory.mktemp("own-tokens")
    given = {"LORIKEET_CATALOG": str(root / "catalog"), "LORIKEET_CACHE_DIR": str(root / "cache")}
    settings = Settings.from_env(given | {"LORIKEET_MAX_ADDED_TOKENS": "4"})
    digest = write_blob(trained, root / "blob")
    open_store(settings.catalog).put_file(blob_key(digest), root / "blob")
    encoders = CallEncoders({BASE: PromptEncoder(settings.base_models[BASE])})
    body = DefaultsBody.model_validate({"tokenizer": read_tokenizer(trained)})
    defaults = asyncio.run(checked_defaults(body, encoders, "acme", BASE, ROWS))
    encoder = PromptEncoder(settings.base_models[BASE]).with_tokenizer(defaults.tokenizer)
    encoders.close()
    ref = AdapterRef("acme", "own", 1, digest, vocabulary=ROWS)
    call = Call(
        request_id="r",
        endpoint=Endpoint.COMPLETIONS,
        created=0,
        tenant="acme",
        model=BASE,
        adapter=ref,
        prompts=(PROMPT,),
        max_tokens=TOKENS,
        sampling=SamplingParams(temperature=0, ignore_eos=True, logprobs=2),
        defaults=defaults,
    )

    def ask(*each):
        async def inside():
            replica = Replica("r0", BASE, settings)
            try:
                return [await ask_one(replica, f"r{i}", one) for i, one in enumerate(each)]
            finally:
                replica.close()

        async def ask_one(replica, name, fields):
            asked = replace(call, request_id=name, **fields)
            encoded = encode_call(asked, encoder, 512).to_send()
            async with local_gateway(replica, name) as gateway:
                items = [item async for item in gateway.stream_encoded(encoded)]
            return json.loads(items[-1])["choices"][0]

        return asyncio.run(inside())

    biased = replace(call.sampling, logit_bias=((FIRST + 1, 100.0),))
    ends = replace(biased, logit_bias=((FIRST, 100.0),), stop_token_ids=(FIRST,), ignore_eos=False)
    held = {
        "endpoint": Endpoint.CHAT,
        "prompts": (),
        "messages": ({"role": "user", "content": "hi"},),
        "format": Format('{"enum": ["yes"]}'),
        "sampling": replace(call.sampling, logprobs=None),
        "max_tokens": 32,
    }
    return ask({}, {"sampling": biased}, {"sampling": ends}, held)


def test_a_greedy_answer_with_its_log_probabilities_equals_pefts(trained, answers):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(trained)
    base = AutoModelForCausalLM.from_pretrained(
        Settings.from_env({}).base_models[BASE], dtype=torch.float32
    )
    base.resize_token_embeddings(ROWS)
    model = peft.PeftModel.from_pretrained(base, trained)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    assert {FIRST, FIRST + 1} <= {*ids[0].tolist()}
    made = model.generate(input_ids=ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
    new = made[0, ids.shape[1] :]
    assert answers[0]["text"] == tokenizer.decode(new, skip_special_tokens=True)
    with torch.inference_mode():
        logits = model(made[:, :-1]).logits[0, -TOKENS:]
    want = logits.log_softmax(-1).gather(-1, new[:, None])[:, 0]
    got = torch.tensor(answers[0]["logprobs"]["token_logprobs"])
    assert (got - want).abs().max() <= 1e-4
    assert answers[0]["logprobs"]["tokens"] == tokenizer.convert_ids_to_tokens(new)


def test_own_tokens_are_text_or_ends_and_held_answers_do_without_them(answers):
    _, biased, ends, held = answers
    assert biased["text"] == "lorikeet" * TOKENS
    assert biased["logprobs"]["tokens"] == ["lorikeet"] * TOKENS
    assert (ends["text"], ends["finish_reason"]) == ("", "stop")
    assert json.loads(held["message"]["content"]) == "yes"
