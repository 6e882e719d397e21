"""Step on the device: its forward pass, the tokens sampled from it, and reading them back.

`compute` lays the planned chunks out as a batch (batch_builder.py) and has a ModelRunner run it.
`sample` draws the next tokens.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

import numpy as np
import torch

from lorikeet_engine.device.async_copies import Download, upload
from lorikeet_engine.errors import DeviceLost, EngineError, NotFinite
from lorikeet_engine.execution.batch_builder import (
    StepInput,
    build_step_input,
    divide_by_adapter,
    group_by_adapter,
    with_noise,
)
from lorikeet_engine.execution.cuda_graphs import CudaGraphs
from lorikeet_engine.execution.grammar_masks import allowed_tokens
from lorikeet_engine.execution.kv_tensors import parts_of_pages, with_parts
from lorikeet_engine.execution.pooling import PooledPrompts
from lorikeet_engine.execution.prompt_scores import LogitsReader, PromptScores
from lorikeet_engine.kernels.attention.protocol import AttentionBackend
from lorikeet_engine.kernels.lora.types import LoraWeights, Segments
from lorikeet_engine.models.batch import Batch
from lorikeet_engine.models.llama import LlamaModel
from lorikeet_engine.models.states import RecurrentStates
from lorikeet_engine.request import LogprobsMode, TokenLogprobs
from lorikeet_engine.sampling.draws import SamplingRow
from lorikeet_engine.sampling.grammar import Grammars
from lorikeet_engine.sampling.logprob_readback import LogprobReadback
from lorikeet_engine.sampling.processed_logprobs import ProcessedLogprobs
from lorikeet_engine.sampling.sampler import NOT_FINITE, Sampler
from lorikeet_engine.scheduling.forced_budget import ForcedBudget
from lorikeet_engine.scheduling.scheduler import StepPlan
from lorikeet_engine.scheduling.sequence import Chunk, Sequence, SequenceStatus
from lorikeet_engine.scheduling.step_budget import ExpectedStep
from lorikeet_engine.scheduling.step_counters import StepLaunch
from lorikeet_engine.settings import EngineSettings


class ModelRunner:
    """Runner of batches through a model; holds the KV pages and the adapters' weights.

    On CUDA a step copies its batch to static tensors and replays a graph (cuda_graphs.py), unless
    it is too large for the graphs.

    small_sizes: numbers of tokens to which small steps are padded, ascending; empty without graphs.
    prompt_sizes: numbers of tokens to which other steps with prompts are padded, ascending; empty
        without graphs. A step with a few tokens near a prompt's beginning is still a small step.
    """

    def __init__(
        self,
        model: LlamaModel,
        attention: AttentionBackend,
        weights: LoraWeights | None,
        kv: torch.Tensor,
        graphs: CudaGraphs | None = None,
        states: RecurrentStates | None = None,
    ) -> None:
        """Take a loaded model and the tensors that it works on.

        attention: computes attention for batches that the graphs do not fit.
        weights: memory of the adapters' weights; None for an engine that serves only the base
            model.
        kv: tensor of the KV pages on the device (allocate_kv in kv_tensors.py).
        graphs: captured with this model, weights and kv; used for batches that fit them.
        states: states of delta nets; None for a model without delta nets.
        """
        self.model = model
        self._attention = attention
        self.weights = weights
        self.kv = kv
        self._graphs = graphs
        self._states = states
        self._kv_parts = parts_of_pages(model.config, model.shape, kv)
        self._hidden: torch.Tensor | None = None  # of a step, until the MTP head has read them
        self.small_sizes = () if graphs is None else graphs.whole_sizes
        self.prompt_sizes = () if graphs is None else graphs.piecewise_sizes

    @property
    def state_tensors(self) -> list[torch.Tensor]:
        """Tensors of the states of delta nets, each [layers, slots, …]; [] without delta nets."""
        return [] if self._states is None else self._states.tensors

    @property
    def state_slots(self) -> int:
        """Number of slots for states of delta nets; 0 for a model without delta nets."""
        return 0 if self._states is None else self._states.slots

    @property
    def state_bytes(self) -> int:
        """Bytes of a slot for a state of delta nets; 0 for a model without delta nets."""
        return 0 if self._states is None else self._states.nbytes // self._states.slots

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """Attention window of each group of layers; None for a group that attends to all tokens."""
        return self.model.config.kv_groups.windows

    def share(
        self,
        step: StepInput,
        previous: torch.Tensor | None = None,
        scores: PromptScores | None = None,
        *,
        graphs: bool = True,
    ) -> None:
        """Have the processes of other GPUs launch a step; does nothing on an engine with one GPU.

        Call right before the step's `forward`, or if `graphs` is False before its `forward_eager`.

        previous: tokens that the previous step sampled, [rows] int64 on the device. Needed if the
            step has pending tokens.
        scores: prompt scores, which need logits besides those for sampling; None: no prompt is
            scored.
        graphs: whether CUDA graphs may be used.
        """

    @torch.inference_mode()
    def forward(self, batch: Batch, scores: LogitsReader | None = None) -> torch.Tensor:
        """Return the logits [rows, vocab] of the tokens batch.logit_rows, in the model's dtype.

        Keys and values are written to the KV pages. The caller owns the result and may change it in
        place.

        scores: reader of logits of prompt tokens, besides the returned ones; None: no prompt is
            scored.
        """
        if self._graphs is None or not self._graphs.fit(batch):
            return self.forward_eager(batch, scores)
        batch = self._placed(batch)
        self._begin_states(batch)
        return self._logits(self._graphs.forward(batch), batch, scores)

    @torch.inference_mode()
    def forward_eager(self, batch: Batch, scores: LogitsReader | None = None) -> torch.Tensor:
        """Compute the result of `forward` without CUDA graphs.

        scores: reader of logits of prompt tokens, besides the returned ones; None: no prompt is
            scored.
        """
        self._hidden = None  # the memory plan counts those of one step
        batch = self._placed(batch)
        self._attention.plan(batch)
        self._begin_states(batch)
        hidden = self.model.forward(batch, self.kv, self.weights, self._attention, self._states)
        return self._logits(hidden, batch, scores)

    @torch.inference_mode()
    def predict(self, batch: Batch, following: torch.Tensor, *, predicts: bool) -> torch.Tensor:
        """Have the MTP head predict the token after the next one, for each row of logits of the
        step that ran last.

        batch: batch of that step.
        following [tokens] int64: next token of each of the step's tokens.
        predicts: False: the head only writes its keys and values, from which it predicts later.
        → [rows] int64, or [0] unless `predicts`
        """
        hidden, self._hidden = self._hidden, None
        assert hidden is not None, "the head of no step"
        rows = batch.logit_rows if predicts else batch.logit_rows[:0]
        batch = replace(batch, token_ids=following, logit_rows=rows)
        if predicts:
            self._attention.plan(batch)  # graphs have plans of their own
        of_step = hidden, batch, self.kv, self.weights, self._attention
        return self.model.predict(*of_step).argmax(-1)

    def _placed(self, batch: Batch) -> Batch:
        """Return the batch with page numbers that count parts of pages, if several layers share a
        piece of a page; else the batch itself.
        """
        return with_parts(batch, self._kv_parts, self.kv.shape[3]) if self._kv_parts else batch

    def _begin_states(self, batch: Batch) -> None:
        if self._states is not None and batch.states is not None:
            self._states.begin(batch.states)

    def _logits(
        self, hidden: torch.Tensor, batch: Batch, scores: LogitsReader | None
    ) -> torch.Tensor:
        if self.model.config.mtp is not None:
            self._hidden = hidden
        if scores is not None:
            scores.compute(hidden, lambda h, heads: self.model.logits(h, self.weights, heads))
        rows = batch.logit_rows
        wanted = hidden if batch.ordered and len(rows) == len(hidden) else hidden[rows]
        return self.model.logits(wanted, self.weights, batch.head_segments)


Predict = Callable[[torch.Tensor], torch.Tensor]
"""Returns predictions for the sampled tokens, [rows] int64 → [predictions] int64."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Tokens that a step sampled: one for each sequence whose tokens so far are all computed, and
    one more for each drafted token.

    tokens: sampled tokens by row of the logits; meaningless in rows with an error.
    logprobs: log probabilities by row, for rows that requested them.
    errors: errors by row, for rows without a token.
    predicted: by row, tokens that the MTP head or the draft LoRA predicts after the sampled one.
    """

    tokens: list[int]
    logprobs: Mapping[int, TokenLogprobs]
    errors: Mapping[int, EngineError]
    predicted: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def accepted(self, row: int, drafted: tuple[int, ...]) -> int:
        """Return how many drafted tokens of a sequence are accepted: the first ones, as far as they
        equal the tokens sampled in their place.

        Raises the error of the row that samples the token behind them, if any.

        row: first row of the sequence in the logits.
        """
        end = row
        for draft in drafted:
            if end in self.errors or self.tokens[end] != draft:
                break
            end += 1
        if error := self.errors.get(end):
            raise error
        return end - row

    def delivered(
        self, row: int, sequence: Sequence, accepted: int
    ) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]:
        """Return the tokens that a step adds to an answer, and their log probabilities: accepted
        tokens, the token sampled behind them, and the tokens forced after it.

        There are no forced tokens where log probabilities are wanted. A sampled stop id is left
        out, unless the request asks to keep stop ids.

        row: first row of the sequence in the logits.
        accepted: number of accepted tokens.
        """
        *before, token = self.tokens[row : row + accepted + 1]
        ends = token in sequence.stop_ids and not sequence.request.sampling.keep_stop_token
        tokens = tuple(before) if ends else (*before, token, *sequence.forced)
        if row not in self.logprobs:
            return tokens, ()
        return tokens, tuple(self.logprobs[row + at] for at in range(len(tokens)))


class PendingSample:
    """Tokens that a step samples, on their way to the host.

    tokens: sampled tokens on the device, [rows] int64. Rows whose logits are not finite hold an
        arbitrary token; their sequences end with an error.
    """

    def __init__(
        self,
        sequences: list[Sequence],
        tokens: torch.Tensor,
        logprobs: list[LogprobReadback | ProcessedLogprobs],
        errors: Mapping[int, EngineError],
        predict: Predict | None = None,
        predictions: Mapping[int, int] | None = None,
    ) -> None:
        """Begin to copy the tokens to the host.

        predict: returns predictions for the sampled tokens; None: there are none.
        predictions: by row, the number of predictions after the row's token, in their order.
        """
        self.tokens = tokens.clamp(min=0)
        self._sequences = sequences
        self._download = Download(tokens)
        self._predicted = None if predict is None else Download(predict(self.tokens))
        self._predictions = predictions or {}
        self._logprobs = logprobs
        self._errors = errors

    def wait(self) -> SampledTokens:
        """Wait for the sampled tokens to reach the host; return them. Raises device errors."""
        tokens = self._download.wait().tolist()
        logprobs = {row: each for some in self._logprobs for row, each in some.read().items()}
        errors = dict(self._errors)
        if NOT_FINITE in tokens:
            for row, token in enumerate(tokens):
                if token == NOT_FINITE:
                    errors.setdefault(row, NotFinite.under(self._sequences[row].adapter))
        predicted, at = dict[int, tuple[int, ...]](), 0
        if self._predicted is not None:
            values = self._predicted.wait().tolist()
            for row, count in self._predictions.items():
                predicted[row] = tuple(values[at : at + count])
                at += count
        return SampledTokens(tokens, logprobs, errors, predicted)


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """Step whose forward pass was launched.

    chunks: the step's chunks in the order of the batch.
    launch: time of the launch, and numbers of sequences and adapters.
    logits: [tokens to sample, vocab], on the device, in the order of the chunks.
    scores: log probabilities of the prompts' tokens; None if no prompt is scored.
    pooled: embeddings or head's scores of the prompts; None if no prompt is pooled.
    predict: has the MTP head predict a token after each sampled one, [rows] int64, or returns what
        the draft LoRA has predicted; None without either.
    predictions: by row, the number of tokens predicted after the sampled one.
    """

    chunks: list[Chunk]
    logits: torch.Tensor
    launch: StepLaunch
    scores: PromptScores | None
    pooled: PooledPrompts | None
    predict: Predict | None = None
    predictions: Mapping[int, int] = field(default_factory=dict)

    @property
    def sequences(self) -> list[Sequence]:
        """Sequence of each row of the logits."""
        return [chunk.sequence for chunk in self.chunks for _ in range(chunk.rows)]

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar restricts a token sampled from this step."""
        return any(c.completes and c.sequence.matcher is not None for c in self.chunks)


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """Step that was launched and whose results the host has not read yet.

    chunks: the step's chunks in the order of the batch.
    launch: time of the launch, and numbers of sequences and adapters.
    sample: tokens that the step samples.
    scores: log probabilities of the prompts' tokens; None if no prompt is scored.
    pooled: embeddings or head's scores of the prompts; None if no prompt is pooled.
    forced: by row, the tokens that a grammar requires after the sampled token.
    followed: by a sequence's first row, how many of its drafted tokens can be accepted.
    """

    chunks: list[Chunk]
    sample: PendingSample
    launch: StepLaunch
    scores: PromptScores | None
    pooled: PooledPrompts | None
    forced: Mapping[int, tuple[int, ...]]
    followed: Mapping[int, int]


