"""Requirements of uploads that become versions, and errors of those that do not."""

import hashlib
import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load, save

from lorikeet.catalog.catalog import AdapterCatalog, blob_key
from lorikeet.catalog.store.local import LocalStore
from lorikeet_engine.adapter_format import write_blob
from tests.gateway.conftest import LIMITS, SHAPE, Gateway, chat, make_blob, make_peft, serving
from tests.gateway.test_bad_requests import CHAT, error_of
from tests.remote_store import RemoteStore
from tests.waiting import eventually


@pytest.fixture
def blob(tmp_path: Path) -> bytes:
    return make_blob(tmp_path / "peft", seed=9)


def test_a_valid_blob_becomes_a_version_and_is_stored(gateway: Gateway, blob: bytes) -> None:
    answer = gateway.upload("acme/new", blob)
    assert answer.status_code == 201
    version = answer.json()
    assert (version["adapter"], version["version"], version["aliases"]) == ("acme/new", 1, ["prod"])
    assert version["size_bytes"] == len(blob)
    assert gateway.catalog.store.get(blob_key(version["digest"])) == blob


def test_the_same_blob_again_is_the_same_version(gateway: Gateway, blob: bytes) -> None:
    first = gateway.upload("acme/new", blob)
    again = gateway.upload("acme/new", blob)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json()


def test_a_later_version_is_prod_only_when_promoted(gateway: Gateway) -> None:
    assert gateway.register("acme/support", seed=1)["aliases"] == []
    assert gateway.register("acme/support", seed=2, promote=True)["aliases"] == ["prod"]


def test_the_base_model_is_found_by_the_last_part_of_its_name(
    gateway: Gateway, tmp_path: Path
) -> None:
    for number, name in enumerate(["tiny", "org/Tiny-1B", "Tiny-1B", "/home/ann/Tiny-1B/"]):
        config = {"base_model_name_or_path": name}
        made = make_blob(tmp_path / str(number), seed=number, config=config)
        assert gateway.upload(f"acme/a{number}", made).json()["base_model"] == "tiny"


def test_an_unknown_base_model_is_refused_unless_the_admin_names_one(
    gateway: Gateway, tmp_path: Path
) -> None:
    made = make_blob(tmp_path / "peft", config={"base_model_name_or_path": "else/Other-7B"})
    error = error_of(gateway.upload("acme/new", made), 422)
    assert (error["code"], error["param"]) == ("invalid_adapter", "base_model")
    for word in ("else/Other-7B", "tiny, wider", "--base-model NAME", "?base_model=NAME"):
        assert word in error["message"]
    assert gateway.upload("acme/new", made, base_model="tiny").json()["base_model"] == "tiny"
    unknown = gateway.upload("acme/new", made, base_model="huge")
    assert error_of(unknown, 400)["param"] == "base_model"


def test_the_error_of_an_adapter_without_a_base_model_says_so(
    gateway: Gateway, tmp_path: Path
) -> None:
    made = make_blob(tmp_path / "peft", config={"base_model_name_or_path": None})
    error = error_of(gateway.upload("acme/new", made), 422)
    assert error["message"].startswith("the adapter names no base model; served here: tiny, wider")
    assert gateway.upload("acme/new", made, base_model="tiny").json()["base_model"] == "tiny"


def edited(blob: bytes, edit: Callable[[dict[str, Any]], None], tail: bytes = b"") -> bytes:
    """Return the blob with a changed header."""
    length = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + blob[8 + length :] + tail


def with_config(blob: bytes, **changes: Any) -> bytes:
    def edit(header: dict[str, Any]) -> None:
        config = json.loads(header["__metadata__"]["lorikeet"])
        header["__metadata__"]["lorikeet"] = json.dumps(config | changes)

    return edited(blob, edit)


