"""Adapters with tokens of their own: prompts, answers and stops by the version's tokenizer.

The reference is transformers' tokenizer, to which the same tokens were added.
"""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save
from transformers import AddedToken, PreTrainedTokenizerFast

from lorikeet.catalog.catalog import blob_key
from lorikeet.gateway.admin.adapter_defaults import DefaultsBody, checked_defaults
from lorikeet.gateway.call_encoders import CallEncoders
from lorikeet.gateway.services import ServedModel
from lorikeet.gateway.vllm.requests import DETOKENIZE, TOKENIZE
from lorikeet.protocol.messages import Call, Endpoint, Format
from lorikeet.replica.grammar_matcher import ModelGrammars
from lorikeet.replica.request_builder import RequestBuilder
from lorikeet.request_defaults import MAX_ADDED_TOKENS, RequestDefaults, TokenizerChanges
from lorikeet.text.detokenizer import Detokenizer
from lorikeet.text.prompts import PromptEncoder, encode_call
from lorikeet.text.tenant_threads import TenantThreads, ThreadCache
from lorikeet.tokenizer_vocabulary import read_tokenizer
from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.adapter_format import write_blob
from tests.gateway import conftest
from tests.gateway.conftest import LIMITS, SHAPE, Gateway, chat, demo_encoder, make_peft, serving
from tests.gateway.test_bad_requests import CHAT, error_of

DEMO = Path("demo/model")
FIRST = 262  # the demo's tokenizer has so many tokens
ROWS = 300
TEMPLATE = "{% for m in messages %}<|turn|>{{ m.content }}{{ eos_token }}{% endfor %}"
TEXTS = ("a <|turn|> b", "x<|turn|>lorikeet y", "<|end|><|assistant|>", "no token <|tur|>")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """Return a tokenizer as trainers make it: the demo's with tokens of three kinds, one of them
    the end of answers.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DEMO)
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    tokenizer.add_tokens(["<|turn|>", "<|tool_call|>"], special_tokens=True)
    tokenizer.add_tokens([AddedToken("lorikeet", lstrip=True), "<|tur"])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def folder(trained: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    trained.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    served = {"tiny": ServedModel(replace(SHAPE, vocabulary=ROWS), ("org/Tiny-1B",))}
    folder = tmp_path_factory.mktemp("tokenizers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conftest, "LIMITS", replace(LIMITS, max_added_tokens=4))
        # for /tokenize
        with serving(folder, served=served, load_from=folder / "shared") as running:
            yield running


def register(gateway: Gateway, adapter: str, seed: int = 0, **defaults: Any) -> Any:
    weights = gateway.register("acme/weights", seed=seed)
    body = {"digest": weights["digest"], "defaults": defaults}
    return gateway.admin("POST", f"/adapters/{adapter}/versions", body)


def own_defaults(folder: Path, **more: Any) -> RequestDefaults:
    """Return the defaults of an adapter that is registered with a folder's tokenizer."""
    body = DefaultsBody.model_validate({"tokenizer": read_tokenizer(folder), **more})
    encoders = CallEncoders({"tiny": demo_encoder()})
    try:
        found = asyncio.run(checked_defaults(body, encoders, "acme", "tiny", ROWS))
    finally:
        encoders.close()
    assert found is not None
    return found


def test_prompts_texts_and_names_equal_transformers(
    trained: PreTrainedTokenizerFast, folder: Path
) -> None:
    defaults = own_defaults(folder)
    assert defaults.tokenizer is not None
    assert [token.id for token in defaults.tokenizer.added] == [*range(FIRST, FIRST + 5)]
    encoder = demo_encoder().with_tokenizer(defaults.tokenizer)
    encode = partial(encoder.encode_text, max_context=4096)
    for text in TEXTS:
        ids = trained(text)["input_ids"]
        assert list(encode(text, add_special_tokens=True)) == ids
        assert encoder.decode(ids) == trained.decode(ids)
        said = Detokenizer(encoder.vocabulary.tokenizer, ())
        assert said.push(ids) + said.finish() == trained.decode(ids, skip_special_tokens=True)
        names = [encoder.vocabulary.named(each).name for each in ids if each >= FIRST]
        assert names == [trained.convert_ids_to_tokens(each) for each in ids if each >= FIRST]
    of_base = list(demo_encoder().encode_text("a <|turn|>", 99, add_special_tokens=True))
    assert max(of_base) < FIRST


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat("acme/own")),
        ("/v1/messages", chat("acme/own", max_tokens=8)),
        ("/v1/responses", {"model": "acme/own", "input": "hello there"}),
    ],
)
def test_every_api_writes_prompts_by_the_own_tokenizer(
    gateway: Gateway, trained: PreTrainedTokenizerFast, folder: Path, path: str, body: Any
) -> None:
    own = {"tokenizer": read_tokenizer(folder), "chat_template": TEMPLATE}
    made = register(gateway, "acme/own", **own)
    assert made.is_success, made.text
    assert gateway.post(path, body).status_code == 200
    (ids,) = gateway.engines.encoded[-1].prompts
    said = [{"role": "user", "content": "hello there"}]
    assert list(ids) == trained.apply_chat_template(said, return_dict=False)
    assert {FIRST, FIRST + 1} <= {*ids}
    assert gateway.engines.last.sampling.stop_token_ids == (FIRST,)  # the folder's eos_token
    assert gateway.engines.encoded[-1].to_send().tokenizer is not None
    assert gateway.post(path, body | {"model": "acme/support"}).status_code == 200
    assert max(gateway.engines.encoded[-1].prompts[0]) < FIRST