def compute(
    runner: ModelRunner,
    plan: StepPlan,
    settings: EngineSettings,
    previous: InFlightStep | None,
    expected: ExpectedStep | None,
    pages_arrive: Callable[[], bool] = lambda: True,
) -> ForwardPass | None:
    """Launch the forward pass of a plan's chunks; the host waits for nothing but `pages_arrive`.

    Returns None, and launches nothing, if `pages_arrive` returns False.

    previous: the previous step, if the host has not read it yet; its sampled tokens are copied into
        this step's input on the device.
    expected: time that this step should take, to compare with its measured time; None: it is not
        compared.
    pages_arrive: waits for KV pages from the host that the chunks need; returns whether they came
        undamaged.
    """
    launched_s, chunks = time.perf_counter(), group_by_adapter(plan.chunks)
    sampled = previous.sample.tokens if previous else None
    divided = divide_by_adapter(chunks)
    in_batch = with_noise(divided, plan.draft)
    step_input = build_step_input(in_batch, settings.page_size, runner.kv_windows)
    scores = PromptScores(divided, plan.scored, settings.max_running) if plan.scored else None
    pooled = _pooled(in_batch, runner)
    batch = step_input.upload(torch.device(settings.device), sampled)
    if not pages_arrive():
        return None
    runner.share(step_input, sampled, scores)
    logits = runner.forward(batch, _Readers.of(scores, pooled))
    launch = StepLaunch(launched_s, len(chunks), len(batch.segments or ()), expected)
    forward = ForwardPass(chunks, logits, launch, scores, pooled)
    if runner.model.config.mtp is not None:
        predict = partial(_predict, runner, batch, divided, plan.predicts)
        rows = len(forward.sequences) if plan.predicts else 0
        return replace(forward, predict=predict, predictions=dict.fromkeys(range(rows), 1))
    if in_batch is not divided:
        return _with_noise_read(forward)
    return forward


