"""Death of an engine process, as clients see it."""

import os
import signal

import httpx

from demo.tasks import TASKS
from tests.e2e.conftest import REPLICAS
from tests.e2e.service_processes import complete, engine_processes

TASK = TASKS[0]


def test_after_an_engine_dies_its_stream_ends_with_an_error_and_new_requests_succeed(service):
    body = {"model": TASK.model, "prompt": "a", "max_tokens": 900, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {service.tenant_keys[TASK.tenant]}"}
    url = f"{service.url}/v1/completions"
    assert len(engine_processes(service)) == REPLICAS
    with (
        httpx.Client(timeout=60, headers=headers) as client,
        client.stream("POST", url, json={**body, "stream": True}) as streamed,
    ):
        events = (line for line in streamed.iter_lines() if line)
        next(events)
        for pid in engine_processes(service):
            os.kill(pid, signal.SIGKILL)
        assert "send the request again" in [*events][-1]
        answer = client.post(url, json={**body, "max_tokens": 2})
    assert answer.status_code == 200
    assert complete(service)
