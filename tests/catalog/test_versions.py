"""Versions and aliases: registration, sharing, selection, promotion, rollback, retirement."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lorikeet.catalog.catalog import AdapterCatalog, blob_key
from lorikeet.catalog.changes import AliasMoved, DefaultsSet, VersionRegistered
from lorikeet.catalog.log import Log
from lorikeet.catalog.partition_format import decode_tenant, encode_tenant
from lorikeet.catalog.reader import CatalogReader
from lorikeet.catalog.records import BlobFacts, VersionRecord
from lorikeet.catalog.store.object_store import ObjectStore
from lorikeet.errors import (
    Conflict,
    InvalidInput,
    NotFound,
    UnknownModel,
    UnknownTenant,
)
from lorikeet.parity.figures import GapCause, Parity, Verdict
from lorikeet.request_defaults import AddedToken, RequestDefaults, TokenizerChanges
from lorikeet_engine.adapter import AdapterRef, Embedder, Head, Pooling, Problem, TouchedModules

Register = Callable[..., VersionRecord]


def prod(catalog: AdapterCatalog, label: str = "acme/support") -> int:
    tenant, _, name = label.partition("/")
    return catalog.reader.refresh().adapter(tenant, name).aliases["prod"]


def test_the_first_version_becomes_prod_and_later_versions_on_request(
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
    ref = catalog.reader.state.resolve("acme/support", "acme")
    assert ref == AdapterRef("acme", "support", 1, digest)
    assert catalog.reader.state.version_of(ref).base_model == "demo"


def test_the_same_blob_is_the_same_version(catalog: AdapterCatalog, register: Register) -> None:
    register("acme/support", b"1")
    register("acme/support", b"2")
    before = catalog.reader.state.seq

    assert register("acme/support", b"1").version == 1
    assert catalog.reader.state.seq == before
    assert register("acme/support", b"2", promote=True).version == 2
    assert prod(catalog) == 2
    assert len(catalog.reader.state.adapter("acme", "support").versions) == 2


OWN = RequestDefaults("{{ messages }}", "Be brief.", ("<end>",), (7,), {"top_k": 7, "min_p": 0.1})


def test_the_same_blob_with_other_request_defaults_is_another_version(
    catalog: AdapterCatalog, register: Register
) -> None:
    other = replace(OWN, system_prompt="")
    for _ in range(2):
        for number, defaults in enumerate((None, OWN, other), 1):
            made = register("acme/support", b"1", defaults=defaults)
            assert (made.version, made.defaults) == (number, defaults)
    newest = catalog.reader.state.resolve(f"acme/support@{made.digest}", "acme")
    assert newest.version == 3
    catalog.retire("acme", "support", 2, actor="ann")
    assert register("acme/support", b"1", defaults=OWN).version == 4


def test_a_versions_request_defaults_are_in_the_entry_that_registers_it(
    store: ObjectStore, register: Register
) -> None:
    """Releases that do not know request defaults refuse the entry by the change's type."""
    register("acme/support", b"1", defaults=OWN)
    entry = Log(store).read(0)[-1]
    assert [type(change) for change in entry.changes] == [
        VersionRegistered,
        DefaultsSet,
        AliasMoved,
    ]


def test_request_defaults_survive_log_snapshot_retirement_and_restore(
    catalog: AdapterCatalog, store: ObjectStore, register: Register
) -> None:
    tokens = (AddedToken(262, "<|x|>", True, normalized=False),)
    tokenizer = TokenizerChanges(tokens, (("eos_token", "<|x|>"),))
    other = RequestDefaults(stop=("x",), tokenizer=tokenizer)
    made = [None, OWN, other, OWN]
    for number, defaults in enumerate(made):
        register("acme/support", bytes([number]), defaults=defaults)
    register("acme/second", b"1", defaults=OWN)
    catalog.retire("acme", "support", actor="ann")
    catalog.restore("acme", "support", actor="ann")
    catalog.reader.snapshot()
    for reader in (catalog.reader, CatalogReader(store)):
        reader.refresh()
        record = reader.ask(lambda state: state.adapter("acme", "support"))
        assert [version.defaults for version in record.versions] == made
    tenant = catalog.reader.ask(lambda state: state.tenant_state("acme"))
    assert tenant is not None
    data = encode_tenant(tenant)
    assert data.count(b"Be brief.") == 1
    assert decode_tenant("acme", data) == tenant


