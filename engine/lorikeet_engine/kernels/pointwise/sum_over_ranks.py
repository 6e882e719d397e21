"""Sum of one token's row over ranks, inside the kernel that normalises the row."""

import torch
import triton
import triton.language as tl

from lorikeet_engine.parallel.sums import RowExchange


def exchange_operands(
    exchange: RowExchange | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, int, int, int]:
    """Return operands of sum_over_ranks: addresses, epochs, rank, world and most_rows.

    exchange: memory through which ranks send rows; None: there is one rank, and addresses and
        epochs are None.
    """
    if exchange is None:
        return None, None, 0, 1, 0
    _, world, most_rows, _ = exchange.received.shape
    return exchange.addresses, exchange.epochs, exchange.rank, world, most_rows


@triton.jit  # type: ignore[untyped-decorator]
def sum_over_ranks(
    own: tl.tensor,
    columns: tl.tensor,
    inside: tl.tensor,
    row: tl.tensor,
    addresses: tl.tensor,
    epochs: tl.tensor,
    rank: tl.constexpr,
    world: tl.constexpr,
    most_rows: tl.constexpr,
    width: tl.constexpr,
) -> tl.tensor:
    """Send a row to all other ranks, wait for theirs, and return the sum.

    Rows are added in the order of ranks, in float32, and the sum is rounded to own's dtype.

    own: this rank's row, 0 beyond its width.
    columns, inside: indices of own's columns, and mask of those below the width.
    row: index of the row.
    addresses [world] int64: address of the memory in which each rank receives rows.
    epochs [most_rows] int32: number of times that each row was summed; raised by 1 here.
    rank: index of this rank.
    world: number of ranks.
    most_rows: maximum number of rows that the exchange sums.
    """
    epoch = tl.load(epochs + row) + 1
    tag = epoch.to(tl.uint32) << 16
    words = own.to(tl.uint16, bitcast=True).to(tl.uint32) | tag
    first = (epoch & 1) * world  # of the ranks' rows; epoch % 2 is negative once epochs wrap
    for peer in tl.static_range(world):
        if peer != rank:
            place = ((first + rank) * most_rows + row) * width
            tl.store(_received(addresses, peer) + place + columns, words, mask=inside)
    total = tl.zeros_like(own).to(tl.float32)
    for peer in tl.static_range(world):
        if peer == rank:
            total += own.to(tl.float32)
        else:
            place = ((first + peer) * most_rows + row) * width
            sent = _received(addresses, rank) + place + columns
            # volatile: read from memory each time, in words of 32 bits, which are never torn
            words = tl.load(sent, mask=inside, other=0, volatile=True)
            words = tl.where(inside, words ^ tag, 0)
            while tl.max(words, 0) > 0xFFFF:  # some word is of another epoch
                words = tl.load(sent, mask=inside, other=0, volatile=True)
                words = tl.where(inside, words ^ tag, 0)
            total += words.to(tl.uint16).to(own.dtype, bitcast=True).to(tl.float32)
    tl.debug_barrier()  # all threads have read the epoch
    tl.store(epochs + row, epoch)
    return total.to(own.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _received(addresses: tl.tensor, rank: tl.constexpr) -> tl.tensor:
    """Return the address, as mapped on this GPU, of the memory in which a rank receives rows."""
    address = tl.load(addresses + rank).to(tl.pointer_type(tl.uint32))
    return tl.multiple_of(address, 16)