def _with_noise_read(forward: ForwardPass) -> ForwardPass:
    """Take the draft LoRA's predictions from the last rows of the logits, those of noise."""
    ends = accumulate(chunk.rows for chunk in forward.chunks)
    counts = {
        end - 1: len(chunk.noise)
        for end, chunk in zip(ends, forward.chunks, strict=True)
        if chunk.noise
    }
    rows = len(forward.sequences)
    predicted = forward.logits[rows:].argmax(-1)
    return replace(
        forward, logits=forward.logits[:rows], predict=lambda _: predicted, predictions=counts
    )


def _predict(
    runner: ModelRunner, batch: Batch, chunks: list[Chunk], predicts: bool, tokens: torch.Tensor
) -> torch.Tensor:
    """Have the MTP head predict a token after each one that a step sampled: see ModelRunner.

    batch: batch of the step.
    chunks: the step's chunks in the order of the batch.
    tokens: sampled tokens, [rows] int64 on the device.
    """
    following = batch.token_ids.roll(-1)
    ends = zip(batch.query_starts[1:].tolist(), chunks, strict=True)
    known = [(end - 1, c.sequence.tokens[c.end]) for end, c in ends if not c.completes]
    if known:
        at, ids = upload(np.array(known, np.int64).T.copy(), tokens.device)
        following.index_copy_(0, at, ids)
    following.index_copy_(0, batch.logit_rows, tokens)
    return runner.predict(batch, following, predicts=predicts)


