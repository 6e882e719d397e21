"""Failures of a store in S3: lost answers, stalls, conflicts, missing rights; and their errors."""

import hashlib
import http.client
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from ipaddress import ip_address
from pathlib import Path

import pytest
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.records import TenantRecord
from lorikeet.catalog.store import s3
from lorikeet.catalog.store.object_store import ObjectStore, open_store
from lorikeet.errors import NotFound, ObjectNotFound, StoreError, StoreRefused
from lorikeet.file_store import FileStore
from lorikeet.response_store import ResponseStore, StoredResponse
from tests.s3_proxy import proxied

MIB = 2**20
KUBERNETES = Path(__file__).parents[2] / "k8s" / "README.md"


@pytest.fixture
def url(s3_bucket: str) -> str:
    return f"{s3_bucket}/{uuid.uuid4().hex}"


def test_a_commit_with_a_lost_answer_is_retried_and_counts_once(url: str) -> None:
    statuses: list[int] = []

    def lose_the_first_answer(request: BaseHTTPRequestHandler) -> bool:
        if request.command != "PUT" or "/log/" not in request.path:
            return False
        status, _, _ = request.forward()  # type: ignore[attr-defined]
        statuses.append(status)
        if len(statuses) == 1:
            request.close_connection = True
            return True
        return False

    with proxied(lose_the_first_answer):
        catalog = AdapterCatalog.init(open_store(url))

    assert statuses == [200, 412]  # the retry met the object that the first attempt wrote
    assert catalog.reader.state.seq == 1
    assert CatalogReader(open_store(url)).refresh().seq == 1


def test_a_conflict_of_conditional_writes_is_retried(url: str) -> None:
    refused: list[str] = []

    def answer_409_twice(request: BaseHTTPRequestHandler) -> bool:
        if request.command != "PUT" or len(refused) == 2:
            return False
        refused.append(request.path)
        body = b"<Error><Code>ConditionalRequestConflict</Code><Message>m</Message></Error>"
        request.send_response(409)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)
        return True

    with proxied(answer_409_twice):
        open_store(url).put_if_absent("log/1", b"data")

    assert len(refused) == 2
    assert open_store(url).get("log/1") == b"data"


def test_a_writer_that_dies_during_a_write_leaves_no_object(url: str) -> None:
    """MiniStack stores the bytes that arrived, unless a digest says that some are missing."""
    cut: list[str] = []

    def forward_a_part(request: BaseHTTPRequestHandler) -> bool:
        if request.command != "PUT" or cut:
            return False
        cut.append(request.path)
        server = http.client.HTTPConnection(request.upstream)  # type: ignore[attr-defined]
        server.putrequest(request.command, request.path, skip_host=True)
        for name, value in request.headers.items():
            if name != "Expect":
                server.putheader(name, value)
        server.endheaders(b"an en")
        server.close()
        time.sleep(0.5)  # the server stores or refuses what it has
        request.close_connection = True
        return True

    with proxied(forward_a_part):
        open_store(url).put_if_absent("log/1", b"an entry")

    assert len(cut) == 1
    assert open_store(url).get("log/1") == b"an entry"  # the second attempt met no half entry


def test_a_download_resumes_where_a_connection_broke(url: str, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(data := os.urandom(20 * MIB + 7))
    open_store(url).put_file("blob", tmp_path / "in")
    ranges: list[str] = []

    def break_after_3_mib(request: BaseHTTPRequestHandler) -> bool:
        if request.command != "GET":
            return False
        ranges.append(request.headers["Range"])
        _, _, body = request.forward()  # type: ignore[attr-defined]
        request.send_response(206)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body[: 3 * MIB])
        request.close_connection = len(body) > 3 * MIB
        return True

    with proxied(break_after_3_mib):
        digest = open_store(url).download("blob", tmp_path / "out")

    assert digest == hashlib.sha256(data).hexdigest()
    assert (tmp_path / "out").read_bytes() == data
    starts = [0, 3 * MIB, 6 * MIB]  # requested in each full range of 8 MiB
    wanted = [at + start for at in (0, 8 * MIB) for start in starts]
    wanted += [16 * MIB, 19 * MIB]
    assert sorted(int(header[6:].split("-")[0]) for header in ranges) == wanted


