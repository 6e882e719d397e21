"""Reports of smoke tests of adapters."""

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from lorikeet.gateway.admin.smoke import MAX_TOKENS, PROMPTS, smoke_report
from lorikeet.protocol.messages import Refusal, SmokeTest
from tests.gateway.conftest import Gateway, demo_encoder, make_blob, serving, smoke_result
from tests.gateway.test_bad_requests import error_of

BASE = list(range(32))


def said(*pairs: tuple[Sequence[int], Sequence[int]]) -> dict[str, Any]:
    prompts = [f"prompt {i}" for i in range(len(pairs))]
    return smoke_report(prompts, smoke_result([b for b, _ in pairs], [a for _, a in pairs]))


def test_answers_are_compared_position_by_position() -> None:
    seen = said((BASE, [0, 1, 99, *BASE[3:]]), (BASE, BASE))
    assert (seen["tokens"], seen["equal_share"], seen["first_difference"]) == (64, 63 / 64, 2)
    assert [p["first_difference"] for p in seen["prompts"]] == [2, None]
    assert seen["prompts"][0]["adapter"].startswith("0 1 99 3")
    assert seen["warnings"] == []


def test_an_answer_that_ends_earlier_differs_from_there_on() -> None:
    seen = said((BASE, BASE[:8]))
    assert (seen["equal_share"], seen["first_difference"]) == (8 / 32, 8)


@pytest.mark.parametrize(
    ("pairs", "says"),
    [
        ([(BASE, BASE)], "changed none of 32 tokens"),
        ([([], [])], "changed none of 0 tokens"),
        ([(BASE, []), (BASE, BASE)], "empty answer to 1 of 2 prompts"),
        ([(BASE, [5] * 32)], "repeats itself in 1 of 1"),
        ([(BASE, BASE[:16] + [5, 6] * 8)], "repeats itself in 1 of 1"),
    ],
)
def test_suspicious_answers_cause_a_warning(pairs: list[Any], says: str) -> None:
    (warning,) = said(*pairs)["warnings"]
    assert says in warning


@pytest.mark.parametrize("adapted", [[5] * 15, [5, 6, 7] * 10, BASE[::-1]])
def test_short_or_varied_answers_are_no_loops(adapted: list[int]) -> None:
    assert said((BASE, adapted))["warnings"] == []


def test_a_base_model_that_repeats_itself_is_not_the_adapters_fault() -> None:
    assert said(([7] * 32, [5] * 32))["warnings"] == []


def smoke(gateway: Gateway, adapter: str = "acme/support", **body: Any) -> httpx.Response:
    return gateway.admin("POST", f"/adapters/{adapter}/smoke", body)


def test_a_registered_adapter_is_tried_by_alias_or_version(gateway: Gateway) -> None:
    gateway.register("acme/support", seed=1)
    for selector, version in (("prod", 1), ("2", 2)):
        seen = smoke(gateway, selector=selector).raise_for_status().json()
        assert (seen["adapter"], seen["version"]) == ("acme/support", version)
        base_model, test = gateway.engines.smoke_tests[-1]
        assert (base_model, test.adapter.version) == ("tiny", version)
        shown = [demo_encoder().backend.decode(list(prompt)) for prompt in test.prompts]
        assert (shown, test.max_tokens) == (list(PROMPTS), MAX_TOKENS)
        assert seen["replica"] == "replica-7"


def test_the_admins_own_prompts_are_used(gateway: Gateway) -> None:
    seen = smoke(gateway, prompts=["a", "b"], max_tokens=3).raise_for_status().json()
    assert [p["prompt"] for p in seen["prompts"]] == ["a", "b"]
    assert seen["tokens"] == 6


def test_an_invalid_smoke_test_says_why(gateway: Gateway) -> None:
    error_of(smoke(gateway, "acme/nothing"), 404)
    assert "acme/support@9" in error_of(smoke(gateway, selector="9"), 404)["message"]
    for body in ({"prompts": []}, {"prompts": [""]}, {"max_tokens": 0}, {"max_tokens": 10**6}):
        error_of(smoke(gateway, **body), 400)
    assert gateway.engines.smoke_tests == []


def test_a_replicas_refusal_is_passed_on(gateway: Gateway) -> None:
    gateway.engines.try_out = lambda _: Refusal("invalid_adapter", "its logits overflow")
    assert error_of(smoke(gateway), 422)["message"] == "its logits overflow"


def test_without_a_replica_the_base_model_is_named(tmp_path: Path) -> None:
    with serving(tmp_path, first_item_timeout_s=0.1) as gateway:

        async def never(base_model: str, test: SmokeTest) -> Any:
            await asyncio.sleep(60)

        gateway.engines.smoke = never  # type: ignore[method-assign, assignment]
        message = error_of(smoke(gateway), 503)["message"]
        assert "no replica of tiny tried acme/support@1 within 0.1 s" in message


def test_a_smoke_that_fails_registers_nothing(gateway: Gateway, tmp_path: Path) -> None:
    blob = make_blob(tmp_path / "peft", seed=9)
    body = {"digest": hashlib.sha256(blob).hexdigest(), "size_bytes": len(blob)}
    gateway.admin("POST", "/uploads", body).raise_for_status()
    path = f"/admin/v1/uploads/{body['digest']}/parts/1"
    gateway.request("PUT", path, gateway.admin_key, content=blob).raise_for_status()
    wanted = {"digest": body["digest"], "smoke": True}

    gateway.engines.try_out = lambda _: Refusal("invalid_adapter", "its logits overflow")
    before = gateway.catalog.reader.refresh().seq
    error_of(gateway.admin("POST", "/adapters/acme/new/versions", wanted), 422)
    assert gateway.catalog.reader.refresh().seq == before

    gateway.engines.try_out = type(gateway.engines)().try_out
    version = gateway.admin("POST", "/adapters/acme/new/versions", wanted).json()
    assert (version["version"], version["smoke"]["equal_share"]) == (1, 0.0)
    assert [str(test.adapter) for _, test in gateway.engines.smoke_tests] == ["acme/new@1"] * 2