def _pooled(chunks: list[Chunk], runner: ModelRunner) -> PooledPrompts | None:
    if not any(chunk.pools for chunk in chunks):
        return None
    return PooledPrompts(chunks, runner.weights, runner.model.score)


@torch.inference_mode()
def sample(
    sampler: Sampler, forward: ForwardPass, budget: ForcedBudget, grammars: Grammars | None
) -> InFlightStep:
    """Sample the next tokens from a forward pass, whose logits are changed in place.

    Each token is the likeliest one, or drawn with a hash of the sequence's seed and step, so that a
    request with a seed gets the same tokens in any batch with the same logits.

    The matchers of the sequences' grammars must have accepted the tokens of the previous step. The
    host waits for nothing. Grammars, penalties and log probabilities cost time only for sequences
    that use them.

    budget: bounds the tokens that grammars force in the next step.
    grammars: None on an engine without grammars.
    """
    sequences, logits = forward.sequences, forward.logits
    special = {i: sequence for i, sequence in enumerate(sequences) if not sequence.plain_sampling}
    allowed = allowed_tokens(grammars, forward.chunks, logits, budget)
    for sequence in special.values():
        _count_tokens(sampler, sequence)
    rows = list[SamplingRow]()
    for chunk in forward.chunks:
        if chunk.completes:
            rows.append(_row(chunk.sequence))
            rows += [_row(chunk.sequence, *draft) for draft in enumerate(chunk.drafted, 1)]
    counts = _logprobs_counts(special, LogprobsMode.RAW)
    logprobs = LogprobReadback(logits, counts) if counts else None
    allowed.forbid_others(logits)
    of_drawn = _logprobs_counts(special, LogprobsMode.PROCESSED)
    processed = ProcessedLogprobs(of_drawn) if of_drawn else None
    tokens = sampler.sample(logits, rows, processed)
    if logprobs is not None:
        logprobs.download(logits, tokens)
    reported = [each for each in (logprobs, processed) if each is not None]
    predicted = forward.predict, forward.predictions
    pending = PendingSample(sequences, tokens, reported, allowed.errors, *predicted)
    return InFlightStep(
        forward.chunks,
        pending,
        forward.launch,
        forward.scores,
        forward.pooled,
        allowed.forced,
        allowed.followed,
    )


