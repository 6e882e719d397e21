"""Jobs for a host of many GPUs: which run at the same time, and outcomes of failed ones."""

import json
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from loadtest.engine import decode, many_gpus, throughput
from loadtest.engine.many_gpus import GpuJob, jobs_of, run_all

JOB = """
import argparse, json, os, subprocess, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--json")
parser.add_argument("--sleep", type=float, default=0.0)
parser.add_argument("--exit", type=int, default=0)
parser.add_argument("--child", action="store_true")
parser.add_argument("--meets", nargs=2)  # writes the first file, and waits for the second
given = parser.parse_args()
began_s = time.time()
child = subprocess.Popen(["sleep", "60"]).pid if given.child else None
told = {name: os.environ[name] for name in (
    "CUDA_VISIBLE_DEVICES", "NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST",
    "NVSHMEM_DISABLE_NVLS",
)}
if given.json:
    open(given.json, "w").write(json.dumps({"began_s": began_s, "child": child, **told}))
print("this is said in the log", flush=True)
time.sleep(given.sleep)
if given.meets:
    open(given.meets[0], "w").close()
    while not os.path.exists(given.meets[1]):
        time.sleep(0.01)
if given.json:
    open(given.json, "w").write(json.dumps({"began_s": began_s, "ended_s": time.time(), **told}))
sys.exit(given.exit)
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Return a function that makes jobs that do little."""
    (tmp_path / "little_job.py").write_text(textwrap.dedent(JOB))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(many_gpus, "_POLL_S", 0.02)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda name, gpus, *more, limit_s=30.0, **others: GpuJob(
        name, gpus, limit_s, "little_job", more, **others
    )


def run(jobs, folder, seconds=60.0):
    """Run jobs; return the outcomes by name, and the number of outcomes in each report."""
    counts = []
    outcomes = run_all(jobs, folder, seconds, lambda outcomes: counts.append(len(outcomes)))
    return {each.name: each for each in outcomes}, counts


def test_jobs_with_disjoint_gpus_run_at_once_and_others_in_turn(job, tmp_path):
    sleep = ("--sleep", "0.5")
    jobs = [
        job("left", range(2), *sleep),
        job("all", range(4), *sleep),
        job("right", range(2, 4), *sleep),
    ]
    outcomes, counts = run(jobs, tmp_path)
    assert counts == [1, 2, 3]
    left, all_, right = (outcomes[name].results for name in ("left", "all", "right"))
    assert all_["began_s"] > left["ended_s"]
    assert right["began_s"] > all_["ended_s"], "it came later, and may not overtake"
    here, there = str(tmp_path / "here"), str(tmp_path / "there")
    pair = [
        job("left", range(2), "--meets", here, there),
        job("right", range(2, 4), "--meets", there, here),
    ]
    both, _ = run(pair, tmp_path)
    assert [both[name].outcome for name in ("left", "right")] == ["done", "done"]


