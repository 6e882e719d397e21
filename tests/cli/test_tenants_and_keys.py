"""tenants and keys against a real gateway."""

import json
import time
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from lorikeet.cli import app
from tests.cli.conftest import Lorikeet


def test_a_tenant_is_made_with_its_limits(lorikeet: Lorikeet) -> None:
    lorikeet.do("tenants", "create", "globex", "--concurrent", "32", "--tokens-per-min", "1.5M")
    rows = [line.split() for line in lorikeet.do("tenants", "list").splitlines()]
    assert ["globex", "no", "limit", "1.5M", "32", "no", "limit", "1"] in [row[:8] for row in rows]
    assert tenant(lorikeet, "globex")["tokens_per_min"] == 1_500_000


def test_making_a_tenant_again_leaves_its_limits(lorikeet: Lorikeet) -> None:
    lorikeet.do("tenants", "create", "globex", "--concurrent", "32")
    again = lorikeet.run("tenants", "create", "globex")
    assert (again.exit_code, again.stdout) == (3, "")
    assert "lorikeet tenants limit" in " ".join(again.stderr.split())
    assert tenant(lorikeet, "globex")["max_concurrent"] == 32


EVERY_LIMIT = """
    --requests-per-min 600 --tokens-per-min 1M --burst 30s --concurrent 8 --context 8192
    --tokens-per-month 500M --cost-per-month 99.50 --adapters 20 --bytes 2GiB
    --pinned-bytes 1GiB --rank 32 --adapter-bytes 512MiB --weight 2
    --files-bytes 256MiB --files 100 --open-batches 3 --batch-lines 16
"""


def test_every_limit_is_set_shown_and_lifted(lorikeet: Lorikeet) -> None:
    before = tenant(lorikeet, "acme")
    said = lorikeet.do("tenants", "limit", "acme", *EVERY_LIMIT.split())
    assert tenant(lorikeet, "acme") == before | {
        "requests_per_min": 600,
        "tokens_per_min": 1_000_000,
        "burst_s": 30.0,
        "max_concurrent": 8,
        "max_context": 8192,
        "tokens_per_month": 500_000_000,
        "cost_per_month": 99.5,
        "weight": 2.0,
        "max_adapters": 20,
        "max_total_bytes": 2 << 30,
        "pin_budget_bytes": 1 << 30,
        "max_rank": 32,
        "max_adapter_bytes": 512 << 20,
        "files_bytes": 1 << 28,
        "max_files": 100,
        "open_batches": 3,
        "batch_lines": 16,
    }
    shown = lorikeet.do("tenants", "show", "acme")
    for words in (
        "Tokens a minute 1M",
        "Tokens a month 500M",
        "Cost a month 99.5",
        "Context 8192",
        "Weight 2",
    ):
        assert words in " ".join(said.split())
        assert words in " ".join(shown.split())
    assert "in use: 0," in shown

    liftable = [word for word in EVERY_LIMIT.split() if word.startswith("--")]
    liftable = [word for word in liftable if word not in ("--burst", "--weight")]
    lorikeet.do("tenants", "limit", "acme", *(word for each in liftable for word in (each, "none")))
    kept = {"burst_s": 30.0, "weight": 2.0}
    assert tenant(lorikeet, "acme") == before | kept


def test_limits_that_are_not_named_stay(lorikeet: Lorikeet) -> None:
    lorikeet.do("tenants", "limit", "acme", "--concurrent", "8", "--weight", "0.5")
    lorikeet.do("tenants", "limit", "acme", "--concurrent", "none", "--context", "2k")
    now = tenant(lorikeet, "acme")
    assert (now["max_concurrent"], now["max_context"], now["weight"]) == (None, 2000, 0.5)
    told = "tenant options set acme max_concurrent=none max_context=2000"
    assert told in lorikeet.run("log", COLUMNS="200").stdout


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--concurrent 0",
        "--concurrent -1",
        "--concurrent many",
        "--context 1KiB",
        "--tokens-per-min 0.0001k",
        "--requests-per-min " + "9" * 5000,
        "--bytes 2PB",
        "--pinned-bytes 0",
        "--rank 1.5",
        "--burst 30",
        "--burst none",
        "--weight 0",
        "--weight none",
    ],
    ids=lambda words: words[:24],
)
def test_malformed_limits_are_wrong_usage(words: str) -> None:
    result = CliRunner().invoke(app, ["tenants", "limit", "acme", *words.split()])
    assert result.exit_code == 2  # 1 if it had asked a server


def test_limits_of_an_unknown_tenant_are_refused(lorikeet: Lorikeet) -> None:
    for words in (["tenants", "limit", "nobody", "--rank", "4"], ["tenants", "show", "nobody"]):
        result = lorikeet.run(*words)
        assert (result.exit_code, "nobody" in result.stderr) == (1, True)


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


