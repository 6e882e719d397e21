"""A pushed version is ready before the store has it, and durable as soon as the store takes it."""

import hashlib
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.gateway.app import create_app
from lorikeet.gateway.pushing import push_pipeline, pushed_versions, routes
from lorikeet.gateway.services import ServedModel, Services
from tests.gateway.conftest import LIMITS, SHAPE, Gateway, chat, encoders_of, listening, serving
from tests.gateway.linked_peers import LinkedPeers, link
from tests.gateway.test_bad_requests import error_of
from tests.gateway.trainer import Trainer, digest_of
from tests.moved_time import MovedTime
from tests.remote_store import RemoteStore
from tests.waiting import eventually


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_pipeline, "_KEEP_S", 0.1)


@pytest.fixture
def store(tmp_path: Path) -> RemoteStore:
    return RemoteStore(tmp_path / "store")


@pytest.fixture
def peers() -> LinkedPeers:
    return LinkedPeers()


@pytest.fixture
def gateway(tmp_path: Path, store: RemoteStore, peers: LinkedPeers) -> Iterator[Gateway]:
    with serving(tmp_path, store, peers=peers) as running:
        yield running


@pytest.fixture
def trainer(gateway: Gateway) -> Trainer:
    made = Trainer(gateway)
    warm = made.push(made.blob(seed=100), name="policy-warm", wait="durable")
    assert warm.is_success  # the gateway knows the key now
    return made


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> MovedTime:
    """Clock by which versions expire, which a test moves."""
    return MovedTime(monkeypatch, push_pipeline, pushed_versions, routes)


def is_durable(trainer: Trainer, blob: bytes) -> bool:
    return bool(trainer.show(digest_of(blob)).json().get("durable"))


def digest_that_answers(gateway: Gateway, model: str) -> str:
    answer = gateway.post("/v1/chat/completions", chat(model))
    assert answer.status_code == 200, answer.text
    return answer.headers["x-lorikeet-adapter-digest"]


def number_that_answers(gateway: Gateway, model: str) -> int | None:
    answer = gateway.post("/v1/chat/completions", chat(model)).json()
    number: int | None = answer["adapter"]["version"]
    return number


def test_an_unreachable_store_delays_durable_and_not_ready(
    trainer: Trainer, store: RemoteStore
) -> None:
    gateway, blob = trainer.gateway, trainer.blob()
    with store.away():
        began_s = time.monotonic()
        pushed = trainer.push(blob)
        assert time.monotonic() - began_s < 10  # not the minute for which it may wait
        version = pushed.json()
        assert (pushed.status_code, version["aliases"]) == (201, ["prod"])
        assert (version["ready"], version["durable"], version["version"]) == (True, False, None)
        for model in (version["model"], "acme/policy", "acme/policy@prod"):
            assert digest_that_answers(gateway, model) == digest_of(blob)
            assert number_that_answers(gateway, model) is None
        waited = trainer.push(blob, wait="durable", timeout_s=0.3)
        assert (waited.status_code, waited.json()) == (202, version)
        card = gateway.openai().models.retrieve(version["model"])
        assert (card.id, card.created) == (version["model"], int(version["created"]))
    assert eventually(lambda: is_durable(trainer, blob))
    now = trainer.show(digest_of(blob)).json()
    assert now | {"created": None} == version | {"durable": True, "version": 1, "created": None}
    assert digest_that_answers(gateway, version["model"]) == digest_of(blob)
    assert number_that_answers(gateway, version["model"]) == 1


def test_a_number_names_no_version_before_it_is_durable(
    trainer: Trainer, store: RemoteStore
) -> None:
    with store.away():
        assert trainer.push(trainer.blob()).is_success
        answer = trainer.gateway.post("/v1/chat/completions", chat("acme/policy@1"))
        assert answer.status_code in (404, 503)


def test_a_version_shows_once_every_replica_has_it(trainer: Trainer) -> None:
    gateway = trainer.gateway
    first, second = trainer.blob(1), trainer.blob(2)
    trainer.push(first, wait="durable")
    gateway.engines.takes_pushes = False
    pushed = trainer.push(second, alias="prod", timeout_s=0.3)
    assert (pushed.status_code, pushed.json()["aliases"]) == (202, [])
    assert not pushed.json()["ready"]
    assert trainer.show(digest_of(second)).status_code == 404
    assert digest_that_answers(gateway, "acme/policy") == digest_of(first)
    gateway.engines.takes_pushes = True
    assert eventually(lambda: trainer.show(digest_of(second)).status_code == 200)
    assert digest_that_answers(gateway, "acme/policy") == digest_of(second)
    assert eventually(lambda: is_durable(trainer, second))


