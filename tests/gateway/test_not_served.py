"""What docs/openai.md lists as not served is refused by name, with one code."""

from typing import Any

import pytest

from tests.gateway.conftest import Gateway
from tests.gateway.test_bad_requests import CHAT, COMPLETIONS, TURN

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [TURN]},
    COMPLETIONS: {"prompt": "x"},
    RESPONSES: {"input": "x"},
    MESSAGES: {"messages": [TURN], "max_tokens": 9},
}
FIELDS: list[tuple[str, str, Any]] = [
    (CHAT, "audio", {"voice": "x", "format": "wav"}),
    (CHAT, "modalities", ["text", "audio"]),
    (CHAT, "prediction", {"type": "content", "content": "x"}),
    (CHAT, "web_search_options", {}),
    (CHAT, "store", True),
    (CHAT, "use_beam_search", True),
    (CHAT, "guided_grammar", "start: x"),
    (CHAT, "messages", [{"role": "user", "content": [PICTURE]}]),
    (COMPLETIONS, "suffix", "x"),
    (COMPLETIONS, "best_of", 3),
    (RESPONSES, "conversation", "conv_1"),
    (RESPONSES, "background", True),
    (RESPONSES, "prompt", {"id": "x"}),
    (RESPONSES, "truncation", "auto"),
    (RESPONSES, "tools", [{"type": "web_search"}]),
    (MESSAGES, "container", "x"),
    (MESSAGES, "mcp_servers", [{}]),
    (MESSAGES, "inference_geo", "us"),
    (MESSAGES, "speed", "fast"),
]


@pytest.mark.parametrize(("path", "field", "value"), FIELDS, ids=lambda value: str(value)[:20])
def test_a_field_that_is_not_served_is_refused_by_name(
    gateway: Gateway, path: str, field: str, value: Any
) -> None:
    answer = gateway.post(path, {"model": "tiny", **BODIES[path], field: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    code = error["details"]["error_code"] if path == MESSAGES else error["code"]
    assert code == "unsupported_parameter", error
    assert field in error["message"]


@pytest.mark.parametrize("path", ["audio/speech", "images/generations", "moderations"])
def test_an_endpoint_that_is_not_served_is_refused_by_name(gateway: Gateway, path: str) -> None:
    answer = gateway.post(f"/v1/{path}", {"model": "tiny"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"
    assert f"/v1/{path}" in answer.json()["error"]["message"]
