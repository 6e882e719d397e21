"""Which replica has computed how much of a prompt."""

from lorikeet.routing.locations import (
    BLOCK_TOKENS,
    CHARACTERS_PER_TOKEN,
    MAX_HASHED_BLOCKS,
    PrefixIndex,
    prefix_hashes,
)

BLOCK = "x" * (BLOCK_TOKENS * CHARACTERS_PER_TOKEN)


def text(*letters: str) -> str:
    """A block of each letter."""
    return "".join(BLOCK.replace("x", letter) for letter in letters)


def test_prompts_share_the_blocks_up_to_their_first_difference():
    one, other = prefix_hashes(text("a", "b", "c")), prefix_hashes(text("a", "b", "d") + "rest")
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    assert prefix_hashes(text("b")) != one[1:2]  # what came before is part of a block


def test_only_whole_blocks_count_and_only_so_many():
    assert len(prefix_hashes(BLOCK[:-1])) == 0
    assert len(prefix_hashes(BLOCK)) == len(prefix_hashes(BLOCK * 2 + "y")) - 1 == 1
    assert len(prefix_hashes(BLOCK * (MAX_HASHED_BLOCKS + 5))) == MAX_HASHED_BLOCKS
    assert len(prefix_hashes(tuple(range(2 * BLOCK_TOKENS + 1)))) == 2


def test_salts_keep_equal_prompts_apart():
    chains = {
        prefix_hashes(BLOCK, tenant, digest)
        for tenant in ("acme", "globex")
        for digest in (None, "d1", "d2")
    }
    assert len(chains) == 6


def test_who_computed_a_block_last_has_all_before_it():
    known = PrefixIndex()
    known.add(prefix_hashes(text("a", "b", "c")), "first")
    assert known.cached_tokens(prefix_hashes(text("a", "b", "z"))) == {"first": 2 * BLOCK_TOKENS}
    known.add(prefix_hashes(text("a")), "second")
    assert known.cached_tokens(prefix_hashes(text("a", "b", "c", "d"))) == {
        "second": BLOCK_TOKENS,
        "first": 3 * BLOCK_TOKENS,
    }
    assert known.cached_tokens(prefix_hashes(text("z", "a"))) == {}


def test_what_was_not_computed_for_longest_is_forgotten():
    known = PrefixIndex(max_blocks=3)
    for letter in "abc":
        known.add(prefix_hashes(text(letter)), letter)
    known.add(prefix_hashes(text("a")), "again")
    known.add(prefix_hashes(text("d")), "d")
    found = [known.cached_tokens(prefix_hashes(text(letter))) for letter in "abcd"]
    assert [list(each) for each in found] == [["again"], [], ["c"], ["d"]]
