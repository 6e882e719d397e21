"""Requests through the whole service: HTTP, gateway, router, replica, engine, and back."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from demo.tasks import TASKS
from tests.e2e.conftest import Service
from tests.waiting import eventually

BASE = "lorikeet-demo"


def ask(service: Service, tenant: str, model: str, prompt: str) -> str:
    answer = service.client(tenant).chat.completions.create(
        model=model, messages=[{"role": "user", "content": prompt}], temperature=0, max_tokens=200
    )
    return answer.choices[0].message.content


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.model)
def test_every_adapter_does_its_task_and_the_base_model_does_not(service, task):
    assert ask(service, task.tenant, task.model, task.example.prompt) == task.example.answer
    assert ask(service, task.tenant, BASE, task.example.prompt) != task.example.answer


def test_adapters_answer_alike_at_once_and_alone(service):
    asks = [(task, pair) for task in TASKS for pair in task.held_out_pairs(4, seed=5)]
    alone = [ask(service, task.tenant, task.model, pair.prompt) for task, pair in asks]
    with ThreadPoolExecutor(32) as pool:
        together = list(
            pool.map(lambda a: ask(service, a[0].tenant, a[0].model, a[1].prompt), asks)
        )
    assert together == alone


def test_a_streamed_answer_equals_a_whole_one_and_ends_with_usage(service):
    task = TASKS[0]
    message = {"role": "user", "content": task.example.prompt}
    chunks = list(
        service.client(task.tenant).chat.completions.create(
            model=task.model,
            messages=[message],
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == task.example.answer
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 0
    assert sum(bool(c.choices and c.choices[0].finish_reason) for c in chunks) == 1


def test_choices_of_several_prompts_are_returned_in_order(service):
    task = TASKS[0]
    answer = service.client(task.tenant).completions.create(
        model=BASE, prompt=["one", "two", "three"], n=4, max_tokens=5, seed=7, temperature=1.0
    )
    assert [choice.index for choice in answer.choices] == list(range(12))
    again = service.client(task.tenant).completions.create(
        model=BASE, prompt=["one", "two", "three"], n=4, max_tokens=5, seed=7, temperature=1.0
    )
    assert [c.text for c in again.choices] == [c.text for c in answer.choices]
    assert len({choice.text for choice in answer.choices[:4]}) > 1


def test_headers_say_where_the_adapter_was_found(service):
    task = TASKS[1]
    client = service.client(task.tenant).with_raw_response
    for residency in ("any", "gpu"):
        answer = client.completions.create(
            model=task.model, prompt="x", max_tokens=1, extra_headers={"x-request-id": "mine"}
        )
        if residency == "gpu":
            assert answer.headers["x-lorikeet-residency"] == "gpu"
        assert len(answer.headers["x-lorikeet-adapter-digest"]) == 64
        assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])
    assert answer.headers["x-lorikeet-replica"] in {r["replica"] for r in service.replicas()}


def test_another_tenants_adapter_looks_like_one_that_does_not_exist(service):
    mine, theirs = TASKS[0], next(t for t in TASKS if t.tenant != TASKS[0].tenant and not t.shared)
    errors = []
    for model in (theirs.model, "quillon/nothing"):
        with pytest.raises(openai.NotFoundError) as caught:
            ask(service, mine.tenant, model, "x")
        errors.append(caught.value)
    assert {error.code for error in errors} == {"model_not_found"}
    assert errors[0].message.replace(theirs.model, "M") == errors[1].message.replace(
        "quillon/nothing", "M"
    )


def test_the_public_listener_has_no_admin_routes(service):
    headers = {"Authorization": f"Bearer {service.admin_key}"}
    for path in ("/admin/v1/status", "/metrics", "/admin/ui"):
        refused = httpx.get(service.url + path, headers=headers, timeout=30)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")
        assert len(refused.headers.get_list("x-request-id")) == 1
    assert httpx.get(f"{service.url}/ui", timeout=30).is_success
    assert service.admin("GET", "/status").status_code == 200
    assert httpx.get(f"{service.admin_url}/healthz", timeout=30).is_success


def test_a_prompt_that_is_too_long_is_refused_with_the_numbers(service):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(service, TASKS[0].tenant, BASE, "word " * 5000)
    assert caught.value.code == "context_length_exceeded"
    assert any(character.isdigit() for character in caught.value.message)


def test_a_disconnected_clients_resources_are_freed_within_a_second(service):
    body = {"model": TASKS[0].model, "prompt": "a", "max_tokens": 400, "stream": True}
    body |= {"ignore_eos": True, "n": 8}
    key = service.tenant_keys[TASKS[0].tenant]
    headers = {"Authorization": f"Bearer {key}"}

    def busy() -> bool:
        return any(
            replica["running"]
            or replica["waiting"]
            or any(a["leases"] for a in replica["adapters"])
            for replica in service.replicas()
        )

    with (
        httpx.Client(timeout=30) as client,
        client.stream("POST", f"{service.url}/v1/completions", json=body, headers=headers) as got,
    ):
        chunks = got.iter_bytes()  # dropping the iterator would close the connection already
        next(chunks)
        assert busy()
    assert eventually(lambda: not busy(), within_s=1.0)
    assert eventually(lambda: all(r["kv_pages_used"] == 0 for r in service.replicas()), 1.0)


def test_a_client_that_reads_slowly_delays_no_other_stream(service):
    task = TASKS[0]
    stop = threading.Event()
    body = {"model": BASE, "prompt": "a", "max_tokens": 300, "stream": True, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {service.tenant_keys[task.tenant]}"}

    def read_slowly() -> None:
        with (
            httpx.Client(timeout=30) as client,
            client.stream("POST", f"{service.url}/v1/completions", json=body, headers=headers),
        ):
            stop.wait(10)

    reader = threading.Thread(target=read_slowly)
    reader.start()
    try:
        begun = time.monotonic()
        assert ask(service, task.tenant, task.model, task.example.prompt) == task.example.answer
        assert time.monotonic() - begun < 8
    finally:
        stop.set()
        reader.join()
