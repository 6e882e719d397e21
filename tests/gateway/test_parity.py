"""Parity proofs of registered and pushed versions at the gateway."""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from lorikeet.client import Client
from lorikeet.errors import LorikeetError
from lorikeet.gateway.body import split_parts
from lorikeet.parity.figures import Bounds, GapCause, Parity, Verdict
from lorikeet.parity.probes import MAX_TOKENS, Probe, Probes, parse_probes
from lorikeet.protocol.messages import Refusal
from tests.gateway.conftest import Gateway, demo_encoder, make_blob, make_peft
from tests.gateway.test_bad_requests import error_of
from tests.gateway.trainer import Trainer

ACCEPTED = Parity(Verdict.ACCEPTED, 3, 0.01, 0.03, 0.0002, base_mean=0.008)
WARNED = replace(
    ACCEPTED,
    verdict=Verdict.WARNED,
    cause=GapCause.SCALING,
    reason="scaled by 2 times the file's α",
)
REFUSED = replace(WARNED, verdict=Verdict.REFUSED, mean=1.5)
PROBE = {"token_ids": [5, 6, 7, 8], "logprobs": [-0.5, -1.0, -0.25]}
PROBES = {"probes": [PROBE]}


def upload(gateway: Gateway, tmp_path: Path, seed: int = 9) -> str:
    """Upload a blob without registering it; return its digest."""
    blob = make_blob(tmp_path / "peft", seed=seed)
    digest = hashlib.sha256(blob).hexdigest()
    body = {"digest": digest, "size_bytes": len(blob)}
    gateway.admin("POST", "/uploads", body).raise_for_status()
    path = f"/admin/v1/uploads/{digest}/parts/1"
    gateway.request("PUT", path, gateway.admin_key, content=blob).raise_for_status()
    return digest


def register(gateway: Gateway, digest: str, **wanted: Any) -> httpx.Response:
    path = "/adapters/acme/proved/versions"
    return gateway.admin("POST", path, {"digest": digest, "probes": PROBES, **wanted})


def shown(gateway: Gateway, adapter: str = "acme/proved") -> dict[str, Any]:
    versions = gateway.admin("GET", f"/adapters/{adapter}").raise_for_status().json()["versions"]
    found: dict[str, Any] = versions[-1]
    return found


def test_a_registration_with_probes_keeps_the_proof_with_the_version(
    gateway: Gateway, tmp_path: Path
) -> None:
    gateway.engines.proved = WARNED
    answer = register(gateway, upload(gateway, tmp_path)).raise_for_status().json()
    figures = {"tokens": 3, "mean": 0.01, "max": 0.03, "kl": 0.0002, "base_mean": 0.008}
    told = {"verdict": "warned", "cause": "scaling", "reason": WARNED.reason}
    assert answer["parity"] == figures | told
    assert shown(gateway)["parity"] == answer["parity"]
    assert shown(gateway, "acme/support")["parity"] is None
    (test,) = gateway.engines.proofs
    assert (str(test.adapter), test.bounds) == ("acme/proved@1", Bounds(0.05, 0.5))
    assert test.probes == Probes.model_validate(PROBES)


def test_a_refused_proof_registers_nothing_and_names_the_cause(
    gateway: Gateway, tmp_path: Path
) -> None:
    gateway.engines.proved = REFUSED
    before = gateway.catalog.reader.refresh().seq
    error = error_of(register(gateway, upload(gateway, tmp_path)), 422)
    assert (error["code"], error["param"]) == ("invalid_adapter", "probes")
    assert error["message"] == (
        "log-probabilities of 3 tokens differ from the trainer's by 1.5 nats on average, more than "
        "0.5: scaled by 2 times the file's α"
    )
    assert gateway.catalog.reader.refresh().seq == before


def test_a_version_that_exists_gets_a_new_proof_in_the_answer(
    gateway: Gateway, tmp_path: Path
) -> None:
    digest = upload(gateway, tmp_path)
    register(gateway, digest, probes=None).raise_for_status()
    gateway.engines.proved = ACCEPTED
    again = register(gateway, digest).raise_for_status().json()
    assert (again["version"], again["parity"]["verdict"]) == (1, "accepted")