def test_each_job_sees_only_its_gpus_and_no_multicast(job, tmp_path, monkeypatch):
    outcomes, _ = run([job("right", range(2, 4))], tmp_path)
    told = outcomes["right"].results
    assert told["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert told["NCCL_NVLS_ENABLE"] == "0"
    assert told["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == told["NVSHMEM_DISABLE_NVLS"] == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    outcomes, _ = run([job("right", range(2, 4))], tmp_path)
    assert outcomes["right"].results["CUDA_VISIBLE_DEVICES"] == "6,7"


def test_a_failed_job_is_reported_with_its_log_and_the_others_go_on(job, tmp_path):
    jobs = [job("bad", range(4), "--exit", "3"), job("good", range(4))]
    outcomes, _ = run(jobs, tmp_path)
    assert outcomes["bad"].outcome == "failed with 3"
    assert "this is said in the log" in outcomes["bad"].log_end
    assert outcomes["good"].outcome == "done"
    assert outcomes["good"].log_end is None
    assert "this is said" in (tmp_path / "good.log").read_text()


def test_a_job_beyond_its_limit_is_killed_with_its_children(job, tmp_path):
    slow = job("slow", range(4), "--child", "--sleep", "60", limit_s=4.0)
    began_s = time.monotonic()
    outcomes, _ = run([slow, job("next", range(4))], tmp_path)
    assert time.monotonic() - began_s < 20
    assert outcomes["slow"].outcome == "did not end within 4 s"
    assert not psutil.pid_exists(outcomes["slow"].results["child"]), "what it wrote is kept"
    assert outcomes["next"].outcome == "done"


def test_a_job_without_time_left_is_not_begun(job, tmp_path, monkeypatch):
    monkeypatch.setattr(many_gpus, "_LEAST_S", 0.5)
    jobs = [job("long", range(4), "--sleep", "60"), job("late", range(4))]
    outcomes, _ = run(jobs, tmp_path, seconds=1.5)
    assert "did not end" in outcomes["long"].outcome
    assert outcomes["late"].outcome == "not begun: no time was left"


def test_main_writes_all_of_a_part_and_names_unfinished_jobs(job, tmp_path, monkeypatch):
    jobs = [job("good", range(4)), job("bad", range(4), "--exit", "1", writes=False)]
    monkeypatch.setattr(many_gpus, "jobs_of", lambda part, gpus, folder, commit: jobs)
    out = tmp_path / "out" / "part1.json"
    arguments = ["many_gpus", "--part", "1", "--json", str(out), "--commit", "abc"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match="not done: bad"):
        many_gpus.main()
    written = json.loads(out.read_text())
    assert (written["commit"], written["part"], written["gpus"]) == ("abc", 1, 4)
    assert [each["outcome"] for each in written["jobs"]] == ["done", "failed with 1"]
    assert (tmp_path / "out" / "part1" / "bad.log").exists()


def test_missed_jobs_are_chosen_by_name(job, tmp_path, monkeypatch, capsys):
    jobs = [job(name, range(4)) for name in ("a", "b", "c")]
    monkeypatch.setattr(many_gpus, "jobs_of", lambda *_: jobs)
    out = tmp_path / "again.json"
    arguments = ["many_gpus", "--part", "2", "--json", str(out), "--jobs"]
    monkeypatch.setattr(sys, "argv", [*arguments, "c", "a"])
    with pytest.raises(SystemExit, match="0"):
        many_gpus.main()
    assert [each["name"] for each in json.loads(out.read_text())["jobs"]] == ["a", "c"]
    monkeypatch.setattr(sys, "argv", [*arguments, "d"])
    with pytest.raises(SystemExit, match="2"):
        many_gpus.main()
    assert "no job d: want some of a, b, c" in capsys.readouterr().err


@pytest.mark.parametrize("gpus", [4, 8])
def test_every_programs_parser_accepts_its_job(gpus, tmp_path, monkeypatch):
    jobs = [job for part in (1, 2) for job in jobs_of(part, gpus, tmp_path, "abc")]
    assert len({job.name for job in jobs}) == len(jobs)
    for each in jobs:
        assert each.gpus.stop <= gpus
        if each.module != "pytest":
            refused = _refusal(each, monkeypatch)
            assert refused is None, f"{each.name}: {refused}"
            assert each.arguments[-2:] == ("--commit", "abc")
    parallel = [job for job in jobs if "--tensor-parallel" in job.arguments]
    assert all(
        job.arguments[job.arguments.index("--tensor-parallel") + 1] == str(len(job.gpus))
        for job in parallel
    )


def test_every_row_named_by_a_job_exists():
    known = {work.label for part in (throughput, decode) for work in part.WORKS}
    for job in jobs_of(1, 4, Path(), "abc") + jobs_of(2, 8, Path(), "abc"):
        asked = {each for each in job.arguments if "256/128" in each and each != "256/128"}
        assert asked <= known


def test_two_halves_run_side_by_side_and_alone(tmp_path):
    *others, first, second = jobs_of(2, 4, tmp_path, "abc")
    assert (first.gpus, second.gpus) == (range(2), range(2, 4))
    assert {job.gpus for job in others} == {range(4)}
    assert first.arguments == second.arguments
    assert "18000000000" in first.arguments


class _ParsedError(Exception):
    pass


def _refusal(job, monkeypatch):
    """Return the error of the program's parser for the arguments; None if it accepts them."""
    import argparse
    import importlib

    program, said = importlib.import_module(job.module), []
    parse = argparse.ArgumentParser.parse_args

    def parsed(self, *given):
        parse(self, *given)
        raise _ParsedError

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parsed)
        patch.setattr(argparse.ArgumentParser, "error", lambda self, text: said.append(text))
        patch.setattr(sys, "argv", [job.module, *job.arguments, "--json", "/tmp/x"])
        with pytest.raises(_ParsedError):
            program.main()
    return said[0] if said else None