def test_registering_needs_a_tenant_and_valid_names(
    catalog: AdapterCatalog, store: ObjectStore, register: Register
) -> None:
    with pytest.raises(UnknownTenant):
        register("nobody/support", b"1")
    with pytest.raises(InvalidInput) as refused:
        register("acme/../x", b"1")
    assert refused.value.param == "name"
    assert list(store.list("blobs/")) == []


def test_a_tenant_sees_its_own_and_shared_adapters(
    catalog: AdapterCatalog, register: Register
) -> None:
    catalog.create_tenant("other", actor="ann")
    register("acme/private", b"1")
    register("acme/shared", b"2", shared=True)
    register("other/mine", b"3")

    assert [record.label for record in catalog.reader.state.visible_to("acme")] == [
        "acme/private",
        "acme/shared",
    ]
    assert [record.label for record in catalog.reader.state.visible_to("other")] == [
        "acme/shared",
        "other/mine",
    ]
    assert (
        catalog.reader.state.resolve("acme/shared", "other").digest
        == hashlib.sha256(b"2").hexdigest()
    )


def test_sharing_stays_until_it_is_changed(catalog: AdapterCatalog, register: Register) -> None:
    register("acme/support", b"1", shared=True)
    register("acme/support", b"2")
    assert catalog.reader.state.adapter("acme", "support").shared

    register("acme/support", b"2", shared=False)
    assert not catalog.reader.state.adapter("acme", "support").shared
    assert catalog.reader.state.visible_to("other") == ()


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
        "mine/x@01",
        "mine/x@١",
        "mine/x@1@1",
        "mine/x@",
        "mine/x/x",
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
        catalog.reader.state.resolve(model, "mine")

    assert refused.value.message == (
        f"The model {model!r} does not exist or you do not have access to it. "
        "GET /v1/models lists yours."
    )
    assert refused.value.param == "model"


def test_versions_and_aliases_select(catalog: AdapterCatalog, register: Register) -> None:
    for data in (b"1", b"2", b"3"):
        register("acme/support", data)
    catalog.promote("acme", "support", 2, alias="canary", actor="ann")

    resolved = {
        selector: catalog.reader.state.resolve(f"acme/support{selector}", "acme").version
        for selector in ("", "@prod", "@canary", "@1", "@3")
    }
    assert resolved == {"": 1, "@prod": 1, "@canary": 2, "@1": 1, "@3": 3}
    assert catalog.reader.state.adapter("acme", "support").aliases_of(2) == ("canary",)


def test_promote_checks_the_expected_version(catalog: AdapterCatalog, register: Register) -> None:
    for data in (b"1", b"2", b"3"):
        register("acme/support", data)

    catalog.promote("acme", "support", 2, expect=1, actor="ann")
    with pytest.raises(Conflict, match="points to version 2, not to version 1"):
        catalog.promote("acme", "support", 3, expect=1, actor="bob")
    with pytest.raises(Conflict, match="points to nothing"):
        catalog.promote("acme", "support", 3, "canary", expect=1, actor="bob")
    assert prod(catalog) == 2


def test_promote_refuses_an_absent_version(catalog: AdapterCatalog, register: Register) -> None:
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
        catalog.reader.state.resolve("acme/support@2", "acme")
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
    assert catalog.reader.state.visible_to("acme") == ()
    assert catalog.reader.state.pins(0) == ()
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
    assert not catalog.reader.state.adapter("acme", "support").shared
    assert catalog.reader.state.visible_to("other") == ()


