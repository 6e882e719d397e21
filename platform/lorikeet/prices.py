"""Prices of tokens by base model and adapter, from which requests' costs are computed.

Costs are whole numbers of 10^-12 of the prices' currency, so that sums are exact.
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import NamedTuple

from lorikeet_engine.adapter import Adapter, Composition

COST_UNITS = 10**12
"""Units of cost in one unit of the currency."""
_PRICED_TOKENS = 10**6
_PRICE = r"[0-9]{1,6}(?:\.[0-9]{1,6})?"
_PRICES = re.compile(rf"({_PRICE})/({_PRICE})/({_PRICE})")


class Price(NamedTuple):
    """Prices of one token, in units of cost, which are 10^-12 of the currency.

    input: a prompt's token that is computed.
    cached_input: a prompt's token that is found in the prefix cache.
    output: a token of an answer.
    """

    input: int
    cached_input: int
    output: int

    def cost(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> int:
        """Return a request's cost, in units of 10^-12 of the currency.

        prompt_tokens: all tokens of the prompts.
        cached_tokens: those of them that were found in the prefix cache.
        """
        computed = (prompt_tokens - cached_tokens) * self.input
        return computed + cached_tokens * self.cached_input + output_tokens * self.output

    def __str__(self) -> str:
        """Return the prices of a million tokens as text: input/cached/output."""
        return "/".join(f"{Decimal(each * _PRICED_TOKENS) / COST_UNITS:f}" for each in self)


Prices = Mapping[str, Price]
"""Prices by base model, or by tenant/name of an adapter; with FLEX behind it those of lines of
batches and of service tier flex.
"""

FLEX = ":flex"

FREE = Price(0, 0, 0)


def parse_prices(value: object) -> object:
    """Parse `name=input/cached/output,name=…`, prices of a million tokens each, into a Price by
    name; return a value that is no string unchanged.

    Raises ValueError for another form.
    """
    if not isinstance(value, str):
        return value
    prices: dict[str, Price] = {}
    for item in filter(str.strip, value.split(",")):
        name, _, text = map(str.strip, item.partition("="))
        match = _PRICES.fullmatch(text)
        if not name or match is None:
            raise ValueError(
                f"{item.strip()!r}: want name=input/cached/output, prices of a million tokens, "
                "such as llama=0.15/0.03/0.6"
            )
        if name in prices:
            raise ValueError(f"{name} is given twice")
        prices[name] = Price(
            *(int(Decimal(each) * COST_UNITS // _PRICED_TOKENS) for each in match.groups())
        )
    return prices


def show_money(amount: float) -> str:
    """Format an amount of money, to 10^-6."""
    return f"{amount:.6f}".rstrip("0").rstrip(".")


def price_of(
    prices: Prices, base_model: str, adapter: Adapter | None, *, background: bool = False
) -> Price:
    """Return the price of a request's tokens.

    An adapter without a price has its base model's; a base model without one is free. Each token
    of a composition has the highest price among its adapters'.

    adapter: None for the base model alone.
    background: whether the request is a line of a batch, or of service tier flex. A model
        without a price of its own for these has its ordinary price.
    """

    def of(name: str, otherwise: Price) -> Price:
        usual = prices.get(name, otherwise)
        return prices.get(name + FLEX, usual) if background else usual

    base = of(base_model, FREE)
    if adapter is None or not prices:
        return base
    members = adapter.members if isinstance(adapter, Composition) else (adapter,)
    own = [of(f"{each.tenant}/{each.name}", base) for each in members]
    return Price(*map(max, zip(*own, strict=True)))
