import time

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence
from tokenizers.models import BPE

from lorikeet.text.detokenizer import Detokenizer, StopStrings


def run(stream, token_ids):
    deltas = []
    for token_id in token_ids:
        deltas.append(stream.push([token_id]))
        if stream.stopped:
            break
    return [*deltas, stream.finish()]


@pytest.mark.parametrize("text", ["plain words", "zażółć gęślą", "日本語 and 🦜🦜", ""])
def test_pieces_join_to_the_whole_text_and_never_break_a_character(tokenizer, text):
    deltas = run(Detokenizer(tokenizer, []), tokenizer.encode(text).ids)
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


def test_text_ends_before_a_stop_string_that_spans_tokens(tokenizer):
    ids = tokenizer.encode("one two END three").ids
    stream = Detokenizer(tokenizer, [], stop=StopStrings(["END"]))
    assert "".join(run(stream, ids)) == "one two "
    assert stream.stopped
    assert stream.tokens == len("one two END")


def test_the_earliest_of_several_stop_strings_wins(tokenizer):
    stream = Detokenizer(tokenizer, [], stop=StopStrings(["three", "two"]))
    assert "".join(run(stream, tokenizer.encode("one two three").ids)) == "one "


def test_an_incomplete_stop_string_is_sent_in_the_end(tokenizer):
    stream = Detokenizer(tokenizer, [], stop=StopStrings(["ENDING"]))
    deltas = run(stream, tokenizer.encode("the END").ids)
    assert deltas[:5] == ["t", "h", "e", " ", ""]
    assert "".join(deltas) == "the END"


def test_a_stop_string_is_not_looked_for_before_min_tokens(tokenizer):
    stream = Detokenizer(tokenizer, [], stop=StopStrings(["b"]), min_tokens=3)
    assert "".join(run(stream, tokenizer.encode("abcdbe").ids)) == "abcd"


def test_an_unfinished_character_at_the_end_is_shown_as_a_replacement(tokenizer):
    ids = tokenizer.encode("a🦜").ids[:-1]
    assert "".join(run(Detokenizer(tokenizer, []), ids)).startswith("a\ufffd")


@pytest.mark.parametrize("lacking", [1, 2, 3])
def test_a_prompt_that_ends_within_a_character_is_not_repeated(tokenizer, lacking):
    ids = tokenizer.encode("half a 🦜").ids
    prompt, rest = ids[:-lacking], ids[-lacking:]
    for answer, text in (
        (tokenizer.encode("abc").ids, "abc"),
        ([*rest, *tokenizer.encode("!é").ids], "🦜!é"),
        ([*rest[:-1], *tokenizer.encode("ab").ids], "ab"),
    ):
        stream = Detokenizer(tokenizer, prompt)
        assert "".join(run(stream, answer)) == text
        assert stream.offsets[0] == 0


@pytest.fixture(scope="module")
def byte_tokens() -> Tokenizer:
    """A tokenizer of words and of single bytes, as SentencePiece makes them."""
    words = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁x"]
    made = Tokenizer(BPE({word: at for at, word in enumerate(words)}, [], byte_fallback=True))
    made.decoder = Sequence([Replace("▁", " "), ByteFallback(), Fuse()])
    return made


@pytest.mark.parametrize(
    ("prompt", "answer", "text"),
    [
        ("", [*b"\n\xf0", 256], "\n\ufffd x"),
        ("", [*b"a\xff", 256, *"🦜".encode()], "a\ufffd x🦜"),
        ("日本語日", [*"\n🦜".encode(), 256], "\n🦜 x"),
    ],
)
def test_a_wrong_byte_token_spoils_no_other(byte_tokens, prompt, answer, text):
    assert "".join(run(Detokenizer(byte_tokens, list(prompt.encode())), answer)) == text


def undecodable(tokenizer: Tokenizer, kind: str) -> tuple[Tokenizer, int]:
    """A tokenizer, and one of its tokens of which no number makes text."""
    if kind == "half a character":
        return tokenizer, tokenizer.encode("é").ids[1]
    own = Tokenizer.from_str(tokenizer.to_str())
    own.add_special_tokens([AddedToken("<|end|>", special=True)])
    return own, own.token_to_id("<|end|>")


@pytest.mark.parametrize("kind", ["half a character", "special"])
@pytest.mark.parametrize("count", [1, 60, 61, 64, 200])
def test_undecodable_tokens_leave_surrounding_text_intact(tokenizer, kind, count):
    own, token = undecodable(tokenizer, kind)
    before, after = own.encode("so 日").ids, own.encode("本 and 🦜").ids
    stream = Detokenizer(own, own.encode("said ").ids)
    ids = [*before, *[token] * count, *after]
    assert "".join(run(stream, ids)) == own.decode(ids)
    assert stream.sent_tokens == stream.tokens == len(stream.offsets) == len(ids)


@pytest.mark.parametrize("kind", ["half a character", "special"])
def test_undecodable_tokens_take_constant_time_each(tokenizer, kind):
    own, token = undecodable(tokenizer, kind)
    stream, took_s = Detokenizer(own, []), []
    for _ in range(6):
        began_s = time.thread_time()
        for _ in range(1000):
            stream.push([token])
        took_s.append(time.thread_time() - began_s)
    assert took_s[-1] < 5 * took_s[0]
