"""Speed of streams held to a JSON schema, compared with plain streams, through HTTP on one GPU.

python -m loadtest.bench_structured --json structured.json --folder /tmp/real

The base model alone. First --checked answers for each schema are read whole and validated against
the schema. Then streams of equal length run, shorter than any validated answer, so that none ends
by itself: plain ones and ones for each schema, one alone, --streams at once, and half of them
beside as many plain ones. All are sampled at temperature 1. Streams begin one after another within
--spread seconds, so that prompts arrive at all times, as in a service. If all began at once, plain
streams would stay in step and structured ones would not, and the comparison would measure the
prompts' arrivals.

A rate is the tokens of an answer over the seconds from its request to its end: the median over the
answers of a run, and of that the median of --repeats runs, in which all kinds take turns. The
vocabulary of a random model has one token per byte of text, so JSON keys take more tokens than with
the vocabulary of a real model.

Prints the rates as tables and writes them as JSON; exits with 1 if a structured stream is below 90%
of a plain one, or a plain one beside structured ones below 95%.
"""

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median

import httpx
from jsonschema import Draft202012Validator

from loadtest.client import (
    Server,
    Session,
    chat_request,
    messages,
    schema_format,
    send_all,
    structured_request,
)
from loadtest.cluster import PROXIES
from loadtest.engine.harness import arguments, facts, show, write
from loadtest.real_service.adapters import fill_catalog
from loadtest.real_service.random_models import SHAPES, add_model_arguments, settings_of_model
from loadtest.real_service.service import service
from loadtest.report import all_whole
from loadtest.schemas import SCHEMAS, Schema
from loadtest.streamed_answer import LoadRequest
from lorikeet.settings import Settings

LEAST_OF_PLAIN = 0.9
LEAST_BESIDE = 0.95
PLAIN = "plain"
_OWN = "structured"  # folder of the catalog and cache, recreated for each run
_TEXT = "Take down what this customer wrote, as JSON. Number "
_CUT = 0.75  # share of the shortest checked answer: later ones may be shorter
_ANSWER_S = 300.0


@dataclass(frozen=True, slots=True)
class StreamRates:
    """Tokens per second of one stream, plain or held to a schema, among streams of its kind.

    of_plain: structured rate as a share of the plain rate.
    events: events per token of structured streams; tokens forced by the schema share an event.
    """

    schema: str
    streams: int
    plain: float
    structured: float
    of_plain: float
    events: float


@dataclass(frozen=True, slots=True)
class MixedRates:
    """Tokens per second of one stream, where half the streams are held to a schema.

    plain_kept, structured_kept: rate as a share of the rate among as many streams of one kind.
    of_plain: structured rate as a share of the plain rate beside it.
    """

    schema: str
    streams: int
    plain: float
    plain_kept: float
    structured: float
    structured_kept: float
    of_plain: float


class StructuredLoad:
    """Load of streams of `tokens` tokens on one service."""

    def __init__(
        self, server: Server, model: str, tokens: int, rounds: int, spread_s: float
    ) -> None:
        """Take the sizes of the load.

        model: model of all requests.
        tokens: tokens of each answer.
        rounds: requests of each stream, one after another.
        spread_s: seconds within which streams begin.
        """
        self._server, self._model, self._tokens, self._rounds = server, model, tokens, rounds
        self._spread_s = spread_s
        self._numbers = itertools.count()
        self.events = defaultdict[str, list[float]](list)  # kind → events per token of each answer

    def rates(self, streams: Mapping[str, int]) -> dict[str, float]:
        """Run streams of several kinds at once; return tokens per second of a stream of each kind.

        streams: kind → number of streams; kinds are PLAIN and the names of SCHEMAS.
        Raises RuntimeError for an incomplete answer.
        """
        counted: dict[LoadRequest, str] = {}
        encoded: dict[LoadRequest, bytes] = {}
        sessions = []
        for kind, count in streams.items():
            # Structured streams end sooner: more rounds keep plain ones from running alone.
            more = self._rounds if kind != PLAIN and len(streams) > 1 else 0
            for number in range(count):
                requests = tuple(self._request() for _ in range(self._rounds + more))
                counted |= dict.fromkeys(requests[: self._rounds], kind)
                encoded |= {request: self._encode(request, kind) for request in requests}
                sessions.append(Session(self._spread_s * number / count, requests))
        sending = send_all(self._server.url, sessions, encoded, time.monotonic())
        found = defaultdict[str, list[float]](list)
        for answer in all_whole(asyncio.run(sending)):
            if answer.request in counted:
                kind = counted[answer.request]
                found[kind].append(self._tokens / (answer.ended_s - answer.sent_s))
                self.events[kind].append(sum(answer.events) / self._tokens)
        return {kind: median(rates) for kind, rates in found.items()}

    def _request(self) -> LoadRequest:
        return LoadRequest(self._model, 0, self._tokens, seed=next(self._numbers))

    def _encode(self, request: LoadRequest, kind: str) -> bytes:
        text = f"{_TEXT}{request.seed}"
        if kind == PLAIN:
            return chat_request(self._server, request, text)
        return structured_request(self._server, request, text, SCHEMAS[kind])


