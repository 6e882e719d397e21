"""Prefix hashes, and the index of replicas that computed prefixes."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from lorikeet.protocol.status_update import PrefixRoom
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


def test_a_prefix_beyond_a_replicas_room_loses_its_end():
    known, chain = PrefixIndex(), prefix_hashes(text("a", "b", "c"))
    known.add(chain, "r", PrefixRoom(BLOCK_TOKENS, BLOCK_TOKENS, 8))
    assert known.cached_tokens(chain) == {"r": 2 * BLOCK_TOKENS}
    assert known.host_tokens(chain[:1], "r", BLOCK_TOKENS) == 0


BLOCKS = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4).map(lambda of: text(*of))


@given(
    computed=st.lists(st.tuples(BLOCKS, st.sampled_from(["one", "other"])), max_size=30),
    asked=BLOCKS,
    on_gpu=st.integers(1, 6),
    on_host=st.integers(0, 6),
)
def test_blocks_leave_the_gpu_for_the_host_and_then_the_replica(computed, asked, on_gpu, on_host):
    """An index with room agrees with the order in which each replica computed its blocks."""
    known, room = PrefixIndex(), PrefixRoom(on_gpu * BLOCK_TOKENS, on_host * BLOCK_TOKENS, 8)
    last: dict[int, str] = {}
    recent: dict[str, list[int]] = {"one": [], "other": []}  # the most recent last
    for prompt, replica in computed:
        chain = prefix_hashes(prompt)
        known.add(chain, replica, room)
        recent[replica] = [each for each in recent[replica] if each not in chain]
        recent[replica] += reversed(chain)
        last |= dict.fromkeys(chain, replica)
    chain, expected = prefix_hashes(asked), dict[str, int]()
    for count, block in enumerate(chain, 1):
        replica = last.get(block)
        if replica is None or block not in recent[replica][-on_gpu - on_host :]:
            break
        expected[replica] = count * BLOCK_TOKENS
    assert known.cached_tokens(chain) == expected
    for replica, tokens in expected.items():
        there = set(recent[replica][-on_gpu - on_host :]) - set(recent[replica][-on_gpu:])
        expected_host = sum(block in there for block in chain[: tokens // BLOCK_TOKENS])
        assert known.host_tokens(chain, replica, tokens) == expected_host * BLOCK_TOKENS
    known.remove_replica("one")
    assert known.host_tokens(chain, "one", len(chain) * BLOCK_TOKENS) == 0
