"""Files by OpenAI's client: uploaded, listed, read, deleted, expired and refused."""

import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from lorikeet.catalog.records import TenantRecord
from lorikeet.catalog.store.local import LocalStore
from lorikeet.errors import InsufficientQuota
from lorikeet.file_store import CONTENTS, LIFETIME_S, PREFIX, FileStore, clean_up
from lorikeet.gateway.routes import files as routes
from tests.gateway.conftest import FILES_BYTES, Gateway, serving
from tests.gateway.official_types import validate_as
from tests.gateway.test_bad_requests import error_of

LINES = b'{"custom_id": "a"}\n' * 100
TENANT = TenantRecord("acme", 0.0)


class Clock:
    """A clock that a test moves."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gateway(tmp_path: Path, clock: Clock) -> Iterator[Gateway]:
    with serving(tmp_path, clock=clock) as running:
        yield running


def upload(gateway: Gateway, content: bytes = LINES, tenant: str = "acme", **more: Any) -> Any:
    files = gateway.openai(tenant).files
    return files.create(file=("lines.jsonl", content), purpose="batch", **more)


def send(gateway: Gateway, **form: Any) -> httpx.Response:
    return gateway.request("POST", "/v1/files", gateway.keys["acme"], **form)


def test_openais_client_uploads_lists_reads_and_deletes_a_file(gateway: Gateway) -> None:
    client = gateway.openai()
    made = client.files.create(file=io.BytesIO(LINES), purpose="batch")
    validate_as("FileObject", made.model_dump())
    assert (made.bytes, made.purpose, made.status) == (len(LINES), "batch", "processed")
    assert made.expires_at == made.created_at + LIFETIME_S
    assert client.files.retrieve(made.id) == made
    assert list(client.files.list()) == [made]
    assert client.files.content(made.id).content == LINES
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.files.content(made.id)
    assert list(client.files.list()) == []
    assert not list(gateway.catalog.reader.store.list(CONTENTS))


def test_a_large_file_comes_back_as_it_was_sent(gateway: Gateway) -> None:
    content = bytes(range(256)) * 20_000
    made = upload(gateway, content)
    assert gateway.openai().files.content(made.id).content == content


def test_lists_have_pages_in_either_order(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorikeet.file_store.PAGE", 2)
    made = [upload(gateway, f"{n}".encode()).id for n in range(5)]
    files = gateway.openai().files
    assert [file.id for file in files.list()] == made[::-1]
    assert [file.id for file in files.list(order="asc", limit=1)] == made
    assert [file.id for file in files.list(after=made[1])] == [made[0]]
    assert list(files.list(purpose="batch_output")) == []
    with pytest.raises(openai.BadRequestError):
        files.list(after="file-other")
    for file in files.list():
        files.delete(file.id)
    assert list(files.list()) == [], "the id before a page may be of a deleted file"


def test_expired_files_hide_no_other(
    gateway: Gateway, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorikeet.file_store.PAGE", 2)
    kept = upload(gateway)
    after = {"anchor": "created_at", "seconds": 3600}
    for _ in range(3):
        upload(gateway, expires_after=after)
    clock.ahead_s = 3601
    assert [file.id for file in gateway.openai().files.list()] == [kept.id]


def test_a_file_expires_when_its_upload_says(gateway: Gateway, clock: Clock) -> None:
    after = {"anchor": "created_at", "seconds": 3600}
    made = upload(gateway, expires_after=after)
    assert made.expires_at == made.created_at + 3600
    kept = upload(gateway)
    clock.ahead_s = 3601
    files, store = gateway.openai().files, gateway.catalog.reader.store
    with pytest.raises(openai.NotFoundError):
        files.retrieve(made.id)
    assert [file.id for file in files.list()] == [kept.id]
    assert len(list(clean_up(store, clock(), dry_run=True))) == 1
    assert len(list(store.list(CONTENTS))) == 2
    deleted = list(clean_up(store, clock(), dry_run=False))
    assert [made.id in one.key for one in deleted] == [True]
    assert list(store.list(PREFIX)) == [f"{PREFIX}acme/{kept.id}"]


def test_contents_that_no_file_has_are_deleted_after_a_day(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    store.put_if_absent(f"{CONTENTS}acme/file-{'0' * 24}-ffffffff", b"lines")
    assert not list(clean_up(store, time.time(), dry_run=False))
    assert len(list(clean_up(store, time.time() + 86_401, dry_run=False))) == 1
    assert not list(store.list(CONTENTS))


def test_a_file_of_a_given_id_is_made_once(tmp_path: Path) -> None:
    now = [1000.0]
    store = FileStore(LocalStore(tmp_path / "store"), 10**6, lambda: now[0])
    (tmp_path / "one").write_bytes(b"one")
    (tmp_path / "two").write_bytes(b"two")
    file_id = f"file-{'0' * 24}-output"
    first = store.add("acme", tmp_path / "one", "out.jsonl", 3600, file_id)
    now[0] += 5
    assert store.add("acme", tmp_path / "two", "out.jsonl", 3600, file_id) == first
    assert store.download("acme", file_id, tmp_path / "read") == first
    assert (tmp_path / "read").read_bytes() == b"one"
    assert first.purpose == "batch_output"


def test_files_beyond_the_quota_are_refused(gateway: Gateway, clock: Clock) -> None:
    first = upload(gateway, b"x" * (FILES_BYTES - 10))
    with pytest.raises(openai.RateLimitError) as refused:
        upload(gateway, b"x" * 11)
    assert refused.value.code == "insufficient_quota"
    assert upload(gateway, b"x" * 11, tenant="globex").bytes == 11
    clock.ahead_s = LIFETIME_S + 1
    assert upload(gateway, b"x" * 11).id != first.id


@pytest.mark.parametrize(("quota_bytes", "max_files"), [(3, 10), (100, 1)])
def test_two_uploads_at_once_do_not_both_fit_where_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota_bytes: int, max_files: int
) -> None:
    monkeypatch.setattr("lorikeet.file_store.MAX_FILES", max_files)

    class Slow(LocalStore):
        def put_file(self, key: str, path: Path) -> None:
            super().put_file(key, path)
            if not refused:
                refused.append("the first is under way")
                with pytest.raises(InsufficientQuota):
                    store.upload(TENANT, path, "second", 3600)

    refused = list[str]()
    store = FileStore(Slow(tmp_path / "store"), quota_bytes, time.time)
    (tmp_path / "in").write_bytes(b"12")
    first = store.upload(TENANT, tmp_path / "in", "first", 3600)
    assert store.page("acme", 10, None, "asc", None) == ([first], False)


def test_a_tenants_own_limits_hold_and_are_shown_with_their_use(gateway: Gateway) -> None:
    first = upload(gateway)
    own = {"files_bytes": 3 * len(LINES), "max_files": 2, "batch_lines": 5}
    assert gateway.admin("PATCH", "/tenants/acme", own).json().items() >= own.items()
    upload(gateway)
    with pytest.raises(openai.RateLimitError, match=r"bytes in 2 files.*delete some") as refused:
        upload(gateway)
    assert refused.value.code == "insufficient_quota"
    gateway.openai().files.delete(first.id)
    with pytest.raises(openai.RateLimitError):
        upload(gateway, 3 * LINES)
    answer = gateway.request("GET", "/v1/limits", gateway.keys["acme"]).json()
    assert {row["limit"]: (row["most"], row["used"]) for row in answer["data"]} == {
        "files_bytes": (3 * len(LINES), len(LINES)),
        "max_files": (2, 1),
        "open_batches": (20, 0),
        "batch_lines": (5, None),
    }
    assert upload(gateway, tenant="globex").bytes == len(LINES)


def test_more_files_than_can_be_listed_are_refused(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorikeet.file_store.MAX_FILES", 2)
    upload(gateway)
    upload(gateway)
    with pytest.raises(openai.RateLimitError):
        upload(gateway)


FORM = {"purpose": "batch"}
FILE = {"file": ("lines.jsonl", LINES)}


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"data": FORM, "files": {"file": ("lines.jsonl", b"")}}, "file"),
        ({"files": FILE}, "purpose"),
        ({"data": {"purpose": "fine-tune"}, "files": FILE}, "purpose"),
        ({"data": FORM | {"more": "1"}, "files": FILE}, "more"),
        ({"data": FORM, "files": {"other": ("lines.jsonl", LINES)}}, "other"),
        ({"data": FORM | {"file": "text"}, "files": {"purpose": ("x", b"batch")}}, "file"),
        ({"data": FORM | {"expires_after[seconds]": "3600"}, "files": FILE}, None),
        (
            {
                "data": FORM
                | {"expires_after[anchor]": "created_at", "expires_after[seconds]": "10"},
                "files": FILE,
            },
            "expires_after[seconds]",
        ),
        ({"json": FORM}, "content-type"),
        ({"content": b"x", "more_headers": {"content-type": "multipart/form-data"}}, None),
        (
            {
                "content": b"--x\r\nno header",
                "more_headers": {"content-type": "multipart/form-data; boundary=x"},
            },
            None,
        ),
    ],
)
def test_a_wrong_form_is_refused(gateway: Gateway, form: dict[str, Any], param: str | None) -> None:
    error = error_of(send(gateway, **form), 400)
    assert param is None or error["param"] == param
    assert not list(gateway.catalog.reader.store.list(CONTENTS))


def test_a_file_beyond_the_size_limit_is_refused(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MAX_FILE_BYTES", 1000)
    assert error_of(send(gateway, data=FORM, files={"file": ("a", b"x" * 1001)}), 400)
    large = {"file": ("a", b"x" * 100_000)}
    assert error_of(send(gateway, data=FORM, files=large), 413)["code"] == "request_too_large"


def test_more_transfers_of_a_tenant_at_once_are_refused(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = upload(gateway)
    monkeypatch.setattr(routes, "MAX_TRANSFERS", 0)
    with pytest.raises(openai.RateLimitError):
        upload(gateway)
    with pytest.raises(openai.RateLimitError):
        gateway.openai().files.content(made.id)


def test_without_a_store_of_files_the_operator_is_told_of_the_setting(tmp_path: Path) -> None:
    with serving(tmp_path, files=None) as gateway:
        for method, path in (("GET", "/v1/files"), ("DELETE", "/v1/files/file-1")):
            answer = gateway.request(method, path, gateway.keys["acme"])
            assert "LORIKEET_FILES_BYTES" in error_of(answer, 404)["message"]
        assert error_of(send(gateway, data=FORM, files=FILE), 404)
