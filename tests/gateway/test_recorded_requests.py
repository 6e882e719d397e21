"""Recorded requests of many clients are accepted and can be rendered for a model.

The requests were recorded from the examples in tests/clients/examples and from coding agents at
work, for each client those with most fields. Texts were cut to 60 characters, and of Codex's and
Claude Code's tools one or two of each kind were kept.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import Gateway
from tests.gateway.scripted_replica import ScriptedReplica

RECORDED = json.loads((Path(__file__).parent / "recorded_requests.json").read_text())


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> ScriptedReplica:
    return ScriptedReplica(tmp_path_factory.mktemp("replica"), max_context=10_000)


@pytest.mark.parametrize(
    "recorded", RECORDED, ids=[f"{request['client']} {request['path']}" for request in RECORDED]
)
def test_a_recorded_request_is_answered(
    unchanged: Gateway, replica: ScriptedReplica, recorded: dict[str, Any]
) -> None:
    unchanged.engines.replay = replica.writes(recorded.get("answer", "fine"))
    answer = unchanged.post(recorded["path"], recorded["body"])
    assert answer.is_success, answer.text
    assert "failed" not in answer.text
