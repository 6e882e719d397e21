"""Invariants of the state after any sequence of operations."""

from collections.abc import Collection

import hypothesis.strategies as st
from hypothesis import given, settings

from lorikeet.catalog.apply import apply_entries
from lorikeet.catalog.changes import (
    CatalogCreated,
    Entry,
    KeyCreated,
    Pinned,
    TenantCreated,
    TenantOptionsSet,
)
from lorikeet.catalog.log_format import object_from_json, object_to_json
from lorikeet.catalog.records import AdapterRecord, BlobFacts, Scope
from lorikeet.catalog.rules import adapters as adapter_rules
from lorikeet.catalog.rules import pins as pin_rules
from lorikeet.catalog.rules import tenants_and_keys as tenant_rules
from lorikeet.catalog.rules.limits import TenantOptions
from lorikeet.catalog.snapshots import partition_from_bytes, partition_to_bytes
from lorikeet.catalog.state import (
    COMMON,
    PARTITIONS,
    CatalogState,
    Partition,
    UnreadPartition,
    partition_of,
)
from lorikeet.catalog.view import CatalogView
from lorikeet.errors import LorikeetError
from lorikeet_engine.adapter import Residency

TENANTS = st.sampled_from(["a", "a", "b"])
NAMES = st.sampled_from(["x", "y"])
ALIASES = st.sampled_from(["prod", "canary"])
VERSIONS = st.integers(0, 5)
MAYBE_VERSION = st.none() | VERSIONS

ACTS = st.one_of(
    st.tuples(st.just("tenant"), TENANTS, st.none() | st.integers(1, 2)),
    st.tuples(st.just("key"), TENANTS, st.integers(0, 3)),
    st.tuples(st.just("rotate"), st.integers(0, 3)),
    st.tuples(st.just("revoke"), st.integers(0, 3)),
    st.tuples(
        st.just("register"),
        TENANTS,
        NAMES,
        st.sampled_from("1234"),
        st.none() | st.booleans(),
        st.booleans(),
    ),
    st.tuples(st.just("promote"), TENANTS, NAMES, VERSIONS, ALIASES, MAYBE_VERSION),
    st.tuples(st.just("rollback"), TENANTS, NAMES, ALIASES, MAYBE_VERSION),
    st.tuples(st.just("retire"), TENANTS, NAMES, MAYBE_VERSION),
    st.tuples(st.just("pin"), TENANTS, st.none() | NAMES, ALIASES | VERSIONS.map(str)),
    st.tuples(st.just("unpin"), TENANTS, st.none() | NAMES),
    st.tuples(st.just("budget"), TENANTS, st.none() | st.integers(1, 30)),
)


def decide(state: CatalogState, act: tuple) -> adapter_rules.Changes:  # type: ignore[type-arg]
    match act:
        case ("tenant", name, limit):
            if state.tenant_state(name) is None:
                return tenant_rules.create_tenant(state, name, {"max_concurrent": limit})
            options = TenantOptions(max_concurrent=limit, weight=2.0)
            return tenant_rules.limit_tenant(state, TenantOptionsSet(tenant=name, options=options))
        case ("key", tenant, number):
            key = KeyCreated(
                id=f"k{number}", tenant=tenant, scopes=(Scope.INFER,), sha256=f"{number}"
            )
            return tenant_rules.create_key(state, key, {"name": "ci", "requests_per_min": 5})
        case ("rotate", number):
            return tenant_rules.rotate_key(state, f"k{number}", f"r{number}", f"r{number}", 1.0, 9)
        case ("revoke", number):
            return tenant_rules.revoke_key(state, f"k{number}")
        case ("register", tenant, name, digest, shared, promote):
            facts = BlobFacts(digest, 10, 8, "demo", 20)
            alias = "prod" if promote else None
            return adapter_rules.register(state, tenant, name, facts, shared=shared, alias=alias)
        case ("promote", *rest):
            return adapter_rules.promote(state, *rest)
        case ("rollback", *rest):
            return adapter_rules.rollback(state, *rest)
        case ("retire", *rest):
            return adapter_rules.retire(state, *rest)
        case ("pin", tenant, name, selector):
            pin = Pinned(
                tenant=tenant,
                name=name,
                selector=selector,
                tier=Residency.HOST,
                replicas=None,
                reason="",
                expires=None,
            )
            return pin_rules.pin(state, pin, now=1.0)
        case ("budget", tenant, pin_budget_bytes):
            budget = TenantOptions(pin_budget_bytes=pin_budget_bytes)
            return tenant_rules.limit_tenant(state, TenantOptionsSet(tenant=tenant, options=budget))
        case ("unpin", *rest):
            return pin_rules.unpin(state, *rest)
    raise AssertionError(act)


