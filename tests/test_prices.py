"""Prices as settings write them, and costs by them."""

import pytest

from lorikeet.errors import InvalidSetting
from lorikeet.prices import COST_UNITS, FREE, Price, parse_prices, price_of, show_money
from lorikeet.settings import Settings
from lorikeet_engine.adapter import AdapterRef, Composition

TEXT = "base=0.15/0.03/0.6,acme/support=3/0.0125/1.2"
PRICES = {
    "base": Price(150_000, 30_000, 600_000),
    "acme/support": Price(3_000_000, 12_500, 1_200_000),
}
SUPPORT = AdapterRef("acme", "support", 1, "a" * 64)
TONE = AdapterRef("acme", "tone", 1, "b" * 64)


def test_prices_are_read_and_written_exactly() -> None:
    assert parse_prices(TEXT) == PRICES
    assert ",".join(f"{name}={price}" for name, price in PRICES.items()) == TEXT


def test_money_is_shown_without_an_exponent() -> None:
    amounts = (250.0, 99.5, 0.00001, 1e9)
    assert list(map(show_money, amounts)) == ["250", "99.5", "0.00001", "1000000000"]


def test_a_cost_is_the_sum_over_classes_of_tokens() -> None:
    cost = PRICES["base"].cost(1_000_000, 400_000, 50_000)
    assert cost / COST_UNITS == pytest.approx(0.6 * 0.15 + 0.4 * 0.03 + 0.05 * 0.6, rel=1e-15)


def test_an_adapter_has_its_own_price_or_its_base_models() -> None:
    assert price_of(PRICES, "base", None) == price_of(PRICES, "base", TONE) == PRICES["base"]
    assert price_of(PRICES, "base", SUPPORT) == PRICES["acme/support"]
    assert price_of(PRICES, "other", TONE) == price_of({}, "base", SUPPORT) == FREE


def test_a_composition_has_the_highest_price_of_each_class() -> None:
    both = Composition((SUPPORT, TONE), (1.0, 1.0))
    assert price_of(PRICES, "base", both) == Price(3_000_000, 30_000, 1_200_000)


def test_batches_and_flex_may_have_prices_of_their_own() -> None:
    text = f"{TEXT},base:flex=0.075/0.015/0.3,acme/support:flex=1/0/1"
    prices = parse_prices(text)
    given = {"LORIKEET_BASE_MODELS": "base=demo/model", "LORIKEET_PRICES": text}
    assert Settings.from_env(given).prices == prices
    half, own = Price(75_000, 15_000, 300_000), Price(1_000_000, 0, 1_000_000)
    assert price_of(prices, "base", None, background=True) == half
    assert price_of(prices, "base", TONE, background=True) == half
    assert price_of(prices, "base", SUPPORT, background=True) == own
    assert price_of(prices, "base", SUPPORT) == PRICES["acme/support"]
    assert price_of(PRICES, "base", SUPPORT, background=True) == PRICES["acme/support"]
    assert price_of(PRICES, "base", None, background=True) == PRICES["base"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("base", "want name=input/cached/output"),
        ("base=1/2", "want name=input/cached/output"),
        ("base=-1/0/2", "want name=input/cached/output"),
        ("base=0.0000001/0/2", "want name=input/cached/output"),
        ("=1/2/3", "want name=input/cached/output"),
        ("base=1/2/3,base=1/2/3", "base is given twice"),
        ("bse=1/2/3", "bse is no base model: there are base"),
    ],
)
def test_other_forms_are_refused(text: str, says: str) -> None:
    with pytest.raises(InvalidSetting, match=says):
        Settings.from_env({"LORIKEET_BASE_MODELS": "base=demo/model", "LORIKEET_PRICES": text})
