"""Part of a request that the router reads."""

from array import array
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lorikeet.protocol.messages import Call, EncodedCall, Endpoint, TokenIds, Work
from lorikeet.routing.fleet import Fleet
from lorikeet.routing.locations import BLOCK_TOKENS, MAX_HASHED_BLOCKS
from lorikeet.serving.request_router import AdapterAffinityRouter, routing_request_of
from lorikeet_engine.adapter import AdapterRef

REF = AdapterRef("acme", "support", 1, "d" * 64)
HASHED = MAX_HASHED_BLOCKS * BLOCK_TOKENS


def encoded(*prompts: TokenIds) -> EncodedCall:
    call = Call("r", Endpoint.CHAT, 0, "acme", "tiny", REF, 8, 4096, n=2)
    return EncodedCall(call, prompts)


def test_the_work_is_of_all_prompts_tokens_and_choices() -> None:
    two = routing_request_of(encoded(array("i", [1] * 30), array("i", [2] * 12)))
    assert two.work == Work(42, rank=8, adapter_bytes=4096, sequences=4)
    assert (two.adapter, two.tenant) == (REF, "acme")


def test_the_prefix_is_the_first_prompts_beginning() -> None:
    long = array("i", [7] * (HASHED + BLOCK_TOKENS))
    hashes = routing_request_of(encoded(long)).prefix_hashes
    assert len(hashes) == MAX_HASHED_BLOCKS
    assert routing_request_of(encoded(long[:HASHED], long)).prefix_hashes == hashes
    assert routing_request_of(encoded(array("i", [8]) + long)).prefix_hashes != hashes


@pytest.mark.parametrize(
    ("lost", "allowed"),
    [((), {"r1", "r2", "r3"}), (("r1", "r3"), {"r2"}), (("r1", "r2", "r3"), {"r1", "r2", "r3"})],
)
def test_a_call_avoids_replicas_that_were_lost_with_it_if_there_are_others(
    lost: tuple[str, ...], allowed: set[str]
) -> None:
    router = AdapterAffinityRouter.__new__(AdapterAffinityRouter)
    router._fleet, router._listed, router._by_name = Fleet(), [], {}
    router._fleet.set_replicas(["r1", "r2", "r3"])
    router._replica_queue_len_cache = SimpleNamespace(get=lambda _: None)  # type: ignore[assignment]
    listed = [
        SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in ("r1", "r2", "r3")
    ]
    call = replace(encoded(array("i", [1] * 30)), attempt=len(lost), lost=lost)
    pending = SimpleNamespace(args=(call,), kwargs={})
    router._fleet.on_begun(call.attempt_id)
    ranks = router._ranked(listed, pending)  # type: ignore[arg-type]
    assert {each.replica_id.unique_id for rank in ranks for each in rank} == allowed
    decision = router._fleet.decision(call.attempt_id)
    assert decision is not None
    assert decision.replica in allowed
    assert {candidate.replica for candidate in decision.candidates} <= allowed
