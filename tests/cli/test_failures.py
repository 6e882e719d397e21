"""A failure is one sentence on stderr with its remedy, and an exit status."""

import json
import shutil
import socket
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from typer.testing import CliRunner, Result

from lorikeet.cli import app
from lorikeet.cli.admin_client import AdminClient
from lorikeet.gateway.listeners import PublicListener
from tests.cli.conftest import Lorikeet
from tests.cli.peft_folders import peft_folder
from tests.gateway.conftest import listening


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, arguments, env=environment, prog_name="lorikeet")


def sentence(result: Result) -> str:
    """Return the one line on stderr; check that stdout is empty."""
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    return line.removeprefix("Error: ")


def test_a_missing_key_names_the_variable() -> None:
    assert "LORIKEET_ADMIN_KEY" in sentence(run("list", LORIKEET_ADMIN_KEY=""))


def test_an_unreachable_server_is_named_with_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    said = sentence(run("--server", url, "--key", "lk_x", "list"))
    assert url in said
    assert "start the service" in said


def test_a_server_without_tls_is_not_taken_for_an_unreachable_one(lorikeet: Lorikeet) -> None:
    url = lorikeet.url.replace("http://", "https://")
    said = sentence(run("--server", url, "--key", "lk_x", "list"))
    assert f"no TLS with {url}" in said
    assert "http://, or set SSL_CERT_FILE" in said


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:8001", "ftp://x"])
def test_a_malformed_address_is_named_with_the_remedy(address: str) -> None:
    said = sentence(run("--server", address, "--key", "lk_x", "list"))
    assert f"cannot ask {address}" in said
    assert "an address such as http://127.0.0.1:8001" in said


def test_a_server_that_is_not_lorikeet_is_recognised(stranger: str) -> None:
    said = sentence(run("--server", stranger, "--key", "lk_x", "list"))
    assert "is that the admin listener's address?" in said


def test_the_tenants_listener_is_recognised() -> None:
    with listening(PublicListener(FastAPI())) as url:
        assert f"is {url} the admin listener?" in sentence(
            run("--server", url, "--key", "lk_x", "list")
        )


def test_a_wrong_key_shows_the_servers_message(lorikeet: Lorikeet) -> None:
    assert "key" in sentence(lorikeet.run("list", LORIKEET_ADMIN_KEY="lk_wrong"))


def test_an_older_service_is_shown_or_named() -> None:
    """Its answers lack what 0.1.0 lacked: prompts, states, pages on the host, costs, tier flex."""
    adapter = {"adapter": "acme/support", "version": 1, "residency": "gpu", "pinned": True}
    load = dict.fromkeys(("running", "waiting", "kv_pages_used", "kv_pages_total"), 0)
    replica = {
        "replica": "old",
        "base_model": "tiny",
        "base_quantization": None,
        "tensor_parallel": 1,
        "fp8_kv": False,
        **load,
        **dict.fromkeys(("arena_bytes_used", "arena_bytes_total"), 0),
        "adapters": [adapter | {"gpu_bytes": 1, "leases": 0}],
    }
    pin = {
        "tenant": "acme",
        "adapter": "acme/support",
        "selector": "prod",
        "tier": "gpu",
        "replicas": None,
        "priority": 0,
        "image_bytes": 1,
        "expires": None,
        "state": "met",
        "reason": "launch",
        "shortfalls": [],
    }
    tokens = dict.fromkeys(("prompt_tokens", "cached_tokens", "output_tokens", "slot_s"), 7)
    loads = dict.fromkeys(("loads", "load_bytes", "pushes", "pushed_bytes"), 0)
    old = FastAPI()
    status = {"catalog_seq": 1, "catalog_age_s": 0, "pins": {"met": 1}, "replicas": [replica]}
    old.get("/admin/v1/status")(lambda: status)
    old.get("/admin/v1/pins")(lambda: {"data": [pin]})
    days = {"from": "2026-11-01", "to": "2026-11-30"}
    row = {"tenant": "acme", "requests": 3, **tokens, **loads}
    old.get("/admin/v1/usage")(lambda: {**days, "data": [row]})
    old.get("/admin/v1/tenants")(lambda: days)
    limits = {"tenant": "acme", "adapters": 1, "total_bytes": 1, "created": 0, "weight": 2.0}
    old.get("/admin/v1/tenants/acme")(lambda: limits)
    unknown = ("adapter", "model", "base_quantization", "base_warning", "code", "first_token_ms")
    asked = {"request": "GET /v1/models", "received": 0, "tenant": "acme", "key_id": "k1"}
    asked |= dict.fromkeys((*unknown, "replica", "residency", "tokens"))
    asked |= {"outcome": "finished", "total_ms": 1.0, "stages": [], "attempts": []}
    old.get("/admin/v1/requests/r1")(lambda: asked)
    with listening(old) as url:
        for command, shown in (
            ("status", "old"),
            ("pins", "launch"),
            ("usage", "acme"),
            ("tenants show acme", "Weight"),
            ("why r1", "Finished after 1.0 ms"),
        ):
            result = run("--server", url, "--key", "lk_x", *command.split())
            assert (result.exit_code, result.stderr) == (0, ""), result
            assert shown in result.stdout
        said = sentence(run("--server", url, "--key", "lk_x", "tenants", "list"))
    assert "has no 'data': the service is older than this command" in said


