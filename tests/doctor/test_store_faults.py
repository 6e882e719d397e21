"""Each fault of the catalog's store is the only finding, and names its fix."""

import re
import socket
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler

import pytest

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.store.object_store import open_store
from lorikeet.doctor.finding import Severity
from tests.doctor.conftest import Patient, faults, keys_of, variable
from tests.s3_proxy import proxied

OK, WARNING, PROBLEM = Severity.OK, Severity.WARNING, Severity.PROBLEM


@pytest.fixture
def new_url(s3_bucket: str) -> str:
    return f"{s3_bucket}/{uuid.uuid4().hex}"


def test_a_bucket_without_a_catalog_is_found(patient: Patient, new_url: str) -> None:
    (fault,) = faults(patient.examined("catalog", **variable("CATALOG", new_url)))
    assert fault.severity is PROBLEM
    assert "correct LORIKEET_CATALOG, or `lorikeet init`" in fault.fix


def test_a_catalog_without_an_admin_key_is_found(patient: Patient, new_url: str) -> None:
    AdapterCatalog.init(open_store(new_url))
    (fault,) = faults(patient.examined("catalog", **variable("CATALOG", new_url)))
    assert fault.severity is PROBLEM
    assert "no working admin key" in fault.message
    assert "lorikeet init" in fault.fix


def forget_the_condition(request: BaseHTTPRequestHandler) -> bool:
    del request.headers["If-None-Match"]
    return False


def forbid_writing(request: BaseHTTPRequestHandler) -> bool:
    return request.command == "PUT" and _answer(request, 403, "AccessDenied")


def return_other_bytes(request: BaseHTTPRequestHandler) -> bool:
    of_test_object = request.path.rpartition("/")[2].startswith("doctor-")
    return request.command == "GET" and of_test_object and _answer(request, 200, "Cached")


def live_in_the_past(request: BaseHTTPRequestHandler) -> bool:
    if request.command != "HEAD":
        return False
    request.send_response(200)
    request.send_header("Last-Modified", "Sun, 01 Nov 2026 00:00:00 GMT")
    request.send_header("Content-Length", "0")
    request.end_headers()
    return True


def _answer(request: BaseHTTPRequestHandler, status: int, code: str) -> bool:
    body = f"<Error><Code>{code}</Code><Message>m</Message></Error>".encode()
    request.send_response(status)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.wfile.write(body)
    return True


@pytest.mark.parametrize(
    ("trouble", "check", "found", "fix"),
    [
        (forget_the_condition, "conditional writes", "ignores If-None-Match", "versioning"),
        (forbid_writing, "store", "PutObject is not allowed: .*s3:PutObject", "credentials"),
        (return_other_bytes, "store", "bytes that were not written", "proxy or cache"),
        (live_in_the_past, "clock", r"differ by \d+ s", "NTP"),
    ],
)
def test_an_unreliable_store_is_found_with_its_fix(
    patient: Patient,
    trouble: Callable[[BaseHTTPRequestHandler], bool],
    check: str,
    found: str,
    fix: str,
) -> None:
    before = keys_of(patient.environ["LORIKEET_CATALOG"])
    with proxied(trouble):
        (fault,) = faults(patient.examined("catalog"))
    assert (fault.check, fault.severity) == (check, PROBLEM)
    assert re.search(found, fault.message), fault
    assert fix in fault.fix
    assert keys_of(patient.environ["LORIKEET_CATALOG"]) == before


def test_a_dead_endpoint_does_not_delay_other_checks(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, answers nothing
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{silent.getsockname()[1]}")
        fault, *others = faults(patient.examined("catalog", "limits", "disk cache", wait_s=1.0))
    assert fault.severity is PROBLEM
    assert "no answer within 1 s" in fault.message
    assert "AWS_ENDPOINT_URL_S3" in fault.fix
    assert others == []