def with_tensors(blob: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    length = int.from_bytes(blob[:8], "little")
    tensors = load(blob)
    change(tensors)
    metadata: dict[str, str] = json.loads(blob[8 : 8 + length])["__metadata__"]
    return bytes(save(tensors, metadata))


def poisoned(value: float) -> Callable[[bytes], bytes]:
    def poison(tensors: dict[str, Any]) -> None:
        tensors[min(tensors)][1, 3] = value

    return lambda blob: with_tensors(blob, poison)


def dropped(blob: bytes) -> bytes:
    return with_tensors(blob, lambda tensors: tensors.pop(min(tensors)))


def renamed(old: str, new: str) -> Callable[[bytes], bytes]:
    def rename(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[name.replace(old, new)] = tensors.pop(name)

    return lambda blob: with_tensors(blob, rename)


def retyped(blob: bytes) -> bytes:
    def retype(tensors: dict[str, Any]) -> None:
        for name in tensors:
            tensors[name] = tensors[name].astype(np.float64)

    return with_tensors(blob, retype)


def widened(blob: bytes) -> bytes:
    def widen(tensors: dict[str, Any]) -> None:
        name = min(tensors)
        tensors[name] = np.concatenate([tensors[name]] * 2, axis=1)

    return with_tensors(blob, widen)


def with_vectors(kind: str, value: float = 1.0, more: int = 0) -> Callable[[bytes], bytes]:
    """Give each linear a vector of a kind, with `more` elements than its outputs."""

    def add(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if "lora_B" in name]:
            vector = np.full(len(tensors[name]) + more, value, np.float32)
            tensors[name.replace("lora_B.weight", kind)] = vector

    return lambda blob: with_tensors(blob, add)


@pytest.mark.parametrize("kind", ["lora_magnitude_vector", "lora_B.bias"])
def test_a_blob_with_dora_or_biases_becomes_a_version(
    gateway: Gateway, blob: bytes, kind: str
) -> None:
    answer = gateway.upload("acme/new", with_vectors(kind)(blob))
    assert answer.status_code == 201, answer.text


BAD_BLOBS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", "not a safetensors file"),
    "pickle": (lambda _: b"\x80\x04\x95" + b"cos\nsystem\n" * 20, "not a safetensors file"),
    "zip": (lambda _: b"PK\x03\x04" * 50, "not a safetensors file"),
    "truncated": (lambda blob: blob[:-5], "truncated"),
    "longer": (lambda blob: blob + b"more", "after the last tensor"),
    "header bomb": (lambda _: (2**62).to_bytes(8, "little") + b"{}", "truncated"),
    "big header": (lambda _: (99_000).to_bytes(8, "little") + b"[" * 99_000, "JSON"),
    "not json": (lambda _: (4).to_bytes(8, "little") + b"{{{{" * 9, "JSON"),
    "not packed": (
        lambda blob: edited(blob, lambda header: header.pop("__metadata__")),
        "lorikeet register",
    ),
    "config not json": (
        lambda blob: edited(blob, lambda header: header["__metadata__"].update(lorikeet="{")),
        "JSON",
    ),
    "nan": (poisoned(float("nan")), "q_proj.lora_A holds NaN or Inf"),
    "inf": (poisoned(float("-inf")), "q_proj.lora_A holds NaN or Inf"),
    "nan in a magnitude": (
        with_vectors("lora_magnitude_vector", float("nan")),
        "lora_magnitude_vector holds NaN or Inf",
    ),
    "too many magnitudes": (with_vectors("lora_magnitude_vector", more=1), "has 8 outputs"),
    "a bias that the base model lacks": (with_vectors("bias"), "the base model has none there"),
    "half missing": (dropped, "lora_A"),
    "unknown module": (renamed("self_attn.q_proj", "router"), "router"),
    "unknown tensor": (renamed("lora_A", "lora_C"), "lora_C"),
    "layer too deep": (renamed("layers.0", "layers.7"), "layers"),
    "float64": (retyped, "F64"),
    "wrong width": (widened, "16"),
    "wrong rank": (lambda blob: with_config(blob, r=3), "rank"),
    "dora": (lambda blob: with_config(blob, use_dora=True), "use_dora"),
    "modules_to_save": (
        lambda blob: with_config(blob, modules_to_save=["lm_head"]),
        "modules_to_save",
    ),
    "bias": (lambda blob: with_config(blob, bias="all"), "bias"),
    "alpha nan": (lambda blob: with_config(blob, lora_alpha=float("nan")), "NaN"),
}


def with_head(folder: Path, **config: Any) -> tuple[bytes, str]:
    """Return a blob made from a folder with a saved head, and the head's SHA-256."""
    peft = make_peft(folder / "peft", config=config)
    head = np.ones((SHAPE.vocabulary, SHAPE.hidden), np.float32)
    weights = peft / "adapter_model.safetensors"
    tensors = load(weights.read_bytes()) | {"base_model.model.lm_head.weight": head}
    weights.write_bytes(save(tensors))
    write_blob(peft, folder / "blob")
    return (folder / "blob").read_bytes(), hashlib.sha256(head.tobytes()).hexdigest()


@pytest.mark.parametrize(("spoil", "says"), BAD_BLOBS.values(), ids=list(BAD_BLOBS))
def test_a_bad_blob_is_refused_with_the_reason(
    unchanged: Gateway, blob: bytes, spoil: Callable[[bytes], bytes], says: str
) -> None:
    before = unchanged.catalog.reader.refresh()
    error = error_of(unchanged.upload("acme/support", spoil(blob)), 422)
    assert error["code"] == "invalid_adapter"
    assert says in error["message"]
    assert "/tmp" not in error["message"]
    assert unchanged.catalog.reader.refresh() is before


def test_a_blob_with_a_saved_head_is_accepted_if_the_head_is_the_base_models(
    gateway: Gateway, tmp_path: Path
) -> None:
    made, digest = with_head(tmp_path)
    error = error_of(gateway.upload("acme/headed", made), 422)
    assert (error["code"], error["param"]) == ("invalid_adapter", "lm_head")
    assert "save_embedding_layers=False" in error["message"]
    gateway.engines.base_matrices.add(digest)
    assert gateway.upload("acme/headed", made).status_code == 201


def test_of_a_head_that_was_trained_whole_the_rows_that_differ_become_the_version(
    gateway: Gateway, tmp_path: Path
) -> None:
    made, _ = with_head(tmp_path, modules_to_save=["lm_head"])
    gateway.engines.changed = [3, 9]
    first, again = gateway.upload("acme/headed", made), gateway.upload("acme/headed", made)
    assert (first.status_code, again.status_code) == (201, 200)
    version = first.json()
    assert version == again.json()
    stored = gateway.catalog.store.get(blob_key(version["digest"]))
    assert hashlib.sha256(stored).hexdigest() == version["digest"]
    rows = load(stored)["base_model.model.lm_head.modules_to_save.weight"]
    assert rows.shape == (2, SHAPE.hidden)
    assert version["touches"]["tokens"] == 2


def test_a_rank_above_the_limit_is_refused(unchanged: Gateway, tmp_path: Path) -> None:
    made = make_blob(tmp_path, rank=5)
    error = error_of(unchanged.upload("acme/support", made), 422)
    assert "rank 5" in error["message"]
    assert "4" in error["message"]


def test_an_adapter_of_another_base_model_does_not_fit(unchanged: Gateway, blob: bytes) -> None:
    error = error_of(unchanged.upload("acme/support", blob, base_model="wider"), 422)
    assert "another base model" in error["message"]


def test_an_upload_above_the_limit_is_refused(unchanged: Gateway) -> None:
    error = error_of(unchanged.upload("acme/support", b"x" * (LIMITS.max_bytes + 1)), 413)
    assert error["code"] == "request_too_large"
    assert "LORIKEET_MAX_ADAPTER_BYTES" in error["message"]
    path = "/admin/v1/adapters/acme/support/versions"
    parts = (b"x" * 10_000 for _ in range(LIMITS.max_bytes // 10_000 + 1))
    error_of(unchanged.request("PUT", path, unchanged.admin_key, content=parts), 413)


def test_names_and_flags_are_checked(unchanged: Gateway, blob: bytes) -> None:
    assert error_of(unchanged.upload("nobody/x", blob), 404)["code"] == "tenant_not_found"
    assert error_of(unchanged.upload("acme/X", blob), 400)["param"] == "name"
    assert error_of(unchanged.upload("acme/a..b", blob), 400)["param"] == "name"
    assert error_of(unchanged.upload("acme/x", blob, promote="perhaps"), 400)["param"] == "promote"


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("nobody/x/versions", b"404"),
        ("acme/X/versions", b"400"),
        ("acme/x/versions?base_model=huge", b"400"),
        ("acme/x/versions?promote=perhaps", b"400"),
    ],
)
def test_errors_in_the_address_are_found_before_the_body_is_sent(
    unchanged: Gateway, target: str, says: bytes
) -> None:
    address = httpx.URL(unchanged.url)
    head = (
        f"PUT /admin/v1/adapters/{target} HTTP/1.1\r\nhost: x\r\ncontent-length: 50000\r\n"
        f"authorization: Bearer {unchanged.admin_key}\r\n\r\n"
    )
    with socket.create_connection((address.host, address.port or 0), timeout=5) as connection:
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 " + says)


def test_a_flood_of_uploads_does_not_delay_a_revocation(tmp_path: Path) -> None:
    blobs = [make_blob(tmp_path / "peft", seed=seed) for seed in range(40)]
    store = RemoteStore(tmp_path / "store")
    with serving(tmp_path, store, refresh_s=0.05) as gateway, ThreadPoolExecutor(40) as clients:
        assert gateway.post(CHAT, chat("tiny")).status_code == 200
        with store.hangs():
            answers = [clients.submit(gateway.upload, "acme/many", blob) for blob in blobs]
            time.sleep(1.0)
            elsewhere = AdapterCatalog(LocalStore(tmp_path / "store"))
            (key,) = elsewhere.reader.refresh().keys("acme")
            elsewhere.revoke_key(key.id, actor="test")
            assert eventually(lambda: gateway.post(CHAT, chat("tiny")).status_code == 401)
        assert {answer.result().status_code for answer in answers} == {201}