def _without(lacking: Collection[str], value: Any) -> Any:
    """Return a JSON value without the members named in `lacking`, at any depth."""
    if isinstance(value, list):
        return [_without(lacking, each) for each in value]
    if not isinstance(value, dict):
        return value
    return {name: _without(lacking, each) for name, each in value.items() if name not in lacking}


def test_register_and_show_work_at_a_service_whose_versions_lack_members(
    lorikeet: Lorikeet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.1.0 lacks all of them, and refuses `vocabulary` in a request."""
    folder, ask = peft_folder(tmp_path / "peft"), AdminClient._ask
    shutil.copy("demo/model/tokenizer.json", folder)
    lacking: Collection[str] = ()

    def older(*arguments: Any, **options: Any) -> httpx.Response:
        sent = options.get("content")
        told = json.loads(sent).get("vocabulary") if isinstance(sent, bytes) else None
        if told is not None and "vocabulary" in lacking:
            message = "not supported here: vocabulary"
            said = {"code": "unsupported_parameter", "param": "vocabulary", "message": message}
            return httpx.Response(400, json={"error": said})
        answer = ask(*arguments, **options)
        return httpx.Response(answer.status_code, json=_without(lacking, answer.json()))

    monkeypatch.setattr(AdminClient, "_ask", older)
    of_defaults = ("tokenizer", "defaults", "vocabulary_warning")
    later = ("invocation_tokens", "head", "embedder", "vocabulary", "parity", *of_defaults)
    for number, lacking in enumerate([*((each,) for each in later), later]):
        name = f"acme/a{number}"
        given = ("register", str(folder), name, "--system-prompt", "Be brief.")
        registered, shown = lorikeet.run(*given), lorikeet.run("show", name)
        for result in (registered, shown):
            assert (result.exit_code, result.stderr) == (0, ""), (lacking, result)
            assert ("Be brief." in result.stdout) == ("defaults" not in lacking)
        assert f"{name} version 1, now prod" in registered.stdout


@pytest.mark.parametrize("key", ["lk_\u2026", "lk_a\nb", "lk_\x1b[2J", "lk_\xe9"])
def test_a_malformed_key_is_refused_before_it_is_sent(lorikeet: Lorikeet, key: str) -> None:
    said = sentence(lorikeet.run("list", LORIKEET_ADMIN_KEY=key))
    assert "no key has" in said
    assert "lk_" not in said


def test_options_on_the_root_win_over_the_environment(lorikeet: Lorikeet) -> None:
    key = lorikeet.admin_key
    result = lorikeet.run("--key", key, "list", "--json", LORIKEET_ADMIN_KEY="lk_wrong")
    assert json.loads(result.stdout) == {"data": []}


def test_an_unknown_command_is_wrong_usage() -> None:
    assert run("frobnicate").exit_code == 2


@pytest.fixture(params=[b"HTTP/1.1 200 OK\r\n\r\n<html>", b"HTTP/1.1 502 Oh\r\n\r\n{}"])
def stranger(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server that answers, but not with Lorikeet's JSON."""

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(request.param)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(timeout=10)
