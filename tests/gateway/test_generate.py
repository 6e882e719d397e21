"""Chats and completions through OpenAI's own client."""

import asyncio
import json
import re
from pathlib import Path

import httpx
import openai
import pytest

from lorikeet.protocol.messages import Work
from tests.gateway.conftest import Gateway, chat, demo_encoder

README = Path(__file__).parents[2] / "README.md"


def test_a_chat_answer_is_one_json_body(gateway: Gateway) -> None:
    answer = gateway.openai().chat.completions.create(**chat())
    assert answer.choices[0].message.content == "hello there"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "acme/support"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 4


def test_the_readme_shows_an_answers_fields_in_their_order(gateway: Gateway) -> None:
    shown, *_ = re.findall(r'^    (\{"id":"chatcmpl.+?)\n\n', README.read_text(), re.M | re.S)
    names = re.findall(r'"(\w+)":', shown)  # some are left out
    answer = iter(re.findall(r'"(\w+)":', gateway.post("/v1/chat/completions", chat()).text))
    assert "adapter" in names
    assert [name for name in names if name not in answer] == []  # `in` takes what it has passed


def test_a_chat_stream_brings_its_text_in_pieces(gateway: Gateway) -> None:
    stream = gateway.openai().chat.completions.create(**chat(stream=True))
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == "hello there "
    assert len(pieces) > 2


def test_usage_is_streamed_on_request(gateway: Gateway) -> None:
    body = chat(stream=True, stream_options={"include_usage": True})
    *_, last = gateway.openai().chat.completions.create(**body)
    assert last.choices == []
    assert last.usage.completion_tokens == 2


def test_the_async_client_streams_many_at_once(gateway: Gateway) -> None:
    async def read(client: openai.AsyncOpenAI, content: str) -> str:
        stream = await client.chat.completions.create(**chat(content=content, stream=True))
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def read_all() -> list[str]:
        key = gateway.keys["acme"]
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key) as client:
            return await asyncio.gather(*(read(client, f"request {i}") for i in range(16)))

    assert asyncio.run(read_all()) == [f"request {i} " for i in range(16)]


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(gateway: Gateway) -> None:
    answer = gateway.openai().completions.create(model="acme/support", prompt=["a", "b"], n=2)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]


def test_a_prompt_may_be_token_ids(gateway: Gateway) -> None:
    client = gateway.openai()
    client.completions.create(model="tiny", prompt=[5, 6])
    assert gateway.engines.last.prompts == ((5, 6),)
    client.completions.create(model="tiny", prompt=[[5], [6, 7]])
    assert gateway.engines.last.prompts == ((5,), (6, 7))


def test_completions_stream(gateway: Gateway) -> None:
    stream = gateway.openai().completions.create(model="tiny", prompt="one two", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "one two "


def test_every_field_reaches_the_replica(gateway: Gateway) -> None:
    gateway.openai().chat.completions.create(
        **chat(n=2, max_completion_tokens=9, temperature=0, top_p=0.5, seed=-3, stop=["a", "b"]),
        user="u",
        metadata={"team": "x"},
        extra_body={
            "top_k": 4,
            "min_p": 0.1,
            "repetition_penalty": 1.3,
            "min_tokens": 3,
            "ignore_eos": True,
            "stop_token_ids": [7, 9],
        },
    )
    base_model, call = gateway.engines.calls[-1]
    assert base_model == "tiny"
    assert (call.tenant, call.model, call.n) == ("acme", "acme/support", 2)
    assert (call.max_tokens, call.min_tokens, call.stop) == (9, 3, ("a", "b"))
    sampling = call.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 0.5, 4)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.3)
    assert (sampling.seed, sampling.ignore_eos) == (-3, True)
    assert sampling.stop_token_ids == (7, 9)


