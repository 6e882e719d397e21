"""Table of error codes, the HTTP answers made from it, and Retry-After."""

import pickle
import re
from pathlib import Path

import pytest

from lorikeet import errors
from lorikeet.apis.errors import (
    ClientApi,
    anthropic_error_body,
    api_of_path,
    error_status,
    openai_error_body,
)
from lorikeet.errors import ERRORS, ErrorKind, LorikeetError, engine_code, status_of
from lorikeet.gateway.routes.openapi import document
from lorikeet.retry_after import (
    until_next_month,
    until_one_ends,
    until_queue_is_short,
    whole_seconds,
)
from lorikeet_engine import errors as engine

DOCUMENT = Path(__file__).parents[1] / "docs" / "openai.md"
OF_NO_CLASS = {
    "method_not_allowed",
    "adapter_not_ready",
    "adapter_load_failed",
    "adapter_overflows",
    "upgrade_required",
}
NO_ROUTES = {"405", "409", "410", "426"}  # No HTTP route for tenants answers with these statuses.
ROW = re.compile(r"\| (\d{3}) \| `(\w+)` \| `(\w+)` \| ([^|]+) \|")
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type)]
OURS = [kind for kind in KINDS if issubclass(kind, LorikeetError)]
ENGINES = [kind for kind in vars(engine).values() if isinstance(kind, type)]


def test_every_error_class_has_a_row_and_every_row_a_class():
    assert {kind.code for kind in OURS} | OF_NO_CLASS == set(ERRORS)


@pytest.mark.parametrize("kind", [kind for kind in ENGINES if issubclass(kind, Exception)])
def test_every_engine_error_has_a_code_with_a_row(kind):
    assert engine_code(pickle.loads(pickle.dumps(kind("why")))) in ERRORS


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (engine.InvalidRequest("no"), "invalid_value"),
        (engine.InvalidRequest("no", code="context_length_exceeded"), "context_length_exceeded"),
        (engine.EngineClosed("no"), "unavailable"),
        (engine.EngineOverloaded("no"), "overloaded"),
        (engine.AdapterNotReady("no"), "adapter_not_ready"),
        (engine.AdapterTooLarge("no"), "invalid_adapter"),
        (engine.AdapterRejected("no"), "adapter_load_failed"),
        (engine.AdapterLoadFailed("no"), "adapter_load_failed"),
        (engine.StepFailed("no"), "generation_failed"),
        (engine.NotFinite.under(None), "generation_failed"),
        (engine.NotFinite.under("acme/a"), "adapter_overflows"),
        (engine.DeviceLost("no"), "generation_failed"),
    ],
)
def test_an_engine_error_has_the_code_of_its_class(error, code):
    assert engine_code(error) == code


def test_the_openapi_document_lists_the_statuses_of_the_table():
    for path, operations in document(with_tinker=True)["paths"].items():
        api = api_of_path(path)
        statuses = {str(error_status(code, api)) for code in ERRORS} - NO_ROUTES
        more = {"410"} if api is ClientApi.TINKER else set()
        for method, operation in operations.items():
            pushed = {"201", "202", "409"} if method == "put" else set()
            ended = {"409"} if path.endswith("/cancel") else set()
            expected = statuses | {"200"} | pushed | more | ended
            assert set(operation["responses"]) == expected


def test_tinkers_clients_learn_of_a_used_up_budget_by_status_402():
    assert error_status("insufficient_quota", ClientApi.TINKER) == 402
    assert error_status("rate_limit_exceeded", ClientApi.TINKER) == 429
    assert error_status("insufficient_quota", api_of_path("/v1/completions")) == 429


def test_the_documentation_lists_the_table():
    listed = {
        code: ErrorKind(int(status), kind, anthropic_kind)
        for status, kind, anthropic_kind, codes in ROW.findall(DOCUMENT.read_text())
        for code in re.findall(r"`(\w+)`", codes)
    }
    assert listed == ERRORS


def test_an_unknown_code_is_a_server_error():
    assert status_of("never_heard_of") == 500
    assert openai_error_body("never_heard_of", "why")["error"]["type"] == "server_error"


def test_anthropics_error_shape_has_status_529_for_overload_and_our_code_in_details():
    assert error_status("overloaded", ClientApi.ANTHROPIC) == 529
    others = [code for code in ERRORS if code != "overloaded"]
    assert all(error_status(code, ClientApi.ANTHROPIC) == status_of(code) for code in others)
    body = anthropic_error_body("context_length_exceeded", "shorten it", "r1")
    assert body == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": "prompt is too long: shorten it",
            "details": {"error_code": "context_length_exceeded"},
        },
        "request_id": "r1",
    }


@pytest.mark.parametrize(
    ("wait_s", "said"), [(None, 1), (0.0, 1), (0.2, 1), (1.0, 1), (1.01, 2), (59.5, 60)]
)
def test_retry_after_is_rounded_up_to_whole_seconds(wait_s, said):
    assert whole_seconds(wait_s) == said


def test_the_wait_for_a_short_queue_is_at_most_max_queue_s():
    assert until_queue_is_short(wait_s=70, max_queue_s=60) == 10
    assert until_queue_is_short(wait_s=500, max_queue_s=60) == 60


def test_the_wait_for_a_request_to_end_shrinks_with_the_number_running():
    assert until_one_ends(usual_s=8.0, running=4) == 2.0
    assert until_one_ends(usual_s=8.0, running=0) == 8.0


def test_a_budget_starts_again_on_the_first_of_the_next_month():
    assert until_next_month(1798761599.0) == 1  # the last second of 2026