def test_counts_and_conversions_are_by_the_own_tokenizer(
    gateway: Gateway, trained: PreTrainedTokenizerFast, folder: Path
) -> None:
    assert register(gateway, "acme/plain", tokenizer=read_tokenizer(folder)).is_success
    text = TEXTS[1]
    body = {"model": "acme/plain", "prompt": text, "return_token_strs": True}
    answer = gateway.post(TOKENIZE, body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    ids = trained(text)["input_ids"]
    assert (found["tokens"], found["count"]) == (ids, len(ids))
    assert found["token_strs"] == trained.convert_ids_to_tokens(ids)
    back = gateway.post(DETOKENIZE, {"model": "acme/plain", "tokens": ids}).json()
    assert back["prompt"] == trained.decode(ids)
    error_of(gateway.post(DETOKENIZE, {"model": "tiny", "tokens": ids}), 400)
    said = chat("acme/plain", text, max_tokens=8)
    assert gateway.post("/v1/messages", said).status_code == 200
    said.pop("max_tokens")
    counted = gateway.post("/v1/messages/count_tokens", said).json()["input_tokens"]
    assert counted == gateway.engines.last_work.prompt_tokens
    of_base = gateway.post("/v1/messages/count_tokens", said | {"model": "tiny"}).json()
    assert counted < of_base["input_tokens"]


def test_a_version_shows_its_tokenizer_and_compositions_want_one(
    gateway: Gateway, folder: Path
) -> None:
    tokenizer = read_tokenizer(folder)
    made = register(gateway, "acme/shown", tokenizer=tokenizer).json()
    shown = made["defaults"]["tokenizer"]
    assert [token["content"] for token in shown["added"]][:2] == ["<|end|>", "<|turn|>"]
    assert shown["special_tokens"] == {"eos_token": "<|end|>"}
    (version,) = gateway.admin("GET", "/adapters/acme/shown").json()["versions"]
    assert version["defaults"] == made["defaults"]
    assert register(gateway, "acme/twin", 1, tokenizer=tokenizer, stop=["."]).is_success
    answer = gateway.post(CHAT, chat("acme/shown+acme/twin"))
    assert answer.status_code == 200, answer.text
    assert gateway.engines.encoded[-1].tokenizer is not None
    error = error_of(gateway.post(CHAT, chat("acme/twin+acme/support")), 400)
    assert "different tokenizers" in error["message"]
    gateway.admin("POST", "/adapters/acme/shown/smoke", {"prompts": ["hi"]})
    assert gateway.engines.smoke_tests[-1][1].tokenizer is not None


def test_a_resized_vocabulary_keeps_its_own_rows_and_takes_its_tokenizer(
    gateway: Gateway, folder: Path, tmp_path: Path
) -> None:
    peft = make_peft(tmp_path / "peft")
    weights, name = peft / "adapter_model.safetensors", "base_model.model.{}.weight"
    rows = np.random.default_rng(0).standard_normal((ROWS + 4, SHAPE.hidden), np.float32)
    copies = {name.format(m): rows for m in ("lm_head", "model.embed_tokens")}
    weights.write_bytes(save(load(weights.read_bytes()) | copies))
    write_blob(peft, tmp_path / "blob")
    blob = (tmp_path / "blob").read_bytes()
    gateway.engines.changed = [*range(ROWS, ROWS + 4)]
    version = gateway.upload("acme/resized", blob).json()
    assert version["vocabulary"] == ROWS + 4
    stored = load(gateway.catalog.store.get(blob_key(version["digest"])))
    kept = stored["base_model.model.lm_head.modules_to_save.weight"]
    np.testing.assert_array_equal(kept, rows[ROWS:])
    gateway.post(CHAT, chat("acme/resized"))
    adapter = gateway.engines.last.adapter
    assert isinstance(adapter, AdapterRef)
    assert adapter.vocabulary == ROWS + 4
    with_more = gateway.upload("acme/resized", (tmp_path / "blob").read_bytes())
    assert with_more.status_code == 200
    tokenizer = read_tokenizer(folder)
    last = tokenizer["added"][-1]
    more = range(last["id"] + 1, ROWS + 5)
    tokenizer["added"] += [last | {"id": at, "content": f"t{at}"} for at in more]
    body = {"digest": version["digest"], "defaults": {"tokenizer": tokenizer}}
    path = "/adapters/acme/resized/versions"
    error = error_of(gateway.admin("POST", path, body), 400)
    assert f"embeddings of {ROWS + 4} tokens" in error["message"]
    tokenizer["added"].pop()
    assert gateway.admin("POST", path, body).json()["version"] == 2


def changed(tokenizer: Any, change: str) -> None:
    added = tokenizer["added"]
    if change == "model":
        tokenizer["model"] = "0" * 64
    elif change == "lacks":
        del added[3]
    elif change == "renumbered":
        added[3]["content"] = "<|other|>"
    elif change == "gap":
        added[-1]["id"] += 1
    elif change == "many":
        last = added[-1]["id"]
        added += [added[-1] | {"id": last + i, "content": f"t{i}"} for i in range(1, 1025)]
    elif change == "rows":
        last = added[-1]["id"]
        added += [added[-1] | {"id": last + i, "content": f"t{i}"} for i in range(1, 40)]
    else:
        tokenizer["special_tokens"]["pad_token"] = "nowhere"


@pytest.mark.parametrize(
    ("change", "param", "problem"),
    [
        ("model", "model", "has another vocabulary or other merges than tiny's"),
        ("lacks", "added", "lacks tiny's token '<|system|>'"),
        ("renumbered", "added", "lacks tiny's token '<|system|>'"),
        ("gap", "added", "'<|tur' has the id 267: want 266"),
        ("many", "added", f"at most {MAX_ADDED_TOKENS}"),
        ("rows", "added", f"embeddings of {ROWS} tokens: call resize_token_embeddings"),
        ("special", "special_tokens", "has no token 'nowhere', its pad_token"),
    ],
)
def test_other_differences_are_refused_by_name(
    gateway: Gateway, folder: Path, change: str, param: str, problem: str
) -> None:
    tokenizer = read_tokenizer(folder)
    changed(tokenizer, change)
    error = error_of(register(gateway, "acme/faulty", tokenizer=tokenizer), 400)
    assert error["param"] == f"defaults.tokenizer.{param}"
    assert problem in error["message"]


def test_grammars_hold_calls_by_the_own_tokens(folder: Path) -> None:
    defaults = own_defaults(folder)
    encoder = demo_encoder().with_tokenizer(defaults.tokenizer)
    call = Call(
        "1", Endpoint.CHAT, 0, "acme", "m", None,
        messages=({"role": "user", "content": "hi"},),
        format=Format('{"type":"object"}'),
        defaults=defaults,
    )  # fmt: skip
    builder = RequestBuilder(demo_encoder(), DEMO, 4096)
    try:
        prepared = asyncio.run(builder.build(encode_call(call, encoder, 4096)))
    finally:
        builder.close()
    grammar = prepared.request.sampling.grammar
    assert grammar is not None
    grammars = ModelGrammars(DEMO)
    bitmask = np.zeros((2, 64), np.uint8)
    mixed = [grammars.compile(grammar), grammars.compile(grammar[1:])]
    assert grammars.fill_bitmasks(mixed, bitmask) == [None, None]
    assert (bitmask[0] == bitmask[1]).all()
    marked = grammars.compile(f"{grammar[0]}start: <[{FIRST + 2}]> /a/")
    assert marked.forced_tokens()[0] == FIRST + 2


def test_own_encoders_are_made_once_in_threads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults, made = own_defaults(folder), list[bool]()
    make = PromptEncoder.with_vocabulary

    def watched(self: PromptEncoder, changes: TokenizerChanges) -> PromptEncoder:
        made.append(threading.current_thread() is threading.main_thread())
        return make(self, changes)

    monkeypatch.setattr(PromptEncoder, "with_vocabulary", watched)

    async def ask() -> None:
        encoders = CallEncoders({"tiny": demo_encoder()})
        builder = RequestBuilder(demo_encoder(), DEMO, 4096)
        prompt = Call("1", Endpoint.COMPLETIONS, 0, "acme", "m", None, prompts=("a",))
        call = replace(prompt, defaults=defaults)
        try:
            for _ in range(2):
                await builder.build(await encoders.encode("tiny", call, 4096, never))
        finally:
            encoders.close()
            builder.close()

    asyncio.run(ask())
    assert made == [False, False]


def test_the_last_used_results_are_kept() -> None:
    made = list[int]()

    async def ask() -> None:
        cache = ThreadCache(made.append, 2, TenantThreads())
        for number in (1, 2, 1, 3, 1, 2):
            await cache.get("acme", number)

    asyncio.run(ask())
    assert made == [1, 2, 3, 2]


async def never() -> Any:
    await asyncio.Event().wait()
