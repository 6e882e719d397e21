"""More requests than a GPU can answer: what is answered still, and how the others are refused.

python -m loadtest.bench_overload --json overload.json --folder /tmp/real --rates 20 30

The traffic of bench_goodput on a service whose limits are those of an installation that sets none.
In the first --ramp seconds of each rate --backlog requests more arrive, so that the replica is full
from then on; only what comes behind them counts. Rates follow on each other when all is answered.
Tokens are counted until the last request has arrived; a rate's are held against the most of all
rates, the first of which should be one at which nothing is refused.

A refusal takes from when its request was sent until its answer has ended. Retry-After is honest
where those who would come back then find room: of the requests that arrived in the second after
the time that a refusal named, the share that was accepted.
"""

import argparse
import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from loadtest.client import Server, run_sessions
from loadtest.engine.harness import arguments, facts, show, write
from loadtest.real_service.adapter_traffic import (
    Traffic,
    add_traffic_arguments,
    settings_of_traffic,
    warm_service,
)
from loadtest.report import lateness_s, quantiles_ms, split, ttfts_s
from loadtest.streamed_answer import StreamedAnswer

MOST_REFUSAL_MS = 100.0
LEAST_OF_MOST = 0.95
LEAST_ACCEPTED = 0.5
_OWN = "overload"  # what is made anew each time
_LENGTHS = 200  # else what happened to be asked for changes a rate's tokens by some per cent
_COMES_BACK_S = 1.0  # a client comes back within it


@dataclass(frozen=True, slots=True)
class Refusals:
    """What refused requests were told, and how soon. Milliseconds and seconds, None where none.

    accepted_then: of the requests in the second after what Retry-After named, the accepted share.
    """

    refused: int
    refusal_p50: float | None
    refusal_p99: float | None
    refusal_most: float | None
    retry_after: tuple[float, ...]
    accepted_then: float | None

    @property
    def good(self) -> bool:
        """Whether they were quick and honest."""
        if not self.refused:
            return True
        assert self.refusal_most is not None
        honest = self.accepted_then is None or self.accepted_then >= LEAST_ACCEPTED
        return self.refusal_most <= MOST_REFUSAL_MS and min(self.retry_after) > 0 and honest


@dataclass(frozen=True, slots=True)
class OverloadRow:
    """What came of one rate. first_*: of the answered, milliseconds until their first tokens.

    broken: requests that were neither answered nor refused with a Retry-After.
    """

    rate: float
    requests: int
    broken: int
    tokens_per_s: float
    of_most: float
    first_p50: float | None
    first_p99: float | None
    refusals: Refusals


def measure(
    server: Server, traffic: Traffic, rate_per_s: float, seed: int, given: argparse.Namespace
) -> OverloadRow:
    """Measure one rate; of_most is not known yet."""
    backlog_s = np.linspace(0.0, given.ramp, given.backlog, endpoint=False)
    sessions = traffic.sessions(rate_per_s, given.seconds, seed, backlog_s)
    answers = run_sessions(server, sessions, given.clients)
    whole, failures = split(answers)
    late_ms, failed = quantiles_ms(lateness_s(answers))["p99"], dict(failures.most_common(3))
    print(f"{rate_per_s:g} a second: sent {late_ms} ms late (p99); {failed}", flush=True)
    tokens = tokens_between(whole, given.ramp, given.seconds)
    counted = [answer for answer in answers if answer.due_s >= given.ramp]
    whole, failures = split(counted)
    found = refusals(counted)
    first_ms = quantiles_ms(ttfts_s(whole))
    return OverloadRow(
        rate_per_s,
        len(counted),
        failures.total() - found.refused,
        tokens / (given.seconds - given.ramp),
        1.0,
        first_ms["p50"],
        first_ms["p99"],
        found,
    )


def tokens_between(whole: Sequence[StreamedAnswer], from_s: float, to_s: float) -> float:
    """Tokens that came in this time, where an answer's events have as many each."""
    tokens = 0.0
    for answer in whole:
        came = zip(answer.deltas_s, answer.events, strict=True)
        within = sum(events for at_s, events in came if from_s <= at_s < to_s)
        tokens += answer.request.output_tokens * within / sum(answer.events)
    return tokens


def refusals(answers: Sequence[StreamedAnswer]) -> Refusals:
    """What the refused among them were told."""
    refused = [answer for answer in answers if answer.retry_after_s is not None]
    if not refused:
        return Refusals(0, None, None, None, (), None)
    in_order = sorted(answers, key=lambda answer: answer.sent_s)
    sent_s = [answer.sent_s for answer in in_order]
    took_s = [answer.ended_s - answer.sent_s for answer in refused]
    shares = []
    for answer in refused:
        back_s = answer.ended_s + (answer.retry_after_s or 0.0)
        begin, end = (bisect_left(sent_s, at_s) for at_s in (back_s, back_s + _COMES_BACK_S))
        if then := in_order[begin:end]:
            shares.append(sum(one.retry_after_s is None for one in then) / len(then))
    took_ms = quantiles_ms(took_s)
    told = tuple(sorted({answer.retry_after_s or 0.0 for answer in refused}))
    accepted = sum(shares) / len(shares) if shares else None
    most_ms = 1e3 * max(took_s)
    return Refusals(len(refused), took_ms["p50"], took_ms["p99"], most_ms, told, accepted)


def compared(rows: Sequence[OverloadRow]) -> list[OverloadRow]:
    """The rows, each with its tokens a second as a share of the most."""
    most = max(row.tokens_per_s for row in rows)
    return [replace(row, of_most=row.tokens_per_s / most) for row in rows]


def meets_the_goals(rows: Sequence[OverloadRow]) -> bool:
    """Whether some were refused, as they should be, and all that was possible was answered then."""
    over = [row for row in rows if row.refusals.refused]
    kept = all(row.of_most >= LEAST_OF_MOST and row.refusals.good for row in over)
    return bool(over) and kept and not any(row.broken for row in rows)


def main() -> int:
    """Measure and print; 1 if a goal is missed or nothing was refused."""
    given = _arguments()
    noted, variables = facts(given.commit), settings_of_traffic(given, _OWN)
    seeds = count(1)
    with warm_service(given, variables) as (server, traffic):
        alike = replace(traffic, lengths=_LENGTHS)
        rows = [measure(server, alike, rate, next(seeds), given) for rate in given.rates]
    rows = show(compared(rows))
    write(given.json, noted, overload=rows, settings=variables)
    return 0 if meets_the_goals(rows) else 1


def _arguments() -> argparse.Namespace:
    parser = arguments(__doc__)
    add_traffic_arguments(parser, adapters=1000, seconds=40)
    add = parser.add_argument
    add("--rates", type=float, nargs="+", required=True, help="requests a second, in turn")
    add("--backlog", type=int, default=400, help="more requests at the beginning; default 400")
    add("--ramp", type=float, default=10, help="seconds in which they come; default 10")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
