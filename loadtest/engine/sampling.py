"""Sampled decode steps: time that each way of choosing tokens adds to a greedy step.

python -m loadtest.engine.sampling --json sampling.json

Whole steps of one engine on Llama-3.1-8B's shapes. All cases of a group have the same prompts and
take turns, the greedy one first, so that all see the GPU equally warm. Before the timing, the
sampler must draw the same tokens from random logits on the device as on the CPU. Prints a row for
each case.

Long outputs are not generated: a request's prompt holds the output, and before its first step the
prompt is declared to end earlier.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import torch

from loadtest.engine import harness
from loadtest.engine.offline import GREEDY, Work, abort, begin, request_of, steps_ms
from loadtest.engine.random_engine import SETTINGS as SMALL
from lorikeet_engine.engine import Engine
from lorikeet_engine.request import LogprobsMode, Request, SamplingParams, TokenLogprobs
from lorikeet_engine.sampling.draws import SamplingRow
from lorikeet_engine.sampling.logprob_readback import LogprobReadback
from lorikeet_engine.sampling.penalties import Penalties
from lorikeet_engine.sampling.processed_logprobs import ProcessedLogprobs
from lorikeet_engine.sampling.sampler import Sampler

ROUNDS = 5
STEPS = 20
SETTINGS = replace(SMALL, max_context=8192, kv_bytes=40 << 30)
_WARM_UP = 5
_PROMPT = 16
_LEFT = 128  # tokens that a request may still make: more than its warm-up and timed steps
_CHECKED = 16  # rows; each takes a sort of the vocabulary on the CPU
_CLOSE = 2e-5  # tolerance of log probabilities, each within 1e-5 of float64's


@dataclass(frozen=True, slots=True)
class Case:
    """Way of choosing tokens.

    first: sampling parameters of the first request, if different from the others.
    """

    name: str
    sampling: SamplingParams
    first: SamplingParams | None = None

    def of(self, index: int) -> SamplingParams:
        """Return the sampling parameters of the request with this index."""
        return self.first if self.first is not None and index == 0 else self.sampling


@dataclass(frozen=True, slots=True)
class Group:
    """Cases of N requests at once, each with `made` tokens of output; greedy comes first."""

    requests: int
    made: int
    cases: tuple[Case, ...]


_ONE = SamplingParams(temperature=1.0)
_PROCESSED = replace(_ONE, logprobs=20, logprobs_mode=LogprobsMode.PROCESSED)
_BIASES = tuple((400 * i, 1.0) for i in range(300))
GROUPS = (
    Group(
        256,
        0,
        (
            Case("greedy", GREEDY),
            Case("temperature 1", _ONE),
            Case("top_p 0.95, top_k 50", replace(_ONE, top_p=0.95, top_k=50)),
            Case("min_p 0.05", replace(_ONE, min_p=0.05)),
            Case("top_k 50,000", replace(_ONE, top_k=50_000)),
            Case("one of top_k 50,000", _ONE, replace(_ONE, top_k=50_000)),
            Case("top_p 1e-6", replace(_ONE, top_p=1e-6)),
            Case("one of top_p 1e-6", _ONE, replace(_ONE, top_p=1e-6)),
        ),
    ),
    Group(
        64,
        4000,
        (
            Case("greedy", GREEDY),
            Case("temperature 1", _ONE),
            Case(
                "frequency and presence", replace(_ONE, frequency_penalty=0.5, presence_penalty=1)
            ),
            Case("repetition", replace(_ONE, repetition_penalty=1.1)),
            Case("logit_bias of 300", replace(_ONE, logit_bias=_BIASES)),
            Case("logprobs 20", replace(_ONE, logprobs=20)),
            Case("processed logprobs 20", _PROCESSED),
            Case("processed of top_p 0.95", replace(_PROCESSED, top_p=0.95)),
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Steps of one case, in milliseconds.

    A round is one run of every case of the group.
    step_ms: median of all steps.
    over_greedy_ms: median over the rounds of the difference to the group's greedy case.
    rounds_ms: median of each round.
    """

    case: str
    requests: int
    made: int
    step_ms: float
    over_greedy_ms: float
    rounds_ms: tuple[float, ...]


def measure(engine: Engine, group: Group) -> Iterator[Row]:
    """Check the tokens of a group's cases, then time their steps. Raises AssertionError if the
    engine's tokens are wrong.
    """
    harness.check(engine, Work("base", _PROMPT, 32, requests=min(group.requests, 64)))
    for case in group.cases:
        check_draws(engine, group, case)
    times_ms = [list[list[float]]() for _ in group.cases]
    prompts = np.random.default_rng(group.made).integers(
        0, engine.info.vocab_size, (group.requests, _PROMPT + group.made)
    )
    for turn in range(1 + ROUNDS):  # the first compiles kernels and caches prompts
        for case, times in zip(group.cases, times_ms, strict=True):
            took_ms = _time(engine, group, case, prompts.tolist())
            if turn:
                times.append(took_ms)
    greedy = [median(took) for took in times_ms[0]]
    for case, times in zip(group.cases, times_ms, strict=True):
        rounds = [median(took) for took in times]
        over = median(b - a for a, b in zip(greedy, rounds, strict=True))
        step_ms = median(ms for took in times for ms in took)
        yield Row(case.name, group.requests, group.made, step_ms, over, tuple(rounds))


