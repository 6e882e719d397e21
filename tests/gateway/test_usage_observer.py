"""Tokens that a gateway counts for a call, by how the call ends."""

import asyncio
from contextlib import suppress
from dataclasses import replace

from lorikeet.errors import GenerationFailed, LorikeetError, Unavailable
from lorikeet.gateway.usage_observer import UsageObserver
from lorikeet.prices import FREE, Price
from lorikeet.protocol.messages import (
    AnswerHeader,
    Attempt,
    Call,
    Endpoint,
    FinalUsage,
    Refusal,
    RunningUsage,
)
from lorikeet.usage.ledger import UsageAccount, UsageCounts, UsageLedger
from lorikeet_engine.adapter import AdapterRef, Composition

CALL = Call("r", Endpoint.CHAT, 0, "acme", "tiny", None)
TAKEN, HEADER = Attempt("r", "r0", 0.1), AnswerHeader("r0", None, None)
LOST = Attempt("r", "r0", 0.2, (), "the replica was lost")
RUNNING, FINAL, BYTES = RunningUsage(7, 5, 2), FinalUsage(5, 2, 9), b"data: ..."


def counted(*items, error=None, call=CALL, price=FREE):
    """Return the counts of a call with these items, by account, after an end with an error."""
    ledger = UsageLedger()
    observer = UsageObserver(ledger, call, "tiny", price)
    with suppress(LorikeetError, asyncio.CancelledError), observer:
        for item in items:
            if isinstance(item, bytes):
                observer.on_first_bytes()
            observer.on_item(item)
        if error is not None:
            raise error
    return dict(*ledger.take().values())


def counts(*items, **how):
    found = counted(*items, **how)
    return found.get(UsageAccount("acme", "tiny"))


def test_a_complete_answer_counts_its_final_usage_even_if_its_client_reads_no_more():
    for items in ((BYTES, FINAL, BYTES), (FINAL,)):
        assert counts(TAKEN, HEADER, RUNNING, *items) == UsageCounts(1, 5, 2, 9)


def test_a_client_that_leaves_pays_for_tokens_until_then():
    assert counts(TAKEN, HEADER) == UsageCounts(requests=1)
    assert counts(TAKEN, HEADER, RUNNING) == UsageCounts(1, 5, 2, 7)
    assert counts(TAKEN, HEADER, RUNNING, BYTES) == UsageCounts(1, 5, 2, 7)


def test_a_call_that_no_replica_took_counts_nothing():
    assert counts() is None
    assert counts(error=Unavailable("no replica")) is None


def test_a_failure_before_the_first_bytes_counts_nothing():
    refusal = Refusal("generation_failed", "it broke")
    assert counts(TAKEN, HEADER, RUNNING, refusal, error=GenerationFailed("it broke")) is None
    assert counts(TAKEN, HEADER, RUNNING, error=GenerationFailed("it broke")) is None


def test_a_call_that_its_gateway_cancels_counts_only_after_its_first_bytes():
    # such as a line of a batch, which another gateway answers again
    ends = asyncio.CancelledError()
    assert counts(TAKEN, HEADER, RUNNING, error=ends) is None
    assert counts(TAKEN, HEADER, RUNNING, BYTES, error=ends) == UsageCounts(1, 5, 2, 7)


def test_a_failure_within_an_answer_counts_the_tokens_until_then():
    refusal = Refusal("generation_failed", "it broke")
    assert counts(TAKEN, HEADER, RUNNING, BYTES, refusal) == UsageCounts(1, 5, 2, 7)


def test_an_answer_counts_once_if_another_replica_goes_on_and_nothing_if_none_does():
    begun = TAKEN, HEADER, RUNNING, BYTES
    assert counts(*begun, LOST) is None
    assert counts(*begun, LOST, TAKEN, HEADER) == UsageCounts(1, 5, 2, 7)
    assert counts(*begun, LOST, TAKEN, HEADER, BYTES, FINAL, BYTES) == UsageCounts(1, 5, 2, 9)


def test_tokens_of_background_calls_count_as_flex_too_and_each_has_its_price():
    behind = replace(CALL, scheduling=replace(CALL.scheduling, background=True))
    price = Price(1, 2, 3)
    found = counts(TAKEN, HEADER, FINAL, call=behind, price=price)
    assert found == UsageCounts(
        1,
        5,
        2,
        9,
        cost=price.cost(5, 2, 9),
        flex_prompt_tokens=5,
        flex_cached_tokens=2,
        flex_output_tokens=9,
    )


def test_a_composition_has_one_account_of_its_adapters_names():
    refs = [AdapterRef("acme", name, 1, name[0] * 64) for name in ("tone", "domain")]
    composed = replace(CALL, adapter=Composition(tuple(refs), (0.5, 1.5)))
    (account,) = counted(TAKEN, HEADER, FINAL, call=composed)
    assert account == UsageAccount("acme", "tiny", "acme/domain+acme/tone")
