"""Token rate of the product's engine without a service, with which bench_http compares the service.

python -m loadtest.real_service.offline job.json out.json

Runs in a process of its own on the visible device, with the service's LORIKEET_ variables: the
product's engine with the catalog's adapters, stepped by hand, all requests of a work submitted at
once. Tokens of a first, untimed run are compared with a plain forward pass. Writes one row for each
work.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from loadtest.client import Session, random_prompt
from loadtest.cluster import ROOT
from loadtest.engine import plain
from loadtest.engine.offline import generate
from loadtest.real_service.adapters import model_name
from loadtest.streamed_answer import LoadRequest
from lorikeet.replica.engine_process import build_engine
from lorikeet.settings import Settings
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.engine import Engine
from lorikeet_engine.request import Request, SamplingParams

_LOADED_WITHIN_S = 300.0


@dataclass(frozen=True, slots=True)
class ServiceWork:
    """Set of requests that is sent through HTTP and given to the engine alone, to compare the two.

    Adapters are dealt round over the requests.

    streams: concurrent streams.
    rounds: requests of each stream, one after another.
    """

    prompt_tokens: int
    output_tokens: int
    streams: int
    rounds: int
    adapters: int

    @classmethod
    def parse(cls, lengths: str, **sizes: Any) -> "ServiceWork":
        """Parse lengths such as 256/128, tokens in and out. Raises ValueError."""
        prompt, _, output = lengths.partition("/")
        return cls(int(prompt), int(output), **sizes)

    @property
    def label(self) -> str:
        """Lengths of prompt and answer in tokens, as in 256/128."""
        return f"{self.prompt_tokens}/{self.output_tokens}"

    def sessions(self, seed: int) -> Sequence[Session]:
        """Return a session for each stream; different prompts for each seed."""
        numbers = range(self.streams * self.rounds)
        return [
            Session(
                0.0,
                tuple(self._request(number, seed) for number in numbers[stream :: self.streams]),
            )
            for stream in range(self.streams)
        ]

    def _request(self, number: int, seed: int) -> LoadRequest:
        model = model_name(number % self.adapters)
        prompt_seed = seed * 1_000_003 + number
        return LoadRequest(model, self.prompt_tokens, self.output_tokens, prompt_seed)


@dataclass(frozen=True, slots=True)
class Job:
    """Sets of requests that one offline process answers.

    refs: all adapters that the requests use.
    """

    refs: tuple[AdapterRef, ...]
    works: tuple[ServiceWork, ...]

    def write(self, path: Path) -> None:
        """Write the job for the other process."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Job":
        """Read a job that `write` wrote."""
        given = json.loads(path.read_text())
        refs = tuple(AdapterRef(**ref) for ref in given["refs"])
        return cls(refs, tuple(ServiceWork(**work) for work in given["works"]))


def measure(engine: Engine, work: ServiceWork, refs: Sequence[AdapterRef]) -> dict[str, Any]:
    """Check the tokens that the engine generates for a set of requests, then time a run of the set.

    refs: all adapters that the requests use.

    Raises AssertionError if tokens are wrong or too few.
    """
    once = _requests(engine, replace(work, rounds=1), refs, 0)
    shortfall = plain.check(engine, plain.some(generate(engine, once).answers))
    done = generate(engine, _requests(engine, work, refs, 1))
    assert all(len(answer.tokens) == work.output_tokens for answer in done.answers)
    return {"label": work.label, "tokens_per_s": done.tokens_per_s, "shortfall": shortfall}


def run_beside(
    job: Job, variables: Mapping[str, str], processes: int, folder: Path
) -> list[dict[str, Any]]:
    """Run several engines at the same time, each on a device of its own; return all their rows.

    variables: LORIKEET_ variables of the service.
    processes: number of engines.
    folder: folder for the job and the rows.
    Raises CalledProcessError.
    """
    job.write(folder / "job.json")
    outs = [folder / f"offline-{index}.json" for index in range(processes)]
    running = []
    for index, out in enumerate(outs):
        command = [
            sys.executable,
            "-m",
            "loadtest.real_service.offline",
            str(folder / "job.json"),
            str(out),
        ]
        device = {"CUDA_VISIBLE_DEVICES": str(index)}
        running.append(subprocess.Popen(command, cwd=ROOT, env=os.environ | variables | device))
    for process in running:
        if process.wait():
            raise subprocess.CalledProcessError(process.returncode, process.args)
    return [row for out in outs for row in json.loads(out.read_text())]


def main() -> None:
    """Run the job; write one row for each work."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("job", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    job, settings = Job.read(given.job), Settings.from_env()
    engine = build_engine(settings, next(iter(settings.base_models)))
    _load(engine, job.refs)
    rows = [measure(engine, work, job.refs) for work in job.works]
    engine.close()
    given.out.write_text(json.dumps(rows))


def _load(engine: Engine, refs: Sequence[AdapterRef]) -> None:
    deadline = time.monotonic() + _LOADED_WITHIN_S
    for ref in refs:
        engine.pin(ref)
    while any(engine.residency(ref) is not Residency.GPU for ref in refs):
        assert time.monotonic() < deadline, "not all adapters were loaded to the device"
        engine.wait(0.05)
        engine.step()


def _requests(
    engine: Engine, work: ServiceWork, refs: Sequence[AdapterRef], run: int
) -> list[Request]:
    named = {f"{ref.tenant}/{ref.name}": ref for ref in refs}
    requests = [each for session in work.sessions(run) for each in session.requests]
    return [
        _request(engine, f"{run}.{i}", each, named[each.model]) for i, each in enumerate(requests)
    ]


def _request(engine: Engine, name: str, request: LoadRequest, ref: AdapterRef) -> Request:
    prompt = tuple(random_prompt(request, engine.info.vocab_size))
    sampling = SamplingParams(max_tokens=request.output_tokens, temperature=0.0, ignore_eos=True)
    return Request(name, (prompt,), sampling, 1, ref)


if __name__ == "__main__":
    main()
