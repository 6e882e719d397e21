"""Open-loop load test of the tenants' API: `locust -f loadtest/locustfile.py --headless`.

Requests are sent at times drawn before the start, whether or not earlier ones are answered. A slow
server meets a growing queue, as in production, and TTFT counts from the due time of a request.
There is therefore one Locust user, a scheduler; --rate and --duration replace --users and
--run-time, which have no effect.

Prints a table of TTFT and inter-token latency by adapter tier, and writes it as JSON (--out). The
options are described in loadtest/README.md.
"""

import ipaddress
import logging
import random
import socket
import time
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import gevent
import httpx
from gevent.pool import Group
from locust import User, events, task
from locust.env import Environment
from rich.console import Console

from loadtest.client import Server, chat_request, host_and_port, send_on
from loadtest.report import Report
from loadtest.streamed_answer import LoadRequest, StreamedAnswer
from loadtest.workload import Planned, Prompts, Target, Workload, targets_of

SILENCE_S = 120.0
"""Seconds without a byte from the server after which a request counts as failed."""

log = logging.getLogger(__name__)
report = Report()


class CannotStart(Exception):
    """The load test has no requests, no server or no key."""


@events.init_command_line_parser.add_listener
def add_options(parser: ArgumentParser) -> None:
    """Add the options of the workload, of the keys and of the report."""
    usual = Workload()
    add = parser.add_argument
    add("--popularity", default=usual.popularity, help="distinct, uniform, identical, zipf:<s>")
    add("--arrivals", default=usual.arrivals, help="poisson, gamma:<cv>, trace:conv, trace:code")
    add("--rate", type=float, default=usual.rate, help="mean requests per second")
    add("--duration", type=float, default=usual.duration, help="seconds of sending")
    add("--lengths", default=usual.lengths, help="conv, code, trace, fixed:<in>/<out>")
    add("--context", type=int, default=usual.context, help="most tokens of a prompt and its answer")
    add("--base-share", type=float, default=usual.base_share, help="share for the base model")
    add(
        "--reshuffle", type=float, default=usual.reshuffle, help="seconds between popularity orders"
    )
    add("--seed", type=int, default=usual.seed, help="the same seed sends the same requests")
    add("--keys", default=".lorikeet/keys/demo/tenants", help="folder with a file of each key")
    add("--out", default="loadtest/out/report.json", help="JSON file for the report")


class Scheduler(User):
    """Locust user that sends every planned request at its time, then waits for all answers."""

    host = "http://127.0.0.1:8000"
    fixed_count = 1

    @task
    def run_plan(self) -> None:
        """Run the whole test: plan the requests, send each at its time, wait for all answers."""
        try:
            self._send_all()
        except (CannotStart, ValueError) as error:
            log.error("load test cannot start: %s", error)
        self.environment.runner.quit()

    def _send_all(self) -> None:
        options, url = self.environment.parsed_options, self.environment.host or self.host
        _only_this_machine(url)
        keys = _read_keys(Path(options.keys))
        servers = {tenant: Server(url, key, vocabulary=0) for tenant, key in keys.items()}
        targets = targets_of({tenant: _models(server) for tenant, server in servers.items()})
        plan = _workload(options).plan(targets)
        prompts = Prompts.measure(_token_counter(servers, targets))
        words, in_flight = random.Random(options.seed), Group()
        start = time.perf_counter()
        for planned in plan:
            text = prompts.text(planned.input_tokens, words)
            gevent.sleep(max(0.0, start + planned.at_s - time.perf_counter()))
            in_flight.spawn(self._send, servers[planned.tenant], planned, text, start)
        in_flight.join()
        report.elapsed_s = time.perf_counter() - start

    def _send(self, server: Server, planned: Planned, text: str, start: float) -> None:
        request = LoadRequest(planned.model, planned.input_tokens, planned.output_tokens, seed=0)
        answer = StreamedAnswer(request, planned.at_s)
        report.answers.append(answer)
        _chat(server, text, answer, start)
        failed = RuntimeError(answer.failure) if answer.failure else None
        self.environment.events.request.fire(
            request_type="chat",
            name="failed" if failed else answer.residency or "none",
            response_time=1000 * (answer.ended_s - answer.due_s),
            response_length=0 if failed else request.output_tokens,
            exception=failed,
            context={},
        )


