"""Blobs uploaded in parts, which can be resumed, are checked and become versions at the end."""

import base64
import hashlib
import resource
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from lorikeet.catalog.catalog import AdapterCatalog, blob_key
from lorikeet.catalog.records import Scope
from lorikeet.catalog.resumable_uploads import ResumableUploads
from lorikeet.catalog.store.object_store import open_store
from lorikeet.gateway.app import create_app
from lorikeet.gateway.services import ServedModel, Services
from tests.gateway.conftest import LIMITS, SHAPE, Gateway, listening, make_blob, serving
from tests.gateway.test_bad_requests import error_of

PART = 200


@pytest.fixture(params=["local", "s3"])
def gateway(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Gateway]:
    url = str(tmp_path / "store")
    if request.param == "s3":
        url = f"{request.getfixturevalue('s3_bucket')}/{uuid.uuid4().hex}"
    with serving(tmp_path, open_store(url), part_bytes=PART) as running:
        yield running


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Gateway]:
    with serving(tmp_path, part_bytes=PART) as running:
        yield running


@pytest.fixture
def blob(tmp_path: Path) -> bytes:
    return make_blob(tmp_path / "peft", seed=9)


@contextmanager
def another(gateway: Gateway) -> Iterator[Gateway]:
    """Run a second gateway over the same catalog, with larger parts."""
    catalog = AdapterCatalog(open_store(gateway.catalog.store.url))
    base_models = {"tiny": ServedModel(SHAPE, ("org/Tiny-1B",))}
    services = Services(catalog, base_models, LIMITS, gateway.engines, part_bytes=7 * PART)
    with listening(create_app(services)) as url:
        yield Gateway(url, catalog, gateway.engines, gateway.admin_key, gateway.folder)


def digest_of(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()


def begin(gateway: Gateway, blob: bytes, key: str | None = None, **changes: Any) -> httpx.Response:
    body = {"digest": digest_of(blob), "size_bytes": len(blob)} | changes
    return gateway.request("POST", "/admin/v1/uploads", key or gateway.admin_key, json=body)


def missing(gateway: Gateway, blob: bytes) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = begin(gateway, blob).raise_for_status().json()["missing"]
    return parts


def send(
    gateway: Gateway,
    blob: bytes,
    part: dict[str, Any],
    digest: str | None = None,
    **headers: str,
) -> httpx.Response:
    """PUT one part where the gateway said. digest: announced digest of the upload."""
    data = blob[(part["number"] - 1) * PART :][: part["size_bytes"]]
    if part["url"] is not None:
        return httpx.put(part["url"], content=data, headers=headers)
    return put_part(gateway, digest or digest_of(blob), part["number"], data, **headers)


def put_part(
    gateway: Gateway, digest: str, number: int, data: bytes, key: str | None = None, **headers: str
) -> httpx.Response:
    authorization = {"authorization": f"Bearer {key or gateway.admin_key}"}
    path = f"{gateway.url}/admin/v1/uploads/{digest}/parts/{number}"
    return httpx.put(path, content=data, headers=authorization | headers, timeout=20)


def register(
    gateway: Gateway, blob: bytes, adapter: str = "acme/new", **body: Any
) -> httpx.Response:
    path = f"/adapters/{adapter}/versions"
    return gateway.admin("POST", path, {"digest": digest_of(blob), **body})


def uploaded(gateway: Gateway, blob: bytes) -> None:
    for part in missing(gateway, blob):
        send(gateway, blob, part).raise_for_status()


def keys_under(gateway: Gateway, prefix: str) -> list[str]:
    return list(gateway.catalog.store.list(prefix))


def stored(gateway: Gateway, blob: bytes) -> bool:
    return ResumableUploads(gateway.catalog.store).stored(digest_of(blob))


def test_parts_become_a_version_and_are_deleted(gateway: Gateway, blob: bytes) -> None:
    uploaded(gateway, blob)
    assert not stored(gateway, blob)
    answer = register(gateway, blob)
    assert answer.status_code == 201, answer.text
    version = answer.json()
    assert (version["adapter"], version["version"], version["aliases"]) == ("acme/new", 1, ["prod"])
    assert version["digest"] == digest_of(blob)
    assert gateway.catalog.store.get(blob_key(version["digest"])) == blob
    assert keys_under(gateway, "uploads/") == []


def test_an_upload_resumes_after_the_gateway_restarts(gateway: Gateway, blob: bytes) -> None:
    parts = missing(gateway, blob)
    for part in parts[1:-1]:
        send(gateway, blob, part).raise_for_status()
    error_of(register(gateway, blob), 409)

    with another(gateway) as other:
        left = missing(other, blob)
        assert [part["number"] for part in left] == [1, len(parts)]
        for part in left:
            send(other, blob, part).raise_for_status()
        assert register(other, blob).status_code == 201


def test_a_stored_blob_has_no_missing_parts(gateway: Gateway, blob: bytes) -> None:
    uploaded(gateway, blob)
    first = register(gateway, blob).json()
    assert missing(gateway, blob) == []
    again = register(gateway, blob)
    assert (again.status_code, again.json()) == (200, first)
    assert missing(gateway, blob) == []
    other = register(gateway, blob, "globex/same", shared=True)
    assert (other.status_code, other.json()["digest"]) == (201, first["digest"])
    assert keys_under(gateway, "uploads/") == []


def test_concurrent_registrations_of_one_blob_make_one_version(
    gateway: Gateway, blob: bytes
) -> None:
    uploaded(gateway, blob)
    with ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(lambda _: register(gateway, blob), range(4)))
    assert {answer.status_code for answer in answers} <= {200, 201}
    assert {answer.json()["version"] for answer in answers} == {1}
    assert gateway.catalog.store.get(blob_key(digest_of(blob))) == blob