def test_of_two_pushes_with_one_alias_the_later_one_keeps_it(
    trainer: Trainer, store: RemoteStore
) -> None:
    first, second = trainer.blob(1), trainer.blob(2)
    with store.away():
        for blob in (first, second):
            assert trainer.push(blob, alias="prod").json()["aliases"] == ["prod"]
            assert digest_that_answers(trainer.gateway, "acme/policy") == digest_of(blob)
        assert trainer.show(digest_of(first)).json()["aliases"] == []
    assert eventually(lambda: is_durable(trainer, first) and is_durable(trainer, second))
    record = trainer.gateway.catalog.reader.refresh().adapter("acme", "policy")
    assert [version.digest for version in record.versions] == [digest_of(first), digest_of(second)]
    assert record.aliases == {"prod": 2}


def test_a_push_over_the_tenants_limits_is_refused_before_it_shows(trainer: Trainer) -> None:
    catalog = trainer.gateway.catalog
    catalog.limit_tenant("acme", max_adapters=2, actor="test")
    assert eventually(lambda: trainer.push(trainer.blob()).status_code == 409)
    assert "acme/policy" not in {
        record.label for record in catalog.reader.refresh().adapters("acme")
    }


def test_a_tenants_pushes_in_the_pipeline_are_limited(
    trainer: Trainer, store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push_pipeline, "MOST_OF_TENANT", 2)
    with store.away():
        for seed in (1, 2):
            assert trainer.push(trainer.blob(seed)).is_success
        error = error_of(trainer.push(trainer.blob(3)), 503)
        assert error["code"] == "overloaded"
    assert eventually(lambda: trainer.push(trainer.blob(3)).is_success)


@contextmanager
def another(gateway: Gateway, store: RemoteStore, peers: LinkedPeers) -> Iterator[Gateway]:
    """Run a second gateway of the service with these peers."""
    served = {"tiny": ServedModel(SHAPE, ("org/Tiny-1B",))}
    engines = gateway.engines
    parts = AdapterCatalog(store), served, LIMITS, engines, encoders_of(engines)
    services = Services(*parts, peers=peers)
    with listening(create_app(services)) as url:
        yield replace(gateway, url=url, admin_key="")


def test_every_gateway_knows_a_ready_version(
    trainer: Trainer, store: RemoteStore, peers: LinkedPeers
) -> None:
    gateway, blob = trainer.gateway, trainer.blob()
    there_peers = LinkedPeers()
    with another(gateway, store, there_peers) as there:
        peers.others, peers.silent = (there_peers,), 1
        assert trainer.push(blob, timeout_s=0.3).status_code == 202
        peers.silent = 0
        with store.away():
            blob = trainer.blob(2)
            version = trainer.push(blob, alias="prod").json()
            assert (version["ready"], version["durable"]) == (True, False)
            for model in (version["model"], "acme/policy"):
                assert digest_that_answers(there, model) == digest_of(blob)
    peers.others = ()


def test_a_gateway_keeps_its_own_pushes_however_slow_announcements_are(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push_pipeline, "_KEEP_S", 60.0)
    monkeypatch.setattr(pushed_versions, "FORGOTTEN_S", 0.1)
    trainer.push(trainer.blob(1), alias="prod", wait="durable")
    passing = trainer.blob(2)
    assert trainer.push(passing, alias="prod", lifetime_s=60).is_success
    time.sleep(0.3)
    assert digest_that_answers(trainer.gateway, "acme/policy") == digest_of(passing)


def test_an_alias_moves_though_another_gateway_pushes_the_version_without_it(
    trainer: Trainer, store: RemoteStore, peers: LinkedPeers
) -> None:
    gateway, first, second = trainer.gateway, trainer.blob(1), trainer.blob(2)
    trainer.push(first, wait="durable")
    there_peers = LinkedPeers()
    with another(gateway, store, there_peers) as there:
        link([peers, there_peers])
        there_trainer = Trainer(there)
        there_trainer.push(first, wait="durable")
        with store.away():
            assert there_trainer.push(second).json()["aliases"] == []
            assert trainer.push(second, alias="prod").json()["aliases"] == ["prod"]
            for each in (gateway, there):
                assert digest_that_answers(each, "acme/policy") == digest_of(second)
        assert eventually(lambda: is_durable(trainer, second))
        assert eventually(
            lambda: gateway.catalog.reader.refresh().adapter("acme", "policy").aliases["prod"] == 2
        )
        for each in (gateway, there):
            assert digest_that_answers(each, "acme/policy") == digest_of(second)
    peers.others = ()


