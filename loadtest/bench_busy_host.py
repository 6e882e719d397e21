"""Delays of a replica's streams caused by other programs on its host.

python -m loadtest.bench_busy_host --json busy.json --folder /tmp/real

The traffic is that of bench_goodput, at one rate that is easy for the replica. The host has four
loads in turns: none, a spinning process on each core, a process that pins memory and releases it,
and both. In each repeat all four loads get the same requests, with other prompts. A gap is the time
between deltas of an answer.

As root, client processes run at a higher priority than all others. The niceness of the service's
workers is RAY_worker_niceness, 0 by default.

Prints for each load, over all repeats: first tokens and gaps in milliseconds; the milliseconds per
second in which threads of the service were runnable without a core; and the kernel functions in
which threads of engine and replica were found waiting. Exits with 1 if spinning processes make the
p99 gap more than 1.5 times as long.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import numpy as np

from loadtest.client import Server, Session, run_sessions
from loadtest.engine.harness import arguments, facts, percentiles, show, write
from loadtest.real_service.adapter_traffic import (
    Traffic,
    add_traffic_arguments,
    settings_of_traffic,
    warm_service,
)
from loadtest.real_service.busy_host import HostLoad, WaitTimes, host_load
from loadtest.report import all_whole, gaps_s, lateness_s, ttfts_s
from loadtest.streamed_answer import StreamedAnswer
from lorikeet.sizes import parse_size

MOST_OF_QUIET = 1.5
_OWN = "busy"  # folder of the catalog and cache, recreated for each run
_URGENT = -10  # niceness; only root may lower it


@dataclass(frozen=True, slots=True)
class BusyRow:
    """Times to first tokens, and gaps between deltas, under one load of the host; in milliseconds.

    Values are those of all repeats together.

    *_of_quiet: the value as a multiple of the value on a quiet host.
    late_p99: delay of sending, included in first tokens.
    no_core: process → milliseconds per second in which its threads were runnable without a core.
    blocked: process and kernel function → samples in uninterruptible sleep.
    """

    host: HostLoad
    requests: int
    first_p50: float
    first_p99: float
    gap_p50: float
    gap_p99: float
    first_p50_of_quiet: float
    gap_p99_of_quiet: float
    late_p99: float
    no_core: Mapping[str, float]
    blocked: Mapping[str, float]


@dataclass(slots=True)
class HostRuns:
    """Measurements so far under one load of the host."""

    answers: list[StreamedAnswer]
    seconds: float
    no_core_ms: Counter[str]
    blocked: Counter[str]

    def row(self, host: HostLoad, quiet: BusyRow | None) -> BusyRow:
        """Summarise all measurements under a load.

        host: the load.
        quiet: row of the quiet host; None if the host was quiet itself.
        """
        first_p50, first_p99 = percentiles(1e3 * np.array(ttfts_s(self.answers)), 50, 99)
        gap_p50, gap_p99 = percentiles(1e3 * np.array(gaps_s(self.answers)), 50, 99)
        return BusyRow(
            host,
            len(self.answers),
            first_p50,
            first_p99,
            gap_p50,
            gap_p99,
            first_p50 / quiet.first_p50 if quiet else 1.0,
            gap_p99 / quiet.gap_p99 if quiet else 1.0,
            percentiles(1e3 * np.array(lateness_s(self.answers)), 99)[0],
            {part: round(ms / self.seconds, 1) for part, ms in self.no_core_ms.items()},
            dict(self.blocked),
        )


def measure(
    server: Server, sessions: Sequence[Session], given: argparse.Namespace, runs: HostRuns
) -> None:
    """Send requests and add the outcome to `runs`. Raises RuntimeError for an incomplete answer.

    sessions: requests to send.
    given: options of the command line.
    """
    with WaitTimes() as waits, _urgently():
        answers = all_whole(run_sessions(server, sessions, given.clients))
    runs.answers += answers
    runs.seconds += max(answer.ended_s for answer in answers)
    runs.no_core_ms.update(waits.run_delays_ms)
    runs.blocked.update(waits.blocked)


@contextmanager
def _urgently() -> Iterator[None]:
    """Give processes started in this block a higher priority, as if they ran on another machine."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _URGENT)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)


def with_other_prompts(sessions: Sequence[Session], number: int) -> list[Session]:
    """Return the sessions with the same times and lengths, and prompts drawn by `number`."""
    return [
        replace(
            session,
            requests=tuple(
                replace(request, seed=request.seed + number) for request in session.requests
            ),
        )
        for session in sessions
    ]


def measure_all(server: Server, traffic: Traffic, given: argparse.Namespace) -> list[BusyRow]:
    """Measure the traffic under all loads of the host, in turns.

    given: options of the command line.
    """
    every = {host: HostRuns([], 0.0, Counter(), Counter()) for host in HostLoad}
    for repeat in range(given.repeats):
        sessions = traffic.sessions(given.rate, given.seconds, repeat)
        for number, (host, runs) in enumerate(every.items()):
            with host_load(host, given.pinned):
                measure(server, with_other_prompts(sessions, number), given, runs)
    rows: list[BusyRow] = []
    for host, runs in every.items():
        rows.append(runs.row(host, rows[0] if rows else None))
    return rows


def main() -> int:
    """Measure and print; return 1 if the goal beside spinning processes is missed."""
    given = _arguments()
    noted = facts(given.commit)
    variables = settings_of_traffic(given, _OWN, inter_token_goal_ms=given.goal_ms)
    with warm_service(given, variables) as (server, traffic):
        rows = show(measure_all(server, traffic, given))
    write(given.json, noted, busy_host=rows, settings=variables)
    (spinning,) = (row for row in rows if row.host is HostLoad.SPINNING)
    return 0 if spinning.gap_p99_of_quiet <= MOST_OF_QUIET else 1


def _arguments() -> argparse.Namespace:
    parser = arguments(__doc__)
    add_traffic_arguments(parser, adapters=64, seconds=15)
    add = parser.add_argument
    add("--rate", type=float, default=12, help="requests per second; default 12")
    add("--repeats", type=int, default=2, help="runs of every load; default 2")
    add("--pinned", type=parse_size, default="4GiB", help="memory to pin at a time; default 4GiB")
    add("--goal-ms", default="40", help="the service's inter-token goal; default 40")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