def test_bytes_with_another_digest_are_refused_and_deleted(gateway: Gateway, blob: bytes) -> None:
    count = len(missing(gateway, blob))
    other = blob[:-1] + bytes([blob[-1] ^ 1])
    for part in missing(gateway, blob):
        send(gateway, other, part, digest_of(blob)).raise_for_status()
    error = error_of(register(gateway, blob), 422)
    assert f"and not {digest_of(blob)}" in error["message"]
    assert len(missing(gateway, blob)) == count
    assert not stored(gateway, blob)


def test_a_file_that_is_no_adapter_is_refused_and_deleted(gateway: Gateway) -> None:
    blob = b"\x80\x04\x95" + b"cos\nsystem\n" * 50
    uploaded(gateway, blob)
    error = error_of(register(gateway, blob), 422)
    assert "not a safetensors file" in error["message"]
    assert keys_under(gateway, "uploads/") == []
    assert not stored(gateway, blob)


def test_an_upload_waits_until_the_admin_names_its_base_model(
    gateway: Gateway, tmp_path: Path
) -> None:
    blob = make_blob(tmp_path / "peft", config={"base_model_name_or_path": "else/Other-7B"})
    uploaded(gateway, blob)
    assert error_of(register(gateway, blob), 422)["param"] == "base_model"
    assert missing(gateway, blob) == []
    assert register(gateway, blob, base_model="tiny").status_code == 201


def test_an_upload_belongs_to_the_key_that_began_it(gateway: Gateway, blob: bytes) -> None:
    uploaded(gateway, blob)
    _, other = gateway.catalog.create_key(None, {Scope.ADMIN}, actor="test")
    path = "/admin/v1/adapters/acme/new/versions"
    body = {"digest": digest_of(blob)}
    assert gateway.request("POST", path, other, json=body).status_code == 404
    data = blob[:PART]
    assert put_part(gateway, digest_of(blob), 1, data, key=other).status_code == 404
    parts = begin(gateway, blob, other).json()["missing"]
    assert len(parts) > 1
    assert register(gateway, blob).status_code == 201


def test_a_damaged_part_is_refused(gateway: Gateway, blob: bytes) -> None:
    part = missing(gateway, blob)[0]
    wrong = base64.b64encode(hashlib.md5(b"other").digest()).decode()
    right = base64.b64encode(hashlib.md5(blob[:PART]).digest()).decode()
    assert send(gateway, blob, part, **{"content-md5": wrong}).status_code == 400
    assert part["number"] in {left["number"] for left in missing(gateway, blob)}
    assert send(gateway, blob, part, **{"content-md5": right}).status_code == 200
    assert part["number"] not in {left["number"] for left in missing(gateway, blob)}


def test_the_gateway_accepts_parts_even_if_the_store_would(gateway: Gateway, blob: bytes) -> None:
    parts = missing(gateway, blob)
    for part in parts:
        send(gateway, blob, {**part, "url": None}).raise_for_status()
    assert register(gateway, blob).status_code == 201


