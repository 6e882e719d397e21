"""Versions that end while requests use them: replicas keep each one until its last request ends."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from lorikeet.gateway.pushing import push_pipeline, pushed_versions, routes
from tests.gateway.conftest import Gateway, chat, endless, serving
from tests.gateway.linked_peers import LinkedPeers, link
from tests.gateway.test_push_pipeline import another
from tests.gateway.trainer import Trainer, digest_of
from tests.moved_time import MovedTime
from tests.remote_store import RemoteStore
from tests.waiting import eventually


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_pipeline, "_KEEP_S", 0.05)


@pytest.fixture
def store(tmp_path: Path) -> RemoteStore:
    return RemoteStore(tmp_path / "store")


@pytest.fixture
def peers() -> LinkedPeers:
    return LinkedPeers()


@pytest.fixture
def trainer(tmp_path: Path, store: RemoteStore, peers: LinkedPeers) -> Iterator[Trainer]:
    with serving(tmp_path, store, peers=peers) as gateway:
        gateway.engines.replay = endless
        yield Trainer(gateway)


@pytest.fixture
def released(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Digests that replicas were allowed to evict."""
    digests: list[str] = []

    async def release(_base_model: str, digest: str) -> None:
        digests.append(digest)

    monkeypatch.setattr(trainer.gateway.engines, "release", release)
    return digests


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> MovedTime:
    """Clock by which versions expire, which a test moves."""
    return MovedTime(monkeypatch, push_pipeline, pushed_versions, routes)


@contextmanager
def answering(gateway: Gateway, model: str) -> Iterator[None]:
    """Keep a request in flight for the length of the context."""
    body, headers = chat(model, stream=True), {"authorization": f"Bearer {gateway.keys['acme']}"}
    url = f"{gateway.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=20) as answer:
        assert answer.status_code == 200
        yield


def is_gone(trainer: Trainer, blob: bytes) -> bool:
    return trainer.show(digest_of(blob)).status_code == 404


def is_delivered_again(gateway: Gateway, digest: str) -> bool:
    time.sleep(0.6)  # the pipeline looks every 0.25 s whether a version has ended
    gateway.engines.held.pop(digest, None)
    return eventually(lambda: digest in gateway.engines.held, within_s=5)


def test_a_version_is_kept_past_its_end_until_its_last_request_ends(
    trainer: Trainer, moved: MovedTime, released: list[str]
) -> None:
    blob = trainer.blob()
    model = trainer.push(blob, lifetime_s=60).json()["model"]
    with answering(trainer.gateway, model):
        moved.ahead_s = 60.0
        assert eventually(lambda: is_gone(trainer, blob))
        refused = trainer.gateway.post("/v1/chat/completions", chat(model))
        assert refused.json()["error"]["code"] == "model_not_found"
        assert is_delivered_again(trainer.gateway, digest_of(blob))
        assert released == []
    assert eventually(lambda: released == [digest_of(blob)])


def test_a_version_that_is_used_on_another_gateway_is_kept(
    trainer: Trainer, store: RemoteStore, peers: LinkedPeers, released: list[str]
) -> None:
    old, new, there_peers = trainer.blob(1), trainer.blob(2), LinkedPeers()
    with another(trainer.gateway, store, there_peers) as there:
        link([peers, there_peers])
        model = trainer.push(old, lifetime_s=60, keep=1).json()["model"]
        with answering(there, model):
            trainer.push(new, lifetime_s=60, keep=1)
            assert eventually(lambda: is_gone(trainer, old))
            assert is_delivered_again(trainer.gateway, digest_of(old))
            assert released == []
        assert eventually(lambda: released == [digest_of(old)])
    peers.others = ()


def test_a_version_that_a_newer_one_replaces_is_kept_for_its_requests(
    trainer: Trainer, released: list[str]
) -> None:
    old, new = trainer.blob(1), trainer.blob(2)
    model = trainer.push(old, lifetime_s=60, keep=1).json()["model"]
    with answering(trainer.gateway, model):
        trainer.push(new, lifetime_s=60, keep=1)
        assert eventually(lambda: is_gone(trainer, old))
        assert is_delivered_again(trainer.gateway, digest_of(old))
        assert released == []
    assert eventually(lambda: released == [digest_of(old)])


def test_a_version_whose_adapter_is_retired_is_kept_for_its_requests(
    trainer: Trainer, released: list[str]
) -> None:
    first, blob = trainer.blob(1), trainer.blob(2)
    trainer.push(first, wait="durable")
    model = trainer.push(blob, lifetime_s=60).json()["model"]
    assert eventually(lambda: released == [digest_of(first)])
    with answering(trainer.gateway, model):
        trainer.gateway.catalog.retire("acme", "policy", actor="test")
        assert eventually(lambda: is_gone(trainer, blob))
        assert is_delivered_again(trainer.gateway, digest_of(blob))
    assert eventually(lambda: digest_of(blob) in released)


def test_a_version_that_cannot_be_recorded_is_kept_for_its_requests(
    trainer: Trainer, store: RemoteStore, released: list[str]
) -> None:
    first, blob = trainer.blob(1), trainer.blob(2)
    trainer.push(first, wait="durable")
    store.takes_blobs = False
    model = trainer.push(blob).json()["model"]
    with answering(trainer.gateway, model):
        trainer.gateway.catalog.retire("acme", "policy", actor="test")
        store.takes_blobs = True
        assert eventually(lambda: is_gone(trainer, blob))
        assert is_delivered_again(trainer.gateway, digest_of(blob))
    assert eventually(lambda: digest_of(blob) in released)


def test_a_blob_that_is_pushed_again_after_its_end_stays_held(
    trainer: Trainer, moved: MovedTime, released: list[str]
) -> None:
    blob = trainer.blob()
    model = trainer.push(blob, lifetime_s=60).json()["model"]
    with answering(trainer.gateway, model):
        moved.ahead_s = 60.0
        assert eventually(lambda: is_gone(trainer, blob))
        assert trainer.push(blob, lifetime_s=60).json()["ready"]
    time.sleep(0.3)
    assert released == []
    moved.ahead_s = 120.0
    assert eventually(lambda: released == [digest_of(blob)])


def test_the_oldest_ended_version_beyond_the_limit_is_let_go(
    trainer: Trainer, released: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push_pipeline, "MOST_ENDED", 2)
    blobs = [trainer.blob(seed) for seed in (1, 2, 3, 4)]
    with ExitStack() as requests:
        for blob in blobs:
            model = trainer.push(blob, lifetime_s=60, keep=1).json()["model"]
            requests.enter_context(answering(trainer.gateway, model))
        assert eventually(lambda: released == [digest_of(blobs[0])])


def test_an_unused_version_is_released_at_its_end(
    trainer: Trainer, moved: MovedTime, released: list[str]
) -> None:
    blob = trainer.blob()
    trainer.push(blob, lifetime_s=60)
    moved.ahead_s = 60.0
    assert eventually(lambda: released == [digest_of(blob)])
