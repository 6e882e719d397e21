"""Sampling benchmark on a tiny engine: its cases run, and wrong draws are not timed."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from loadtest.engine import harness, sampling
from loadtest.engine.sampling import Case, Group
from lorikeet_engine.request import SamplingParams
from lorikeet_engine.sampling.logprob_readback import LogprobReadback
from lorikeet_engine.sampling.sampler import Sampler
from tests.engine.tiny_engine import SETTINGS, tiny_engine

BIASES = ((3, 1.0), (250, -1.0))


def tiny(group):
    """Return the group with sizes and biases that a tiny engine has room for."""
    cases = tuple(
        replace(case, sampling=replace(case.sampling, logit_bias=BIASES))
        if case.sampling.logit_bias
        else case
        for case in group.cases
    )
    return Group(4, min(group.made, 50), cases)


@pytest.fixture(autouse=True)
def few(monkeypatch):
    for name, value in {"ROUNDS": 2, "STEPS": 3, "_WARM_UP": 1, "SETTINGS": SETTINGS}.items():
        monkeypatch.setattr(sampling, name, value)
    monkeypatch.setattr(sampling, "GROUPS", tuple(map(tiny, sampling.GROUPS)))
    monkeypatch.setattr(harness, "random_engine", tiny_engine)


def test_every_case_is_checked_and_timed(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["sampling", "--json", str(out), "--commit", "abc"])
    sampling.main()
    written = json.loads(out.read_text())
    names = [case.name for group in sampling.GROUPS for case in group.cases]
    assert [row["case"] for row in written["sampling"]] == names
    assert {row["made"] for row in written["sampling"]} == {0, 50}
    for row in written["sampling"]:
        assert len(row["rounds_ms"]) == 2
        assert row["step_ms"] > 0
    assert written["sampling"][0]["over_greedy_ms"] == 0
    assert "top_p 0.95, top_k 50" in capsys.readouterr().out


def test_output_in_the_prompt_counts_as_generated(tmp_path):
    engine, begun = tiny_engine(tmp_path), []
    begin = engine._sampler.penalties.begin

    def watched(params, prompt, output):
        begun.append((prompt, output))
        return begin(params, prompt, output)

    engine._sampler.penalties.begin = watched
    penalised = Case("penalised", SamplingParams(frequency_penalty=1.0))
    sampling._time(engine, Group(4, 50, (penalised,)), penalised, [[7] * 66] * 4)
    engine.close()
    assert begun == [((7,) * 16, (7,) * 50)] * 4


def test_a_device_with_other_log_probabilities_is_not_timed(tmp_path, monkeypatch):
    engine, read, off = tiny_engine(tmp_path), LogprobReadback.read, iter((0.0, 1e-4))

    def read_off(self):
        more = next(off)
        return {row: replace(of, logprob=of.logprob + more) for row, of in read(self).items()}

    monkeypatch.setattr(LogprobReadback, "read", read_off)
    (group,) = (group for group in sampling.GROUPS if group.made)
    (case,) = (case for case in group.cases if case.name == "logprobs 20")
    with pytest.raises(AssertionError, match="logprobs 20: row 0 has"):
        sampling.check_draws(engine, group, case)
    engine.close()


def test_a_device_that_draws_other_tokens_is_not_timed(tmp_path, monkeypatch):
    engine = tiny_engine(tmp_path)
    draws = iter((0, 1))
    monkeypatch.setattr(
        Sampler, "sample", lambda self, logits, *_: torch.full((len(logits),), next(draws))
    )
    (case, *_), group = sampling.GROUPS[0].cases, sampling.GROUPS[0]
    with pytest.raises(AssertionError, match="greedy"):
        sampling.check_draws(engine, group, case)
    engine.close()
