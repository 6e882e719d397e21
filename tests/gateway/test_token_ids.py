"""vLLM's field return_token_ids: answers have the token ids of prompt and output."""

import json
from typing import Any

import pytest

from tests.gateway.conftest import Gateway, Script, chat
from tests.gateway.scripted_replica import ScriptedReplica
from tests.gateway.test_bad_requests import CHAT, COMPLETIONS, error_of

TEXT = "é fine 😀<|eos|>"


@pytest.fixture
def gateway(shared: Gateway) -> Gateway:
    return shared


@pytest.fixture
def replica(script: Script) -> ScriptedReplica:
    """Replica of the gateway whose model writes TEXT and an end of sequence."""
    return script(TEXT)


def ids_of(replica: ScriptedReplica, text: str) -> list[int]:
    return list(replica.encoder.backend.encode(text, add_special_tokens=False).ids)


def events(gateway: Gateway, path: str, body: dict[str, Any]) -> list[Any]:
    lines = gateway.post(path, body | {"stream": True}).raise_for_status().text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_a_chat_has_its_prompts_tokens_once_and_each_choices(
    gateway: Gateway, replica: ScriptedReplica
) -> None:
    answer = gateway.post(CHAT, chat("tiny", "hi", n=2, return_token_ids=True)).json()
    assert answer["prompt_token_ids"] == ids_of(replica, "<|bos|><|user|>hi<|eos|><|assistant|>")
    assert [choice["token_ids"] for choice in answer["choices"]] == [ids_of(replica, TEXT)] * 2
    assert answer["choices"][0]["message"]["content"] == TEXT.removesuffix("<|eos|>")


def test_each_choice_of_a_completion_has_its_prompts_tokens(
    gateway: Gateway, replica: ScriptedReplica
) -> None:
    prompts = [ids_of(replica, "one"), ids_of(replica, "another")]
    asked = {"model": "tiny", "prompt": prompts, "n": 2, "return_token_ids": True}
    choices = gateway.post(COMPLETIONS, asked).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [
        prompt for prompt in prompts for _ in range(2)
    ]
    assert all(choice["token_ids"] == ids_of(replica, TEXT) for choice in choices)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_has_the_prompts_tokens_first_and_then_all_others(
    gateway: Gateway, replica: ScriptedReplica, path: str
) -> None:
    asked = chat("tiny", "hi") if path == CHAT else {"model": "tiny", "prompt": "hi"}
    whole = gateway.post(path, asked | {"return_token_ids": True}).json()
    streamed = events(gateway, path, asked | {"return_token_ids": True})
    choices = [event["choices"][0] for event in streamed]
    at = whole if path == CHAT else whole["choices"][0]
    told = [e if path == CHAT else c for e, c in zip(streamed, choices, strict=True)]
    assert told[0]["prompt_token_ids"] == at["prompt_token_ids"]
    assert not any("prompt_token_ids" in each for each in told[1:])
    assert [i for c in choices for i in c.get("token_ids", ())] == ids_of(replica, TEXT)


@pytest.mark.parametrize("stream", [False, True])
def test_every_token_has_a_logprob(
    gateway: Gateway, replica: ScriptedReplica, stream: bool
) -> None:
    asked = chat("tiny", "hi", logprobs=True, return_token_ids=True, stop="😀")
    if stream:
        choices = [event["choices"][0] for event in events(gateway, CHAT, asked)]
    else:
        choices = gateway.post(CHAT, asked).json()["choices"]
    for choice in choices:
        known = choice["logprobs"]["content"] if choice["logprobs"] else ()
        assert len(known) == len(choice.get("token_ids", ()))
    told = [i for choice in choices for i in choice.get("token_ids", ())]
    assert told == ids_of(replica, TEXT)[:-1], "with the stop string, and nothing behind it"


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_name_tokens_by_their_ids_on_request(
    gateway: Gateway, replica: ScriptedReplica, stream: bool
) -> None:
    """vLLM's return_tokens_as_token_ids: TRL and others read ids from the names."""
    named = [f"token_id:{i}" for i in ids_of(replica, TEXT)]
    asked = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    for path, body in (
        (CHAT, chat("tiny", "hi", logprobs=True)),
        (COMPLETIONS, {"model": "tiny", "prompt": "hi", "logprobs": 0}),
    ):
        if stream:
            choices = [event["choices"][0] for event in events(gateway, path, body | asked)]
        else:
            choices = gateway.post(path, body | asked).raise_for_status().json()["choices"]
        known = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        if path == CHAT:
            entries = [entry for part in known for entry in part["content"]]
            assert [entry["token"] for entry in entries] == named
            assert entries[0]["bytes"] == list("é".encode())[: len(entries[0]["bytes"])]
        else:
            assert [token for part in known for token in part["tokens"]] == named
            shown = [top for part in known for top in part["top_logprobs"]]
            assert shown == [{token: 0.0} for token in named]
        without = gateway.post(path, body | {"return_tokens_as_token_ids": False})
        assert "token_id:" not in without.raise_for_status().text