class _Readers(tuple[LogitsReader, ...]):
    """LogitsReader that has each of several readers compute, in order."""

    @classmethod
    def of(cls, *readers: LogitsReader | None) -> "LogitsReader | None":
        """Combine the readers that are not None; return None if there are none."""
        return cls(each for each in readers if each is not None) or None

    def compute(
        self,
        hidden: torch.Tensor,
        logits_of: Callable[[torch.Tensor, Segments | None], torch.Tensor],
    ) -> None:
        for each in self:
            each.compute(hidden, logits_of)


def raise_if_lost(device: torch.device, error: BaseException) -> None:
    """Raise DeviceLost if `error` is a DeviceLost or has left the device unusable."""
    if isinstance(error, DeviceLost):
        raise error
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as lost:  # an error of the device stays; any other error has passed
        raise DeviceLost(f"{device} failed and stays so: {error}") from lost


def _count_tokens(sampler: Sampler, sequence: Sequence) -> None:
    """Have the device count the sequence's tokens, if penalties or biases change its logits."""
    params = sequence.request.sampling
    finished = sequence.status is SequenceStatus.FINISHED
    if params.changes_logits and sequence.penalty_slot is None and not finished:
        assert not sequence.pending_rows, "a token that nobody can count"
        output = sequence.tokens[sequence.prompt_length :]
        sequence.penalty_slot = sampler.penalties.begin(params, sequence.prompt, output)


def _logprobs_counts(sequences: Mapping[int, Sequence], mode: LogprobsMode) -> dict[int, int]:
    """Return, by row, how many likeliest tokens to report beside the sampled one.

    Only sequences that want log probabilities of this mode have a row in the result.
    """
    params = {i: sequence.request.sampling for i, sequence in sequences.items()}
    return {
        i: p.logprobs
        for i, p in params.items()
        if p.logprobs is not None and p.logprobs_mode is mode
    }


def _row(sequence: Sequence, ahead: int = 0, drafted: int | None = None) -> SamplingRow:
    """Return the sampling parameters of a row of logits.

    ahead: number of drafted tokens before the row's token.
    drafted: the last of these tokens.
    """
    params, step = sequence.request.sampling, sequence.output_length + ahead
    # stop ids below min_tokens; a grammar's mask forbids them itself
    bans = step < params.min_tokens and sequence.matcher is None
    banned = tuple(sequence.stop_ids) if bans else ()
    return SamplingRow(params, sequence.seed, step, banned, sequence.penalty_slot, drafted)
