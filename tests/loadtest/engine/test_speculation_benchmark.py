"""Speculation benchmark: given answers come out, with drafts and without, on a tiny engine."""

from dataclasses import replace
from itertools import pairwise

import pytest

from loadtest.engine import speculation
from loadtest.engine.offline import Work
from loadtest.engine.speculation import Row, text
from lorikeet_engine.sampling.sampler import Sampler
from lorikeet_engine.scheduling import draft_budget
from tests.engine.given_costs import given_costs
from tests.engine.tiny_engine import SETTINGS, tiny_engine

EXTRACTION = Work("1 extraction", 60, 80, adapters=1, requests=1)
PLAIN = Work("2 plain", 60, 20, adapters=2, requests=2)


@pytest.fixture
def engine(tmp_path, monkeypatch, request):
    monkeypatch.setattr(speculation, "TURNS", 1)
    monkeypatch.setattr(draft_budget, "_LEAST_GAIN", 0.0)
    source = getattr(request, "param", "lookup")
    settings = replace(SETTINGS, speculation=source, max_running=16)
    with given_costs():
        engine = tiny_engine(tmp_path, adapters=2, room=2, settings=settings)
    yield engine
    engine.close()


def test_extractions_take_fewer_steps_than_tokens(engine, capsys, monkeypatch):
    extraction, plain = speculation.measure_all(engine, [EXTRACTION, PLAIN])
    assert isinstance(extraction, Row)
    assert extraction.tokens_a_step > 1.15
    assert 0.3 < extraction.accepted <= 1.0
    assert extraction.gain == pytest.approx(extraction.on_per_s / extraction.off_per_s)
    assert extraction.shortfall < 1e-5
    assert plain.tokens_a_step == pytest.approx(1.0, abs=0.1)
    assert "1 extraction 60/80" in capsys.readouterr().out
    monkeypatch.setattr(speculation.GivenTokens, "sample", Sampler.sample)
    with pytest.raises(AssertionError, match="speculation changed the answer"):
        speculation.measure(engine, PLAIN)


@pytest.mark.parametrize("engine", ["draft"], indirect=True)
def test_a_draft_lora_has_the_given_acceptance(engine):
    (plain,) = speculation.measure_all(engine, [PLAIN])
    assert 1.4 < plain.tokens_a_step < 4.0
    assert 0.2 < plain.accepted < 1.0


def test_a_text_copies_the_given_share_of_its_tokens():
    prompt = tuple(range(1000))
    said = text(prompt, 20_000, 0.7, 0)
    follows = sum(b == a + 1 for a, b in pairwise(said))
    assert follows / len(said) == pytest.approx(0.7, abs=0.05)
    assert set(said) <= set(prompt)
