"""Replicas of several GPUs on a host of four or eight: measurements in two calls of ten minutes.

python -m loadtest.engine.many_gpus --part 1 --json part1.json [--gpus 8] [--seconds 560]
python -m loadtest.engine.many_gpus --part 2 --json part2.json [--jobs 8b-http killed-follower]

Part 1: sums over all GPUs, and Llama-3.1-70B's shapes on all of them, in bf16 and FP8: decode
    steps, and tokens per second with adapters. Part 2: loads of a cold adapter; a killed follower;
    four replicas of Llama-3.1-8B's shapes through HTTP; two replicas with half of the GPUs each, at
    once, to compare with the one of part 1. With eight GPUs, replicas of four also have steps and
    FP8. All sizes
are for H200s: two GPUs of 80 GB cannot hold 70B in bf16.

Each job is a program of its own, on its GPUs; jobs with disjoint GPUs run at the same time. A job
that fails, or exceeds its limit, is named, and the others go on. A machine on which nothing is
compiled yet may not have time for all jobs: --jobs runs the missed ones. Results and logs of the
jobs are in a folder beside the JSON file, which has all results and is rewritten after each job.
Prints a line for each job.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from loadtest.engine import harness

ROOT = Path(__file__).parents[2]
SECONDS = 560.0
_LEAST_S = 20.0  # a job with less time is not begun
_POLL_S = 0.2
_TAIL = 3000  # characters of a failed job's log
_ENVIRONMENT = {  # NVLink multicast can put all GPUs of a host out of service
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
_PACKAGES = (ROOT, ROOT / "engine", ROOT / "platform")
_ADAPTERS = ("base 256/128", "8 adapters 256/128", "128 adapters 256/128")
_ADAPTERS_ON_TWO_GPUS = (_ADAPTERS[0], _ADAPTERS[-1])  # a row takes 50 s there
_STEPS = ("base, alone 256/128", "base, 32 256/128")
_KV_BYTES = {2: 18_000_000_000}  # 70B's weights leave no more on two GPUs
_USUAL_KV_BYTES = 10_000_000_000  # 256 sequences of 384 tokens, and a fifth more


@dataclass(frozen=True, slots=True)
class GpuJob:
    """Python module to run as a program on some of the GPUs.

    gpus: indices of the program's GPUs among those that this process sees.
    writes: whether the program takes --json.
    """

    name: str
    gpus: range
    limit_s: float
    module: str
    arguments: tuple[str, ...] = ()
    writes: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a job.

    outcome: `done`, or the failure.
    results: JSON that the job wrote; partial if the job failed.
    log_end: end of the log of a failed job.
    """

    name: str
    gpus: list[int]
    outcome: str
    seconds: float
    results: Any = None
    log_end: str | None = None


