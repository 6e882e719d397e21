"""The stated numbers of pages suffice for the stated numbers of tokens, and no fewer do."""

from hypothesis import given
from hypothesis import strategies as st

from lorikeet_engine.scheduling.page_needs import PageNeeds

needs_of = st.builds(
    lambda size, whole, windowed, window, step: PageNeeds(
        size, (None,) * (whole or not windowed) + (window,) * windowed, step
    ),
    st.sampled_from((1, 4, 16)),
    st.integers(0, 3),
    st.integers(0, 5),
    st.integers(1, 100),
    st.integers(1, 300),
)


@given(needs=needs_of, pages=st.integers(0, 500))
def test_the_longest_sequence_fits_and_a_longer_one_does_not(needs, pages):
    longest = needs.longest(pages)
    if longest is None:
        assert needs.in_steps(1_000_000) <= pages
    else:
        assert needs.in_steps(longest) <= pages < needs.in_steps(longest + 1)


@given(needs=needs_of, pages=st.integers(0, 5000), context=st.integers(1, 2000))
def test_the_stated_number_of_tokens_fits_as_whole_sequences(needs, pages, context):
    tokens = needs.tokens(pages, context)
    sequences = tokens // context
    if sequences and needs.windowed:
        first = needs.in_steps(context)
        assert first + (sequences - 1) * needs.between_steps(context) <= pages
        assert first + (sequences + 1) * needs.between_steps(context) > pages
    if not needs.windowed:
        assert tokens == pages // len(needs.windows) * needs.page_size


@given(needs=needs_of, token=st.integers(0, 1000))
def test_a_token_sees_nothing_before_its_first_page(needs, token):
    first_seen = max(0, token + 1 - (needs.windows[-1] or 10_000))
    page = needs.first(token)
    if needs.windowed:
        assert page == first_seen // needs.page_size


@given(needs=needs_of, written=st.integers(0, 1000), ahead=st.integers(1, 2))
def test_a_decode_has_at_most_window_pages_between_steps(needs, written, ahead):
    if needs.windowed:
        first = needs.first(written // needs.page_size * needs.page_size)
        assert needs.pages_for(written + ahead) - first <= needs.window_pages
