"""Overload: token rate of a GPU that gets too many requests, and speed and honesty of refusals.

python -m loadtest.bench_overload --json overload.json --folder /tmp/real --rates 20 30

The traffic of bench_goodput on a service with default limits. In the first --ramp seconds of each
rate --backlog further requests arrive, which fill the replica; only requests after the ramp count.
The next rate begins when all requests are answered. Tokens are counted until the last request has
arrived, and compared with the most tokens of all rates. The first rate should be one at which
nothing is refused.

A refusal takes from the sending of its request to the end of its answer. Retry-After is honest if
clients that retry then are accepted: `accepted_then` is the accepted share of the requests that
arrived in the second after the time that a refusal named.

Prints a row for each rate and writes them as JSON; exits with 1 if a goal is missed.
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
_OWN = "overload"  # folder of the catalog and cache, recreated for each run
_LENGTHS = 200  # lengths dealt round at every rate; drawn ones would change its tokens by some %
_COMES_BACK_S = 1.0  # seconds after Retry-After in which a client retries


@dataclass(frozen=True, slots=True)
class Refusals:
    """Refusals among the requests that were sent at one rate.

    refusal_*: milliseconds that a refusal took; None if no request was refused.

    retry_after: distinct Retry-After values, in seconds.
    accepted_then: accepted share of the requests in the second after Retry-After.
    """

    refused: int
    refusal_p50: float | None
    refusal_p99: float | None
    refusal_most: float | None
    retry_after: tuple[float, ...]
    accepted_then: float | None

    @property
    def good(self) -> bool:
        """Whether refusals were quick and their Retry-After honest."""
        if not self.refused:
            return True
        assert self.refusal_most is not None
        honest = self.accepted_then is None or self.accepted_then >= LEAST_ACCEPTED
        return self.refusal_most <= MOST_REFUSAL_MS and min(self.retry_after) > 0 and honest


@dataclass(frozen=True, slots=True)
class OverloadRow:
    """Measurements at one rate of requests.

    broken: requests neither answered nor refused with a Retry-After.
    of_most: tokens per second as a share of the highest value of all rates.
    first_p50, first_p99: milliseconds to the first tokens of answered requests.
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
    """Measure the service at one rate of requests; `of_most` is set later, by `compared`.

    seed: seed of the requests.
    given: options of the command line.
    """
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
    """Count the tokens that arrived from from_s to to_s, assuming equal tokens in an answer's
    events.

    whole: complete answers.
    """
    tokens = 0.0
    for answer in whole:
        came = zip(answer.deltas_s, answer.events, strict=True)
        within = sum(events for at_s, events in came if from_s <= at_s < to_s)
        tokens += answer.request.output_tokens * within / sum(answer.events)
    return tokens


def refusals(answers: Sequence[StreamedAnswer]) -> Refusals:
    """Summarise the refusals among the answers.

    For each refusal, find whether the requests sent when its Retry-After had passed were accepted.
    """
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
    """Return the rows with `of_most` set."""
    most = max(row.tokens_per_s for row in rows)
    return [replace(row, of_most=row.tokens_per_s / most) for row in rows]


def meets_the_goals(rows: Sequence[OverloadRow]) -> bool:
    """Whether some rate had refusals, no request was broken, and each rate with refusals had good
    ones and nearly as many tokens per second as the best rate.
    """
    over = [row for row in rows if row.refusals.refused]
    kept = all(row.of_most >= LEAST_OF_MOST and row.refusals.good for row in over)
    return bool(over) and kept and not any(row.broken for row in rows)


def main() -> int:
    """Measure and print; return 1 if a goal is missed or nothing was refused."""
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
    add(
        "--rates",
        type=float,
        nargs="+",
        required=True,
        help="requests per second, one rate after another",
    )
    add("--backlog", type=int, default=400, help="further requests at the beginning; default 400")
    add("--ramp", type=float, default=10, help="seconds in which the backlog arrives; default 10")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
