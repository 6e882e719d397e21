"""Traffic models, compared with their formulas."""

import math
from pathlib import Path

import numpy as np
import pytest

from lorikeet.simulator.workload_models import (
    AZURE_CODE,
    AZURE_CONV,
    UNIFORM,
    Distinct,
    GammaArrivals,
    Identical,
    LengthModel,
    TrafficTrace,
    Zipf,
    choose_adapters,
    cut_to_context,
    deal_ranks,
    parse_popularity,
    poisson,
)

N = 1000


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize(("exponent", "share"), [(1.0, 0.63), (1.2, 0.79), (1.5, 0.93)])
def test_the_64_most_popular_of_1000_carry_most_of_zipfs_traffic(
    exponent: float, share: float
) -> None:
    shares = Zipf(exponent).shares(N)
    assert shares.sum() == pytest.approx(1)
    assert shares[:64].sum() == pytest.approx(share, abs=0.005)
    drawn = Zipf(exponent).draw(rng(), N, 200_000)
    assert (drawn < 64).mean() == pytest.approx(share, abs=0.01)


def test_uniform_popularity_gives_every_adapter_the_same_share() -> None:
    np.testing.assert_allclose(UNIFORM.shares(50), 1 / 50)


def test_distinct_popularity_repeats_no_adapter_before_all_were_requested() -> None:
    drawn = Distinct().draw(rng(), 10, 25)
    assert sorted(drawn[:10]) == sorted(drawn[10:20]) == list(range(10))


def test_identical_popularity_requests_one_adapter() -> None:
    assert len(set(Identical().draw(rng(), 10, 25).tolist())) == 1


@pytest.mark.parametrize(
    ("text", "popularity"),
    [
        ("distinct", Distinct()),
        ("uniform", UNIFORM),
        ("identical", Identical()),
        ("zipf:1.2", Zipf(1.2)),
    ],
)
def test_a_popularity_is_parsed_from_its_name(text: str, popularity: object) -> None:
    assert parse_popularity(text) == popularity


@pytest.mark.parametrize("text", ["", "zipf", "zipf:", "zipf:much", "zipf:nan", "uniform:1"])
def test_an_unknown_popularity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="want distinct"):
        parse_popularity(text)


def test_reshuffling_permutes_the_adapters_and_keeps_their_shares() -> None:
    times_s = np.linspace(0, 600, 20_000, endpoint=False)
    chosen = choose_adapters(Zipf(1.5), 100, times_s, seed=3, reshuffle_s=300)
    first, second = (np.bincount(half, minlength=100) for half in np.split(chosen, 2))
    assert first.argmax() != second.argmax()
    np.testing.assert_allclose(first.max(), second.max(), rtol=0.05)
    whole = choose_adapters(Zipf(1.5), 100, times_s, seed=3, reshuffle_s=math.inf)
    np.testing.assert_array_equal(whole[:10_000], chosen[:10_000])


def test_ranks_are_assigned_to_adapters_in_rotation() -> None:
    assert deal_ranks(6).tolist() == [8, 16, 32, 64, 8, 16]


@pytest.mark.parametrize("cv", [1.0, 2.0, 4.0])
def test_gamma_arrivals_have_the_requested_rate_and_burstiness(cv: float) -> None:
    times_s = GammaArrivals(50, cv).times(rng(), 2000)
    gaps = np.diff(times_s)
    assert (gaps >= 0).all()
    assert 0 < times_s[0] < times_s[-1] < 2000
    assert len(times_s) / 2000 == pytest.approx(50, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_poisson_gaps_are_exponential() -> None:
    gaps = np.diff(poisson(10).times(rng(), 5000))
    for t in (0.05, 0.1, 0.3):
        assert (gaps > t).mean() == pytest.approx(math.exp(-10 * t), abs=0.01)


def test_a_duration_of_zero_has_no_arrivals() -> None:
    assert len(poisson(10).times(rng(), 0)) == 0


@pytest.mark.parametrize("model", [AZURE_CONV, AZURE_CODE])
def test_lengths_are_lognormal(model: LengthModel) -> None:
    inputs, outputs = model.draw(rng(), 100_000)
    assert min(inputs.min(), outputs.min()) >= 1
    assert np.median(inputs) == pytest.approx(math.exp(model.input_mu), rel=0.02)
    assert np.median(outputs) == pytest.approx(math.exp(model.output_mu), rel=0.04)
    assert np.log(inputs).std() == pytest.approx(model.input_sigma, rel=0.02)


def test_lengths_are_cut_to_the_context() -> None:
    inputs, outputs = AZURE_CONV.draw(rng(), 10_000)
    cut_in, cut_out = cut_to_context(inputs, outputs, 512)
    assert (cut_in + cut_out <= 512).all()
    assert min(cut_in.min(), cut_out.min()) >= 1
    fits = inputs + outputs <= 512
    np.testing.assert_array_equal(cut_in[fits], inputs[fits])
    np.testing.assert_array_equal(cut_out[fits], outputs[fits])


@pytest.fixture
def trace(tmp_path: Path) -> TrafficTrace:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:47.6805900,396,109\n"
        "2023-11-16 18:15:50.6805900,879,55\n"
    )
    return TrafficTrace.read(path)


def test_a_trace_is_replayed_with_the_recorded_times_and_lengths(trace: TrafficTrace) -> None:
    np.testing.assert_allclose(trace.times_s, [0, 1, 4])
    assert trace.inputs.tolist() == [374, 396, 879]
    assert trace.outputs.tolist() == [44, 109, 55]


def test_a_trace_scaled_to_a_rate_keeps_its_bursts(trace: TrafficTrace) -> None:
    fast = trace.at_rate(5)
    np.testing.assert_allclose(fast.times_s, [0, 0.1, 0.4])
    assert len(fast.until(0.2)) == 2


@pytest.mark.parametrize("text", ["", "TIMESTAMP,A\n2023-11-16 18:15:46,1\n"])
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.csv"):
        TrafficTrace.read(path)