def test_a_failed_range_fails_the_download_with_its_error(url: str, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(os.urandom(20 * MIB))
    open_store(url).put_file("blob", tmp_path / "in")

    def refuse_the_last(request: BaseHTTPRequestHandler) -> bool:
        if not request.headers.get("Range", "").startswith(f"bytes={16 * MIB}-"):
            return False
        body = b"<Error><Code>AccessDenied</Code></Error>"
        request.send_response(403)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)
        return True

    with proxied(refuse_the_last), pytest.raises(StoreRefused, match="GetObject is not allowed"):
        open_store(url).download("blob", tmp_path / "out")


@pytest.fixture
def hasty_store(url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], ObjectStore]:
    """Factory of stores that give up a silent connection after 0.6 s, or 1.2 s with long timeout.

    These stores retry nothing after 1.15 s. Tests use an ordinary store for calls that should
    succeed, since the server of a busy machine may be as slow as these timeouts.
    """

    def store() -> ObjectStore:
        with monkeypatch.context() as patch:
            patch.setattr(s3, "_CONFIG", s3._CONFIG.merge(Config(read_timeout=0.6)))
            patch.setattr(s3, "_LONG_TIMEOUT", Config(read_timeout=1.2))
            opened = open_store(url)
        monkeypatch.setattr(s3, "_RETRY_WINDOW_S", 1.15)
        return opened

    return store


@contextmanager
def stalling(stalls: Callable[[BaseHTTPRequestHandler], bool], after: int = 0) -> Iterator[None]:
    """Stop answering the requests chosen by `stalls`, after `after` bytes of the body."""
    ended = threading.Event()

    def stall(request: BaseHTTPRequestHandler) -> bool:
        if not stalls(request):
            return False
        if after:
            _, _, body = request.forward()  # type: ignore[attr-defined]
            request.send_response(206)
            request.send_header("Content-Length", str(len(body)))
            request.end_headers()
            request.wfile.write(body[:after])
        ended.wait(10)
        request.close_connection = True
        return True

    with proxied(stall):
        try:
            yield
        finally:
            ended.set()


@pytest.mark.parametrize(
    "act",
    [
        lambda store: store.get("a"),
        lambda store: list(store.list("a")),
        lambda store: store.put_if_absent("a", b"1"),
        lambda store: store.parts.begin("a"),
    ],
    ids=["get", "list", "put", "begin"],
)
def test_an_unanswered_call_is_retried_once_and_fails_within_seconds(
    hasty_store: Callable[[], ObjectStore], act: Callable[[ObjectStore], object]
) -> None:
    commands: list[str] = []

    def every(request: BaseHTTPRequestHandler) -> bool:
        commands.append(request.command)
        return True

    with stalling(every):
        began_s = time.monotonic()
        with pytest.raises(StoreError, match="Read timeout"):
            act(hasty_store())
        assert time.monotonic() - began_s < 10
    assert len(commands) == 2


@pytest.mark.parametrize(
    "act",
    [
        lambda store, _, file: store.put_file("b", file),
        lambda store, *_: store.touch("a"),
        lambda store, token, file: store.parts.put("up", token, 1, file),
        lambda store, token, _: store.parts.join("up", token),
        lambda store, *_: store.parts.copy("a", "b"),
    ],
    ids=["put_file", "touch", "put", "join", "copy"],
)
def test_an_unanswered_write_with_long_timeout_is_not_retried(
    url: str,
    hasty_store: Callable[[], ObjectStore],
    tmp_path: Path,
    act: Callable[[ObjectStore, str, Path], object],
) -> None:
    (tmp_path / "in").write_bytes(b"data")
    store = open_store(url)
    store.put_file("a", tmp_path / "in")
    store.parts.put("up", token := store.parts.begin("up"), 1, tmp_path / "in")
    hung: list[str] = []

    def writes(request: BaseHTTPRequestHandler) -> bool:
        if request.command in ("PUT", "POST"):
            hung.append(request.path)
        return request.command in ("PUT", "POST")

    with stalling(writes):
        began_s = time.monotonic()
        with pytest.raises(StoreError, match="Read timeout"):
            act(hasty_store(), token, tmp_path / "in")
        assert time.monotonic() - began_s < 10
    assert len(hung) == 1


