"""Tenants, keys, versions, aliases and pins, as an administrator meets them."""

import hashlib
from collections.abc import Callable

import pytest

from lorikeet.catalog import (
    AdapterCatalog,
    CatalogState,
    ObjectStore,
    PinRecord,
    Scope,
    VersionRecord,
    blob_key,
    secret_sha256,
)
from lorikeet.catalog.rules.pin_budget import versions_kept
from lorikeet.errors import (
    Conflict,
    InvalidInput,
    NotFound,
    StoreError,
    UnknownKey,
    UnknownModel,
    UnknownTenant,
)
from lorikeet_engine.adapter import AdapterRef, Residency

Register = Callable[..., VersionRecord]


def prod(catalog: AdapterCatalog, label: str = "acme/support") -> int:
    tenant, _, name = label.partition("/")
    return catalog.refresh().adapter(tenant, name).aliases["prod"]


def kept(catalog: AdapterCatalog, pin: PinRecord) -> list[int]:
    return [version.ref.version for version in versions_kept(catalog.state, pin)]


def test_a_store_holds_one_catalog(store: ObjectStore) -> None:
    AdapterCatalog.init(store)

    with pytest.raises(Conflict, match="already is a catalog"):
        AdapterCatalog.init(store)


def test_an_empty_store_says_what_to_do(store: ObjectStore) -> None:
    with pytest.raises(StoreError, match="lorikeet init"):
        AdapterCatalog(store).refresh()


def test_a_second_reader_sees_the_same_state(
    catalog: AdapterCatalog, store: ObjectStore, register: Register
) -> None:
    register("acme/support", b"1")
    catalog.create_key("acme", [Scope.INFER, Scope.ADMIN], actor="ann")
    catalog.pin("acme", "support", tier=Residency.HOST, replicas=2, expires=2000.0, actor="ann")
    reader = AdapterCatalog(store)

    assert reader.state == CatalogState()
    assert reader.refresh() == catalog.state
    assert reader.state is reader.refresh()


def test_a_tenant_is_made_once(catalog: AdapterCatalog) -> None:
    catalog.limit_tenant("acme", max_concurrent=4, actor="ann")

    with pytest.raises(Conflict, match="already is a tenant 'acme'"):
        catalog.create_tenant("acme", actor="bob")
    assert catalog.state.tenant("acme").limits.max_concurrent == 4


def test_a_tenants_limit_is_changed_in_place(catalog: AdapterCatalog, clock: list[float]) -> None:
    clock[0] = 2000.0

    limited = catalog.limit_tenant("acme", max_concurrent=4, actor="bob")
    assert (limited.limits.max_concurrent, limited.created) == (4, 1000.0)
    before = catalog.state.seq
    assert catalog.limit_tenant("acme", max_concurrent=4, actor="bob") == limited
    assert catalog.state.seq == before
    lifted = catalog.limit_tenant("acme", max_concurrent=None, actor="bob")
    assert lifted.limits.max_concurrent is None
    assert [tenant.name for tenant in catalog.state.tenants()] == ["acme"]
    with pytest.raises(InvalidInput, match="max_concurrent=0"):
        catalog.limit_tenant("acme", max_concurrent=0, actor="bob")
    with pytest.raises(UnknownTenant, match="nobody"):
        catalog.limit_tenant("nobody", max_concurrent=4, actor="bob")


