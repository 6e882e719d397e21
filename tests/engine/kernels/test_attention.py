"""Paged attention equals attention written out, whatever the mix and wherever the pages lie."""

import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lorikeet_engine.errors import SettingsError
from lorikeet_engine.kernels.attention import choose_attention, prefixes
from lorikeet_engine.kernels.attention.protocol import AttentionShape, PageTable, kv_head_dim
from lorikeet_engine.kernels.attention.sdpa import SdpaAttention
from lorikeet_engine.kernels.fp8_kv import FP8_KV, KvScales

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16


class History:
    """Tokens fed to each sequence so far, and a cache poisoned with NaN."""

    def __init__(
        self, tokens, dtype=torch.float32, scales=None, window=None, soft_cap=None, sinks=None
    ):
        """scales: of pages of FP8."""
        self.tokens, self.dtype, self.scales = tokens, dtype, scales
        self.window, self.soft_cap, self.sinks = window, soft_cap, sinks
        tokens.windows = (window,)
        self.cache = torch.full(
            (2, tokens.pages, tokens.page_size, KV_HEADS, HEAD_DIM),
            torch.nan,
            dtype=dtype if scales is None else FP8_KV,
        )
        self.seen = {}
        self.random = torch.Generator().manual_seed(11)

    def attend(self, counts):
        """Feed counts[name] random tokens to each sequence → (got, want)."""
        batch = self.tokens.batch({name: [0] * count for name, count in counts.items()})
        total = sum(counts.values())
        width = HEADS + 2 * KV_HEADS
        qkv = torch.randn(total, width, HEAD_DIM, generator=self.random).to(self.dtype)
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        stored = k, v
        if self.scales is not None:  # what is seen is what the pages hold
            stored = k.to(FP8_KV), v.to(FP8_KV)
            k, v = stored[0].double() * self.scales.key, stored[1].double() * self.scales.value
        want = []
        for name, start, end in zip(
            counts, batch.query_starts[:-1], batch.query_starts[1:], strict=True
        ):
            keys, values = self.seen.get(name, (k[:0], v[:0]))
            self.seen[name] = torch.cat((keys, k[start:end])), torch.cat((values, v[start:end]))
            keys, values = self.seen[name]
            want.append(written_out(q[start:end], keys, values, *self.rules))
        store(self.cache, batch, *stored)
        backend = SdpaAttention(self.soft_cap)
        got = backend.attend(q, self.cache, batch, self.scales, self.window, sinks=self.sinks)
        return got, torch.cat(want)

    @property
    def rules(self):
        return self.window, self.soft_cap, self.sinks


def store(kv, batch, k, v):
    """Put a batch's keys and values where it says."""
    for slots in batch.kv_slots:
        kv[0].flatten(0, 1)[slots, :, : k.shape[-1]] = k
        kv[1].flatten(0, 1)[slots, :, : v.shape[-1]] = v


def written_out(q, keys, values, window=None, soft_cap=None, sinks=None):
    """softmax(q·Kᵀ / √d)·V, a query and a head at a time, in float64."""
    out = torch.empty(q.shape, dtype=torch.float64)
    before = len(keys) - len(q)
    for t, query in enumerate(q.double()):
        for head in range(HEADS):
            end = before + t + 1
            first = 0 if window is None else max(0, end - window)
            k = keys[first:end, head // (HEADS // KV_HEADS)].double()
            v = values[first:end, head // (HEADS // KV_HEADS)].double()
            scores = k @ query[head] / math.sqrt(HEAD_DIM)
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head : head + 1].double()))
            out[t, head] = torch.softmax(scores, dim=0)[: len(v)] @ v
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


@pytest.mark.parametrize("window", [1, 20, 64])
def test_a_window_hides_all_tokens_before_it(paged_tokens, window):
    history = History(paged_tokens(), window=window)
    assert_equal(*history.attend({"a": 63, "b": 1}))
    assert_equal(*history.attend({"b": 20, "c": 133, "a": 1}))


def test_scores_are_bent_to_the_soft_cap(paged_tokens):
    history = History(paged_tokens(), window=40, soft_cap=0.7)
    assert_equal(*history.attend({"a": 63, "b": 1}))
    assert_equal(*history.attend({"a": 1, "b": 20}))