def check_adapter(record: AdapterRecord) -> None:
    assert [version.version for version in record.versions] == list(
        range(1, len(record.versions) + 1)
    )
    usable = {version.version for version in record.versions if not version.retired}
    assert set(record.aliases.values()) <= usable
    assert record.retired == (not usable)
    assert not (record.retired and record.shared)
    assert ("prod" in record.aliases) == bool(usable)
    assert set(record.aliases) == set(record.alias_history)


@settings(deadline=None)
@given(st.lists(ACTS, max_size=40))
def test_states_keep_their_invariants_and_snapshots_give_the_same_state(acts: list[tuple]) -> None:  # type: ignore[type-arg]
    tenant = TenantCreated(name="a")
    start = (CatalogCreated(), tenant)
    entries = [Entry(seq=1, nonce="n", actor="ann", time=1.0, changes=start)]
    states = [apply_entries(CatalogState(), entries)]
    for act in acts:
        state = states[-1]
        try:
            changes = decide(state, act)
        except LorikeetError:
            continue
        if changes:
            entry = Entry(
                seq=state.seq + 1, nonce="n", actor="ann", time=1.0, changes=tuple(changes)
            )
            entries.append(entry)
            states.append(apply_entries(state, [entry]))
            assert states[-1] != state
        for record in states[-1].adapters():
            check_adapter(record)
            assert (
                (record.tenant, record.name) in states[-1].partitions[COMMON].shared
            ) == record.shared

    # in one go, from its JSON, and from every moment on, it is the same state
    assert list(object_from_json(object_to_json(entries), "log/1")) == entries
    for at, state in enumerate(states):
        assert apply_entries(CatalogState(), entries[: at + 1]) == state
        assert apply_entries(state, entries[at + 1 :]) == states[-1]

    # and so it is from a snapshot of any moment, its partitions read early or late
    read_at = len(states) // 2
    for at, state in enumerate(states):
        view = stored(state)
        view.advance(entries[at + 1 : read_at])
        view.read(range(0, PARTITIONS + 1, 2))
        view.advance(entries[at + 1 :])
        view.read(range(PARTITIONS + 1))
        assert list(map(partition_to_bytes, view.state.partitions)) == list(
            map(partition_to_bytes, states[-1].partitions)
        )
        assert list(view.state.adapters()) == list(states[-1].adapters())
        assert view.state.keys() == states[-1].keys()


def stored(state: CatalogState) -> CatalogView:
    """Make a view of a snapshot of the state, whose partitions have different digests."""
    data = {
        str(number): partition_to_bytes(partition)
        for number, partition in enumerate(state.partitions)
    }
    unread = tuple(map(UnreadPartition, data))

    class Stored:
        def read(self, digests: Collection[str]) -> dict[str, Partition]:
            return {digest: partition_from_bytes(data[digest], digest) for digest in digests}

    return CatalogView(Stored(), CatalogState(state.seq, state.time, unread))


def test_unchanged_partitions_are_shared_with_the_previous_state() -> None:
    facts = BlobFacts("1", 10, 8, "demo", 20)
    tenants = [TenantCreated(name=name) for name in "ab"]
    start = apply_entries(
        CatalogState(), [Entry(seq=1, nonce="", actor="", time=1.0, changes=tuple(tenants))]
    )
    for tenant in "ab":
        changes = adapter_rules.register(start, tenant, "x", facts)
        entry = Entry(seq=start.seq + 1, nonce="", actor="", time=1.0, changes=tuple(changes))
        start = apply_entries(start, [entry])

    changes = adapter_rules.register(start, "a", "y", facts)
    entry = Entry(seq=start.seq + 1, nonce="", actor="", time=1.0, changes=tuple(changes))
    after = apply_entries(start, [entry])

    assert after.tenant_state("b") is start.tenant_state("b")
    assert after.adapter("a", "x") is start.adapter("a", "x")
    assert [record.name for record in start.adapters("a")] == ["x"]
    changed = [
        at for at in range(PARTITIONS + 1) if after.partitions[at] is not start.partitions[at]
    ]
    assert changed == [partition_of("a")]
