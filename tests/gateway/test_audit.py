"""The audit stream: a line for each change that an admin's key asks for."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lorikeet.catalog.records import KeyRecord, Scope
from lorikeet.gateway.audit import AuditStream
from tests.gateway.collector import collecting
from tests.gateway.conftest import Gateway, chat, serving
from tests.gateway.test_bad_requests import CHAT
from tests.waiting import eventually


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    with serving(tmp_path, audit=AuditStream(str(tmp_path / "audit"), "gateway-1")) as running:
        yield running


def lines(gateway: Gateway) -> list[dict[str, Any]]:
    """Lines of the stream behind that of the first registration."""
    _, *found = map(json.loads, (gateway.folder / "audit").read_text().splitlines())
    return found


def test_a_change_is_one_line_with_who_what_and_when(gateway: Gateway) -> None:
    began = time.strftime("%Y-%m-%dT%H:%M", time.gmtime())
    record, secret = gateway.catalog.create_key(None, {Scope.ADMIN}, name="ci", actor="test")
    answer = gateway.request("PATCH", "/admin/v1/tenants/acme", secret, json={"max_adapters": 9})
    assert answer.is_success
    (line,) = lines(gateway)
    assert line.pop("time") >= began
    assert line == {
        "level": "info",
        "event": "admin_action",
        "key": record.id,
        "key_name": "ci",
        "action": "PATCH /tenants/{tenant}",
        "subject": "acme",
        "result": "done",
        "status": 200,
        "made": None,
        "request_id": answer.headers["x-request-id"],
        "gateway": "gateway-1",
    }


def test_what_was_made_is_named_without_its_secret(gateway: Gateway) -> None:
    gateway.admin("POST", "/tenants", {"tenant": "initech"})
    made = gateway.admin("POST", "/tenants/initech/keys", {"name": "ci"}).json()
    rotated = gateway.admin("POST", f"/keys/{made['id']}/rotate", {}).json()
    gateway.register("acme/support", seed=1)
    found = [(each["action"], each["subject"], each["made"]) for each in lines(gateway)]
    assert found == [
        ("POST /tenants", "", {"tenant": "initech"}),
        ("POST /tenants/{tenant}/keys", "initech", {"id": made["id"], "tenant": "initech"}),
        ("POST /keys/{key_id}/rotate", made["id"], {"id": rotated["id"], "tenant": "initech"}),
        (
            "PUT /adapters/{tenant}/{name}/versions",
            "acme/support",
            {"adapter": "acme/support", "version": 2},
        ),
    ]
    text = (gateway.folder / "audit").read_text()
    assert not [key for key in (made["key"], rotated["key"], gateway.admin_key) if key in text]


def test_refused_changes_of_known_keys_are_written(gateway: Gateway) -> None:
    gateway.admin("PATCH", "/tenants/nobody", {"max_adapters": 9})
    gateway.admin("PATCH", "/tenants/acme", {"max_adapters": -1})
    record, secret = gateway.catalog.create_key(None, {Scope.READ_ONLY}, actor="test")
    for key in (secret, gateway.keys["acme"]):
        gateway.request("DELETE", "/admin/v1/pins/acme", key)
    found = lines(gateway)
    assert [(each["status"], each["result"]) for each in found] == [
        (404, "refused"),
        (400, "refused"),
        (403, "refused"),
        (403, "refused"),
    ]
    assert found[2]["key"] == record.id
    assert found[3]["key"] == gateway.catalog.reader.state.keys("acme")[0].id


def test_a_change_that_fails_is_written_as_it_is_answered(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(gateway.catalog, "limit_tenant", fail)
    answer = gateway.admin("PATCH", "/tenants/acme", {"max_adapters": 9})
    (line,) = lines(gateway)
    assert (line["status"], line["result"]) == (answer.status_code, "failed") == (500, "failed")
    assert line["request_id"] == answer.headers["x-request-id"]


def test_reads_requests_of_tenants_and_unknown_keys_write_nothing(gateway: Gateway) -> None:
    gateway.admin("GET", "/tenants")
    gateway.post(CHAT, chat())
    for key in (None, "lk_made-up"):
        gateway.request("DELETE", "/admin/v1/pins/acme", key)
    gateway.admin("DELETE", "/nothing")
    assert lines(gateway) == []


def test_a_moved_file_is_made_again(gateway: Gateway) -> None:
    (gateway.folder / "audit").rename(gateway.folder / "audit.1")
    gateway.admin("DELETE", "/pins/acme")
    (line,) = map(json.loads, (gateway.folder / "audit").read_text().splitlines())
    assert (line["subject"], line["status"]) == ("acme", 404)


def test_a_line_that_cannot_be_written_is_told_in_the_log(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    (gateway.folder / "audit").unlink()
    (gateway.folder / "audit").mkdir()
    assert gateway.admin("PATCH", "/tenants/acme", {"max_adapters": 9}).is_success
    assert "audit_not_written" in caplog.messages
    (gateway.folder / "audit").rmdir()
    assert gateway.admin("PATCH", "/tenants/acme", {"max_adapters": 8}).is_success
    (line,) = map(json.loads, (gateway.folder / "audit").read_text().splitlines())
    assert line["status"] == 200


def test_a_line_that_standard_output_refuses_is_told_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with suppress(OSError), Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "__stdout__", full)
        key = KeyRecord("key-1", None, frozenset({Scope.ADMIN}), "", 1.0)
        AuditStream("stdout", "g").write(key, "r", "POST /keys", "", 201, None)
    assert caplog.messages == ["audit_not_written"]


def test_a_collector_gets_changes_as_otlp_logs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with collecting() as collector:
        stream = AuditStream(collector.url, "gateway-1")
        with serving(tmp_path, audit=stream) as gateway:
            answer = gateway.admin("POST", "/tenants", {"tenant": "initech"})
            assert eventually(lambda: len(collector.logs) == 2)
            collector.status = 400  # not 503, after which senders try again
            gateway.admin("DELETE", "/pins/acme")
            assert eventually(lambda: "audit_not_written" in caplog.messages)
            collector.status = 200
            gateway.admin("DELETE", "/pins/globex")  # sent at the end
    assert caplog.messages.count("audit_not_written") == 1
    assert [attributes["subject"] for _, attributes in collector.logs][-1] == "globex"
    event, attributes = collector.logs[1]
    assert event == "admin_action"
    assert attributes.pop("key").startswith("key-")
    assert attributes == {
        "action": "POST /tenants",
        "subject": "",
        "result": "done",
        "status": 201,
        "made.tenant": "initech",
        "key_name": "",
        "request_id": answer.headers["x-request-id"],
        "gateway": "gateway-1",
    }


def test_what_a_collector_has_not_taken_is_told_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lorikeet.tracing import log_exporter

    monkeypatch.setattr(log_exporter, "_CLOSE_S", 0.1)
    monkeypatch.setattr(log_exporter, "_QUEUE", 512)
    with collecting() as collector:
        collector.status = 503
        stream = AuditStream(collector.url, "gateway-1")
        key = KeyRecord("key-1", None, frozenset({Scope.ADMIN}), "0" * 64, 0.0)
        for _ in range(514):
            stream.write(key, "r", "POST /tenants", "", 201, None)
        assert len(caplog.messages) == 2, "the queue has no room for two"
        stream.close()
    assert "refused 512 records" in caplog.records[-1].__dict__["error"]
    assert set(caplog.messages) == {"audit_not_written"}


def test_the_stream_can_be_standard_output() -> None:
    program = (
        "import sys; from lorikeet.gateway.audit import *; "
        "from lorikeet.catalog.records import KeyRecord, Scope; "
        "sys.stdout = None; "  # as Serve replaces it
        "key = KeyRecord('key-1', None, frozenset({Scope.ADMIN}), '', 1.0); "
        "AuditStream('stdout', 'g').write(key, 'r', 'POST /keys', '', 201, None)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert json.loads(done.stdout)["key"] == "key-1"
