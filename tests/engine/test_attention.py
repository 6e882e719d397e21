"""Paged attention equals attention written out, whatever the mix and wherever the pages lie."""

import math

import pytest
import torch

from lorikeet_engine.kernels.attention import SdpaAttention

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16


class History:
    """What every sequence has been given so far, and a cache poisoned with NaN."""

    def __init__(self, tokens, dtype=torch.float32):
        self.tokens = tokens
        self.cache = torch.full(
            (2, tokens.pages, tokens.page_size, KV_HEADS, HEAD_DIM), torch.nan, dtype=dtype
        )
        self.seen = {}
        self.random = torch.Generator().manual_seed(11)

    def attend(self, counts):
        """Feed counts[name] random tokens to each sequence → (got, want)."""
        batch = self.tokens.batch({name: [0] * count for name, count in counts.items()})
        total = sum(counts.values())
        width = HEADS + 2 * KV_HEADS
        qkv = torch.randn(total, width, HEAD_DIM, generator=self.random).to(self.cache.dtype)
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        want = []
        for name, start, end in zip(
            counts, batch.query_starts[:-1], batch.query_starts[1:], strict=True
        ):
            keys, values = self.seen.get(name, (k[:0], v[:0]))
            self.seen[name] = torch.cat((keys, k[start:end])), torch.cat((values, v[start:end]))
            want.append(written_out(q[start:end], *self.seen[name]))
        return SdpaAttention().attend(q, k, v, self.cache, batch), torch.cat(want)


def written_out(q, keys, values):
    """softmax(q·Kᵀ / √d)·V, a query and a head at a time, in float64."""
    out = torch.empty(q.shape, dtype=torch.float64)
    before = len(keys) - len(q)
    for t, query in enumerate(q.double()):
        for head in range(HEADS):
            k = keys[: before + t + 1, head // (HEADS // KV_HEADS)].double()
            v = values[: before + t + 1, head // (HEADS // KV_HEADS)].double()
            scores = torch.softmax(k @ query[head] / math.sqrt(HEAD_DIM), dim=0)
            out[t, head] = scores @ v
    return out


@pytest.fixture
def history(paged_tokens):
    return History(paged_tokens())


EPS = torch.finfo(torch.float32).eps


def assert_equal(got, want, eps=EPS):
    torch.testing.assert_close(got.double(), want, rtol=0, atol=16 * eps * want.abs().max().item())


@pytest.mark.parametrize("count", [1, 16, 63, 133])
def test_a_whole_prompt_at_once(history, count):
    assert_equal(*history.attend({"a": count}))


def test_chunks_and_decodes_of_one_sequence_continue_each_other(history):
    for count in (63, 1, 1, 17, 48, 1):
        assert_equal(*history.attend({"a": count}))


def test_prefill_chunks_and_decodes_mix_in_one_batch(history):
    assert_equal(*history.attend({"a": 63, "b": 1}))
    assert_equal(*history.attend({"b": 1, "c": 133, "a": 1}))
    assert_equal(*history.attend({"a": 1, "b": 1, "c": 1, "d": 1}))
    assert_equal(*history.attend({"d": 20, "a": 5, "b": 1}))


def test_bfloat16_stays_within_its_precision(paged_tokens):
    got, want = History(paged_tokens(), torch.bfloat16).attend({"a": 63, "b": 1})
    assert got.dtype == torch.bfloat16
    assert_equal(got, want, eps=torch.finfo(torch.bfloat16).eps / 8)


def test_nothing_but_the_batch_s_own_slots_is_written(history):
    batch_of = history.tokens.tables
    history.attend({"a": 63, "b": 5})
    written = ~history.cache.isnan().all(dim=(-1, -2))  # [2, pages, page_size]
    for name, length in {"a": 63, "b": 5}.items():
        for position in range(length):
            page = batch_of[name][position // 16]
            written[:, page, position % 16] ^= True
    assert not written.any()