@pytest.mark.parametrize(
    ("given", "bounds"),
    [
        ({"warn_above": 0.01, "refuse_above": 0.02}, Bounds(0.01, 0.02)),
        ({"refuse_above": 0.01}, Bounds(0.01, 0.01)),
        ({"warn_above": 2.0}, Bounds(2.0, 2.0)),
    ],
)
def test_bounds_of_a_proof_can_be_stated(
    gateway: Gateway, tmp_path: Path, given: dict[str, float], bounds: Bounds
) -> None:
    register(gateway, upload(gateway, tmp_path), **given).raise_for_status()
    assert gateway.engines.proofs[-1].bounds == bounds


def test_impossible_bounds_and_malformed_probes_are_refused(
    gateway: Gateway, tmp_path: Path
) -> None:
    digest = upload(gateway, tmp_path)
    error = error_of(register(gateway, digest, warn_above=0.5, refuse_above=0.1), 400)
    assert error["param"] == "refuse_above"
    error_of(register(gateway, digest, warn_above=-1.0), 400)
    for bad in (
        {"logprobs": [-1.0] * 4},
        {"base_logprobs": [-1.0]},
        {"logprobs": [0.5]},
        {"token_ids": [5]},
        {"messages": [{"role": "user"}]},
    ):
        error = error_of(register(gateway, digest, probes={"probes": [PROBE | bad]}), 400)
        assert error["param"].startswith("probes.probes[0]"), error
    assert gateway.engines.proofs == []


def test_a_replicas_refusal_of_probes_is_passed_on(gateway: Gateway, tmp_path: Path) -> None:
    gateway.engines.proved = Refusal("invalid_value", "probes: too long", "probes")
    error = error_of(register(gateway, upload(gateway, tmp_path)), 400)
    assert (error["message"], error["param"]) == ("probes: too long", "probes")


def test_another_chat_template_than_the_trainers_gives_a_warning(
    gateway: Gateway, tmp_path: Path
) -> None:
    messages = [{"role": "user", "content": "hello"}]
    own = list(demo_encoder().encode_turn("hello", 4096))
    for prompt, verdict in ((own, "accepted"), ([*own[:3], 9, 9], "warned")):
        probe = {"token_ids": [*prompt, 7], "logprobs": [-1.0], "messages": messages}
        digest = upload(gateway, tmp_path, seed=len(prompt))
        made = register(gateway, digest, probes={"probes": [probe]}).raise_for_status().json()
        assert made["parity"]["verdict"] == verdict
    assert made["parity"]["cause"] == "template"
    assert "from token 3 on" in made["parity"]["reason"]


def test_proofs_are_counted_by_verdict_and_cause(gateway: Gateway, tmp_path: Path) -> None:
    gateway.engines.proved = REFUSED
    error_of(register(gateway, upload(gateway, tmp_path)), 422)
    page = gateway.request("GET", "/metrics", gateway.admin_key).text
    found = (line for line in page.splitlines() if line.startswith("lorikeet_parity_proofs_total{"))
    assert {'cause="scaling"', 'verdict="refused"'} <= set(re.split("[{,}]", next(found)))
    assert re.search(r'lorikeet_parity_mean_nats_sum{.*base_model="tiny".*} 1\.5', page)


def push(trainer: Trainer, blob: bytes, probes: bytes, **query: Any) -> httpx.Response:
    digest = hashlib.sha256(blob).hexdigest()
    return trainer.push(probes + blob, digest=digest, probes_bytes=len(probes), **query)


def test_a_push_is_proved_on_delivered_weights_before_requests_can_use_it(
    gateway: Gateway,
) -> None:
    trainer = Trainer(gateway)
    blob, probes = trainer.blob(), Probes.model_validate(PROBES)
    gateway.engines.proved = ACCEPTED
    body = probes.model_dump_json(exclude_defaults=True).encode()
    answer = push(trainer, blob, body, wait="durable", refuse_above=0.3, alias="prod")
    assert answer.status_code == 201, answer.text
    made = answer.json()
    assert (made["parity"]["verdict"], made["aliases"]) == ("accepted", ["prod"])
    (test,) = gateway.engines.proofs
    assert (test.probes, test.bounds) == (probes, Bounds(0.05, 0.3))
    assert gateway.engines.held[test.adapter.digest] == blob
    assert shown(gateway, "acme/policy")["parity"] == made["parity"]
    assert trainer.show(made["digest"]).json()["parity"] == made["parity"]