def test_the_long_timeout_exceeds_the_retry_window_and_stays_below_15_s() -> None:
    assert s3._STALL_TIMEOUT_S < s3._RETRY_WINDOW_S < s3._LONG_TIMEOUT.read_timeout < 15  # type: ignore[attr-defined]


def test_a_stalled_download_resumes_on_another_connection(
    url: str, hasty_store: Callable[[], ObjectStore], tmp_path: Path
) -> None:
    (tmp_path / "in").write_bytes(data := os.urandom(9 * MIB))
    open_store(url).put_file("blob", tmp_path / "in")
    stalled: list[str] = []

    def the_first(request: BaseHTTPRequestHandler) -> bool:
        if stalled or not request.headers.get("Range", "").startswith("bytes=0-"):
            return False
        stalled.append(request.path)
        return True

    with stalling(the_first, after=MIB):
        digest = hasty_store().download("blob", tmp_path / "out")

    assert digest == hashlib.sha256(data).hexdigest()
    assert stalled


def test_a_download_that_receives_no_byte_fails_within_seconds(
    url: str, hasty_store: Callable[[], ObjectStore], tmp_path: Path
) -> None:
    (tmp_path / "in").write_bytes(os.urandom(9 * MIB))
    open_store(url).put_file("blob", tmp_path / "in")

    with stalling(lambda request: "Range" in request.headers):
        began_s = time.monotonic()
        with pytest.raises(StoreError, match="blob: Read timeout"):
            hasty_store().download("blob", tmp_path / "out")
        assert time.monotonic() - began_s < 15


