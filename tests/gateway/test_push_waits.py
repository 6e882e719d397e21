"""Waiting pushes and hanging uploads do not delay other pushes."""

import asyncio
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from starlette.requests import Request

from lorikeet.gateway.pushing import routes
from lorikeet.gateway.pushing.push_pipeline import Push
from lorikeet.gateway.pushing.routes import PushEndpoints, PushQuery
from tests.gateway.conftest import Gateway, leaving, serving
from tests.gateway.test_bad_requests import error_of
from tests.gateway.trainer import Trainer, digest_of
from tests.remote_store import RemoteStore
from tests.waiting import eventually


@pytest.fixture
def store(tmp_path: Path) -> RemoteStore:
    return RemoteStore(tmp_path / "store")


@pytest.fixture
def gateway(tmp_path: Path, store: RemoteStore) -> Iterator[Gateway]:
    with serving(tmp_path, store) as running:
        yield running


@pytest.fixture
def trainer(gateway: Gateway) -> Trainer:
    return Trainer(gateway)


def test_a_push_beyond_the_limit_of_waiting_pushes_is_answered_at_once(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_MOST_WAITING", 2)
    gateway, blob = trainer.gateway, trainer.blob()
    gateway.engines.takes_pushes = False
    with ThreadPoolExecutor(3) as clients:
        asked = [clients.submit(trainer.push, blob, timeout_s=30) for _ in range(3)]
        assert eventually(lambda: any(each.done() for each in asked))
        assert sum(each.done() for each in asked) == 1
        gateway.engines.takes_pushes = True
        codes = sorted(each.result().status_code for each in asked)
    assert codes == [201, 201, 202]


def test_a_push_goes_on_when_its_waiting_client_disconnects(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_MOST_WAITING", 1)
    gateway, blob = trainer.gateway, trainer.blob()
    gateway.engines.takes_pushes = False
    waiting, wait = list[Push](), PushEndpoints.wait

    async def counted(
        endpoints: PushEndpoints, request: Request, push: Push, query: PushQuery
    ) -> None:
        waiting.append(push)
        try:
            await wait(endpoints, request, push, query)
        finally:
            waiting.remove(push)

    monkeypatch.setattr(PushEndpoints, "wait", counted)
    path = f"/v1/adapters/policy/versions/{digest_of(blob)}?alias=next"
    with leaving(gateway, "PUT", path, trainer.key, blob):
        assert eventually(lambda: waiting, within_s=20)
    assert eventually(lambda: not waiting)
    with ThreadPoolExecutor(1) as clients:
        again = clients.submit(trainer.push, blob, timeout_s=30)
        time.sleep(0.2)
        assert not again.done()  # else too many waited
        gateway.engines.takes_pushes = True
        assert again.result().json()["aliases"] == ["next", "prod"]


def test_uploads_that_hang_at_the_store_keep_no_push_from_being_ready(
    trainer: Trainer, store: RemoteStore
) -> None:
    gateway, (pushed_blob, *blobs) = trainer.gateway, [trainer.blob(seed) for seed in range(1, 6)]
    with ThreadPoolExecutor(4) as admins, store.hangs():
        uploads = [
            admins.submit(gateway.upload, f"acme/upload-{at}", blob)
            for at, blob in enumerate(blobs)
        ]
        assert eventually(lambda: store.hanging == 4)
        pushed = trainer.push(pushed_blob, timeout_s=30)
        assert (pushed.status_code, pushed.json()["ready"]) == (201, True)
    assert [upload.result().status_code for upload in uploads] == [201] * 4


def test_a_refused_pushs_folder_is_removed_off_the_event_loop(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_loop: list[bool] = []

    class Folder(tempfile.TemporaryDirectory[str]):
        def cleanup(self) -> None:
            in_loop.append(asyncio._get_running_loop() is not None)
            super().cleanup()

    monkeypatch.setattr(tempfile, "TemporaryDirectory", Folder)
    assert error_of(trainer.push(trainer.blob(), digest="0" * 64), 422)["param"] == "digest"
    assert in_loop == [False]