def test_a_call_has_its_exact_work(gateway: Gateway) -> None:
    record = gateway.catalog.reader.refresh().adapter("acme", "support").versions[0]

    def work(path: str, **body: object) -> Work:
        gateway.post(f"/v1/{path}", body)
        return gateway.engines.last_work

    def tokens(text: str, *, whole: bool = False) -> int:
        return len(demo_encoder().backend.encode(text, add_special_tokens=not whole))

    long = "and so on, " * 200 + "or not"
    texts = work("completions", model="tiny", prompt=["x" * 400, long], n=3)
    assert texts == Work(tokens("x" * 400) + tokens(long), sequences=6)
    ids = work("completions", model="acme/support", prompt=[[1, 2, 3], [4, 5]])
    assert ids == Work(5, record.max_rank, record.gpu_bytes, 2)
    assert ids.rank > 0 < ids.adapter_bytes
    prompt = tokens(f"<|bos|><|user|>{long}<|eos|><|assistant|>", whole=True)
    assert work("chat/completions", **chat(content=long)).prompt_tokens == prompt


def test_text_parts_of_a_message_are_joined(gateway: Gateway) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    gateway.openai().chat.completions.create(**chat(content=parts))  # type: ignore[arg-type]
    assert gateway.engines.last.messages == ({"role": "user", "content": "one two"},)


def test_by_default_a_chat_may_fill_the_context_and_a_completion_has_16_tokens(
    gateway: Gateway,
) -> None:
    gateway.openai().chat.completions.create(**chat())
    assert gateway.engines.last.max_tokens is None
    gateway.openai().completions.create(model="tiny", prompt="a")
    assert gateway.engines.last.max_tokens == 16


def test_no_op_defaults_mean_absent(gateway: Gateway) -> None:
    body = chat(
        presence_penalty=0,
        frequency_penalty=0.0,
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=True,
        functions=[],
        response_format={"type": "text"},
        modalities=["text"],
        logit_bias={},
        logprobs=False,
        top_logprobs=0,
        store=False,
        service_tier="auto",
        prompt=None,
    )
    body["messages"][0] |= {"tool_calls": [], "annotations": [], "refusal": None}
    body |= {"stream": True, "stream_options": {"include_obfuscation": False}}
    assert gateway.post("/v1/chat/completions", body).status_code == 200
    gateway.openai().completions.create(
        model="tiny",
        prompt="a",
        presence_penalty=0,
        frequency_penalty=0,
        logit_bias={},
        best_of=1,
        echo=False,
        suffix=None,
        logprobs=None,
    )
    assert gateway.engines.last.prompts == ("a",)


def test_a_developer_message_is_a_system_message(gateway: Gateway) -> None:
    body = chat()
    body["messages"].insert(0, {"role": "developer", "content": "be brief"})
    assert gateway.post("/v1/chat/completions", body).status_code == 200
    assert gateway.engines.last.messages[0] == {"role": "system", "content": "be brief"}


def test_null_means_absent(gateway: Gateway) -> None:
    answer = gateway.post("/v1/chat/completions", chat(temperature=None, tools=None, stop=None))
    assert answer.status_code == 200
    assert gateway.engines.last.sampling.temperature == 1.0


def test_headers_say_which_weights_answered_and_where(gateway: Gateway) -> None:
    for stream in (False, True):
        answer = gateway.post("/v1/chat/completions", chat(stream=stream))
        call = gateway.engines.last
        assert call.adapter is not None
        assert answer.headers["x-request-id"] == call.request_id
        assert answer.headers["x-lorikeet-replica"] == "replica-7"
        assert answer.headers["x-lorikeet-adapter-digest"] == call.adapter.digest
        assert answer.headers["x-lorikeet-residency"] == "host"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_names_its_adapters_version_and_digest(gateway: Gateway, stream: bool) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    for path, asked in (
        ("/v1/chat/completions", chat("acme/support")),
        ("/v1/completions", {"model": "acme/support", "prompt": "hi"}),
    ):
        text = gateway.post(path, asked | options).raise_for_status().text
        answer = json.loads(text.split("data: ")[-2] if stream else text)
        ref = gateway.engines.last.adapter
        assert ref is not None
        known = {"name": "acme/support", "version": 1, "digest": ref.digest}
        assert answer["adapter"] == known
        assert answer["usage"]["completion_tokens"]
        base = gateway.post(path, asked | options | {"model": "tiny"}).text
        assert '"adapter"' not in base