def test_a_push_whose_proof_is_refused_leaves_no_version(gateway: Gateway) -> None:
    trainer = Trainer(gateway)
    gateway.engines.proved = REFUSED
    blob = trainer.blob()
    error = error_of(
        push(trainer, blob, Probes.model_validate(PROBES).model_dump_json().encode()), 422
    )
    assert "differ from the trainer's" in error["message"]
    assert trainer.show(hashlib.sha256(blob).hexdigest()).status_code == 404
    assert trainer.push(blob).json()["parity"] is None  # without probes, nothing is compared


@pytest.mark.parametrize(
    ("probes", "param"),
    [(b"{}", "probes"), (b'{"probes": []}', "probes"), (b"[" * 300_000, "probes")],
)
def test_a_push_with_malformed_probes_is_refused(
    gateway: Gateway, probes: bytes, param: str
) -> None:
    trainer = Trainer(gateway)
    answer = push(trainer, trainer.blob(), probes)
    assert answer.status_code in (400, 413), answer.text
    assert gateway.engines.proofs == []


def test_a_body_that_is_shorter_than_its_probes_is_refused(gateway: Gateway) -> None:
    trainer = Trainer(gateway)
    blob = trainer.blob()
    error = error_of(trainer.push(blob, probes_bytes=len(blob) + 1), 400)
    assert error["param"] == "probes_bytes"


def test_the_client_pushes_probes_and_warns_of_a_proof_that_warns(gateway: Gateway) -> None:
    trainer = Trainer(gateway)
    client = Client(gateway.url, gateway.keys["acme"], publish_key=trainer.key)
    folder = make_peft(gateway.folder / "policy", seed=4)
    gateway.engines.proved = WARNED
    probes = Probes.model_validate(PROBES)
    with pytest.warns(UserWarning, match="scaled by 2 times"):
        version = client.push(folder, "policy", probes=probes, warn_above=0.001)
    assert version.parity is not None
    assert version.parity["mean"] == 0.01
    assert gateway.engines.proofs[-1].bounds == Bounds(0.001, 0.5)
    gateway.engines.proved = REFUSED
    other = make_peft(gateway.folder / "other", seed=5)
    with pytest.raises(LorikeetError, match="differ from the trainer's") as refused:
        client.push(other, "policy", probes=probes)
    assert refused.value.code == "invalid_adapter"
    client.close()


def test_probes_are_bounded_and_errors_name_the_field() -> None:
    long = Probe(token_ids=[1] * (MAX_TOKENS // 2 + 1), logprobs=[-1.0])
    with pytest.raises(LorikeetError, match="limit is 65536"):
        parse_probes('{"probes": [%s, %s]}' % ((long.model_dump_json(),) * 2))
    with pytest.raises(LorikeetError, match=r"the probes, probes\.0\.logprobs: Field required"):
        parse_probes('{"probes": [{"token_ids": [1, 2]}]}')
    with pytest.raises(LorikeetError, match=r"the probes: .*JSON"):
        parse_probes("nonsense")


@pytest.mark.parametrize("size", [1, 3, 5, 100])
def test_probes_are_split_from_a_body_however_its_parts_are_cut(size: int) -> None:
    body = bytes(range(20))

    async def split(count: int) -> tuple[bytes, bytes]:
        async def parts() -> AsyncIterator[bytes]:
            for begin in range(0, len(body), size):
                yield body[begin : begin + size]

        head, rest = await split_parts(parts(), count)
        return head, b"".join([part async for part in rest])

    for count in (0, 1, 7, 20):
        assert asyncio.run(split(count)) == (body[:count], body[count:])
    assert asyncio.run(split(25)) == (body, b"")