def test_a_client_that_disconnects_in_mid_body_changes_nothing(trainer: Trainer) -> None:
    blob, gateway = trainer.blob(), trainer.gateway
    at = urlsplit(gateway.url)
    head = (
        f"PUT /v1/adapters/policy/versions/{hashlib.sha256(blob).hexdigest()} HTTP/1.1\r\n"
        f"host: x\r\nauthorization: Bearer {trainer.key}\r\ncontent-length: {len(blob)}\r\n\r\n"
    )
    before = gateway.catalog.reader.refresh().seq
    with socket.create_connection((at.hostname or "", at.port or 0)) as connection:
        connection.sendall(head.encode() + blob[:100])
    time.sleep(0.2)
    assert trainer.show(digest_of(blob)).status_code == 404
    assert gateway.catalog.reader.refresh().seq == before
    assert trainer.push(blob, wait="durable").status_code == 201


def test_a_version_with_a_lifetime_expires_and_is_never_recorded(
    trainer: Trainer, moved: MovedTime
) -> None:
    gateway, first, passing = trainer.gateway, trainer.blob(1), trainer.blob(2)
    trainer.push(first, wait="durable")
    before = gateway.catalog.reader.refresh().seq
    version = trainer.push(passing, alias="prod", lifetime_s=60).json()
    assert (version["ready"], version["durable"], version["aliases"]) == (True, False, ["prod"])
    assert version["expires"] == pytest.approx(version["created"] + 60)
    assert digest_that_answers(gateway, "acme/policy") == digest_of(passing)
    moved.ahead_s = 60.0
    assert eventually(lambda: trainer.show(digest_of(passing)).status_code == 404)
    assert gateway.post("/v1/chat/completions", chat(version["model"])).status_code == 404
    assert digest_that_answers(gateway, "acme/policy") == digest_of(first)
    assert gateway.catalog.reader.refresh().seq == before


