"""What other programs on a replica's host cost its streams.

python -m loadtest.bench_busy_host --json busy.json --folder /tmp/real

The traffic of bench_goodput at one rate, easy for the replica, in turns: on a quiet host, beside a
process on each core that spins, beside one that pins memory and lets go of it in turns, and beside
both. In each repeat all four get the same requests, with other prompts. A gap is the time between
two deltas of an answer.

The clients' processes come before all others where root runs them. RAY_worker_niceness is the
service's, 0 if it is not set.

For each, over all repeats: how long the threads of the service's processes were ready to run and
had no core, milliseconds a second, and how often a thread of the engine or its replica was found
waiting in the kernel, and where.
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
_OWN = "busy"  # what is made anew each time
_URGENT = -10  # which only root may be


@dataclass(frozen=True, slots=True)
class BusyRow:
    """First tokens and gaps beside one load, milliseconds, of all repeats together.

    *_of_quiet: as many times what they are on a quiet host. late: by which requests were sent after
    they were due, which first tokens include. no_core: milliseconds a second.
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
    """What was seen beside one load so far."""

    answers: list[StreamedAnswer]
    seconds: float
    no_core_ms: Counter[str]
    blocked: Counter[str]

    def row(self, host: HostLoad, quiet: BusyRow | None) -> BusyRow:
        """The row of them all. quiet: the quiet host's, None for that itself."""
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
    """Send these requests and note what came of them. Raises RuntimeError for a bad answer."""
    with WaitTimes() as waits, _urgently():
        answers = all_whole(run_sessions(server, sessions, given.clients))
    runs.answers += answers
    runs.seconds += max(answer.ended_s for answer in answers)
    runs.no_core_ms.update(waits.run_delays_ms)
    runs.blocked.update(waits.blocked)


@contextmanager
def _urgently() -> Iterator[None]:
    """Let processes that start in this block run before all others, as clients elsewhere would."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _URGENT)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)


def with_other_prompts(sessions: Sequence[Session], number: int) -> list[Session]:
    """The sessions at the same times and of the same lengths, with prompts by this number."""
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
    """Measure each load, in turns."""
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
    """Measure and print; 1 if spinning processes cost more than they may."""
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
    add("--rate", type=float, default=12, help="requests a second; default 12")
    add("--repeats", type=int, default=2, help="of every load; default 2")
    add("--pinned", type=parse_size, default="4GiB", help="what is pinned at a time; 4GiB")
    add("--goal-ms", default="40", help="the service's inter-token goal; default 40")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
