"""The catalog's state shows pushed versions until the log has them."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.records import BlobFacts
from lorikeet.catalog.state import PartitionsNotRead, UnreadPartition, partition_of
from lorikeet.catalog.store.local import LocalStore
from lorikeet.errors import UnknownModel
from lorikeet.gateway.pushing.pushed_versions import FORGOTTEN_S, PushedVersion, PushedVersions


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest.fixture
def pushed(clock: list[float]) -> PushedVersions:
    return PushedVersions(lambda: clock[0])


@pytest.fixture
def catalog(tmp_path: Path) -> AdapterCatalog:
    made = AdapterCatalog.init(LocalStore(tmp_path / "store"))
    made.create_tenant("acme", actor="test")
    (tmp_path / "blob").write_bytes(b"blob")
    return made


def version(letter: str, created: float, alias: str | None = None) -> PushedVersion:
    return PushedVersion("acme", "policy", BlobFacts(letter * 64, 4, 2, "tiny", 8), alias, created)


def digest_at(pushed: PushedVersions, catalog: AdapterCatalog, model: str = "acme/policy") -> str:
    return pushed.applied_to(catalog.reader.state, "acme").resolve(model, "acme").digest[0]


def test_without_pushed_versions_the_state_is_the_catalogs_own(
    pushed: PushedVersions, catalog: AdapterCatalog
) -> None:
    assert pushed.applied_to(catalog.reader.state, "acme") is catalog.reader.state


def test_a_pushed_version_is_found_by_its_digest_and_its_alias(
    pushed: PushedVersions, catalog: AdapterCatalog
) -> None:
    pushed.add(version("a", 1))
    pushed.add(version("b", 2, "canary"))
    assert digest_at(pushed, catalog) == "a"
    assert digest_at(pushed, catalog, "acme/policy@canary") == "b"
    assert digest_at(pushed, catalog, f"acme/policy@{'b' * 64}") == "b"
    with pytest.raises(UnknownModel):
        digest_at(pushed, catalog, f"acme/policy@{'c' * 64}")


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_the_later_push_gets_the_alias_in_any_order_of_announcements(
    pushed: PushedVersions, catalog: AdapterCatalog, order: str
) -> None:
    created = {"a": 1.0, "b": 2.0}
    for letter in order:
        pushed.add(version(letter, created[letter], "prod"))
    assert digest_at(pushed, catalog) == "b"
    assert pushed.alias_of(version("a", 1, "prod")) is None
    assert pushed.alias_of(version("b", 2, "prod")) == "prod"


def test_a_version_that_is_no_longer_announced_is_forgotten(
    pushed: PushedVersions, catalog: AdapterCatalog, clock: list[float]
) -> None:
    pushed.add(version("a", 1))
    pushed.add(version("b", 2, "prod"))
    clock[0] = FORGOTTEN_S - 1
    pushed.add(version("a", 1))
    clock[0] = FORGOTTEN_S + 1
    assert digest_at(pushed, catalog) == "a"
    with pytest.raises(UnknownModel):
        digest_at(pushed, catalog, f"acme/policy@{'b' * 64}")


def test_a_gateways_own_version_is_kept_without_announcements(
    pushed: PushedVersions, catalog: AdapterCatalog, clock: list[float]
) -> None:
    ours = version("a", 1, "prod")
    pushed.carry(ours.key)
    pushed.add(ours)
    clock[0] = 2 * FORGOTTEN_S
    assert digest_at(pushed, catalog) == "a"
    pushed.let_go(ours.key)
    clock[0] += FORGOTTEN_S - 1  # the log may be read that late
    assert digest_at(pushed, catalog) == "a"
    clock[0] += 2
    with pytest.raises(UnknownModel):
        digest_at(pushed, catalog)


def test_a_version_in_the_log_is_the_logs(
    pushed: PushedVersions, catalog: AdapterCatalog, tmp_path: Path
) -> None:
    ours = version("a", 1, "prod")
    pushed.add(ours)
    assert digest_at(pushed, catalog) == "a"
    catalog.register("acme", "policy", tmp_path / "blob", ours.facts, alias="prod", actor="test")
    catalog.register(
        "acme", "policy", tmp_path / "blob", version("b", 2).facts, promote=True, actor="test"
    )
    assert digest_at(pushed, catalog) == "b"
    assert len(pushed) == 0


def test_an_alias_that_an_admin_moves_meanwhile_stays_there(
    pushed: PushedVersions, catalog: AdapterCatalog, tmp_path: Path
) -> None:
    for letter in "ab":
        facts = version(letter, 0).facts
        catalog.register("acme", "policy", tmp_path / "blob", facts, actor="test")
    ours = version("c", 1, "prod")
    pushed.add(ours)
    assert digest_at(pushed, catalog) == "c"
    catalog.promote("acme", "policy", 2, actor="test")
    assert digest_at(pushed, catalog) == "b"
    assert pushed.alias_of(ours) is None
    assert digest_at(pushed, catalog, f"acme/policy@{'c' * 64}") == "c"


def test_an_earlier_push_that_lands_late_takes_no_alias_from_a_later_one(
    pushed: PushedVersions, catalog: AdapterCatalog, tmp_path: Path
) -> None:
    catalog.register("acme", "policy", tmp_path / "blob", version("a", 0).facts, actor="test")
    earlier, later = version("b", 1, "prod"), version("c", 2, "prod")
    pushed.add(earlier)
    assert digest_at(pushed, catalog) == "b"
    pushed.add(later)
    assert digest_at(pushed, catalog) == "c"
    catalog.register("acme", "policy", tmp_path / "blob", earlier.facts, promote=True, actor="test")
    assert digest_at(pushed, catalog) == "c"
    assert pushed.alias_of(later) == "prod"


def test_a_tenants_pushed_versions_need_no_partition_for_another_tenant(
    pushed: PushedVersions, catalog: AdapterCatalog
) -> None:
    catalog.create_tenant("globex", actor="test")
    pushed.add(version("a", 1))
    partitions = list(catalog.reader.state.partitions)
    partitions[partition_of("acme")] = UnreadPartition("0" * 64)
    state = replace(catalog.reader.state, partitions=tuple(partitions))
    assert pushed.applied_to(state, "globex") is state
    with pytest.raises(PartitionsNotRead):
        pushed.applied_to(state, "acme")


def test_an_alias_stays_the_later_pushs_when_only_that_one_is_in_the_log(
    pushed: PushedVersions, catalog: AdapterCatalog, tmp_path: Path
) -> None:
    earlier, later = version("a", 1, "prod"), version("b", 2, "prod")
    pushed.add(earlier)
    pushed.add(later)
    catalog.register("acme", "policy", tmp_path / "blob", later.facts, alias="prod", actor="test")
    assert digest_at(pushed, catalog) == "b"
    assert pushed.alias_of(earlier) is None
    pushed.remove(earlier.key)
    pushed.add(earlier)
    assert digest_at(pushed, catalog) == "b"


def test_an_alias_that_the_log_lacks_moves_though_the_log_has_the_version(
    pushed: PushedVersions, catalog: AdapterCatalog, tmp_path: Path
) -> None:
    for letter in "ab":
        facts = version(letter, 0).facts
        catalog.register("acme", "policy", tmp_path / "blob", facts, actor="test")
    passing = replace(version("b", 1, "prod"), expires=time.time() + 60)
    pushed.add(passing)
    assert digest_at(pushed, catalog) == "b"
    pushed.remove(passing.key)
    assert digest_at(pushed, catalog) == "a"


def test_an_alias_that_a_later_announcement_names_is_adopted(
    pushed: PushedVersions, catalog: AdapterCatalog
) -> None:
    pushed.add(version("a", 1))
    pushed.add(version("b", 1, "canary"))
    assert digest_at(pushed, catalog) == "a"
    pushed.add(version("b", 2, "prod"))
    pushed.add(version("b", 1))
    assert digest_at(pushed, catalog) == "b"
    assert pushed.alias_of(version("b", 1)) == "prod"


def test_announcing_a_recorded_version_again_moves_no_alias(
    pushed: PushedVersions, catalog: AdapterCatalog, tmp_path: Path
) -> None:
    catalog.register("acme", "policy", tmp_path / "blob", version("a", 0).facts, actor="test")
    ours = version("b", 1, "prod")
    pushed.add(ours)
    catalog.register("acme", "policy", tmp_path / "blob", ours.facts, alias="prod", actor="test")
    assert digest_at(pushed, catalog) == "b"
    catalog.promote("acme", "policy", 1, actor="test")
    pushed.add(ours)
    assert digest_at(pushed, catalog) == "a"


def test_the_longer_lifetime_of_two_pushes_of_one_blob_counts(
    pushed: PushedVersions, catalog: AdapterCatalog
) -> None:
    passing = replace(version("a", 1), expires=time.time() + 60)
    pushed.add(passing)
    for again, expires in (
        (replace(passing, expires=1.0), passing.expires),
        (version("a", 1), None),
    ):
        pushed.add(again)
        held = pushed.get(passing.key)
        assert held is not None
        assert held.expires == expires


def test_an_adapter_that_is_retired_ends_its_pushed_versions(
    pushed: PushedVersions, catalog: AdapterCatalog, tmp_path: Path
) -> None:
    catalog.register("acme", "policy", tmp_path / "blob", version("a", 0).facts, actor="test")
    ours = replace(version("b", 1, "prod"), seq=catalog.reader.state.seq)
    pushed.add(ours)
    assert digest_at(pushed, catalog) == "b"
    catalog.retire("acme", "policy", actor="test")
    for _ in range(2):  # its gateway may announce it once more
        with pytest.raises(UnknownModel):
            digest_at(pushed, catalog)
        pushed.add(ours)
    pushed.add(replace(version("c", 2), seq=catalog.reader.state.seq))
    assert digest_at(pushed, catalog) == "c"


def test_a_lifetime_ends_by_the_seconds_left_when_it_was_announced(
    pushed: PushedVersions, catalog: AdapterCatalog, clock: list[float]
) -> None:
    long_ago = replace(version("a", 1), expires=1.0, left_s=60.0)  # this clock is an hour ahead
    pushed.add(long_ago)
    clock[0] = 15.0
    pushed.add(replace(long_ago, left_s=45.0))
    assert digest_at(pushed, catalog) == "a"
    clock[0] = 30.0
    pushed.add(replace(long_ago, expires=100.0, left_s=90.0))  # pushed again, for longer
    for clock[0] in (45.0, 60.0, 75.0, 90.0, 105.0):
        pushed.add(long_ago)
        assert digest_at(pushed, catalog) == "a"
    clock[0] = 121.0
    with pytest.raises(UnknownModel):
        digest_at(pushed, catalog)


def test_an_announcement_copies_no_claims_of_other_aliases(
    pushed: PushedVersions, clock: list[float]
) -> None:
    for number in range(300):
        clock[0] += 1e-3
        pushed.add(version("a", clock[0], f"a{number}"))
    claims = pushed._claims
    pushed.add(version("a", clock[0] + 1, "next"))
    assert pushed._claims is claims
    assert len(claims) == 301


def test_claims_of_aliases_are_forgotten_in_turn(
    pushed: PushedVersions, clock: list[float]
) -> None:
    for at, alias in ((0.0, "one"), (1.0, "two"), (1800.0, "one")):
        clock[0] = at
        pushed.add(version("a", 1 + at, alias))
    clock[0] = 3602.0
    pushed.add(version("a", 3603.0, "three"))
    assert [alias for _, _, alias in pushed._claims] == ["one", "three"]