@pytest.mark.parametrize("soft_cap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 20])
def test_a_sink_of_each_head_takes_its_share_of_the_softmax(paged_tokens, window, soft_cap):
    sinks = torch.tensor([-40.0, -1.0, 0.0, 2.0, 7.0, 300.0])
    history = History(paged_tokens(), window=window, soft_cap=soft_cap, sinks=sinks)
    assert_equal(*history.attend({"a": 63, "b": 1}))
    assert_equal(*history.attend({"b": 20, "c": 133, "a": 1}))


def test_bfloat16_stays_within_its_precision(paged_tokens):
    got, want = History(paged_tokens(), torch.bfloat16).attend({"a": 63, "b": 1})
    assert got.dtype == torch.bfloat16
    assert_equal(got, want, eps=torch.finfo(torch.bfloat16).eps / 8)


def test_pages_of_fp8_stand_for_their_numbers_times_the_scales(paged_tokens):
    history = History(paged_tokens(), scales=KvScales(key=1.7, value=0.3))
    assert_equal(*history.attend({"a": 63, "b": 1}))
    assert_equal(*history.attend({"b": 20, "c": 133, "a": 1}))


CUDA = torch.device("cuda")
LARGE = AttentionShape(heads=8, kv_heads=2, head_dim=128, page_size=16, dtype=torch.bfloat16)


def test_a_machine_without_flashinfer_is_told_which_extra_it_wants(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.delitem(sys.modules, "lorikeet_engine.kernels.attention.flashinfer", False)
    with pytest.raises(SettingsError, match=r"--editable '\.\[cuda\]'"):
        choose_attention([LARGE], CUDA)


@pytest.mark.parametrize(
    ("shape", "device"),
    [
        (LARGE, torch.device("cpu")),
        (replace(LARGE, dtype=torch.float32), CUDA),
        (replace(LARGE, head_dim=16), CUDA),
    ],
)
def test_torch_attends_where_flashinfer_cannot(shape, device, caplog):
    assert isinstance(choose_attention([shape], device), SdpaAttention)
    assert ("attention_is_slow" in caplog.text) == (device == CUDA), "a CPU has nothing else"


def test_pages_of_fp8_are_refused_on_a_gpu_that_has_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A10")
    with pytest.raises(SettingsError, match="kv_dtype=fp8: NVIDIA A10 is older than Ada"):
        choose_attention([replace(LARGE, fp8_kv=True)], CUDA)


def test_the_warning_names_the_property_without_flashinfer_kernels(caplog):
    choose_attention([replace(LARGE, head_dim=48)], CUDA)
    choose_attention([replace(LARGE, dtype=torch.float32)], CUDA)
    narrow, wide = (record.reason for record in caplog.records)
    assert "heads of 64 to 512, and these have 48" in narrow
    assert "float32" in wide


@pytest.mark.gpu
class TestFlashInfer:
    """FlashInfer says what torch says, over the same poisoned pages, in bfloat16 and in FP8."""

    @pytest.fixture(params=[None, KvScales(), KvScales(0.11, 0.17)], ids=["bf16", "fp8", "scaled"])
    def scales(self, request):
        return request.param

    @pytest.fixture(
        params=[
            LARGE,
            replace(LARGE, windows=(None, 50, 50, 50)),
            replace(LARGE, head_dim=256, windows=(1, 20), soft_cap=0.7),
            replace(LARGE, head_dim=96),
            replace(LARGE, long_contexts=True),
            replace(LARGE, head_dim=96, long_contexts=True),
        ],
        ids=["", "windows", "soft cap", "odd heads", "long", "long, odd heads"],
    )
    def shape(self, request):
        return request.param

    @pytest.fixture
    def backend(self, shape, scales):
        return choose_attention([replace(shape, fp8_kv=scales is not None)], CUDA)

    @pytest.fixture
    def compare(self, paged_tokens, backend, scales, shape):
        s, tokens = shape, paged_tokens(device="cuda", windows=shape.windows)
        kv = torch.full(
            (2, tokens.all_pages, s.page_size, s.kv_heads, kv_head_dim(s.head_dim, "cuda")),
            torch.nan,
            dtype=s.dtype if scales is None else FP8_KV,
            device="cuda",
        )
        kv[..., s.head_dim :] = 0
        random = torch.Generator("cuda").manual_seed(5)

        def compare(counts):
            batch = tokens.batch({name: [0] * count for name, count in counts.items()})
            size = (sum(counts.values()), s.heads + 2 * s.kv_heads, s.head_dim)
            qkv = torch.randn(size, generator=random, device="cuda").to(s.dtype)
            q, k, v = qkv.split((s.heads, s.kv_heads, s.kv_heads), dim=1)
            store(kv, batch, k.to(kv.dtype), v.to(kv.dtype))
            backend.plan(batch)
            for group, window in enumerate(s.windows):
                got = backend.attend(q, kv, batch, scales, window, group)
                want = SdpaAttention(s.soft_cap).attend(q, kv, batch, scales, window, group)
                torch.testing.assert_close(got, want, rtol=0, atol=4 * torch.finfo(s.dtype).eps)

        return compare

    @pytest.mark.parametrize("count", [1, 16, 63, 133])
    def test_a_whole_prompt_at_once(self, compare, count):
        compare({"a": count})

    def test_prefill_chunks_and_decodes_mix_in_one_batch(self, compare):
        compare({"a": 63, "b": 1})
        compare({"b": 1, "c": 133, "a": 1})
        compare({"a": 1, "b": 1, "c": 1, "d": 1})
        compare({"d": 20, "a": 5, "b": 1})
        compare({"d": 1, "a": 1, "b": 1, "c": 1})

    def test_decodes_beside_prompts_that_see_much_are_attended_to_apart(
        self, compare, backend, shape, monkeypatch
    ):
        monkeypatch.setattr(sys.modules[type(backend).__module__], "SEEN_TO_SPLIT", 70 * 60)
        backend.captured(4, torch.zeros(4, 64, dtype=torch.int32, device="cuda"))
        compare({"a": 63})
        assert backend._split is None  # there are no decodes
        compare({"b": 1, "a": 60, "c": 1, "d": 20})
        if None not in shape.windows:  # nobody sees much
            assert backend._split is None
            return
        assert backend._split.prompt_rows.tolist() == [*range(1, 61), *range(62, 82)]
        compare({"a": 60, "b": 1, "c": 1, "d": 1})
        assert backend._split.decode_rows.tolist() == [60, 61, 62]
        compare({"b": 1, "d": 20})
        assert backend._split is None  # they see little
        compare({"a": 60, **{f"{i}": 1 for i in range(5)}})
        assert backend._split is None  # too many

    def test_prompts_that_see_much_are_attended_to_by_kernels_for_hopper(
        self, compare, backend, shape, scales, monkeypatch
    ):
        monkeypatch.setattr(sys.modules[type(backend).__module__], "SEEN_TO_SPLIT", 1)
        hopper = torch.cuda.get_device_capability() == (9, 0)
        is_served = shape.long_contexts and scales is None and hopper
        compare({"a": 100, "b": 15})
        assert (backend._planned_hopper is not None) == is_served
        compare({"a": 100, "b": 300})
        compare({"a": 1, "b": 1})
        assert backend._planned_hopper is None  # decodes

    @pytest.mark.parametrize("shape", [replace(LARGE, long_contexts=True)], ids=[""])
    @pytest.mark.parametrize("scales", [None], ids=[""])
    def test_a_prefix_is_cut_if_the_chunk_sees_enough_tokens(self, compare, backend, monkeypatch):
        if backend._hopper is None:
            pytest.skip("needs a Hopper GPU")
        monkeypatch.setattr(sys.modules[type(backend).__module__], "SEEN_TO_SPLIT", 1)
        module = sys.modules[type(backend._hopper).__module__]
        monkeypatch.setattr(prefixes, "count_parts", lambda *_: 3)
        compare({"a": 300, "b": 40})
        compare({"a": 30, "b": 40, "c": 7})
        assert backend._planned_hopper is None  # FA2's
        monkeypatch.setattr(module, "SEEN_TO_CUT", 1)
        compare({"a": 30, "b": 40, "c": 7})
        assert backend._planned_hopper._cut is not None

    def test_many_sequences_of_many_lengths(self, compare):
        compare({str(i): 1 + 5 * i for i in range(12)})
        for _ in range(3):
            compare({str(i): 1 for i in range(12)})

    @pytest.mark.parametrize("kv_heads", [1, 2, 4])
    def test_there_is_room_to_split_long_sequences_of_few_kv_heads(self, kv_heads):
        shape, pages = replace(LARGE, heads=32, kv_heads=kv_heads), 2000
        batch = SimpleNamespace(
            query_starts=np.arange(5, dtype=np.int32) * 64,
            page_tables=(
                PageTable(
                    np.arange(5, dtype=np.int32) * pages,
                    np.zeros(4 * pages, np.int32),
                    np.full(4, pages * shape.page_size, np.int32),
                ),
            ),
        )
        choose_attention([shape], CUDA).plan(batch)