def test_the_missing_rest_of_a_short_body_is_requested_again(url: str, tmp_path: Path) -> None:
    """A short Content-Length raises no error in the HTTP client."""
    (tmp_path / "in").write_bytes(data := os.urandom(2 * MIB))
    open_store(url).put_file("blob", tmp_path / "in")

    def halve(request: BaseHTTPRequestHandler) -> bool:
        if request.command != "GET":
            return False
        _, _, body = request.forward()  # type: ignore[attr-defined]
        request.send_response(206)
        request.send_header("Content-Length", str((len(body) + 1) // 2))
        request.end_headers()
        request.wfile.write(body[: (len(body) + 1) // 2])
        return True

    with proxied(halve):
        digest = open_store(url).download("blob", tmp_path / "out")

    assert digest == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (403, "AccessDenied", "not allowed: the role needs s3:ListBucket"),
        (403, "SignatureDoesNotMatch", "credentials are refused"),
        (400, "ExpiredToken", "credentials are refused"),
        (501, "NotImplemented", "does not implement .*another store"),
    ],
)
def test_a_refusal_names_its_remedy(url: str, status: int, code: str, message: str) -> None:
    def refuse(request: BaseHTTPRequestHandler) -> bool:
        body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)
        return True

    with proxied(refuse):
        store = open_store(url)
        for act in (
            lambda: store.get("a"),
            lambda: store.put_if_absent("a", b""),
            lambda: list(store.list("a")),
        ):
            with pytest.raises(StoreError, match=message):
                act()


def test_a_missing_bucket_is_named_and_is_no_missing_object(s3_bucket: str, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"1")
    store = open_store("s3://no-such-bucket/x")

    for act in (
        lambda: store.get("a"),
        lambda: store.put_if_absent("a", b""),
        lambda: store.put_file("a", tmp_path / "in"),
        lambda: list(store.list("")),
        lambda: CatalogReader(store).refresh(),
    ):
        with pytest.raises(
            StoreRefused, match="'no-such-bucket' does not exist: create it"
        ) as told:
            act()
        assert not isinstance(told.value, ObjectNotFound)


def test_missing_credentials_and_server_name_their_remedy(
    url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    with pytest.raises(StoreError, match="check the network, AWS_ENDPOINT_URL_S3"):
        open_store(url).get("a")

    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(StoreError, match="no AWS credentials: set AWS_ACCESS_KEY_ID"):
        open_store(url).get("a")


def test_a_store_sees_only_its_prefix_of_the_bucket(s3_bucket: str) -> None:
    name = uuid.uuid4().hex
    inner, outer = open_store(f"{s3_bucket}/{name}/a/"), open_store(f"{s3_bucket}/{name}")
    inner.put_if_absent("x", b"1")
    open_store(f"{s3_bucket}/{name}/ab").put_if_absent("y", b"2")

    assert list(inner.list("")) == ["x"]
    assert list(outer.list("")) == ["a/x", "ab/y"]
    assert inner.url == f"{s3_bucket}/{name}/a"


def test_stored_responses_use_the_rights_that_the_documentation_gives_gateways(url: str) -> None:
    rights = set[str]()

    def note(request: BaseHTTPRequestHandler) -> bool:
        assert "/responses/acme/resp_" in request.path
        rights.add(f"s3:{request.command.title()}Object")
        return False

    saved = StoredResponse(0, {"id": f"resp_{'a' * 32}", "output": []}, [])
    with proxied(note):
        responses = ResponseStore(open_store(url), lifetime_s=60, clock=lambda: 0)
        responses.save("acme", saved)
        assert responses.get("acme", saved.response["id"]) == saved
        responses.delete("acme", saved.response["id"])
        with pytest.raises(NotFound):
            responses.get("acme", saved.response["id"])
    assert rights == {"s3:PutObject", "s3:GetObject", "s3:DeleteObject"}
    (row,) = re.findall(r"^\| `lorikeet` \(gateways.*", KUBERNETES.read_text(), re.MULTILINE)
    assert "`s3:GetObject`, `s3:PutObject` and `s3:ListBucket` under the catalog's prefix" in row
    assert "`s3:DeleteObject` under `uploads/`, and under `responses/`" in row


def test_files_in_a_bucket_need_only_rights_that_a_gateway_has(url: str, tmp_path: Path) -> None:
    rights = set[tuple[str, str]]()

    def note(request: BaseHTTPRequestHandler) -> bool:
        place = re.search("/(files|file_contents)/acme/", request.path)
        rights.add((request.command, place[1] if place else "list"))
        return False

    (tmp_path / "sent").write_bytes(b"lines")
    with proxied(note):
        files = FileStore(open_store(url), 10**6, time.time)
        files.check_quota(TenantRecord("acme", 0.0), 5)
        made = files.add("acme", tmp_path / "sent", "lines.jsonl", 3600)
        assert files.page("acme", 10, None, "desc", None) == ([made], False)
        assert files.download("acme", made.id, tmp_path / "read") == made
        assert (tmp_path / "read").read_bytes() == b"lines"
        files.delete("acme", made.id)
        with pytest.raises(NotFound):
            files.get("acme", made.id)
    deleted = {place for command, place in rights if command == "DELETE"}
    assert deleted == {"files", "file_contents"}
    assert {command for command, _ in rights} == {"GET", "HEAD", "PUT", "DELETE"}
    (row,) = re.findall(r"^\| `lorikeet` \(gateways.*", KUBERNETES.read_text(), re.MULTILINE)
    assert "`files/`, `file_contents/`, `open_batches/` and `batch_runs/` where files are" in row


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1 with its key, in one PEM file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    path.write_bytes(private + signed.public_bytes(serialization.Encoding.PEM))
    return path


def test_writes_over_tls_have_a_length_and_no_checksum_trailer(
    url: str, certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ceph 16 refuses uploads in chunks with a trailer (MissingContentLength)."""
    written: list[dict[str, str]] = []

    def note(request: BaseHTTPRequestHandler) -> bool:
        if request.command == "PUT":
            written.append({name.lower(): value for name, value in request.headers.items()})
        return False

    # A part is sent once, and must be stored within 12 s: small parts, for a busy machine.
    monkeypatch.setattr(
        s3,
        "_TRANSFER",
        TransferConfig(MIB, multipart_chunksize=5 * MIB, preferred_transfer_client="classic"),
    )
    file, copy = tmp_path / "file", tmp_path / "copy"
    file.write_bytes(os.urandom(6 * MIB))  # uploaded in two parts
    with proxied(note, certificate):
        store = open_store(url)
        store.put_if_absent("small", b"bytes")
        store.put_file("large", file)
        token = store.parts.begin("upload")
        store.parts.put("upload", token, 1, certificate)
        assert store.get("small") == b"bytes"
        store.download("large", copy)
    assert copy.read_bytes() == file.read_bytes()
    assert len(written) >= 4
    for headers in written:
        assert int(headers["content-length"]) > 0
        assert not {"x-amz-trailer", "x-amz-decoded-content-length"} & headers.keys()