def measure_all(engine: Engine, groups: Iterable[Group]) -> list[Row]:
    """Measure the groups in order; print each row as it is measured."""
    return harness.show(row for group in groups for row in measure(engine, group))


def check_draws(engine: Engine, group: Group, case: Case) -> None:
    """Draw from equal logits on device and CPU; raise AssertionError unless tokens are equal.

    Requested log probabilities and ids of the likeliest tokens are compared too.
    """
    model, vocab, count = engine._runner.model, engine.info.vocab_size, _CHECKED
    random = torch.Generator().manual_seed(len(case.name))
    logits = torch.randn(count, vocab, generator=random).to(model.dtype)
    made = torch.randint(vocab, (count, group.made), generator=random).tolist()
    params = [case.of(i) for i in range(count)]
    devices = model.device, torch.device("cpu")
    drawn = [_draw(logits.to(device, copy=True), params, made) for device in devices]
    (tokens, got), (want, expected) = drawn
    assert tokens == want, f"{case.name}: the device draws other tokens than the CPU"
    for row, of in expected.items():
        assert _are_close(got[row], of), f"{case.name}: row {row} has {got[row]}, on the CPU {of}"


def _are_close(got: TokenLogprobs, want: TokenLogprobs) -> bool:
    values, expected = ((of.logprob, *(logprob for _, logprob in of.top)) for of in (got, want))
    ids, expected_ids = ([token for token, _ in of.top] for of in (got, want))
    return ids == expected_ids and np.allclose(values, expected, rtol=0, atol=_CLOSE)


def _draw(
    logits: torch.Tensor, params: list[SamplingParams], made: list[list[int]]
) -> tuple[list[int], dict[int, TokenLogprobs]]:
    """Draw a token for each row of logits; return the tokens, and the requested log probabilities
    by row.

    params: sampling parameters of each row.
    made: output of each row so far.
    """
    slots, vocab = logits.shape
    penalties = Penalties(slots, vocab, logits.device)
    rows = [
        SamplingRow(
            one,
            i,
            len(output),
            slot=penalties.begin(one, (), output) if one.changes_logits else None,
        )
        for i, (one, output) in enumerate(zip(params, made, strict=True))
    ]
    counts = {i: n for i, one in enumerate(params) if (n := one.logprobs) is not None}
    if not counts:
        return Sampler(penalties).sample(logits, rows).tolist(), {}
    if params[0].logprobs_mode is LogprobsMode.PROCESSED:
        processed = ProcessedLogprobs(counts)
        return Sampler(penalties).sample(logits, rows, processed).tolist(), processed.read()
    logprobs = LogprobReadback(logits, counts)
    tokens = Sampler(penalties).sample(logits, rows)
    logprobs.download(logits, tokens)
    return tokens.tolist(), logprobs.read()


def _time(engine: Engine, group: Group, case: Case, prompts: list[list[int]]) -> list[float]:
    """Return the times of STEPS steps of one case, in milliseconds."""
    requests = [_request(group, case, i, prompt) for i, prompt in enumerate(prompts)]
    for one in requests:
        engine.submit(one)
    for sequence in engine._requests.submitted:
        sequence.prompt_length -= group.made
        sequence.prompt = sequence.prompt[: sequence.prompt_length]
    begin(engine, requests)
    steps_ms(engine, _WARM_UP)
    took_ms = steps_ms(engine, STEPS)
    running = engine.status().live.running
    assert running == len(requests), f"{case.name}: {running} of {len(requests)} run"
    abort(engine, requests)
    return took_ms


def _request(group: Group, case: Case, index: int, prompt: list[int]) -> Request:
    """Make one request. All requests of a group share a salt, so they find each other's prompts in
    the prefix cache.

    index: number of the request in its case.
    """
    name, tokens = f"{case.name} {index}", group.made + _LEFT
    return request_of(name, prompt, tokens, None, f"{group.made}", case.of(index))


def main() -> None:
    """Measure all groups on one engine."""
    options = harness.arguments(__doc__).parse_args()
    facts = harness.facts(options.commit)
    with harness.full_engine(room=1, settings=SETTINGS) as engine:
        rows = measure_all(engine, GROUPS)
    harness.write(options.json, facts, sampling=rows)


if __name__ == "__main__":
    main()