def main() -> int:
    """Measure and print; return 1 if a goal is missed."""
    given = _arguments()
    noted, variables = facts(given.commit), _variables(given)
    key = fill_catalog(Settings.from_env(variables), ranks=[]).key
    with service(variables, given.proxy) as running:
        server = Server(running.url, key, SHAPES[given.shape]["vocab_size"])
        shortest = min(
            shortest_answer(server, given.shape, schema, given.checked)
            for schema in SCHEMAS.values()
        )
        tokens = min(given.tokens, int(_CUT * shortest))
        print(f"all answers fit their schemas; streams of {tokens} tokens", flush=True)
        load = StructuredLoad(server, given.shape, tokens, given.rounds, given.spread)
        alike, mixed = measure(load, given.streams, given.repeats)
    show(alike)
    show(mixed)
    write(given.json, noted, tokens=tokens, alike=alike, mixed=mixed)
    slowest = min([row.of_plain for row in alike] + [row.of_plain for row in mixed])
    return (
        0
        if slowest >= LEAST_OF_PLAIN and min(row.plain_kept for row in mixed) >= LEAST_BESIDE
        else 1
    )


def measure(
    load: StructuredLoad, streams: int, repeats: int
) -> tuple[list[StreamRates], list[MixedRates]]:
    """Measure one stream of each kind, then `streams` of each kind at once, then half plain and
    half structured streams at once.

    repeats: number of runs, of which the median counts.
    """
    counts, half = (1, streams), streams // 2
    alike = defaultdict[tuple[str, int], list[float]](list)
    mixed = defaultdict[tuple[str, str], list[float]](list)
    for _ in range(repeats):
        for count, kind in itertools.product(counts, (PLAIN, *SCHEMAS)):
            alike[kind, count].append(load.rates({kind: count})[kind])
        for schema in SCHEMAS:
            for kind, rate in load.rates({PLAIN: half, schema: half}).items():
                mixed[schema, kind].append(rate)
    own = {key: median(rates) for key, rates in alike.items()}
    beside = {key: median(rates) for key, rates in mixed.items()}

    def stream_rates(schema: str, count: int) -> StreamRates:
        plain, structured = own[PLAIN, count], own[schema, count]
        events = median(load.events[schema])
        return StreamRates(schema, count, plain, structured, structured / plain, events)

    def mixed_rates(schema: str) -> MixedRates:
        plain, structured = beside[schema, PLAIN], beside[schema, schema]
        kept = plain / own[PLAIN, streams], structured / own[schema, streams]
        return MixedRates(schema, streams, plain, kept[0], structured, kept[1], structured / plain)

    alike_rows = [stream_rates(*row) for row in itertools.product(SCHEMAS, counts)]
    return alike_rows, [mixed_rates(schema) for schema in SCHEMAS]


def shortest_answer(server: Server, model: str, schema: Schema, count: int) -> int:
    """Generate `count` answers and validate each against the schema; return the tokens of the
    shortest.

    Raises RuntimeError for an answer that was cut off, and jsonschema's ValidationError.
    """
    judge = Draft202012Validator(schema)

    def tokens_of(number: int) -> int:
        body = {"model": model, "messages": messages(f"{_TEXT}{number}")}
        answer = httpx.post(
            f"{server.url}/v1/chat/completions",
            headers={"Authorization": f"Bearer {server.key}"},
            json=body | {"response_format": schema_format(schema)},
            timeout=_ANSWER_S,
        )
        said = answer.raise_for_status().json()
        (choice,) = said["choices"]
        if choice["finish_reason"] != "stop":
            raise RuntimeError(f"an answer ended by {choice['finish_reason']}: {choice}")
        judge.validate(json.loads(choice["message"]["content"]))
        tokens: int = said["usage"]["completion_tokens"]
        return tokens

    with ThreadPoolExecutor(count) as threads:
        return min(threads.map(tokens_of, range(count)))


def _variables(given: argparse.Namespace) -> dict[str, str]:
    return settings_of_model(
        given,
        _OWN,
        replicas=1,
        gateways=given.gateways,
        max_context=2048,
        max_batch_tokens=given.batch_tokens,
        max_running=max(given.streams, given.checked),
    )


def _arguments() -> argparse.Namespace:
    parser = arguments(__doc__)
    add_model_arguments(parser)
    add = parser.add_argument
    add("--gateways", type=int, default=4, help="number of gateways; default 4")
    add("--proxy", choices=PROXIES, default="HAProxy")
    add("--checked", type=int, default=16, help="validated answers of each schema; default 16")
    add("--streams", type=int, default=64, help="streams at once; default 64")
    add("--tokens", type=int, default=128, help="most tokens of a stream; default 128")
    add("--rounds", type=int, default=4, help="requests of each stream; default 4")
    add("--spread", type=float, default=1.0, help="seconds within which streams begin; default 1")
    add("--repeats", type=int, default=3, help="runs of every kind; default 3")
    add("--batch-tokens", type=int, default=8192, help="most tokens of a step; default 8192")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