def test_a_jump_of_the_systems_clock_ends_no_lifetime(
    trainer: Trainer, moved: MovedTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    passing = trainer.blob(1)
    version = trainer.push(passing, alias="prod", lifetime_s=60).json()
    monkeypatch.setattr(moved, "monotonic", time.monotonic)
    moved.ahead_s = 3600.0
    time.sleep(0.5)  # the pipeline looks at its versions meanwhile
    assert trainer.show(digest_of(passing)).json()["ready"]
    assert digest_that_answers(trainer.gateway, version["model"]) == digest_of(passing)


def test_a_version_with_a_lifetime_that_is_pushed_without_one_becomes_durable(
    trainer: Trainer, moved: MovedTime
) -> None:
    blob = trainer.blob()
    passing = trainer.push(blob, lifetime_s=60).json()
    assert (passing["ready"], passing["durable"]) == (True, False)
    kept = trainer.push(blob, wait="durable", timeout_s=30)
    version = kept.json()
    assert (kept.status_code, version["durable"], version["expires"]) == (200, True, None)
    moved.ahead_s = 61.0
    time.sleep(0.5)  # longer than the lifetime
    assert digest_that_answers(trainer.gateway, version["model"]) == digest_of(blob)


def test_the_longer_of_two_lifetimes_holds(trainer: Trainer) -> None:
    trainer.push(trainer.blob(1), wait="durable")
    blob = trainer.blob(2)
    first = trainer.push(blob, lifetime_s=60).json()
    longer = trainer.push(blob, lifetime_s=120).json()
    assert longer["expires"] > first["expires"] + 59
    assert trainer.push(blob, lifetime_s=1).json()["expires"] == longer["expires"]


def test_a_version_in_the_pipeline_gets_the_alias_of_a_later_push(
    trainer: Trainer, store: RemoteStore
) -> None:
    gateway, first, second = trainer.gateway, trainer.blob(1), trainer.blob(2)
    trainer.push(first, wait="durable")
    with store.away():
        assert trainer.push(second).json()["aliases"] == []
        assert trainer.push(second, alias="prod").json()["aliases"] == ["prod"]
        assert digest_that_answers(gateway, "acme/policy") == digest_of(second)
    assert eventually(lambda: is_durable(trainer, second))
    assert gateway.catalog.reader.refresh().adapter("acme", "policy").aliases == {"prod": 2}


def test_a_durable_version_lends_its_lifetime_to_an_alias(
    trainer: Trainer, moved: MovedTime
) -> None:
    gateway, first, second = trainer.gateway, trainer.blob(1), trainer.blob(2)
    for blob in (first, second):
        trainer.push(blob, wait="durable")
    pushed = trainer.push(second, alias="prod", lifetime_s=60).json()
    assert (pushed["version"], pushed["aliases"]) == (2, ["prod"])
    assert digest_that_answers(gateway, "acme/policy") == digest_of(second)
    moved.ahead_s = 60.0
    assert eventually(lambda: digest_that_answers(gateway, "acme/policy") == digest_of(first))


@pytest.mark.parametrize("lifetime", [{}, {"lifetime_s": 60}])
def test_an_adapter_stays_retired_despite_a_push_in_the_pipeline(
    trainer: Trainer, store: RemoteStore, lifetime: dict[str, float]
) -> None:
    gateway, first, second = trainer.gateway, trainer.blob(1), trainer.blob(2)
    trainer.push(first, wait="durable")
    store.takes_blobs = False
    assert trainer.push(second, alias="prod", **lifetime).json()["ready"]
    gateway.catalog.retire("acme", "policy", actor="test")
    assert eventually(
        lambda: gateway.post("/v1/chat/completions", chat("acme/policy")).status_code == 404
    )
    store.takes_blobs = True
    assert eventually(lambda: trainer.show(digest_of(second)).status_code == 404)
    time.sleep(0.7)
    assert gateway.catalog.reader.refresh().adapter("acme", "policy").retired
    assert trainer.show(digest_of(second)).status_code == 404
    assert trainer.push(second, wait="durable").json()["aliases"] == ["prod"]


def test_a_push_that_fails_by_a_fault_says_so(
    trainer: Trainer, store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(key: str, path: Path) -> None:
        raise RuntimeError(f"{key} cannot be written")

    with monkeypatch.context() as patch:
        patch.setattr(store, "put_file", broken)
        assert (
            error_of(trainer.push(trainer.blob(), wait="durable"), 500)["code"] == "internal_error"
        )
    assert trainer.show(digest_of(trainer.blob())).status_code == 404
    assert trainer.push(trainer.blob(), wait="durable").status_code == 201


def test_a_tenants_versions_are_written_one_after_another(
    trainer: Trainer, store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_file, writing, together = store.put_file, list[str](), list[int]()

    def slow(key: str, path: Path) -> None:
        writing.append(key)
        together.append(len(writing))
        time.sleep(0.1)
        put_file(key, path)
        writing.remove(key)

    monkeypatch.setattr(store, "put_file", slow)
    blobs = {f"policy-{seed}": trainer.blob(seed) for seed in (1, 2, 3)}
    for name, blob in blobs.items():
        assert trainer.push(blob, name, wait="none").is_success
    for name, blob in blobs.items():
        assert trainer.push(blob, name, wait="durable").json()["durable"]
    assert together == [1, 1, 1]


def test_newer_versions_replace_older_versions_with_a_lifetime(trainer: Trainer) -> None:
    blobs = [trainer.blob(seed) for seed in (1, 2, 3)]
    kept = trainer.blob(4)
    trainer.push(kept, wait="durable")
    for blob in blobs:
        assert trainer.push(blob, lifetime_s=60, keep=2).json()["ready"]
    there = [trainer.show(digest_of(blob)).status_code for blob in (*blobs, kept)]
    assert there == [404, 200, 200, 200]
    time.sleep(0.5)  # an ended version is not announced again
    assert trainer.show(digest_of(blobs[0])).status_code == 404


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"keep": 2}, "keep"),
        ({"lifetime_s": 60, "wait": "durable"}, "wait"),
        ({"lifetime_s": 0}, "lifetime_s"),
        ({"wait": "long"}, "wait"),
        ({"timeout_s": 601}, "timeout_s"),
    ],
)
def test_an_invalid_push_names_the_field(
    trainer: Trainer, query: dict[str, Any], param: str
) -> None:
    assert error_of(trainer.push(trainer.blob(), **query), 400)["param"] == param


def test_a_misspelt_lifetime_makes_nothing_durable(trainer: Trainer) -> None:
    error = error_of(trainer.push(trainer.blob(), lifetime=60), 400)
    assert (error["code"], error["param"]) == ("unsupported_parameter", "lifetime")
    assert error["message"] == "not supported here: lifetime"
    assert trainer.show(digest_of(trainer.blob())).status_code == 404
