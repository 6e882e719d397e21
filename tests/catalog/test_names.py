"""Valid names of tenants, adapters and aliases."""

import pytest

from lorikeet.catalog.names import (
    check_alias,
    check_name,
    check_selector,
    is_selector,
)
from lorikeet.errors import InvalidInput

GOOD = ["a", "7", "acme", "support-v2", "a.b_c-d", "x" * 64]
BAD = [
    "",
    "x" * 65,
    "Acme",
    ".a",
    "-a",
    "a..b",
    "..",
    "a/b",
    "a@b",
    "a b",
    "a\n",
    "a\x00",
    "a\x1b[2J",
    "ä",
    "a\u202e",
    "٣",
]


@pytest.mark.parametrize("name", GOOD)
def test_a_good_name_is_returned(name: str) -> None:
    assert check_name(name, "tenant") == name


@pytest.mark.parametrize("name", BAD)
def test_a_bad_name_is_refused_with_the_rule(name: str) -> None:
    with pytest.raises(InvalidInput, match="want 1 to 64 of a-z") as refused:
        check_name(name, "tenant")

    assert refused.value.param == "tenant"
    assert refused.value.message.isprintable()
    assert len(refused.value.message) < 400


@pytest.mark.parametrize("alias", ["1", "007", *BAD])
def test_an_alias_is_a_name_and_no_number(alias: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check_alias(alias)

    assert refused.value.param == "alias"


def test_a_selector_is_an_alias_or_a_version() -> None:
    assert check_selector("prod") == "prod"
    assert check_selector("12") == "12"
    assert is_selector("prod")
    assert is_selector("12")
    for bad in ("", "0", "012", "-1", "1" * 10, "١", "1\n", "Prod"):
        assert not is_selector(bad)
        with pytest.raises(InvalidInput):
            check_selector(bad)
