"""Products of which ranks have parts are summed once: at once, or by the norm that reads them."""

from typing import Any

import pytest
import torch

from lorikeet_engine.kernels.lora.types import LoraDelta
from lorikeet_engine.models import norms
from lorikeet_engine.models.norms import Product, RmsNorm, summed_product
from lorikeet_engine.parallel.rank_group import RankGroup
from lorikeet_engine.parallel.sums import MOST_SENT_BYTES, RowExchange, most_rows
from tests.engine.ranks import run_ranks

WIDTH, MOST_ROWS = 8, 3


def exchange() -> RowExchange:
    received = torch.zeros(2, 2, MOST_ROWS, WIDTH, dtype=torch.int32)
    nothing = torch.zeros(2, dtype=torch.int64), torch.zeros(MOST_ROWS, dtype=torch.int32)
    return RowExchange(0, received, *nothing)


def part(rows: int, rank: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, LoraDelta]:
    """y, and 8 to be added to its first row."""
    y = torch.full((rows, WIDTH), 1.0 + rank, dtype=dtype)
    return y, LoraDelta(torch.full_like(y, 8.0), torch.tensor([1], dtype=torch.int32))


def products(group: RankGroup) -> list[Product]:
    """Without an exchange, with one, and of rows that it does not take."""
    found = [summed_product(*part(2, group.rank), None, group)]
    group.sums._exchange = exchange()
    found += [summed_product(*part(rows, group.rank), None, group) for rows in (2, MOST_ROWS + 1)]
    found.append(summed_product(*part(2, group.rank, torch.float32), None, group))
    return found


def test_ranks_sum_at_once_the_products_that_the_norm_cannot_sum(tmp_path):
    for rank, (without, small, many, precise) in enumerate(run_ranks(2, products, tmp_path)):
        for product in (without, many, precise):
            assert product.y[0].tolist() == [3.0 + 16.0] * WIDTH
            assert product.y[1:].unique().tolist() == [3.0]
            assert (product.lora, product.exchange) == (None, None)
        assert small.y.unique().tolist() == [1.0 + rank]
        assert small.lora is not None
        assert small.exchange is not None


@pytest.mark.parametrize(
    ("width", "world", "rows"), [(8192, 2, 32), (8192, 8, 4), (4096, 2, 64), (1 << 20, 8, 1)]
)
def test_a_rank_sends_at_most_most_sent_bytes_for_a_sum(width, world, rows):
    assert most_rows(width, world) == rows
    assert rows == 1 or rows * width * 4 * (world - 1) <= MOST_SENT_BYTES


def test_one_process_sums_nothing():
    y, lora = part(2, 0)
    weight = torch.ones(WIDTH)
    assert summed_product(y, lora, weight, None) == Product(y, lora, weight)
    assert y.unique().tolist() == [1.0]


@pytest.mark.parametrize("rounded", [True, False])
def test_the_norm_gets_the_exchange_of_its_product(monkeypatch, rounded):
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(norms, "add_rms_norm", lambda *given, fp8: told.append((fp8, *given)))
    norm = RmsNorm.__new__(RmsNorm)
    norm.eps, norm.multiplier, norm.weight, norm.scalar = 1e-5, 0.5, torch.ones(WIDTH), 0.9
    x, output_weight, (y, lora) = torch.zeros(2, WIDTH), torch.ones(WIDTH), part(2, 0)
    product = Product(y, lora, output_weight, exchange())
    norm.inputs(x, product, rounded=rounded)
    want = (rounded, x, y, norm.weight, 1e-5, lora, 0.5, output_weight, product.exchange, 0.9)
    assert all(got is wanted or got == wanted for got, wanted in zip(told[0], want, strict=True))