def test_a_base_model_answers_without_an_adapter(gateway: Gateway) -> None:
    answer = gateway.post("/v1/chat/completions", chat("wider"))
    base_model, call = gateway.engines.calls[-1]
    assert (base_model, call.adapter) == ("wider", None)
    assert answer.headers["x-lorikeet-replica"] == "replica-7"
    assert "x-lorikeet-adapter-digest" not in answer.headers
    assert "x-lorikeet-residency" not in answer.headers


def test_versions_and_aliases_name_different_weights(gateway: Gateway) -> None:
    gateway.register("acme/support", seed=1)
    gateway.admin("POST", "/adapters/acme/support/promote", {"version": 2, "alias": "next"})
    versions = {}
    for model in ("acme/support", "acme/support@1", "acme/support@2", "acme/support@next"):
        assert gateway.post("/v1/chat/completions", chat(model)).status_code == 200
        adapter = gateway.engines.last.adapter
        assert adapter is not None
        versions[model.partition("@")[2]] = adapter.version
    assert versions == {"": 1, "1": 1, "2": 2, "next": 2}


def test_a_name_without_a_tenant_is_the_tenants_own_adapters(gateway: Gateway) -> None:
    gateway.register("acme/support", seed=1, shared=True)
    gateway.register("acme/tiny", seed=2)
    for model, named in (
        ("support", "acme/support"),
        ("support@2", "acme/support"),
        ("tiny", None),  # the base model
        ("acme/tiny", "acme/tiny"),
    ):
        answer = gateway.post("/v1/chat/completions", chat(model)).raise_for_status().json()
        assert answer["model"] == model
        ref = gateway.engines.last.adapter
        assert (ref and f"{ref.tenant}/{ref.name}") == named
    shown = gateway.request("GET", "/v1/models/support", gateway.keys["acme"]).json()
    assert (shown["id"], shown["owned_by"]) == ("support", "acme")
    of_others = gateway.post("/v1/chat/completions", chat("support"), tenant="globex")
    assert of_others.status_code == 404  # though it is shared
    assert "'support'" in of_others.json()["error"]["message"]


def test_models_are_listed_with_their_context_length_the_tenants_own_first(
    gateway: Gateway,
) -> None:
    gateway.register("acme/support", seed=1, shared=True)
    gateway.register("globex/own", seed=2)
    listed = gateway.request("GET", "/v1/models", gateway.keys["globex"]).json()["data"]
    lengths = [(model["id"], model["max_model_len"]) for model in listed]
    assert lengths[:2] == [("globex/own", 4096), ("acme/support", 4096)]
    assert lengths[2:] == [("tiny", 4096), ("wider", None)]
    gateway.admin("PATCH", "/tenants/acme", {"max_context": 1000})
    for model in ("acme/support", "tiny", "wider"):
        shown = gateway.request("GET", f"/v1/models/{model}", gateway.keys["acme"]).json()
        assert shown["max_model_len"] == 1000


def test_a_key_may_come_as_the_password_in_the_services_url(gateway: Gateway) -> None:
    """TRL's VLLMClient has a setting for the URL and none for a key."""

    def status(path: str, key: str) -> int:
        host = gateway.url.removeprefix("http://")
        return httpx.get(f"http://any:{key}@{host}{path}").status_code

    assert status("/v1/models", gateway.keys["acme"]) == 200
    assert status("/v1/models", "lk_made-up") == 401
    assert status("/v1/models", "") == 401
    assert status("/admin/v1/tenants", gateway.admin_key) == 401
    for coded in ("x", "/w=="):
        headers = {"authorization": f"Basic {coded}"}
        assert httpx.get(f"{gateway.url}/v1/models", headers=headers).status_code == 401


def test_request_ids_are_the_servers_own(gateway: Gateway) -> None:
    key = {"authorization": f"Bearer {gateway.keys['acme']}", "x-request-id": "mine"}
    answer = httpx.get(f"{gateway.url}/v1/models", headers=key)
    assert answer.headers["x-request-id"] != "mine"
    assert len(answer.headers["x-request-id"]) == 32
