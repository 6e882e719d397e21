"""Bookkeeping of KV pages and states: none is lost or shared wrongly, prefixes are found again."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lorikeet_engine.scheduling.kv_cache import KVCache, PageKeys, SequencePages
from lorikeet_engine.scheduling.state_pool import StatePool

PAGE = 4


def keys_of(tokens, salt="", digest=None, pages=None):
    full = len(tokens) // PAGE if pages is None else pages
    return PageKeys(list(tokens), PAGE, salt, digest).keys[:full]


def cache_tokens(cache, tokens, salt="", digest=None):
    """Take, publish and release the pages of a finished sequence; return them."""
    pages = cache.take(cache.pages_for(len(tokens)))
    for page, key in zip(pages, keys_of(tokens, salt, digest), strict=False):
        cache.publish(page, key)
    cache.release(pages)
    return pages


def test_a_prefix_is_found_page_by_page_up_to_the_first_difference():
    cache = KVCache(8, PAGE)
    pages = cache_tokens(cache, range(12))
    assert cache.find(keys_of(range(12))) == pages
    assert cache.find(keys_of([0, 1, 2, 3, 4, 5, 6, 99, 8, 9, 10, 11])) == pages[:1]


def test_equal_tokens_after_different_prefixes_are_different_pages():
    cache = KVCache(8, PAGE)
    cache_tokens(cache, [1, 1, 1, 1, 5, 6, 7, 8])
    assert cache.find(keys_of([2, 2, 2, 2, 5, 6, 7, 8])) == []
    assert cache.find(keys_of([5, 6, 7, 8])) == []


def test_a_partial_page_is_never_shared():
    cache = KVCache(8, PAGE)
    pages = cache_tokens(cache, range(7))
    assert cache.find(keys_of(range(8))) == pages[:1]


@pytest.mark.parametrize(
    ("salt", "digest"), [("globex", "a" * 64), ("acme", "b" * 64), ("acme", None), ("", "a" * 64)]
)
def test_another_salt_or_adapter_never_finds_the_pages(salt, digest):
    cache = KVCache(8, PAGE)
    cache_tokens(cache, range(8), "acme", "a" * 64)
    assert cache.find(keys_of(range(8), salt, digest)) == []
    assert len(cache.find(keys_of(range(8), "acme", "a" * 64))) == 2


def test_salt_and_digest_cannot_be_shifted_into_one_another():
    assert keys_of(range(4), "ab", "c") != keys_of(range(4), "a", "bc")


def test_keys_of_more_tokens_extend_the_earlier_keys():
    tokens = list(range(9))
    kv = SequencePages(tokens, PageKeys(tokens, PAGE))
    before = kv.keys(2)
    tokens += [9, 10, 11]
    assert kv.keys(3)[:2] == before
    assert kv.keys(3) == keys_of(range(12))


def test_cached_pages_are_given_out_last_and_the_least_recently_used_first():
    cache = KVCache(4, PAGE)
    old = cache_tokens(cache, [1] * PAGE)
    new = cache_tokens(cache, [2] * PAGE)
    assert set(cache.take(2)).isdisjoint(old + new)
    assert cache.take(1) == old
    assert cache.find(keys_of([1] * PAGE)) == []
    assert cache.find(keys_of([2] * PAGE)) == new


def test_a_cached_prefix_is_evicted_from_its_tail():
    cache = KVCache(3, PAGE)
    pages = cache_tokens(cache, range(12))
    cache.take(1)
    assert cache.find(keys_of(range(12))) == pages[:2]


def test_a_shared_page_outlives_each_of_its_users_but_the_last():
    cache = KVCache(2, PAGE)
    pages = cache_tokens(cache, range(4))
    cache.share(pages)
    cache.share(pages)
    cache.release(pages)
    assert (cache.used, cache.free) == (1, 1)
    assert cache.take(1) != pages
    cache.release(pages)
    assert (cache.used, cache.free) == (1, 1)


def test_the_first_to_publish_a_key_keeps_it():
    cache = KVCache(4, PAGE)
    first, second = cache.take(2)
    (key,) = keys_of(range(4))
    cache.publish(first, key)
    cache.publish(second, key)
    cache.release([second])
    cache.take(3)  # including the second's page
    assert cache.find([key]) == [first]


def running(cache, tokens):
    """Return a sequence with pages for all its tokens."""
    kv = SequencePages(list(tokens), PageKeys(tokens, PAGE))
    assert cache.allocate(kv, len(tokens), 0)
    return kv


def test_a_prefix_is_awaited_until_its_last_page_is_written_or_given_up():
    cache = KVCache(30, PAGE)
    first = running(cache, range(20))
    second = SequencePages([*range(12), 99, 98], PageKeys([*range(12), 99, 98], PAGE))
    assert cache.awaits_prefix(second)
    cache.publish_written(first, 8)
    assert cache.awaits_prefix(second)
    cache.publish_written(first, 12)
    assert not cache.awaits_prefix(second)
    third = SequencePages(list(range(19)), PageKeys(range(19), PAGE))
    assert cache.awaits_prefix(third)
    cache.clear(first)
    assert not cache.awaits_prefix(third)
    assert not any(cache._unwritten.values())


def test_a_prefix_with_two_writers_is_awaited_while_one_of_them_is_left():
    cache = KVCache(30, PAGE)
    first, second = running(cache, range(8)), running(cache, range(8))
    third = SequencePages(list(range(9)), PageKeys(range(9), PAGE))
    cache.clear(first)
    assert cache.awaits_prefix(third)
    cache.clear(second)
    assert not cache.awaits_prefix(third)


def test_a_page_with_a_token_that_needs_logits_is_not_awaited():
    cache = KVCache(30, PAGE)
    running(cache, range(4))
    assert not cache.awaits_prefix(SequencePages(list(range(4)), PageKeys(range(4), PAGE)))


def test_forgotten_pages_are_never_found_and_are_given_out_first():
    cache = KVCache(6, PAGE)
    good, bad = cache_tokens(cache, [1] * PAGE), cache_tokens(cache, range(8))
    cache.share(bad[:1])
    cache.forget(bad)
    assert cache.find(keys_of(range(8))) == []
    assert cache.find(keys_of([1] * PAGE)) == good
    assert cache.take(1) == bad[1:]
    cache.release(bad[:1])
    assert cache.take(1) == bad[:1]


WINDOW, STEP = 6, 8


def windowed(pages, windows=(None, WINDOW)):
    return KVCache(pages, PAGE, windows, STEP)


def compute(cache, kv, tokens):
    """Compute a sequence whose steps are read at once; return the most pages of each group."""
    most = [0] * len(kv.pages)
    while kv.computed < tokens:
        end = min(cache.reach(kv, tokens, 0), kv.computed + STEP)
        assert end > kv.computed, "it does not go on"
        assert cache.grow(kv, end)
        most = [max(pair) for pair in zip(most, map(len, kv.pages), strict=True)]
        kv.computed = end
        cache.publish_written(kv, end)
    return most


def test_a_windowed_group_has_the_pages_of_its_window_and_of_a_step():
    cache = windowed(100)
    kv = running(cache, range(60))
    whole, of_window = compute(cache, kv, 60)
    assert whole == 15
    assert of_window <= 4 + STEP // PAGE  # 60 is the end of a page: token 60 sees tokens from 54 on
    assert (kv.first, len(kv.pages[1]), cache.used) == (13, 2, 17)
    cache.clear(kv)
    assert sorted(cache.take(100)) == list(range(100))


def test_a_windowed_prompt_begins_when_one_step_fits_and_continues_in_free_pages():
    need = 10 + 4 + STEP // PAGE  # pages of all its tokens; of the window; of a step
    assert not windowed(need - 1).allocate(kv_of(range(40)), 40, 0)
    assert not windowed(need + 1).allocate(kv_of(range(40)), 40, 1)
    cache = windowed(need)
    kv = running(cache, range(40))
    assert cache.free == STEP // PAGE
    taken = cache.take(1)
    assert cache.reach(kv, 40, 0) == (4 + 1) * PAGE
    cache.release(taken)
    compute(cache, kv, 40)


def kv_of(tokens):
    return SequencePages(list(tokens), PageKeys(tokens, PAGE))


def test_a_prefix_is_found_where_every_group_has_the_pages_it_sees():
    cache = windowed(100)
    kv = running(cache, range(60))
    compute(cache, kv, 60)
    cache.clear(kv)
    keys = keys_of(range(60))

    def found(tokens):
        kv = kv_of(range(tokens))
        assert cache.allocate(kv, tokens, 0)
        at = kv.computed // PAGE
        for page, key in zip(kv.pages[1], keys[kv.first : at], strict=False):
            assert cache._pages_of[1][key] == page
        cache.clear(kv)
        return at

    assert [found(tokens) for tokens in (5, 21, 60)] == [1, 5, 14]
    # A prefix that ends before page 10 needs pages 8 and 9 alone; before page 9, 7 and 8; and so
    # on.
    cache.forget([cache._pages_of[1][keys[8]]])
    assert [found(tokens) for tokens in (33, 37, 41, 45)] == [8, 8, 8, 11]
    cache.forget([cache._pages_of[0][keys[9]]])
    assert found(60) == 8
    cache.forget([cache._pages_of[1][key] for key in keys[:8]])
    assert found(60) == 0


def test_a_prefix_is_found_without_pages_that_no_layer_sees():
    cache = windowed(100, (WINDOW,))
    kv = running(cache, range(60))
    compute(cache, kv, 60)
    cache.clear(kv)
    keys = keys_of(range(60))
    cache.forget([cache._pages_of[0][key] for key in keys[:12]])
    second = running(cache, range(60))
    assert (second.computed, second.first) == (56, 12)


def test_a_windows_pages_stay_cached_until_they_are_needed():
    cache = windowed(30)
    kv = running(cache, range(60))
    compute(cache, kv, 60)
    assert cache.used + 13 == 30, "all that were written are in use or cached"
    assert len(cache._pages_of[1]) == 15
    cache.take(5)
    cached = [key in cache._pages_of[1] for key in keys_of(range(60))]
    assert sum(cached) == 10
    assert all(cached[6:]), "the oldest are given out first"


def test_no_page_is_found_of_a_sequence_whose_keys_are_forgotten():
    cache = windowed(100)
    kv = running(cache, range(60))
    compute(cache, kv, 60)
    cache.forget_keys(kv.full_keys())
    assert cache._pages_of == [{}, {}]


def test_saved_states_leave_slots_for_all_sequences_and_a_state_to_begin_with():
    pool = StatePool(5, running=2)
    first, second = pool.take_to_save(), pool.take_to_save()
    assert pool.take_to_save() is None
    pool.publish(first, b"key", None)
    assert pool.take_to_save() is not None
    assert pool.take_to_save() is None
    pool.release(second)
    assert pool.take_to_save() is not None


class Accounts(RuleBasedStateMachine):
    """Random arrivals, growth, sharing and ends of sequences, checked against a plain model."""

    @initialize(pages=st.integers(1, 12))
    def begin(self, pages):
        self.cache = KVCache(pages, PAGE)
        self.sequences = []  # (tokens, pages)
        self.written = {}  # page → the tokens up to its end, once full

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5 * PAGE))
    def arrive(self, tokens):
        keys = keys_of(tokens, pages=(len(tokens) - 1) // PAGE)
        shared = self.cache.find(keys)
        for i, page in enumerate(shared):
            assert self.written[page] == tuple(tokens[: (i + 1) * PAGE]), "a wrong page was found"
        self.cache.share(shared)
        fresh = self.cache.pages_for(len(tokens)) - len(shared)
        if fresh > self.cache.free:
            self.cache.release(shared)
            return
        pages = shared + self.cache.take(fresh)
        self.sequences.append((tokens, pages))
        self.compute(tokens, pages, len(shared))

    @rule(which=st.integers(0), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=PAGE))
    def grow(self, which, tokens):
        if self.sequences:
            old, pages = self.sequences[which % len(self.sequences)]
            missing = self.cache.pages_for(len(old) + len(tokens)) - len(pages)
            if missing <= self.cache.free:
                full = len(old) // PAGE
                old += tokens
                pages += self.cache.take(missing)
                self.compute(old, pages, full)

    @rule(which=st.integers(0))
    def leave(self, which):
        if self.sequences:
            _, pages = self.sequences.pop(which % len(self.sequences))
            self.cache.release(pages)

    def compute(self, tokens, pages, first):
        owners = [page for _, held in self.sequences for page in held]
        for page in pages[first:]:
            assert owners.count(page) == 1, "a page that is written to has two owners"
            self.written.pop(page, None)
        for i, key in enumerate(keys_of(tokens)):
            if i >= first:
                self.written[pages[i]] = tuple(tokens[: (i + 1) * PAGE])
                self.cache.publish(pages[i], key)

    @invariant()
    def no_page_is_lost(self):
        if hasattr(self, "cache"):
            held = {page for _, pages in self.sequences for page in pages}
            assert self.cache.used == len(held)
            assert self.cache.used + self.cache.free == self.cache.pages

    def teardown(self):
        if hasattr(self, "cache"):
            for _, pages in self.sequences:
                self.cache.release(pages)
            everything = self.cache.take(self.cache.pages)
            assert sorted(everything) == list(range(self.cache.pages))


TestAccounts = Accounts.TestCase
TestAccounts.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