@pytest.mark.parametrize(
    ("name", "limit", "param"), [("A", None, "tenant"), ("a", 0, "max_concurrent")]
)
def test_a_bad_tenant_is_refused(
    catalog: AdapterCatalog, name: str, limit: int | None, param: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        catalog.create_tenant(name, max_concurrent=limit, actor="ann")

    assert refused.value.param == param


def test_a_key_is_found_by_its_secrets_hash_and_nothing_else_is_kept(
    catalog: AdapterCatalog, store: ObjectStore
) -> None:
    key, secret = catalog.create_key("acme", [Scope.INFER], actor="ann")

    assert secret.startswith("lk_")
    assert len(secret) >= 3 + 256 // 6
    assert catalog.state.key_by_sha256(secret_sha256(secret)) == key
    assert catalog.state.key_by_sha256(secret_sha256(secret + "x")) is None
    assert (key.tenant, key.scopes, key.created) == ("acme", {Scope.INFER}, 1000.0)
    assert not any(secret.encode() in store.get(name) for name in store.list(""))


def test_a_revoked_key_stays_known_and_revoked(catalog: AdapterCatalog) -> None:
    key, secret = catalog.create_key("acme", [Scope.INFER], actor="ann")

    assert catalog.revoke_key(key.id, actor="ann").revoked
    before = catalog.state.seq
    assert catalog.revoke_key(key.id, actor="ann").revoked
    assert catalog.state.seq == before
    found = catalog.state.key_by_sha256(secret_sha256(secret))
    assert found is not None
    assert found.revoked


def test_the_last_admins_key_is_not_revoked(catalog: AdapterCatalog) -> None:
    first, _ = catalog.create_key(None, [Scope.ADMIN], actor="ann")
    catalog.create_key("acme", [Scope.INFER, Scope.ADMIN], actor="ann")  # a tenant's: no admin

    with pytest.raises(Conflict, match="keys create --admin"):
        catalog.revoke_key(first.id, actor="ann")

    second, _ = catalog.create_key(None, [Scope.ADMIN], actor="ann")
    assert catalog.revoke_key(first.id, actor="bob").revoked
    with pytest.raises(Conflict, match="the last admin's key"):
        catalog.revoke_key(second.id, actor="bob")
    assert not catalog.state.key(second.id).revoked


def test_keys_that_make_no_sense_are_refused(catalog: AdapterCatalog) -> None:
    with pytest.raises(UnknownTenant, match="nobody"):
        catalog.create_key("nobody", [Scope.INFER], actor="ann")
    with pytest.raises(InvalidInput, match="at least one"):
        catalog.create_key("acme", [], actor="ann")
    with pytest.raises(InvalidInput, match="tenant"):
        catalog.create_key(None, [Scope.INFER], actor="ann")
    with pytest.raises(UnknownKey):
        catalog.revoke_key("key-none", actor="ann")


def test_the_first_version_becomes_prod_and_later_ones_when_asked(
    catalog: AdapterCatalog, register: Register
) -> None:
    assert register("acme/support", b"1").version == 1
    assert prod(catalog) == 1
    assert register("acme/support", b"2").version == 2
    assert prod(catalog) == 1
    assert register("acme/support", b"3", promote=True).version == 3
    assert prod(catalog) == 3


def test_a_version_keeps_its_facts_and_its_blob(
    catalog: AdapterCatalog, store: ObjectStore, register: Register
) -> None:
    digest = hashlib.sha256(b"1").hexdigest()

    assert register("acme/support", b"1") == VersionRecord(
        version=1,
        digest=digest,
        size_bytes=1,
        max_rank=8,
        base_model="demo",
        gpu_bytes=1,
        created=1000.0,
    )
    assert store.get(blob_key(digest)) == b"1"
    ref = catalog.state.resolve("acme/support", "acme")
    assert ref == AdapterRef("acme", "support", 1, digest)
    assert catalog.state.version_of(ref).base_model == "demo"


def test_the_same_blob_is_the_same_version(catalog: AdapterCatalog, register: Register) -> None:
    register("acme/support", b"1")
    register("acme/support", b"2")
    before = catalog.state.seq

    assert register("acme/support", b"1").version == 1
    assert catalog.state.seq == before
    assert register("acme/support", b"2", promote=True).version == 2
    assert prod(catalog) == 2
    assert len(catalog.state.adapter("acme", "support").versions) == 2


def test_registering_needs_a_tenant_and_good_names(
    catalog: AdapterCatalog, store: ObjectStore, register: Register
) -> None:
    with pytest.raises(UnknownTenant):
        register("nobody/support", b"1")
    with pytest.raises(InvalidInput) as refused:
        register("acme/../x", b"1")
    assert refused.value.param == "name"
    assert list(store.list("blobs/")) == []


def test_a_tenant_sees_its_own_adapters_and_shared_ones(
    catalog: AdapterCatalog, register: Register
) -> None:
    catalog.create_tenant("other", actor="ann")
    register("acme/private", b"1")
    register("acme/shared", b"2", shared=True)
    register("other/mine", b"3")

    assert [record.label for record in catalog.state.visible_to("acme")] == [
        "acme/private",
        "acme/shared",
    ]
    assert [record.label for record in catalog.state.visible_to("other")] == [
        "acme/shared",
        "other/mine",
    ]
    assert catalog.state.resolve("acme/shared", "other").digest == hashlib.sha256(b"2").hexdigest()


def test_sharing_stays_until_it_is_changed(catalog: AdapterCatalog, register: Register) -> None:
    register("acme/support", b"1", shared=True)
    register("acme/support", b"2")
    assert catalog.state.adapter("acme", "support").shared

    register("acme/support", b"2", shared=False)
    assert not catalog.state.adapter("acme", "support").shared
    assert catalog.state.visible_to("other") == ()


@pytest.mark.parametrize(
    "model",
    [
        "acme/private",
        "acme/private@1",
        "acme/private@prod",
        "acme/absent",
        "acme/gone",
        "mine/x@7",
        "mine/x@canary",
        "mine/../x",
        "mine/x@prod\n",
        "demo",
        "",
    ],
)
def test_absent_forbidden_retired_and_misspelt_look_alike(
    catalog: AdapterCatalog, register: Register, model: str
) -> None:
    catalog.create_tenant("mine", actor="ann")
    register("acme/private", b"1")
    register("acme/gone", b"2", shared=True)
    catalog.retire("acme", "gone", actor="ann")
    register("mine/x", b"3")

    with pytest.raises(UnknownModel) as refused:
        catalog.state.resolve(model, "mine")

    assert refused.value.message == (
        f"The model {model!r} does not exist or you do not have access to it."
    )
    assert refused.value.param == "model"


def test_versions_and_aliases_select(catalog: AdapterCatalog, register: Register) -> None:
    for data in (b"1", b"2", b"3"):
        register("acme/support", data)
    catalog.promote("acme", "support", 2, alias="canary", actor="ann")

    resolved = {
        selector: catalog.state.resolve(f"acme/support{selector}", "acme").version
        for selector in ("", "@prod", "@canary", "@1", "@3")
    }
    assert resolved == {"": 1, "@prod": 1, "@canary": 2, "@1": 1, "@3": 3}
    assert catalog.state.adapter("acme", "support").aliases_of(2) == ("canary",)


def test_promote_can_insist_on_what_was_there(catalog: AdapterCatalog, register: Register) -> None:
    for data in (b"1", b"2", b"3"):
        register("acme/support", data)

    catalog.promote("acme", "support", 2, expect=1, actor="ann")
    with pytest.raises(Conflict, match="points to version 2, not to version 1"):
        catalog.promote("acme", "support", 3, expect=1, actor="bob")
    with pytest.raises(Conflict, match="points to nothing"):
        catalog.promote("acme", "support", 3, "canary", expect=1, actor="bob")
    assert prod(catalog) == 2


def test_promote_refuses_what_is_not_there(catalog: AdapterCatalog, register: Register) -> None:
    register("acme/support", b"1")

    with pytest.raises(UnknownModel, match="has no version 2"):
        catalog.promote("acme", "support", 2, actor="ann")
    with pytest.raises(UnknownModel, match="has no version 0"):
        catalog.promote("acme", "support", 0, actor="ann")
    with pytest.raises(UnknownModel, match="acme/absent"):
        catalog.promote("acme", "absent", 1, actor="ann")
    with pytest.raises(InvalidInput, match="version"):
        catalog.promote("acme", "support", 1, alias="1", actor="ann")


def test_rollback_goes_back_step_by_step(catalog: AdapterCatalog, register: Register) -> None:
    for data in (b"1", b"2", b"3"):
        register("acme/support", data, promote=True)

    assert catalog.rollback("acme", "support", actor="ann").aliases["prod"] == 2
    assert catalog.rollback("acme", "support", actor="ann").aliases["prod"] == 1
    with pytest.raises(Conflict, match="nothing to go back to"):
        catalog.rollback("acme", "support", actor="ann")
    with pytest.raises(NotFound, match="no alias 'canary'"):
        catalog.rollback("acme", "support", "canary", actor="ann")
    assert catalog.promote("acme", "support", 3, actor="ann").alias_history["prod"] == (1,)


def test_rollback_passes_over_retired_versions(catalog: AdapterCatalog, register: Register) -> None:
    for data in (b"1", b"2", b"3"):
        register("acme/support", data, promote=True)
    catalog.retire("acme", "support", 2, actor="ann")

    assert catalog.rollback("acme", "support", actor="ann").aliases["prod"] == 1


def test_a_version_with_an_alias_is_not_retired(
    catalog: AdapterCatalog, register: Register
) -> None:
    register("acme/support", b"1")
    register("acme/support", b"2")

    with pytest.raises(Conflict, match="is prod: promote another version"):
        catalog.retire("acme", "support", 1, actor="ann")
    catalog.retire("acme", "support", 2, actor="ann")

    with pytest.raises(UnknownModel):
        catalog.state.resolve("acme/support@2", "acme")
    with pytest.raises(Conflict, match="is retired"):
        catalog.promote("acme", "support", 2, actor="ann")
    assert prod(catalog) == 1


def test_a_retired_adapter_comes_back_with_a_new_version(
    catalog: AdapterCatalog, register: Register
) -> None:
    register("acme/support", b"1")
    catalog.pin("acme", "support", actor="ann")

    gone = catalog.retire("acme", "support", actor="ann")
    assert gone.retired
    assert gone.aliases == {}
    assert catalog.state.visible_to("acme") == ()
    assert catalog.state.pins(0) == ()
    assert catalog.retire("acme", "support", actor="ann") == gone

    assert register("acme/support", b"1").version == 2
    assert prod(catalog) == 2
    with pytest.raises(Conflict, match="nothing to go back to"):
        catalog.rollback("acme", "support", actor="ann")


def test_a_shared_adapter_that_was_retired_comes_back_private(
    catalog: AdapterCatalog, register: Register
) -> None:
    catalog.create_tenant("other", actor="ann")
    register("acme/support", b"1", shared=True)
    assert not catalog.retire("acme", "support", actor="ann").shared

    register("acme/support", b"2")
    assert not catalog.state.adapter("acme", "support").shared
    assert catalog.state.visible_to("other") == ()


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
    assert catalog.state.pins(1059.0) == (pin,)
    assert catalog.state.pins(1060.0) == ()


def test_a_pin_on_a_retired_version_promises_nothing(
    catalog: AdapterCatalog, register: Register
) -> None:
    register("acme/support", b"1")
    register("acme/support", b"2")
    pin = catalog.pin("acme", "support", selector="2", actor="ann")
    assert kept(catalog, pin) == [2]

    catalog.retire("acme", "support", 2, actor="ann")
    assert kept(catalog, pin) == []
    assert catalog.state.pins(0) == (pin,)


def test_a_second_pin_replaces_the_first_and_unpin_takes_it_away(
    catalog: AdapterCatalog, register: Register
) -> None:
    register("acme/support", b"1")
    catalog.pin("acme", "support", actor="ann")
    catalog.pin("acme", "support", tier=Residency.HOST, actor="ann")
    assert [pin.tier for pin in catalog.state.pins(0)] == [Residency.HOST]

    catalog.unpin("acme", "support", actor="ann")
    assert catalog.state.pins(0) == ()
    with pytest.raises(NotFound, match="not pinned"):
        catalog.unpin("acme", "support", actor="ann")


def test_a_tenants_pin_and_its_adapters_pins_stand_beside_each_other(
    catalog: AdapterCatalog, register: Register
) -> None:
    register("acme/support", b"1")
    whole = catalog.pin("acme", None, tier=Residency.DISK, priority=2, actor="ann")
    one = catalog.pin("acme", "support", actor="ann")

    assert (whole.label, one.label) == ("acme", "acme/support@prod")
    assert catalog.state.pins(0) == (whole, one)
    catalog.retire("acme", "support", actor="ann")
    assert catalog.state.pins(0) == (whole,)
    catalog.unpin("acme", None, actor="ann")
    assert catalog.state.pins(0) == ()
    with pytest.raises(NotFound, match="'acme' is not pinned"):
        catalog.unpin("acme", None, actor="ann")


def test_new_terms_leave_a_pin_its_age_until_it_ends(
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

    refusal = "would take 120 bytes on each replica, 80 without this one, and its budget is 100"
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


def test_a_smaller_budget_refuses_only_what_adds_to_it(
    catalog: AdapterCatalog, register: Register
) -> None:
    for name in "ab":
        register(f"acme/{name}", name.encode() * 40)
        catalog.pin("acme", name, actor="ann")
    assert catalog.limit_tenant("acme", pin_budget_bytes=10, actor="ann").pin_budget_bytes == 10

    assert catalog.pin("acme", "a", priority=1, actor="ann").priority == 1
    register("acme/a", b"c" * 41)
    with pytest.raises(Conflict, match="81 bytes on each replica, 80 without"):
        catalog.pin("acme", "a", selector="2", actor="ann")
    catalog.promote("acme", "a", 2, actor="ann")  # a pin stops no promotion; the plan will say so


def test_a_budget_of_a_tenant_is_its_own_and_kept_beside_its_limit(
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


def test_what_a_pin_would_do_is_answered_without_pinning(
    catalog: AdapterCatalog, register: Register
) -> None:
    register("acme/support", b"1")
    seq = catalog.state.seq

    def count(before: CatalogState, after: CatalogState) -> tuple[int, int]:
        return len(before.pins(0)), len(after.pins(0))

    assert catalog.if_pinned("acme", "support", count) == (0, 1)
    assert catalog.if_pinned("acme", None, count, priority=4) == (0, 1)
    with pytest.raises(UnknownModel):
        catalog.if_pinned("acme", "absent", count)
    with pytest.raises(InvalidInput, match="priority=1001"):
        catalog.if_pinned("acme", None, count, priority=1001)
    assert catalog.refresh().seq == seq


def test_pins_that_make_no_sense_are_refused(catalog: AdapterCatalog, register: Register) -> None:
    register("acme/support", b"1")

    with pytest.raises(UnknownModel):
        catalog.pin("acme", "absent", actor="ann")
    with pytest.raises(UnknownModel, match="it has versions 1, aliases prod → 1"):
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
