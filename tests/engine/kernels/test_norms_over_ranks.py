"""The norm's kernel sums a row over ranks, of which one runs here and the others' words are put.

Without a GPU it runs in Triton's interpreter. tests/engine/gpu/test_rank_sums.py has real ranks.
"""

import threading
import time

import pytest
import torch

from lorikeet_engine.kernels.fp8 import Activations
from lorikeet_engine.kernels.lora.types import LoraDelta
from lorikeet_engine.kernels.pointwise import fused
from lorikeet_engine.parallel.sums import RowExchange
from tests.engine.interpreter import INTERPRETED

KIND = ("cpu", torch.float16) if INTERPRETED else ("cuda", torch.bfloat16)
pytestmark = (
    []
    if INTERPRETED
    else [
        pytest.mark.gpu,
    ]
)
MOST_ROWS, EPS = 5, 1e-5
worlds = pytest.mark.parametrize(("rank", "world"), [(0, 2), (1, 2), (2, 4)])
widths = pytest.mark.parametrize("width", [64, 100, 1536])


class FakePeers:
    """The memory of all ranks, on one device, where `rank` alone runs."""

    def __init__(self, rank: int, world: int, width: int) -> None:
        shape = 2, world, MOST_ROWS, width
        self.received = [
            torch.zeros(shape, dtype=torch.int32, device=KIND[0]) for _ in range(world)
        ]
        addresses = torch.tensor([each.data_ptr() for each in self.received], device=KIND[0])
        epochs = torch.zeros(MOST_ROWS, dtype=torch.int32, device=KIND[0])
        self.exchange = RowExchange(rank, self.received[rank], addresses, epochs)

    def send(self, parts: torch.Tensor) -> None:
        """Put what the peers' kernels would send; parts [world, rows, width] of all ranks."""
        rank, epochs = self.exchange.rank, self.exchange.epochs.tolist()
        for row in range(parts.shape[1]):
            epoch = epochs[row] + 1
            for peer, part in enumerate(parts[:, row]):
                if peer != rank:
                    self.received[rank][epoch % 2, peer, row] = words(part, epoch)

    def check_sent(self, own: torch.Tensor) -> None:
        """Check that the last epoch sent each row of own [rows, width] to every peer."""
        rank, epochs = self.exchange.rank, self.exchange.epochs.tolist()
        for row, numbers in enumerate(own):
            for received in self.received[:rank] + self.received[rank + 1 :]:
                sent = received[epochs[row] % 2, rank, row]
                assert torch.equal(sent, words(numbers, epochs[row]))


def words(numbers: torch.Tensor, epoch: int) -> torch.Tensor:
    """Numbers of 16 bits as they are sent."""
    tag = epoch % 2**16 - (epoch % 2**16 >= 2**15) * 2**16
    return (numbers.view(torch.int16).int() & 0xFFFF) | (tag << 16)


def random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(KIND[0], KIND[1])


def summed(parts: torch.Tensor) -> torch.Tensor:
    """All ranks' parts, added in order in float32 and rounded."""
    total = torch.zeros(parts.shape[1:], device=parts.device)
    for part in parts:
        total += part.float()
    return total.to(parts.dtype)


@worlds
@widths
def test_a_sum_over_ranks_is_added_and_normed_as_one_rank_would(rank, world, width):
    peers, weight = FakePeers(rank, world, width), random(width)
    for rows in (3, 1, 5, 2, 3):  # steps of other sizes follow one another
        parts, x = random(world, rows, width), random(rows, width)
        alone, own = x.clone(), parts[rank].clone()
        peers.send(parts)
        y = fused.add_rms_norm(x, own, weight, EPS, exchange=peers.exchange)
        peers.check_sent(parts[rank])
        assert torch.equal(y, fused.add_rms_norm(alone, summed(parts), weight, EPS))
        assert torch.equal(x, alone)
    assert peers.exchange.epochs.tolist() == [5, 4, 3, 1, 1]


@pytest.mark.usefixtures("exact_fp8")
@worlds
@widths
def test_lora_of_a_part_is_summed_with_the_part_and_rounded_to_fp8(rank, world, width):
    rows, peers, weight = 4, FakePeers(rank, world, width), random(width)
    parts, x = random(world, rows, width), random(rows, width)
    own, added = random(rows, width), random(width, rows).T.contiguous()
    added[2:] = torch.nan
    lora = LoraDelta(added, torch.tensor([2], dtype=torch.int32, device=KIND[0]))
    parts[rank] = own
    fused.add_delta(parts[rank], lora)
    alone = x.clone()
    peers.send(parts)
    got = fused.add_rms_norm(x, own, weight, EPS, lora, exchange=peers.exchange, fp8=True)
    peers.check_sent(parts[rank])
    want = fused.add_rms_norm(alone, summed(parts), weight, EPS, fp8=True)
    assert bits(got) == bits(want)
    assert torch.equal(x, alone)


@worlds
@widths
@pytest.mark.parametrize("has_weight", [True, False])
def test_a_sum_over_ranks_is_normed_and_multiplied_before_it_is_added(
    rank, world, width, has_weight
):
    rows, peers, weight = 2, FakePeers(rank, world, width), random(width)
    parts, x = random(world, rows, width), random(rows, width)
    alone, rest = x.clone(), (weight if has_weight else None, EPS, None, 0.5, random(width))
    peers.send(parts)
    y = fused.add_rms_norm(x, parts[rank], *rest, peers.exchange)
    assert torch.equal(y, fused.add_rms_norm(alone, summed(parts), *rest))
    assert torch.equal(x, alone)


@pytest.mark.parametrize("epochs", [2**16 - 2, 2**31 - 2])
def test_epochs_are_counted_on_past_the_largest_number(epochs):
    peers, weight = FakePeers(0, 2, 64), random(64)
    peers.exchange.epochs.fill_(epochs)
    for number in range(4):
        parts = random(2, 1 + number, 64)[:, :1].contiguous()
        peers.send(parts)
        x, alone = random(1, 64), random(1, 64)
        fused.add_rms_norm(x, parts[0], weight, EPS, exchange=peers.exchange)
        fused.add_rms_norm(alone, summed(parts), weight, EPS)
        assert torch.equal(x, alone)


@pytest.mark.skipif(not INTERPRETED, reason="this process writes while the kernel runs")
def test_a_word_of_an_earlier_turn_is_waited_out():
    peers, weight = FakePeers(1, 2, 64), random(64)
    for _ in range(2):
        peers.send(torch.full((2, 1, 64), 9.0, dtype=KIND[1]))
        fused.add_rms_norm(random(1, 64), random(1, 64), weight, EPS, exchange=peers.exchange)
    parts, x, alone = random(2, 1, 64), random(1, 64), random(1, 64)
    place = peers.received[1][1, 0, 0]
    late = place[63:].clone()
    peers.send(parts)
    place[63:], late = late, place[63:].clone()
    began_s = time.monotonic()
    timer = threading.Timer(0.5, lambda: place[63:].copy_(late))
    timer.start()
    fused.add_rms_norm(x, parts[1], weight, EPS, exchange=peers.exchange)
    assert time.monotonic() - began_s >= 0.5
    timer.join()
    fused.add_rms_norm(alone, summed(parts), weight, EPS)
    assert torch.equal(x, alone)


def bits(activations: Activations) -> list[list[int]]:
    rounded = activations.fp8
    tensors = (activations.rows, rounded.rows, rounded.scales)
    return [each.view(torch.uint8).flatten().tolist() for each in tensors]
