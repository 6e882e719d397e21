"""Prefix hashes, and the index of replicas that computed prefixes."""

from array import array

from lorikeet.routing.locations import (
    BLOCK_TOKENS,
    MAX_HASHED_BLOCKS,
    PrefixIndex,
    prefix_hashes,
)
from lorikeet_engine.adapter import AdapterRef


def text(*letters: str) -> "array[int]":
    """Return one block of tokens per letter."""
    return array("i", [ord(letter) for letter in letters for _ in range(BLOCK_TOKENS)])


BLOCK = text("x")


def test_prompts_share_the_blocks_up_to_their_first_difference():
    one, other = (prefix_hashes(text("a", "b", last) + array("i", [1])) for last in "cd")
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    assert prefix_hashes(text("b")) != one[1:2]  # what came before is part of a block


def test_only_full_blocks_are_hashed_up_to_a_maximum():
    assert len(prefix_hashes(BLOCK[:-1])) == 0
    assert len(prefix_hashes(BLOCK)) == len(prefix_hashes(BLOCK * 2 + array("i", [1]))) - 1 == 1
    assert len(prefix_hashes(BLOCK * (MAX_HASHED_BLOCKS + 5))) == MAX_HASHED_BLOCKS


def ref(digest: str, *invocation: str) -> AdapterRef:
    return AdapterRef("acme", "support", 1, digest, tuple(map(ord, invocation)))


def test_tenants_and_adapters_keep_equal_prompts_apart():
    chains = {
        prefix_hashes(BLOCK, tenant, adapter)
        for tenant in ("acme", "globex")
        for adapter in (None, ref("d1"), ref("d2"))
    }
    assert len(chains) == 6


def test_activated_loras_share_the_base_models_blocks_before_their_invocation():
    prompt = text("a", "b") + array("i", [ord("i")]) + text("c", "d")
    base = prefix_hashes(prompt)
    one, other = (prefix_hashes(prompt, adapter=ref(digest, "i")) for digest in ("d1", "d2"))
    assert base[:2] == one[:2] == other[:2]
    assert len({base[2], one[2], other[2]}) == len({base[3], one[3], other[3]}) == 3
    assert prefix_hashes(prompt, adapter=ref("d1", "i", "a")) == base, "never invoked"
    assert prefix_hashes(prompt, adapter=ref("d1", "a"))[0] != base[0], "the block of the border"


def test_the_replica_of_a_block_has_all_blocks_before_it():
    known = PrefixIndex()
    known.add(prefix_hashes(text("a", "b", "c")), "first")
    assert known.cached_tokens(prefix_hashes(text("a", "b", "z"))) == {"first": 2 * BLOCK_TOKENS}
    known.add(prefix_hashes(text("a")), "second")
    assert known.cached_tokens(prefix_hashes(text("a", "b", "c", "d"))) == {
        "second": BLOCK_TOKENS,
        "first": 3 * BLOCK_TOKENS,
    }
    assert known.cached_tokens(prefix_hashes(text("z", "a"))) == {}


def test_the_least_recently_computed_blocks_are_dropped():
    known = PrefixIndex(max_blocks=3)
    for letter in "abc":
        known.add(prefix_hashes(text(letter)), letter)
    known.add(prefix_hashes(text("a")), "again")
    known.add(prefix_hashes(text("d")), "d")
    found = [known.cached_tokens(prefix_hashes(text(letter))) for letter in "abcd"]
    assert [list(each) for each in found] == [["again"], [], ["c"], ["d"]]