def test_optional_facts_of_a_version_survive_log_and_snapshot(
    catalog: AdapterCatalog, store: ObjectStore, tmp_path: Path
) -> None:
    touches = TouchedModules(("q_proj", "v_proj"), 2, 4, 1024, tokens=3)
    blob = tmp_path / "blob"
    proof = Parity(Verdict.WARNED, 64, 0.06, 0.5, 1e-3, 0.05, GapCause.QUANTIZATION, "in FP8")
    accepted = Parity(Verdict.ACCEPTED, 64, 0.006, 0.05, 1e-5)
    head = Head(("calm", "wild"), Problem.MULTI_LABEL, 3)
    kinds = (
        (None, None, (), None, None, None),
        (touches, None, (), None, None, None),
        (touches, "org/Demo-4bit", (7, 9), None, None, None),
        (touches, "org/Demo-4bit", (7, 9), proof, None, None),
        (touches, "", (), accepted, None, None),
        (touches, None, (), accepted, None, None),
        (touches, None, (), None, head, None),
        (touches, None, (), None, Head(("LABEL_0",)), None),
        (touches, None, (), None, None, Embedder(Pooling.MEAN, normalizes=False)),
        (touches, None, (), None, None, Embedder(dimensions=(64, 128))),
        (touches, None, (), None, None, None, 262),
    )
    kinds = tuple((*kind, 0)[:7] for kind in kinds)
    for number, (known, trained_on, tokens, parity, scored, embedder, size) in enumerate(kinds):
        blob.write_bytes(data := bytes([number]))
        digest = hashlib.sha256(data).hexdigest()
        facts = BlobFacts(
            *(digest, 1, 8, "demo", 1),
            touches=known,
            trained_on=trained_on,
            invocation_tokens=tokens,
            parity=parity,
            head=scored,
            embedder=embedder,
            vocabulary=size,
        )
        catalog.register("acme", "support", blob, facts, actor="ann")
    seq = catalog.reader.snapshot()

    read = [entry for entry in Log(store).read(0) if entry.seq <= seq]
    registered = [c for e in read for c in e.changes if isinstance(c, VersionRegistered)]
    found = tuple(
        (c.touches, c.trained_on, c.invocation_tokens, c.parity, c.head, c.embedder, c.vocabulary)
        for c in registered
    )
    assert found == kinds
    tenant = catalog.reader.state.tenant_state("acme")
    again = decode_tenant("acme", encode_tenant(tenant))
    versions = again.adapters["support"].versions
    kept = tuple(
        (v.touches, v.trained_on, v.invocation_tokens, v.parity, v.head, v.embedder, v.vocabulary)
        for v in versions
    )
    assert kept == kinds
    assert again == tenant
    assert again.adapters["support"].ref(versions[2]).invocation_tokens == (7, 9)
    assert again.adapters["support"].ref(versions[6]).head == head
    assert again.adapters["support"].ref(versions[9]).embedder == Embedder(dimensions=(64, 128))
    assert again.adapters["support"].ref(versions[10]).vocabulary == 262


def test_releases_that_know_no_kind_of_adapter_read_no_entry_with_it(
    catalog: AdapterCatalog, store: ObjectStore, tmp_path: Path
) -> None:
    blob = tmp_path / "blob"
    kinds = (
        ((), None, None),
        ((7, 9), None, None),
        ((), Head(("LABEL_0",)), None),
        ((), None, Embedder()),
        ((), None, None, 262),
    )
    for number, (tokens, head, embedder, *size) in enumerate(kinds):
        blob.write_bytes(data := bytes([number]))
        digest = hashlib.sha256(data).hexdigest()
        kind = {"invocation_tokens": tokens, "head": head, "embedder": embedder}
        kind |= {"vocabulary": size[0]} if size else {}
        facts = BlobFacts(digest, 1, 8, "demo", 1, **kind)
        catalog.register("acme", "support", blob, facts, actor="ann")
    assert [entry.schema for entry in Log(store).read(0)][-5:] == [1, 2, 2, 2, 2]
