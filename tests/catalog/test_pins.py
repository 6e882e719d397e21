"""Pins of adapters and of whole tenants, and the budget that they stay within."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.changes import Change, Pinned, TenantOptionsSet, schema_of
from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.records import PinRecord, VersionRecord
from lorikeet.catalog.rules.pin_budget import versions_kept
from lorikeet.catalog.state import CatalogState
from lorikeet.errors import (
    Conflict,
    InvalidInput,
    NotFound,
    UnknownModel,
    UnknownTenant,
)
from lorikeet.request_defaults import MAX_SYSTEM_PROMPT_BYTES, RequestDefaults
from lorikeet_engine.adapter import Head, Residency

Register = Callable[..., VersionRecord]


def kept(catalog: AdapterCatalog, pin: PinRecord) -> list[int]:
    return [version.ref.version for version in versions_kept(catalog.reader.state, pin)]


def test_a_pin_follows_its_alias_until_it_ends(
    catalog: AdapterCatalog, register: Register, clock: list[float]
) -> None:
    first = register("acme/support", b"1")
    second = register("acme/support", b"2")
    pin = catalog.pin("acme", "support", replicas=2, reason="launch", expires=1060.0, actor="bob")

    assert (pin.selector, pin.tier, pin.actor) == ("prod", Residency.GPU, "bob")
    assert kept(catalog, pin) == [first.version]
    catalog.promote("acme", "support", 2, actor="ann")
    assert kept(catalog, pin) == [second.version]
    assert catalog.reader.state.pins(1059.0) == (pin,)
    assert catalog.reader.state.pins(1060.0) == ()


def test_a_pin_on_a_retired_version_keeps_no_version(
    catalog: AdapterCatalog, register: Register
) -> None:
    register("acme/support", b"1")
    register("acme/support", b"2")
    pin = catalog.pin("acme", "support", selector="2", actor="ann")
    assert kept(catalog, pin) == [2]

    catalog.retire("acme", "support", 2, actor="ann")
    assert kept(catalog, pin) == []
    assert catalog.reader.state.pins(0) == (pin,)


def test_a_second_pin_replaces_the_first_and_unpin_removes_it(
    catalog: AdapterCatalog, register: Register
) -> None:
    register("acme/support", b"1")
    catalog.pin("acme", "support", actor="ann")
    catalog.pin("acme", "support", tier=Residency.HOST, actor="ann")
    assert [pin.tier for pin in catalog.reader.state.pins(0)] == [Residency.HOST]

    catalog.unpin("acme", "support", actor="ann")
    assert catalog.reader.state.pins(0) == ()
    with pytest.raises(NotFound, match="not pinned"):
        catalog.unpin("acme", "support", actor="ann")


def test_a_tenants_pin_and_its_adapters_pins_coexist(
    catalog: AdapterCatalog, register: Register
) -> None:
    register("acme/support", b"1")
    whole = catalog.pin("acme", None, tier=Residency.DISK, priority=2, actor="ann")
    one = catalog.pin("acme", "support", actor="ann")

    assert (whole.label, one.label) == ("acme", "acme/support@prod")
    assert catalog.reader.state.pins(0) == (whole, one)
    catalog.retire("acme", "support", actor="ann")
    assert catalog.reader.state.pins(0) == (whole,)
    catalog.unpin("acme", None, actor="ann")
    assert catalog.reader.state.pins(0) == ()
    with pytest.raises(NotFound, match="'acme' is not pinned"):
        catalog.unpin("acme", None, actor="ann")


def test_changed_options_keep_a_pins_age_until_it_expires(
    catalog: AdapterCatalog, register: Register, clock: list[float]
) -> None:
    register("acme/support", b"1")
    catalog.pin("acme", "support", expires=1100.0, actor="ann")
    clock[0] = 1050.0
    longer = catalog.pin("acme", "support", expires=1200.0, actor="bob")
    assert (longer.created, longer.expires, longer.actor) == (1000.0, 1200.0, "bob")
    clock[0] = 1200.0
    assert catalog.pin("acme", "support", actor="bob").created == 1200.0


def test_pins_stay_within_a_tenants_budget(
    catalog: AdapterCatalog, register: Register, clock: list[float]
) -> None:
    for name, data in (("a", b"1" * 40), ("b", b"2" * 40), ("c", b"3" * 40), ("twin", b"1" * 40)):
        register(f"acme/{name}", data)
    catalog.limit_tenant("acme", pin_budget_bytes=100, actor="ann")
    catalog.pin("acme", "a", expires=1100.0, actor="ann")
    catalog.pin("acme", "b", tier=Residency.DISK, actor="ann")

    refusal = "would take 120 bytes on each GPU, 80 without this one, and its budget is 100"
    with pytest.raises(Conflict, match=refusal):
        catalog.pin("acme", "c", actor="ann")
    with pytest.raises(Conflict, match=refusal):
        catalog.pin("acme", None, actor="ann")
    catalog.pin("acme", "twin", actor="ann")  # the weights of a, which are counted once
    catalog.pin("acme", "b", replicas=3, actor="ann")  # as before

    clock[0] = 1100.0  # a's pin is over, but the twin has the same weights
    with pytest.raises(Conflict):
        catalog.pin("acme", "c", actor="ann")
    catalog.unpin("acme", "twin", actor="ann")
    catalog.pin("acme", "c", actor="ann")


def test_a_lowered_budget_refuses_only_pins_that_add_bytes(
    catalog: AdapterCatalog, register: Register
) -> None:
    for name in "ab":
        register(f"acme/{name}", name.encode() * 40)
        catalog.pin("acme", name, actor="ann")
    assert catalog.limit_tenant("acme", pin_budget_bytes=10, actor="ann").pin_budget_bytes == 10

    assert catalog.pin("acme", "a", priority=1, actor="ann").priority == 1
    register("acme/a", b"c" * 41)
    with pytest.raises(Conflict, match="81 bytes on each GPU, 80 without"):
        catalog.pin("acme", "a", selector="2", actor="ann")
    catalog.promote("acme", "a", 2, actor="ann")  # a pin stops no promotion; the plan will say so


def test_a_tenants_budget_is_its_own_and_independent_of_its_limits(
    catalog: AdapterCatalog, register: Register
) -> None:
    catalog.create_tenant("globex", actor="ann")
    register("globex/a", b"1" * 50)
    catalog.limit_tenant("acme", pin_budget_bytes=10, actor="ann")
    catalog.pin("globex", "a", actor="ann")
    assert catalog.limit_tenant("acme", max_concurrent=5, actor="ann").pin_budget_bytes == 10
    lifted = catalog.limit_tenant("acme", pin_budget_bytes=None, actor="ann")
    assert lifted.limits.max_concurrent == 5
    with pytest.raises(InvalidInput, match="pin_budget_bytes=0"):
        catalog.limit_tenant("acme", pin_budget_bytes=0, actor="ann")
    with pytest.raises(UnknownTenant):
        catalog.limit_tenant("nobody", pin_budget_bytes=10, actor="ann")


def test_a_question_about_a_pin_sets_no_pin(catalog: AdapterCatalog, register: Register) -> None:
    register("acme/support", b"1")
    seq = catalog.reader.state.seq

    def count(before: CatalogState, after: CatalogState) -> tuple[int, int]:
        return len(before.pins(0)), len(after.pins(0))

    assert catalog.if_pinned("acme", "support", count) == (0, 1)
    assert catalog.if_pinned("acme", None, count, priority=4) == (0, 1)
    with pytest.raises(UnknownModel):
        catalog.if_pinned("acme", "absent", count)
    with pytest.raises(InvalidInput, match="priority=1001"):
        catalog.if_pinned("acme", None, count, priority=1001)
    assert catalog.reader.refresh().seq == seq


def test_invalid_pins_are_refused(catalog: AdapterCatalog, register: Register) -> None:
    register("acme/support", b"1")

    with pytest.raises(UnknownModel):
        catalog.pin("acme", "absent", actor="ann")
    with pytest.raises(UnknownModel, match="it has version 1, aliases prod → 1"):
        catalog.pin("acme", "support", selector="canary", actor="ann")
    with pytest.raises(InvalidInput, match="time to come"):
        catalog.pin("acme", "support", expires=1000.0, actor="ann")
    with pytest.raises(InvalidInput, match="replicas=0"):
        catalog.pin("acme", "support", replicas=0, actor="ann")
    with pytest.raises(InvalidInput, match="promises nothing"):
        catalog.pin("acme", "support", tier=Residency.REMOTE, actor="ann")
    with pytest.raises(InvalidInput):
        catalog.pin("acme", "support", selector="0", actor="ann")
    with pytest.raises(InvalidInput, match="a tenant's pin keeps what prod points at"):
        catalog.pin("acme", None, selector="canary", actor="ann")
    with pytest.raises(UnknownTenant):
        catalog.pin("nobody", None, actor="ann")


def test_a_pins_prompt_stays_until_it_is_removed(
    catalog: AdapterCatalog, register: Register
) -> None:
    prompt = "You are a clerk.\n\u2028\0" * (MAX_SYSTEM_PROMPT_BYTES // 21)  # bytes of one
    register("acme/support", b"1")
    catalog.pin("acme", "support", prompt=prompt, actor="ann")
    again = catalog.pin("acme", "support", priority=2, actor="ann")
    assert (again.prompt, again.priority) == (prompt, 2)
    (version,) = versions_kept(catalog.reader.state, again)
    assert version.prompt == RequestDefaults(None, prompt)

    catalog.retire("acme", "support", actor="ann")
    catalog.restore("acme", "support", actor="ann")
    catalog.reader.snapshot()
    anew = CatalogReader(catalog.store)
    anew.refresh()
    reread = anew.ask(lambda state: state.pin_of("acme", "support"))
    assert reread is not None
    assert reread.prompt == prompt, "whole in the snapshot"

    catalog.remove_prompt("acme", "support", actor="bob")
    left = catalog.reader.state.pin_of("acme", "support")
    assert left == replace(again, prompt=None, created=left.created, actor="bob")
    with pytest.raises(NotFound, match="no pin with a prompt"):
        catalog.remove_prompt("acme", "support", actor="bob")


def test_a_draft_is_one_adapter_on_all_gpus_and_its_base_models_only_one(
    catalog: AdapterCatalog, register: Register
) -> None:
    register("acme/uno", b"1")
    register("acme/other", b"2")
    register("acme/head", b"3", head=Head(("SPAM", "HAM")))
    catalog.pin("acme", "uno", draft=True, actor="ann")
    catalog.reader.snapshot()
    anew = CatalogReader(catalog.store)
    anew.refresh()
    reread = anew.ask(lambda state: state.pin_of("acme", "uno"))
    assert reread is not None
    assert reread.draft
    assert reread.prompt is None

    catalog.pin("acme", "uno", draft=True, priority=1, actor="ann")
    with pytest.raises(Conflict, match=r"acme/uno@prod drafts for this base model already"):
        catalog.pin("acme", "other", draft=True, actor="ann")
    assert catalog.pin("acme", "uno", priority=2, actor="ann").draft
    with pytest.raises(InvalidInput, match="drafts now, with --no-draft"):
        catalog.pin("acme", "uno", tier=Residency.HOST, actor="ann")
    assert not catalog.pin("acme", "uno", draft=False, actor="ann").draft
    with pytest.raises(InvalidInput, match=r"acme/head@1 has a classification head"):
        catalog.pin("acme", "head", draft=True, actor="ann")
    catalog.pin("acme", "other", draft=True, actor="ann")
    for name, more in ((None, {}), ("uno", {"replicas": 1}), ("uno", {"tier": Residency.HOST})):
        with pytest.raises(InvalidInput, match="on the GPUs of all replicas"):
            catalog.pin("acme", name, draft=True, actor="ann", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "schema"),
    [
        (Pinned(tenant="acme", name="support"), 1),
        (Pinned(tenant="acme", name="support", prompt="You are a clerk."), 2),
        (Pinned(tenant="acme", name="support", draft=True), 2),
        (TenantOptionsSet(tenant="acme", options={"max_adapters": 1}), 1),
        (TenantOptionsSet(tenant="acme", options={"cost_per_month": 1.0}), 2),
        (TenantOptionsSet(tenant="acme", options={"open_batches": 1}), 2),
    ],
)
def test_readers_that_would_lose_a_prompt_or_a_limit_refuse_its_entry(
    change: Change, schema: int
) -> None:
    assert schema_of([change]) == schema


@pytest.mark.parametrize(
    ("name", "prompt", "said"),
    [
        (None, "You are a clerk.", "with one adapter"),
        ("support", " \n", "want a text"),
        ("support", "ä" * 2**14 + "x", "32769 bytes: want a text of at most 32768"),
    ],
)
def test_prompts_of_pins_are_texts_for_one_adapter(
    catalog: AdapterCatalog, register: Register, name: str | None, prompt: str, said: str
) -> None:
    register("acme/support", b"1")
    with pytest.raises(InvalidInput, match=said):
        catalog.pin("acme", name, prompt=prompt, actor="ann")
