"""Tinker's own client samples from the service what /v1/completions answers."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from demo.tasks import TASKS
from tests.e2e.conftest import Service

tinker = pytest.importorskip("tinker")
TASK = TASKS[0]
SEED, TOP = 7, 3


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[Any]:
    key = "tml-" + service.tenant_keys[TASK.tenant]
    with tinker.ServiceClient(base_url=service.url, api_key=key) as made:
        yield made


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(Path("demo/model"))
    return list(tokenizer("Tell me about a river.")["input_ids"])


def test_samples_equal_those_of_a_completion(
    service: Service, client: Any, prompt: list[int]
) -> None:
    fields: dict[str, Any] = {"max_tokens": 12, "temperature": 0.9, "top_p": 0.95, "seed": SEED}
    answer = service.client(TASK.tenant).completions.with_raw_response.create(
        model=TASK.model,
        prompt=prompt,
        n=2,
        logprobs=TOP,
        **fields,
        extra_body={
            "top_k": 20,
            "prompt_logprobs": TOP,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        },
    )
    expected = json.loads(answer.text)["choices"]
    sampler = client.create_sampling_client(model_path=f"tinker://{TASK.model}").result()
    params = tinker.SamplingParams(top_k=20, **fields)
    told = sampler.sample(tinker.ModelInput.from_ints(prompt), 2, params, True, TOP, TOP).result()
    for sequence, choice in zip(told.sequences, expected, strict=True):
        assert sequence.tokens == choice["token_ids"]
        known = choice["logprobs"]
        assert sequence.logprobs == pytest.approx(known["token_logprobs"], abs=1e-4)
        for top, named in zip(sequence.topk_logprobs, known["top_logprobs"], strict=True):
            assert [f"token_id:{token}" for token, _ in top] == list(named)[:TOP]
            assert [likely for _, likely in top] == pytest.approx(
                list(named.values())[:TOP], abs=1e-4
            )
    scored = expected[0]["prompt_logprobs"]
    assert told.prompt_logprobs[0] is None
    for at, token in enumerate(prompt[1:], start=1):
        entry = scored[at]
        assert told.prompt_logprobs[at] == pytest.approx(entry[f"{token}"]["logprob"], abs=1e-4)
        ranked = {each["rank"]: int(name) for name, each in entry.items()}
        top = [token for token, _ in told.topk_prompt_logprobs[at]]
        assert top == [ranked[rank] for rank in range(1, TOP + 1)]
    assert sampler.compute_logprobs(tinker.ModelInput.from_ints(prompt)).result() == pytest.approx(
        told.prompt_logprobs, abs=1e-4
    )


def test_many_samples_at_once_are_each_their_own(client: Any, prompt: list[int]) -> None:
    sampler = client.create_sampling_client(base_model="lorikeet-demo").result()

    def sampled(seed: int) -> Any:
        params = tinker.SamplingParams(max_tokens=8, seed=seed)
        return sampler.sample(tinker.ModelInput.from_ints(prompt), 1, params)

    once, again = ([sampled(seed) for seed in range(16)] for _ in range(2))
    first, second = ([each.result().sequences[0].tokens for each in some] for some in (once, again))
    assert first == second
    assert len(set(map(tuple, first))) > 8


@pytest.mark.soak
def test_the_cookbooks_policy_samples_a_group(
    service: Service, client: Any, prompt: list[int]
) -> None:
    """tinker-cookbook 0.6.1's completer of tokens, which its recipes of RL sample with.

    No dependency of the project, as it brings many packages.
    """
    completers = pytest.importorskip("tinker_cookbook.completers")
    sampler = client.create_sampling_client(model_path=f"tinker://{TASK.model}").result()
    policy = completers.TinkerTokenCompleter(sampler, max_tokens=8, temperature=0.0)

    async def group() -> list[Any]:
        given = tinker.ModelInput.from_ints(prompt)
        return await asyncio.gather(*(policy(given, stop=[1]) for _ in range(64)))

    answer = service.client(TASK.tenant).completions.create(
        model=TASK.model,
        prompt=prompt,
        max_tokens=8,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    expected = answer.to_dict()["choices"][0]["token_ids"]
    assert [sample.tokens for sample in asyncio.run(group())] == [expected] * 64