def test_a_key_has_its_own_name_expiry_and_limits(lorikeet: Lorikeet) -> None:
    words = ["--tenant", "acme", "--name", "ci", "--expires", "90d", "--requests-per-min", "60"]
    key = json.loads(lorikeet.do("keys", "create", *words, "--json"))
    assert (key["name"], key["requests_per_min"], key["scopes"]) == ("ci", 60, ["infer"])
    assert key["expires"] == pytest.approx(time.time() + 90 * 86400, abs=60)
    said = lorikeet.do("keys", "limit", key["id"], "--tokens-per-min", "50k", "--priority", "-1")
    assert "Tokens a minute 50k" in " ".join(said.split())
    lorikeet.do("keys", "limit", key["id"], "--requests-per-min", "none")
    now = key_of(lorikeet, key["id"])
    assert (now["requests_per_min"], now["tokens_per_min"], now["priority"]) == (None, 50_000, -1)
    assert " ci " in lorikeet.do("keys", "list")


def test_a_publish_key_is_for_adapters_of_some_names(lorikeet: Lorikeet) -> None:
    words = ["--tenant", "acme", "--publish", "policy-*", "--publish", "draft"]
    limited = ["--requests-per-min", "60", "--bytes-per-min", "10GiB", "--json"]
    key = json.loads(lorikeet.do("keys", "create", *words, *limited))
    assert (key["scopes"], key["adapters"]) == (["publish"], ["policy-*", "draft"])
    assert (key["requests_per_min"], key["bytes_per_min"]) == (60, 10 * 2**30)
    assert models(lorikeet, key["key"]) == httpx.codes.FORBIDDEN
    assert "publish policy-* draft" in lorikeet.do("keys", "list")
    refused = lorikeet.run("keys", "create", *words, "--read-only")
    assert (refused.exit_code, "want --publish with --tenant" in refused.stderr) == (2, True)


def test_a_key_is_for_listed_adapters(lorikeet: Lorikeet) -> None:
    words = ["--tenant", "acme", "--adapters", "draft,lab/*"]
    key = json.loads(lorikeet.do("keys", "create", *words, "--json"))
    assert (key["scopes"], key["adapters"]) == (["infer"], ["draft", "lab/*"])
    assert "infer draft lab/*" in lorikeet.do("keys", "list")
    refused = lorikeet.run("keys", "create", "--admin", "--adapters", "support")
    assert (refused.exit_code, "want --adapters with --tenant" in refused.stderr) == (2, True)


def test_a_key_is_rotated_with_overlap(lorikeet: Lorikeet) -> None:
    words = ["--tenant", "acme", "--name", "ci", "--concurrent", "2"]
    old = json.loads(lorikeet.do("keys", "create", *words, "--json"))
    new, note, until = lorikeet.do("keys", "rotate", old["id"], "--overlap", "24h").splitlines()
    assert models(lorikeet, old["key"]) == models(lorikeet, new) == httpx.codes.OK
    then = key_of(lorikeet, old["id"])
    assert then["expires"] == pytest.approx(time.time() + 86400, abs=60)
    assert then["replaced_by"] in note
    assert old["id"] in until
    made = key_of(lorikeet, then["replaced_by"])
    assert (made["tenant"], made["name"], made["max_concurrent"]) == ("acme", "ci", 2)
    again = lorikeet.run("keys", "rotate", old["id"])
    assert (again.exit_code, then["replaced_by"] in again.stderr) == (3, True)


def test_a_key_is_rotated_at_once(lorikeet: Lorikeet) -> None:
    old = json.loads(lorikeet.do("keys", "create", "--tenant", "acme", "--json"))
    said = lorikeet.do("keys", "rotate", old["id"], "--overlap", "none")
    assert "works no more" in " ".join(said.split())
    assert models(lorikeet, old["key"]) == httpx.codes.UNAUTHORIZED
    assert models(lorikeet, said.splitlines()[0]) == httpx.codes.OK


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


def tenant(lorikeet: Lorikeet, name: str) -> dict[str, Any]:
    return dict(json.loads(lorikeet.do("tenants", "show", name, "--json")))


def key_of(lorikeet: Lorikeet, key_id: str) -> dict[str, Any]:
    listed = json.loads(lorikeet.do("keys", "list", "--json"))["data"]
    return next(key for key in listed if key["id"] == key_id)


def models(lorikeet: Lorikeet, key: str) -> int:
    answer = httpx.get(f"{lorikeet.url}/v1/models", headers={"authorization": f"Bearer {key}"})
    return answer.status_code
