"""vLLM's /inference/v1/generate as SkyRL 0.3's RemoteInferenceClient asks and reads it."""

from pathlib import Path
from typing import Any

import pytest

from lorikeet.gateway.vllm.requests import GENERATE
from tests.gateway.conftest import Gateway
from tests.gateway.scripted_replica import ScriptedReplica
from tests.gateway.test_bad_requests import error_of

TEXT, PROMPT = "é fine 😀<|eos|>", [5, 9, 17, 30]
ROLLOUT = {
    "min_tokens": 1,
    "skip_special_tokens": True,
    "include_stop_str_in_output": True,
    "max_tokens": 20,
    "temperature": 0.8,
    "top_p": 0.9,
    "top_k": -1,
    "min_p": 0.0,
    "logprobs": 1,
    "stop": ["😀"],
}
"""What SkyRL's get_vllm_sampling_params returns."""


@pytest.fixture
def replica(unchanged: Gateway, tmp_path: Path) -> ScriptedReplica:
    scripted = ScriptedReplica(tmp_path)
    unchanged.engines.replay = scripted.writes(TEXT)
    return scripted


def ask(gateway: Gateway, sampling: dict[str, Any], **more: Any) -> Any:
    body = {"model": "support", "token_ids": PROMPT, "sampling_params": sampling, **more}
    return gateway.post(GENERATE, body)


def test_a_rollout_of_skyrl_is_answered(unchanged: Gateway, replica: ScriptedReplica) -> None:
    answer = ask(unchanged, ROLLOUT, cache_salt="step-3").raise_for_status().json()
    (choice,) = answer["choices"]
    made = replica.encoder.backend.encode(TEXT, add_special_tokens=False).ids[:-1]
    assert choice["token_ids"] == made, "with the stop string"
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [0.0] * len(made)
    assert choice["finish_reason"] == "stop"
    call = unchanged.engines.last
    assert unchanged.engines.encoded[-1].prompts[0].tolist() == PROMPT
    assert (call.adapter and call.adapter.name, call.max_tokens, call.stop) == (
        "support",
        20,
        ("😀",),
    )
    assert (call.sampling.temperature, call.sampling.top_p, call.min_tokens) == (0.8, 0.9, 1)


def test_samples_of_skyrls_tinker_server_have_their_prompts_log_probabilities(
    unchanged: Gateway, replica: ScriptedReplica
) -> None:
    sampling = {"n": 2, "logprobs": 0, "output_kind": 2, "prompt_logprobs": 1, "max_tokens": 4}
    answer = ask(unchanged, sampling).raise_for_status().json()
    assert len(answer["choices"]) == 2
    assert answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    first, *others = answer["prompt_logprobs"]
    assert first is None
    known = [entry[f"{token}"]["logprob"] for entry, token in zip(others, PROMPT[1:], strict=True)]
    assert known == [-1.0, -2.0, -3.0]


def test_images_are_refused_with_a_remedy(unchanged: Gateway) -> None:
    answer = ask(unchanged, {}, features={"mm_hashes": {}})
    assert "prompts are token ids" in error_of(answer, 400)["message"]
