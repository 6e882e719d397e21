"""tenants and keys against a real gateway."""

import json

import httpx
import pytest

from tests.cli.conftest import Lorikeet


def test_a_tenant_is_made_with_its_limit(lorikeet: Lorikeet) -> None:
    assert "globex" in lorikeet.do("tenants", "create", "globex", "--max-concurrent", "32")
    rows = [line.split() for line in lorikeet.do("tenants", "list").splitlines()]
    assert ["globex", "32"] in [row[:2] for row in rows]
    assert ["acme", "no", "limit"] in [row[:3] for row in rows]


def test_making_a_tenant_again_leaves_its_limit(lorikeet: Lorikeet) -> None:
    lorikeet.do("tenants", "create", "globex", "--max-concurrent", "32")
    again = lorikeet.run("tenants", "create", "globex")
    assert (again.exit_code, again.stdout) == (3, "")
    assert "lorikeet tenants limit" in " ".join(again.stderr.split())
    assert limits(lorikeet)["globex"] == 32


def test_a_limit_is_changed_and_lifted(lorikeet: Lorikeet) -> None:
    assert "at most 8 requests at once" in lorikeet.do("tenants", "limit", "acme", "8")
    assert limits(lorikeet)["acme"] == 8
    assert "no limit" in lorikeet.do("tenants", "limit", "acme", "none")
    assert limits(lorikeet)["acme"] is None
    assert lorikeet.run("tenants", "limit", "nobody", "8").exit_code == 1


@pytest.mark.parametrize("count", ["0", "-1", "many", "9" * 5000, ""], ids=lambda word: word[:9])
def test_a_limit_is_a_count_or_none(lorikeet: Lorikeet, count: str) -> None:
    assert lorikeet.run("tenants", "limit", "acme", "--", count).exit_code == 2
    assert limits(lorikeet)["acme"] is None


def test_a_tenants_key_works_and_can_be_revoked(lorikeet: Lorikeet) -> None:
    key = json.loads(lorikeet.do("keys", "create", "--tenant", "acme", "--json"))
    assert models(lorikeet, key["key"]) == httpx.codes.OK
    lorikeet.do("keys", "revoke", key["id"])
    listed = json.loads(lorikeet.do("keys", "list", "--tenant", "acme", "--json"))["data"]
    assert [(k["id"], k["revoked"]) for k in listed] == [(key["id"], True)]


def test_a_new_key_stands_alone_on_the_first_line(lorikeet: Lorikeet) -> None:
    key, note = lorikeet.do("keys", "create", "--tenant", "acme").splitlines()
    assert models(lorikeet, key) == httpx.codes.OK
    assert "not shown again" in note


def test_an_admins_key_administers(lorikeet: Lorikeet) -> None:
    key = json.loads(lorikeet.do("keys", "create", "--admin", "--json"))["key"]
    assert lorikeet.run("tenants", "list", LORIKEET_ADMIN_KEY=key).exit_code == 0


def test_a_tenants_key_does_not_administer(lorikeet: Lorikeet) -> None:
    key = json.loads(lorikeet.do("keys", "create", "--tenant", "acme", "--json"))["key"]
    result = lorikeet.run("tenants", "list", LORIKEET_ADMIN_KEY=key)
    assert (result.exit_code, result.stdout) == (1, "")


def test_listing_shows_no_secret(lorikeet: Lorikeet) -> None:
    key = json.loads(lorikeet.do("keys", "create", "--tenant", "acme", "--json"))
    for said in (lorikeet.do("keys", "list"), lorikeet.do("keys", "list", "--json")):
        assert key["id"] in said
        assert key["key"] not in said


@pytest.mark.parametrize("options", [[], ["--tenant", "acme", "--admin"]], ids=" ".join)
def test_a_key_is_either_a_tenants_or_an_admins(lorikeet: Lorikeet, options: list[str]) -> None:
    result = lorikeet.run("keys", "create", *options)
    assert result.exit_code == 2
    assert "--admin" in result.stderr


def test_a_key_of_nobody_fails(lorikeet: Lorikeet) -> None:
    result = lorikeet.run("keys", "create", "--tenant", "nobody")
    assert result.exit_code == 1
    assert "nobody" in result.stderr


@pytest.mark.parametrize("group", ["pins", "adapters", "tenants"])
def test_no_name_leads_to_another_route(lorikeet: Lorikeet, group: str) -> None:
    key = json.loads(lorikeet.do("keys", "create", "--tenant", "acme", "--json"))
    words = {
        "pins": ["unpin", f"../keys/{key['id']}"],
        "adapters": ["keys", "revoke", f"x/../{key['id']}"],
        "tenants": ["tenants", "create", ".."],
    }[group]
    assert lorikeet.run(*words).exit_code == 2
    assert models(lorikeet, key["key"]) == httpx.codes.OK


def limits(lorikeet: Lorikeet) -> dict[str, int | None]:
    listed = json.loads(lorikeet.do("tenants", "list", "--json"))["data"]
    return {tenant["tenant"]: tenant["max_concurrent"] for tenant in listed}


def models(lorikeet: Lorikeet, key: str) -> int:
    answer = httpx.get(f"{lorikeet.url}/v1/models", headers={"authorization": f"Bearer {key}"})
    return answer.status_code