class RunningJob:
    """A job's process, in a folder with its log and its JSON."""

    def __init__(self, job: GpuJob, folder: Path, limit_s: float) -> None:
        """Start the process.

        limit_s: the job's own limit, or the time left for all jobs.
        """
        self.job, self._limit_s = job, limit_s
        self._log, self._json = folder / f"{job.name}.log", folder / f"{job.name}.json"
        arguments = (*job.arguments, *(("--json", str(self._json)) if job.writes else ()))
        visible = _visible_gpus(max(job.gpus) + 1)
        own = {
            "CUDA_VISIBLE_DEVICES": ",".join(visible[gpu] for gpu in job.gpus),
            "PYTHONPATH": os.pathsep.join([*map(str, _PACKAGES), os.environ.get("PYTHONPATH", "")]),
        }
        self._began_s = time.monotonic()
        with self._log.open("w") as log:
            self._process = psutil.Popen(
                [sys.executable, "-m", job.module, *arguments],
                cwd=ROOT,
                env=os.environ | _ENVIRONMENT | own,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def poll(self) -> Outcome | None:
        """Return the outcome if the job has ended; end the job at its limit."""
        code = self._process.poll()
        if code is not None:
            return self._outcome("done" if code == 0 else f"failed with {code}")
        if time.monotonic() - self._began_s < self._limit_s:
            return None
        self.end()
        return self._outcome(f"did not end within {self._limit_s:.0f} s")

    def end(self) -> None:
        """Kill the process and all that it has started."""
        with suppress(psutil.NoSuchProcess):
            every = [self._process, *self._process.children(recursive=True)]
            for process in every:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(every, 10.0)

    def _outcome(self, outcome: str) -> Outcome:
        took_s = time.monotonic() - self._began_s
        results = None
        with suppress(OSError, ValueError):  # no file, or killed while writing
            results = json.loads(self._json.read_text())
        log_end = None if outcome == "done" else self._log.read_text(errors="replace")[-_TAIL:]
        return Outcome(self.job.name, list(self.job.gpus), outcome, took_s, results, log_end)


def jobs_of(part: int, gpus: int, folder: Path, commit: str) -> list[GpuJob]:
    """Return the jobs of one part, in the order in which they get GPUs.

    gpus: number of GPUs to use.
    folder: folder for 8B's model.
    commit: commit that is measured.
    """
    jobs = _models(gpus) if part == 1 else _replicas(gpus, folder)
    of_commit = ("--commit", commit)
    return [replace(j, arguments=(*j.arguments, *of_commit)) if j.writes else j for j in jobs]


def _models(gpus: int) -> list[GpuJob]:
    every = range(gpus)
    return [
        GpuJob("sums", every, 90, "loadtest.engine.rank_sums", ("--gpus", str(gpus))),
        _table("70b-bf16", every, 400),
        _table("70b-fp8", every, 400, "--weight-dtype", "fp8"),
    ]


def _replicas(gpus: int, folder: Path) -> list[GpuJob]:
    every, half = range(gpus), gpus // 2
    first, second = every[:half], every[half:]
    if gpus >= 8:
        halves = [_table(f"70b-bf16-half-{n}", each, 300) for n, each in enumerate((first, second))]
        halves.append(_table("70b-fp8-half", second, 300, "--weight-dtype", "fp8"))
    else:
        only = ("--parts", "throughput")
        halves = [
            _table(f"70b-bf16-half-{n}", each, 330, *only) for n, each in enumerate((first, second))
        ]
    # the case of the test that kills a replica of as many GPUs
    killed = ("-m", "gpu", "-k", f"until_a_follower_is_killed and {gpus}-gpus", "-q")
    shape = ("--config", "llama-3.1-70b", "--tensor-parallel", str(gpus))
    http = ("--replicas", "4", "--folder", str(folder), "--adapters", "32", "--clients", "16")
    return [
        GpuJob("70b-cold-adapter", every, 240, "loadtest.engine.loading", shape),
        GpuJob(
            "killed-follower",
            every,
            200,
            "pytest",
            ("tests/engine/gpu/test_ranks.py", *killed),
            writes=False,
        ),
        # all GPUs, though it uses four: no other job shall take the host's cores
        GpuJob("8b-http", every, 330, "loadtest.bench_http", http),
        *halves,
    ]


def run_all(
    jobs: Sequence[GpuJob],
    folder: Path,
    seconds: float,
    report: Callable[[list[Outcome]], None],
) -> list[Outcome]:
    """Run the jobs, each as soon as its GPUs are free and no earlier job waits for them.

    folder: folder for logs and results.
    seconds: time for all jobs; a job that would have too little of it is not begun.
    report: called with all outcomes so far, after each job.
    """
    waiting, running, outcomes = list(jobs), list[RunningJob](), list[Outcome]()
    end_s = time.monotonic() + seconds

    def note(outcome: Outcome) -> None:
        outcomes.append(outcome)
        print(f"{outcome.name}: {outcome.outcome}, {outcome.seconds:.0f} s", flush=True)
        report(outcomes)

    try:
        while waiting or running:
            for job in list(_startable(waiting, running)):
                waiting.remove(job)
                left_s = end_s - time.monotonic()
                if left_s < _LEAST_S:
                    note(Outcome(job.name, list(job.gpus), "not begun: no time was left", 0.0))
                else:
                    running.append(RunningJob(job, folder, min(job.limit_s, left_s)))
            time.sleep(_POLL_S)
            for each in list(running):
                if (outcome := each.poll()) is not None:
                    running.remove(each)
                    note(outcome)
    finally:
        for each in running:
            each.end()
    return outcomes


def main() -> None:
    """Run one part; exit with 1 if a job failed."""
    parser = _parser()
    options = parser.parse_args()
    jobs = jobs_of(options.part, options.gpus, options.folder.resolve(), options.commit)
    if unknown := {*(options.jobs or ())} - {job.name for job in jobs}:
        parser.error(f"no job {min(unknown)}: want some of {', '.join(job.name for job in jobs)}")
    known = harness.facts(options.commit) | {"gpus": options.gpus, "part": options.part}
    folder = options.json.resolve().with_suffix("")  # absolute: jobs run in another folder
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = run_all(
        [job for job in jobs if not options.jobs or job.name in options.jobs],
        folder,
        options.seconds,
        lambda outcomes: harness.write(options.json, known, jobs=outcomes),
    )
    missed = [each.name for each in outcomes if each.outcome != "done"]
    sys.exit(f"not done: {', '.join(missed)}" if missed else 0)


def _table(name: str, gpus: range, limit_s: float, *more: str) -> GpuJob:
    """Return a job that measures steps and token rates of 70B's shapes, with adapters on GPUs
    alone.

    name: name of the job.
    gpus: indices of its GPUs.
    limit_s: its time limit in seconds.
    more: further options of `loadtest.engine.table`.
    """
    ranks = len(gpus)
    rows = _ADAPTERS_ON_TWO_GPUS if "--parts" in more else (*_ADAPTERS, *_STEPS)
    parts = () if "--parts" in more else ("--parts", "throughput", "decode")
    arguments = (
        *("--config", "llama-3.1-70b", "--tensor-parallel", str(ranks), "--turns", "1"),
        *("--kv-bytes", str(_KV_BYTES.get(ranks, _USUAL_KV_BYTES)), "--host-adapters", "8"),
        *("--rows", *rows, *parts, *more),
    )
    return GpuJob(name, gpus, limit_s, "loadtest.engine.table", arguments)


def _startable(waiting: Sequence[GpuJob], running: Sequence[RunningJob]) -> Iterator[GpuJob]:
    taken = {gpu for each in running for gpu in each.job.gpus}
    for job in waiting:
        if taken.isdisjoint(job.gpus):
            yield job
        taken |= set(job.gpus)


def _visible_gpus(count: int) -> list[str]:
    """Return the first GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(gpu) for gpu in range(count)]


def _parser() -> argparse.ArgumentParser:
    parser = harness.arguments(__doc__)
    add = parser.add_argument
    add("--part", type=int, choices=(1, 2), required=True, help="part to run")
    add("--gpus", type=int, choices=(4, 8), default=4, help="number of GPUs; default 4")
    add("--seconds", type=float, default=SECONDS, help="seconds for all jobs")
    add("--jobs", nargs="+", metavar="JOB", help="only these jobs of the part")
    add(
        "--folder",
        type=Path,
        default=Path("/tmp/lorikeet-models"),
        help="folder for 8B's model and adapters, 30 GB",
    )
    return parser


if __name__ == "__main__":
    main()