def test_an_echoed_prompt_names_tokens_by_their_ids_on_request(
    gateway: Gateway, replica: ScriptedReplica
) -> None:
    prompt = ids_of(replica, "one")
    asked = {"model": "tiny", "prompt": prompt, "echo": True, "logprobs": 1}
    answer = gateway.post(COMPLETIONS, asked | {"return_tokens_as_token_ids": True}).json()
    known = answer["choices"][0]["logprobs"]
    assert known["tokens"][: len(prompt)] == [f"token_id:{i}" for i in prompt]
    assert all(key.startswith("token_id:") for top in known["top_logprobs"][1:] for key in top)


def test_the_requests_of_trls_client_are_answered(
    gateway: Gateway, replica: ScriptedReplica
) -> None:
    """TRL 1.16's VLLMClient: the requests that it sends, the fields that it reads."""
    prompt = ids_of(replica, "one and one")
    asked = {
        "model": "acme/support",
        "prompt": [prompt],
        "n": 2,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "max_tokens": 16,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    for choice in gateway.post(COMPLETIONS, asked).raise_for_status().json()["choices"]:
        names, made = choice["logprobs"]["tokens"], choice["token_ids"]
        assert [int(name.removeprefix("token_id:")) for name in names] == made
    scored = {"prompt": [prompt], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 100}
    answer = gateway.post(COMPLETIONS, {"model": "acme/support", **scored}).json()
    first, *rest = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    for token, entry in zip(prompt[1:], rest, strict=True):
        ranked = sorted(entry.items(), key=lambda item: item[1]["rank"])
        assert str(token) in dict(ranked)


def test_answers_have_no_token_ids_by_default(gateway: Gateway, replica: ScriptedReplica) -> None:
    for path, asked in ((CHAT, chat("tiny", "hi")), (COMPLETIONS, {"prompt": "hi"})):
        body = {"model": "tiny", **asked, "return_token_ids": False}
        assert "token_ids" not in gateway.post(path, body).text
        assert "token_ids" not in json.dumps(events(gateway, path, body))


def test_too_many_repeated_prompt_tokens_are_refused(gateway: Gateway, script: Script) -> None:
    script(TEXT, max_context=100_000)
    body = {"model": "tiny", "prompt": [1] * 70_000, "n": 16, "return_token_ids": True}
    assert error_of(gateway.post(COMPLETIONS, body), 400)["param"] == "return_token_ids"
    assert gateway.post(COMPLETIONS, body | {"n": 1}).is_success


def test_requests_of_skyrls_tinker_server_are_answered(
    gateway: Gateway, replica: ScriptedReplica
) -> None:
    """SkyRL's ExternalInferenceClient: the request it sends for a sample, the fields it reads."""
    prompt = ids_of(replica, "one and one")
    body = {
        "model": "acme/support",
        "prompt": prompt,
        "n": 2,
        "seed": None,
        "max_tokens": 16,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "logprobs": True,
        "stream": False,
        "return_token_ids": True,
        "prompt_logprobs": 0,
    }
    answer = gateway.post(COMPLETIONS, body, more_headers={"X-Session-ID": "session-1"})
    for choice in answer.raise_for_status().json()["choices"]:
        assert choice["token_ids"] == ids_of(replica, TEXT)
        assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
        assert len(choice["prompt_logprobs"]) == len(prompt)
        assert choice["finish_reason"] == "stop"
