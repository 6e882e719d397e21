"""lorikeet.client pushes a trainer's adapters and samples from them, even from a busy service."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import peft
import pytest
import transformers

from demo.fill_catalog import ADAPTERS
from lorikeet.client import Client
from lorikeet.errors import LorikeetError, Unavailable
from tests.gateway.conftest import Gateway, make_peft
from tests.gateway.scripted_replica import ScriptedReplica
from tests.gateway.trainer import Trainer

FOLDER = ADAPTERS / "kestrel" / "spell"


class BusyService:
    """Server that refuses the first pushes as busy, then answers that the version is ready."""

    def __init__(self, busy: int = 0, refusal: int | None = None) -> None:
        self.busy, self.refusal = busy, refusal
        self.bodies: list[bytes] = []
        self.paths: list[str] = []

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        self.paths.append(f"{method} {path}")
        self.bodies.append(body)
        if len(self.bodies) <= self.busy:
            return 503, {"error": {"message": "busy", "code": "overloaded", "param": None}}
        if self.refusal is not None:
            problem = {"message": "rank 512", "code": "invalid_adapter", "param": "r"}
            return self.refusal, {"error": problem}
        if method == "POST":
            choice = {
                "prompt_token_ids": [5],
                "token_ids": [6],
                "text": "a",
                "finish_reason": "stop",
            }
            return 200, {"choices": [choice | {"logprobs": {"token_logprobs": [-0.5]}}]}
        digest = path.partition("?")[0].rpartition("/")[2]
        told = {"adapter": "acme/policy", "model": f"acme/policy@{digest}", "digest": digest}
        known = {"version": None, "ready": True, "durable": False, "created": 0.0}
        return 202 if "wait=durable" in path else 201, told | known


@contextmanager
def at(service: BusyService) -> Iterator[Client]:
    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, told = service.answer(self.command, self.path, body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(told).encode())

        do_GET = do_POST = do_PUT  # noqa: N815

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = Client(f"http://127.0.0.1:{server.server_port}", "lk_a", publish_key="lk_b")
        yield client
        client.close()
        server.shutdown()


def test_a_push_is_retried_while_the_service_is_busy() -> None:
    service = BusyService(busy=1)
    with at(service) as client:
        version = client.push(FOLDER, "policy", alias="prod", lifetime_s=600, keep=2)
        assert client.status(version) == version
    first, second, asked = service.bodies
    assert first == second
    assert asked == b""
    assert version.digest == hashlib.sha256(first).hexdigest()
    assert (version.ready, version.durable, version.version) == (True, False, None)
    path = f"/v1/adapters/policy/versions/{version.digest}"
    query = "wait=ready&timeout_s=60&alias=prod&lifetime_s=600&keep=2"
    assert service.paths[:2] == [f"PUT {path}?{query}"] * 2
    assert service.paths[2] == f"GET {path}"


def test_a_sample_is_retried_while_the_service_is_busy() -> None:
    service = BusyService(busy=1)
    with at(service) as client:
        (choice,) = client.sample("acme/policy", [5], logprobs=None, max_tokens=1)
    assert (choice.token_ids, choice.logprobs, choice.digest) == ((6,), (-0.5,), None)
    assert service.paths == ["POST /v1/completions"] * 2
    asked = {"model": "acme/policy", "prompt": [5], "logprobs": 0, "max_tokens": 1}
    neutral = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    assert json.loads(service.bodies[1]) == asked | neutral | {"return_token_ids": True}


def test_invalid_arguments_are_refused_before_anything_is_sent() -> None:
    service = BusyService()
    with at(service) as client:
        with pytest.raises(LorikeetError, match="without its tenant"):
            client.push(FOLDER, "acme/policy")
        with pytest.raises(LorikeetError, match="leave stream out"):
            client.sample("acme/policy", "hi", stream=True)
    with pytest.raises(LorikeetError, match="--publish"):
        Client("http://127.0.0.1:9", "lk_a").push(FOLDER, "policy")
    assert service.paths == []
    with pytest.raises(LorikeetError, match="address such as http://"):
        Client("127.0.0.1:8000", "lk_a")
    with pytest.raises(LorikeetError, match="publish_key holds characters"):
        Client("http://127.0.0.1:8000", "lk_a", publish_key="lk_…")


def test_an_unreachable_service_is_named() -> None:
    client = Client("http://127.0.0.1:9", "lk_a", publish_key="lk_b")
    with pytest.raises(Unavailable, match=r"no answer from http://127\.0\.0\.1:9: .*refused"):
        client.push(FOLDER, "policy", timeout_s=0)


def test_a_refused_request_is_not_retried() -> None:
    service = BusyService(refusal=422)
    with at(service) as client, pytest.raises(LorikeetError, match="rank 512") as refused:
        client.push(FOLDER, "policy")
    assert (refused.value.code, refused.value.param) == ("invalid_adapter", "r")
    assert len(service.bodies) == 1


@pytest.mark.parametrize("busy", [0, 100])
def test_a_push_that_is_not_durable_in_time_says_so(busy: int) -> None:
    with at(BusyService(busy)) as client, pytest.raises(LorikeetError) as late:
        client.push(str(FOLDER), "policy", wait="durable", timeout_s=0.2)
    assert late.value.code in (Unavailable.code, "overloaded")


def test_tensors_and_their_config_are_the_same_version_as_the_folder_of_them(
    tmp_path: Path,
) -> None:
    config = transformers.AutoConfig.from_pretrained("demo/model")
    model = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_config(config), peft.LoraConfig(r=2)
    )
    model.save_pretrained(str(tmp_path))
    with at(BusyService()) as client:
        of_folder = client.push(tmp_path, "policy")
        weights = peft.get_peft_model_state_dict(model)
        of_tensors = client.push(weights, "policy", config=model.peft_config["default"])
        with pytest.raises(LorikeetError, match="need their config"):
            client.push(weights, "policy")
    assert of_tensors == of_folder


def test_a_sample_has_a_log_probability_for_each_token(gateway: Gateway, tmp_path: Path) -> None:
    replica = ScriptedReplica(tmp_path)
    gateway.engines.replay = replica.writes("fine<|eos|>")
    client = Client(gateway.url, gateway.keys["acme"])
    (first, second) = client.sample("acme/support", (5, 6, 7), n=2, max_tokens=8)
    assert first == second
    assert first.prompt_ids == (5, 6, 7)
    assert len(first.logprobs) == len(first.token_ids) == 5
    assert (first.text, first.finish_reason) == ("fine", "stop")
    assert gateway.engines.last.adapter is not None
    assert first.digest == gateway.engines.last.adapter.digest
    with pytest.raises(LorikeetError, match="nobody"):
        client.sample("acme/nobody", "hi")


def test_a_pushed_adapter_answers(gateway: Gateway, tmp_path: Path) -> None:
    trainer = Trainer(gateway)
    folder = make_peft(gateway.folder / "pushed", seed=3)
    client = Client(gateway.url, gateway.keys["acme"], publish_key=trainer.key)
    version = client.push(folder, "policy", wait="durable")
    assert client.status(version) == version
    assert (version.model, version.version) == (f"acme/policy@{version.digest}", 1)
    gateway.engines.replay = ScriptedReplica(tmp_path).writes("fine")
    (choice,) = client.sample(version, "hi")
    assert choice.digest == version.digest
    with pytest.raises(LorikeetError) as refused:
        client.push(folder, "other")
    assert refused.value.code == "forbidden"