@events.quitting.add_listener
def finish(environment: Environment, **_: Any) -> None:
    """Write the JSON report, and set a failing exit status if any request failed."""
    options = environment.parsed_options
    report.write(Path(options.out), asdict(_workload(options)))
    log.info("report written to %s", options.out)
    if not report.passed:
        environment.process_exit_code = 1


@events.quit.add_listener
def show(**_: Any) -> None:
    """Print the table, below Locust's own output."""
    console = Console()
    console.print(report.table())
    for reason, count in report.failures.most_common():
        console.print(f"{count} failed: {reason}", markup=False)
    asked, lag_s = len(report.answers), report.lag_s
    console.print(f"{asked} requests; the generator was at most {lag_s:.3f} s late")


def _chat(server: Server, text: str, answer: StreamedAnswer, start: float) -> None:
    """Stream one answer on a connection of its own; gevent switches to other requests while it
    waits.

    answer: filled with times and outcome.
    start: time.perf_counter() at the start of the run.
    """

    def now_s() -> float:
        return time.perf_counter() - start

    answer.sent_s = now_s()
    try:
        connection = socket.create_connection(host_and_port(server.url), SILENCE_S)
    except OSError as error:
        answer.failure, answer.ended_s = type(error).__name__, now_s()
        return
    with connection:
        send_on(connection, chat_request(server, answer.request, text), answer, now_s)


def _models(server: Server) -> dict[str, str | None]:
    """Return each model with its base model; None for a base model. Raises CannotStart."""
    headers = {"authorization": f"Bearer {server.key}"}
    try:
        url = f"{server.url}/v1/models"
        answer = httpx.get(url, headers=headers, timeout=SILENCE_S, trust_env=False)
        return {model["id"]: model["parent"] for model in answer.raise_for_status().json()["data"]}
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise CannotStart(f"{server.url} does not list its models: {error!r}") from error


def _only_this_machine(url: str) -> None:
    """Raise ValueError unless the URL is http on a loopback address."""
    host, port = host_and_port(url)
    if not url.startswith("http://") or not host:
        raise ValueError(f"{url}: want http://127.0.0.1:<port>")
    for *_, address in socket.getaddrinfo(host, port):
        if not ipaddress.ip_address(address[0]).is_loopback:
            raise ValueError(f"{url} is not this machine: forward a local port to it")


def _workload(options: Any) -> Workload:
    return Workload(**{option.name: getattr(options, option.name) for option in fields(Workload)})


def _read_keys(folder: Path) -> dict[str, str]:
    try:
        return {file.name: file.read_text().strip() for file in sorted(folder.iterdir())}
    except OSError as error:
        raise CannotStart(f"--keys {folder}: {error}; start the demo first") from error


def _token_counter(servers: Mapping[str, Server], targets: list[Target]) -> Callable[[str], int]:
    """Return a function that asks the server how many tokens a prompt has.

    The function sends the prompt to a base model if there is one among the targets, else to an
    adapter.

    servers: by tenant, the server with the tenant's API key.
    targets: models, and the tenants that may use them.
    """
    target = min(targets, key=lambda target: (not target.is_base, target.model))

    def count(text: str) -> int:
        answer = StreamedAnswer(LoadRequest(target.model, 0, 1, seed=0), due_s=0.0)
        _chat(servers[target.tenants[0]], text, answer, time.perf_counter())
        if answer.failure:
            raise CannotStart(f"{target.model} does not answer: {answer.failure}")
        return answer.prompt_tokens

    return count
