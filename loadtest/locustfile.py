"""An open-loop load test of the tenants' API: `locust -f loadtest/locustfile.py --headless`.

Requests go out at the times that were drawn before the start, whether or not earlier ones have
been answered: a slow server meets a growing queue, as it would in life, and TTFT counts from the
moment a request was due. So there is one Locust user, a scheduler; --users and --run-time have no
meaning here, --rate and --duration take their place.
"""

import json
import logging
import random
import time
from argparse import ArgumentParser
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import gevent
from gevent.pool import Group
from locust import User, events, task
from locust.env import Environment
from rich.console import Console

from loadtest.prompts import Prompts
from loadtest.report import Report
from loadtest.stream import RequestFailed, Server
from loadtest.workload import Ask, Target, Workload, targets_of

log = logging.getLogger(__name__)
report = Report()


class CannotStart(Exception):
    """The load test has nothing to send, nowhere to send it, or no key."""


@events.init_command_line_parser.add_listener
def add_options(parser: ArgumentParser) -> None:
    """The workload's options and where to find keys and put the report."""
    usual = Workload()
    add = parser.add_argument
    add("--popularity", default=usual.popularity, help="distinct, uniform, identical, zipf:<s>")
    add("--arrivals", default=usual.arrivals, help="poisson, gamma:<cv>, trace:conv, trace:code")
    add("--rate", type=float, default=usual.rate, help="mean requests per second")
    add("--duration", type=float, default=usual.duration, help="seconds in which requests go out")
    add("--lengths", default=usual.lengths, help="conv, code, trace, fixed:<in>/<out>")
    add("--context", type=int, default=usual.context, help="most tokens of prompt and answer")
    add("--base-share", type=float, default=usual.base_share, help="requests without an adapter")
    add("--reshuffle", type=float, default=usual.reshuffle, help="seconds until others are popular")
    add("--seed", type=int, default=usual.seed, help="the same seed asks the same things")
    add("--keys-file", default=".lorikeet/demo-keys.json", help='{"tenant": "lk_…"}')
    add("--out", default="loadtest/out/report.json", help="where the report is written")


class Scheduler(User):
    """Sends every request of the plan at its time, then waits for the last answer."""

    host = "http://127.0.0.1:8000"
    fixed_count = 1

    @task
    def run_plan(self) -> None:
        """Plan, send, wait; the whole test."""
        try:
            self._send_all()
        except (CannotStart, ValueError, RequestFailed) as error:
            log.error("load test cannot start: %s", error)
        self.environment.runner.quit()

    def _send_all(self) -> None:
        options = self.environment.parsed_options
        server = Server.at(self.environment.host or self.host)
        keys = _read_keys(Path(options.keys_file))
        targets = targets_of({tenant: server.models(key) for tenant, key in keys.items()})
        plan = _workload(options).plan(targets)
        prompts = Prompts.measure(_token_counter(server, keys, targets))
        words, in_flight = random.Random(options.seed), Group()
        start = time.perf_counter()
        for ask in plan:
            text = prompts.text(ask.input_tokens, words)
            gevent.sleep(max(0.0, start + ask.at_s - time.perf_counter()))
            in_flight.spawn(self._send, server, keys[ask.tenant], ask, text, start + ask.at_s)
        in_flight.join()
        report.elapsed_s = time.perf_counter() - start

    def _send(self, server: Server, key: str, ask: Ask, text: str, due_s: float) -> None:
        report.sent(time.perf_counter() - due_s)
        outcome: dict[str, Any] = {"name": "none", "response_length": 0, "exception": None}
        try:
            answer = server.chat(key, ask.model, text, ask.output_tokens)
        except RequestFailed as failure:
            report.failed(str(failure))
            outcome |= {"name": "failed", "exception": failure}
        else:
            report.answered(
                answer.residency,
                due_s,
                answer.pieces_s,
                prompt_tokens=answer.prompt_tokens,
                completion_tokens=answer.completion_tokens,
            )
            outcome |= {"name": answer.residency, "response_length": answer.completion_tokens}
        elapsed_ms = 1000 * (time.perf_counter() - due_s)
        self.environment.events.request.fire(
            request_type="chat", response_time=elapsed_ms, context={}, **outcome
        )


@events.quitting.add_listener
def finish(environment: Environment, **_: Any) -> None:
    """Write the JSON, and fail if any request did."""
    options = environment.parsed_options
    report.write(Path(options.out), asdict(_workload(options)))
    log.info("report written to %s", options.out)
    if not report.passed:
        environment.process_exit_code = 1


@events.quit.add_listener
def show(**_: Any) -> None:
    """Print the table, below all that Locust itself prints."""
    console = Console()
    console.print(report.table())
    for reason, count in report.failures.most_common():
        console.print(f"{count} failed: {reason}", markup=False)
    console.print(f"{report.asked} requests; the generator was at most {report.lag_s:.3f} s late")


def _workload(options: Any) -> Workload:
    return Workload(**{option.name: getattr(options, option.name) for option in fields(Workload)})


def _read_keys(path: Path) -> dict[str, str]:
    try:
        keys = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CannotStart(f"--keys-file {path}: {error}; start the demo first") from error
    if not isinstance(keys, dict) or not all(isinstance(key, str) for key in keys.values()):
        raise CannotStart(f'--keys-file {path}: want {{"tenant": "lk_…"}}')
    return keys


def _token_counter(server: Server, keys: dict[str, str], targets: list[Target]) -> Any:
    """Asks the server how many tokens a prompt is; the base model if it may be used."""
    target = min(targets, key=lambda target: (not target.is_base, target.model))
    key = keys[target.tenants[0]]
    return lambda text: server.chat(key, target.model, text, 1).prompt_tokens
