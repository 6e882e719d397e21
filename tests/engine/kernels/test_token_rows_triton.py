"""Rows of trained tokens in Triton, against the reference in torch."""

from itertools import accumulate

import pytest
import torch

pytest.importorskip("triton")
from lorikeet_engine.kernels.lora import reference
from lorikeet_engine.kernels.lora.gather import gather
from lorikeet_engine.kernels.lora.tiles import list_tiles
from lorikeet_engine.kernels.lora.token_rows import replace_logits
from lorikeet_engine.kernels.lora.types import LoraGroup, LoraWeights, Segments
from tests.engine.interpreter import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else pytest.mark.gpu
HIDDEN, VOCABULARY = 80, 128_256
EMBEDDINGS = LoraGroup((0,), VOCABULARY, (HIDDEN,))
ROWS = LoraGroup((1,), HIDDEN, (3,))
# the interpreter cuts digits of bfloat16 off where a GPU rounds
DTYPES = [torch.float32, torch.float16 if INTERPRETED else torch.bfloat16]
COUNTS = (5, 0, 40)  # trained tokens of the adapter in each slot
RUNS = [(2, 19), (1, 4), (0, 33)]  # slot, tokens


def adapters(dtype: torch.dtype) -> tuple[LoraWeights, list[list[int]]]:
    """Slots with so many rows in layer 1, and the ids of each; every gap holds NaN."""
    table = torch.zeros(len(COUNTS), 2, 2, 3, dtype=torch.int64)
    pieces, ids, end = [], [], 0
    for slot, count in enumerate(COUNTS):
        ids.append(torch.randperm(VOCABULARY)[:count].sort()[0].tolist())
        rows = torch.randn(count, HIDDEN)
        digits = [[each & 255, each >> 8 & 255, each >> 16] for each in ids[-1]]
        table[slot, 1, 1] = torch.tensor([end, end + rows.numel() + 16, count])
        numbers = torch.tensor(digits, dtype=torch.float32).flatten()
        gap = torch.full((16 + -numbers.numel() % 16,), torch.nan)
        pieces += [rows.flatten(), torch.full((16,), torch.nan), numbers, gap]
        end += sum(piece.numel() for piece in pieces[-4:])
    arena = torch.cat(pieces)
    return LoraWeights(arena.to(DEVICE, dtype), table.to(DEVICE)), ids


def segments() -> Segments:
    lengths = [length for _, length in RUNS]
    starts = [end - length for end, length in zip(accumulate(lengths), lengths, strict=True)]
    parts = ([slot for slot, _ in RUNS], starts, lengths)
    at = [torch.tensor(part, dtype=torch.int32, device=DEVICE) for part in parts]
    return Segments(*at, max_rank=max(COUNTS), max_rows=max(COUNTS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings_of_trained_tokens_are_the_adapters_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights, ids = adapters(dtype)
    tokens = torch.randint(0, VOCABULARY, (sum(length for _, length in RUNS) + 5,))
    tokens[:8] = torch.tensor(ids[2][:4] + ids[2][-4:])
    tokens[19:23] = ids[0][0]  # of an adapter that did not train it
    tokens[30:34] = torch.tensor(ids[0][:4])
    tokens[-1] = ids[0][0]  # of no adapter
    tokens = tokens.to(DEVICE)
    y = torch.randn(len(tokens), HIDDEN, device=DEVICE).to(dtype)
    want = y.clone()
    reference.replace_embeddings(want, tokens, weights, segments(), 1, ROWS)
    assert (want != y).any(1).sum() == 12
    gather(tokens, y, weights, list_tiles(segments(), len(tokens)), 1, EMBEDDINGS, ROWS)
    assert torch.equal(y, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_of_trained_tokens_are_products_with_the_adapters_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weights, ids = adapters(dtype)
    rows = sum(length for _, length in RUNS) + 5
    hidden = torch.randn(rows, HIDDEN, device=DEVICE).to(dtype)
    logits = torch.randn(rows, VOCABULARY, device=DEVICE).to(dtype)
    want = logits.clone()
    reference.replace_logits(want, hidden, weights, segments(), 1, ROWS)
    changed = (want != logits).any(1)
    assert changed[:19].all()
    assert not changed[19:23].any()
    assert changed[23:-5].all()
    assert not changed[-5:].any()
    tiles = list_tiles(segments(), rows)
    replace_logits(logits, hidden, weights, tiles, max(COUNTS), 1, ROWS)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(logits, want, rtol=tolerance, atol=2 * HIDDEN**0.5 * tolerance)
    untouched = torch.ones(VOCABULARY, dtype=torch.bool, device=DEVICE)
    untouched[[each for slot in ids for each in slot]] = False
    assert torch.equal(logits[:, untouched], want[:, untouched])