def test_a_part_has_its_size_and_its_number(local: Gateway, blob: bytes) -> None:
    count = len(missing(local, blob))
    digest = digest_of(blob)
    assert "want 200" in error_of(put_part(local, digest, 1, b"x" * 199), 400)["message"]
    error_of(put_part(local, digest, 1, b"x" * 201), 413)
    error = error_of(put_part(local, digest, count + 1, b"x"), 400)
    assert f"1 to {count}" in error["message"]
    error_of(put_part(local, digest, 0, b"x"), 400)
    error_of(put_part(local, "0" * 64, 1, b"x"), 404)
    assert len(missing(local, blob)) == count


def test_an_invalid_upload_is_refused_before_anything_is_stored(
    local: Gateway, blob: bytes
) -> None:
    error = error_of(begin(local, blob, size_bytes=LIMITS.max_bytes + 1), 413)
    assert str(LIMITS.max_bytes) in error["message"]
    for changes in ({"digest": "../" + "0" * 61}, {"digest": "0" * 63}, {"size_bytes": 0}):
        error_of(begin(local, blob, **changes), 400)
    error_of(begin(local, blob, size_bytes="12"), 400)
    error_of(register(local, blob), 404)
    error_of(register(local, blob, "nobody/new"), 404)
    error_of(register(local, blob, base_model="huge"), 400)
    assert keys_under(local, "uploads/") == []


def test_a_tenants_own_limit_is_checked_before_a_byte_is_sent(local: Gateway, blob: bytes) -> None:
    narrow = {"max_adapter_bytes": len(blob) - 1}
    local.admin("PATCH", "/tenants/globex", narrow).raise_for_status()
    error = error_of(begin(local, blob, tenant="globex"), 413)
    assert f"the limit is {len(blob) - 1}" in error["message"]
    assert begin(local, blob, tenant="acme").status_code == 200
    uploaded(local, blob)
    error = error_of(register(local, blob, "globex/new"), 422)
    assert "LORIKEET_MAX_ADAPTER_BYTES" in error["message"]


def test_only_an_admins_key_uploads(local: Gateway, blob: bytes) -> None:
    digest = digest_of(blob)
    uploaded(local, blob)
    for key, status in ((local.keys["acme"], 403), ("lk_wrong", 401)):
        assert begin(local, blob, key).status_code == status
        assert put_part(local, digest, 1, blob[:PART], key=key).status_code == status
        path = "/admin/v1/adapters/acme/new/versions"
        answer = local.request("POST", path, key, json={"digest": digest})
        assert answer.status_code == status


def test_the_buckets_credentials_do_not_register_an_adapter(s3_bucket: str, tmp_path: Path) -> None:
    url = f"{s3_bucket}/{uuid.uuid4().hex}"
    blob = make_blob(tmp_path / "peft", seed=9)
    with serving(tmp_path, open_store(url), part_bytes=PART) as gateway:
        mine = open_store(url)  # holders of the credentials can write anything
        mine.put_if_absent(f"uploads/{digest_of(blob)}/key-mine/upload.json", b"{}")
        mine.put_if_absent(blob_key(digest_of(blob)), blob)
        before = gateway.catalog.reader.refresh().seq

        path = "/admin/v1/adapters/acme/new/versions"
        body = {"digest": digest_of(blob)}
        signed = AWSRequest("POST", gateway.url + path, data=b"{}")
        SigV4Auth(Credentials("test", "test"), "s3", "us-east-1").add_auth(signed)
        for authorization in (signed.headers["Authorization"], "Bearer test", "Bearer key-mine"):
            answer = httpx.post(
                gateway.url + path, json=body, headers={"authorization": authorization}
            )
            assert answer.status_code == 401
        assert gateway.catalog.reader.refresh().seq == before


def test_a_full_disk_is_an_error_and_the_upload_can_resume(tmp_path: Path) -> None:
    blob = b"x" * LIMITS.max_bytes
    with serving(tmp_path) as gateway:
        assert len(missing(gateway, blob)) == 1
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(blob) // 2, hard))  # as on a full disk
        try:
            error = error_of(put_part(gateway, digest_of(blob), 1, blob), 503)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert "free space in" in error["message"]
        assert put_part(gateway, digest_of(blob), 1, blob).status_code == 200
