"""Messages into and out of the engine: requests and outputs of token ids, plain and picklable."""

from array import array
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NamedTuple

from lorikeet_engine.adapter import Adapter, Pooling, Residency
from lorikeet_engine.errors import EngineError, InvalidRequest

MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 100
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
"""Bounds of repetition_penalty. Beyond them, logits of 32 bits would overflow."""


class FinishReason(Enum):
    """Reason why a choice ended; the values are those of OpenAI's API."""

    STOP = "stop"
    LENGTH = "length"


class LogprobsMode(StrEnum):
    """Distribution that log probabilities are taken from, named as in vLLM.

    RAW: the model's own distribution.
    PROCESSED: the distribution that tokens are drawn from, after penalties, biases, bans, grammar,
        temperature and filters. Greedy tokens have neither temperature nor filters.
    """

    RAW = "raw_logprobs"
    PROCESSED = "processed_logprobs"


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling. Raises InvalidRequest when built with bad values.

    Filters apply after temperature, in the order top_k, top_p, min_p.

    max_tokens: maximum number of output tokens.
    min_tokens: length of the output before which stop tokens are not sampled.
    temperature: 0 is greedy.
    top_p: keeps the likeliest tokens that together have this probability.
    top_k: keeps the k likeliest tokens; 0 keeps all.
    min_p: keeps tokens at least min_p times as likely as the likeliest.
    seed: makes a choice repeatable: choice i of a request samples from seed + i. None: a random
        seed.
    stop_token_ids: tokens that end a choice; with keep_stop_token, they are part of its output.
    ignore_eos: do not add the model's own end-of-sequence ids to stop_token_ids.
    presence_penalty: subtracted once from the logit of every token that occurs in the output.
    frequency_penalty: subtracted from a token's logit once for each occurrence in the output.
    repetition_penalty: divides logits above 0, and multiplies others, of every token that occurs in
        prompt or output; applied before the other penalties.
    logit_bias: pairs of a token id and the number added to its logit.
    logprobs: number of most likely tokens to report in addition to each sampled token; None reports
        no log probabilities.
    logprobs_mode: distribution that `logprobs` are taken from.
    prompt_logprobs: number of most likely tokens to report in addition to each prompt token except
        the first; None reports no log probabilities of the prompt. A prompt whose log probabilities
        are reported is not taken from the prefix cache.
    keep_stop_token: keep the stop token in the output.
    grammar: grammar that the output must follow, as text for the engine's Grammars to compile;
        None: any output.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    logprobs_mode: LogprobsMode = LogprobsMode.RAW
    prompt_logprobs: int | None = None
    keep_stop_token: bool = False
    grammar: str | None = None

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "an integer ≥ 1")
        _require(
            0 <= self.min_tokens <= self.max_tokens,
            "min_tokens",
            self.min_tokens,
            f"an integer from 0 to max_tokens ({self.max_tokens})",
        )
        _require(0.0 <= self.temperature <= 2.0, "temperature", self.temperature, "0 to 2")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0, at most 1")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or a positive integer")
        _require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "0 to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(-2.0 <= value <= 2.0, name, value, "-2 to 2")
        _require(
            MIN_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY,
            "repetition_penalty",
            self.repetition_penalty,
            f"{MIN_REPETITION_PENALTY} to {MAX_REPETITION_PENALTY}",
        )
        for token, bias in self.logit_bias:
            _require(-100.0 <= bias <= 100.0, "logit_bias", {token: bias}, "biases of -100 to 100")
        for name, most in (("logprobs", MAX_LOGPROBS), ("prompt_logprobs", MAX_PROMPT_LOGPROBS)):
            value = getattr(self, name)
            want = f"an integer from 0 to {most}"
            _require(value is None or 0 <= value <= most, name, value, want)

    @property
    def has_repetition_penalty(self) -> bool:
        """Whether repetition_penalty is used, so that even tokens of the prompt change logits."""
        return self.repetition_penalty != 1.0

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty is used, so that output tokens change logits."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0)

    @property
    def changes_logits(self) -> bool:
        """Whether penalties or biases change the logits before a token is chosen."""
        return self.has_penalties or bool(self.logit_bias)


@dataclass(frozen=True)
class SchedulingParams:
    """Parameters of scheduling. Raises InvalidRequest when built with bad values.

    tenant: requests of one tenant share its part of the engine's time.
    weight: waiting tenants divide the engine's time in proportion to their weights.
    priority: requests with a higher value precede others of the same tenant.
    max_queue_s: seconds after which a request that has not begun fails with EngineOverloaded; None
        for no limit.
    max_load_s: seconds after which a request whose adapter is not on the GPU fails with
        AdapterNotReady, while the adapter goes on loading; None for no limit.
    background: the request gets only what all other requests leave of the engine, whatever its
        tenant's weight and its priority: it begins after them, gives its place and pages to them,
        and lengthens their steps by no more than a few percent.
    """

    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    max_queue_s: float | None = None
    max_load_s: float | None = None
    background: bool = False

    def __post_init__(self) -> None:
        _require(self.weight > 0.0, "weight", self.weight, "above 0")


@dataclass(frozen=True)
class Request:
    """One call of the engine: n choices for each prompt. Choices of one prompt share its KV pages.

    Choice i continues prompts[i // n].

    salt: mixed into the hashes by which the prefix cache finds pages, so that tenants share
        no pages.
    made: tokens of each choice that another engine has sampled and that the choice goes on from;
        None for a choice that has ended there. Empty for a new request. The engine outputs only
        the tokens that follow, which are those that the other engine would have sampled next:
        penalties, grammar, limits and draws count the made tokens. Prompts are not scored again.
    pools: how to make one vector of each prompt's hidden states; a Pooled of each prompt is then
        output, before the one token that the prompt's choice makes. A classification or reward head
        takes the last token's hidden state. For a mean, prompts are not taken from the prefix
        cache.
    keeps: name under which the pages of the prompt stay in host memory, where the engine has such
        memory, as long as Engine.keep_prompts lists the name; "": no name. For one prompt.
    """

    request_id: str
    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    adapter: Adapter | None = None
    salt: str = ""
    scheduling: SchedulingParams = field(default_factory=SchedulingParams)
    made: tuple[tuple[int, ...] | None, ...] = ()
    pools: Pooling | None = None
    keeps: str = ""

    def __post_init__(self) -> None:
        _require(self.n >= 1, "n", self.n, "an integer ≥ 1")
        _require(len(self.prompts) >= 1, "prompt", self.prompts, "at least one prompt")
        _require(all(self.prompts), "prompt", "[]", "prompts of at least one token")
        choices, want = len(self.prompts) * self.n, "the tokens of each choice, one not ended"
        unended = len(self.made) == choices and any(made is not None for made in self.made)
        _require(not self.made or unended, "made", len(self.made), want)
        alone = self.n == self.sampling.max_tokens == 1 and not self.made
        alone = alone and self.sampling.prompt_logprobs is None
        want = "n and max_tokens of 1, no made tokens and no prompt_logprobs"
        _require(self.pools is None or alone, "pools", self.pools, want)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of one token, sampled or of a prompt, and of the most likely alternatives.

    top: pairs of token id and log probability, the most likely first.
    rank: place of the token among all tokens by likelihood, 1 for the likeliest; None for sampled
        tokens.

    The distribution is that of the request's LogprobsMode; for prompt tokens it is always the
    model's own.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


class DraftSource(StrEnum):
    """Source of drafted tokens (speculative decoding).

    LOOKUP: the choice's own prompt and output.
    ANSWERS: recent answers to the same tenant with the same adapter.
    MTP: the model's head for multi-token prediction.
    DRAFT: the base model with a draft LoRA.
    """

    LOOKUP = "lookup"
    ANSWERS = "answers"
    MTP = "mtp"
    DRAFT = "draft"


class DraftCounts(NamedTuple):
    """Numbers of drafted tokens (speculative decoding) from one source.

    drafted: drafted tokens that steps have verified.
    accepted: those of them that became output tokens.
    """

    source: DraftSource
    drafted: int
    accepted: int


class DraftSums:
    """Sums of drafted tokens over all sources, for classes with `drafts`.

    drafts: numbers of drafted tokens by source; () without any.
    """

    __slots__ = ()
    drafts: tuple[DraftCounts, ...]

    @property
    def drafted_tokens(self) -> int:
        """Number of drafted tokens that steps have verified."""
        return sum(counts.drafted for counts in self.drafts)

    @property
    def accepted_tokens(self) -> int:
        """Number of drafted tokens that became output tokens."""
        return sum(counts.accepted for counts in self.drafts)


class MemberLoad(NamedTuple):
    """Load of one adapter of a composition (a weighted sum of adapters).

    residency: tier that held the adapter when the request came.
    load_s: seconds for which the request waited for the adapter.
    """

    residency: Residency
    load_s: float


@dataclass(frozen=True)
class EngineTimings(DraftSums):
    """Duration of each phase of one choice until its newest token, in seconds.

    queued_s: from submit to the first step.
    load_s: part of queued_s in which the adapter was loading.
    prefill_s: from the first step to the first token.
    decode_s: from the first token to the newest.
    cached_tokens: number of prompt tokens that were in the KV cache when the choice first began.
    host_tokens: number of these tokens whose KV pages came from host memory.
    preemptions: number of times that the choice was preempted.
    steps: number of steps that the choice took part in.
    drafts: numbers of drafted tokens by source; () without any.
    members: loads of a composition's adapters, in the composition's order; () without one.
    """

    queued_s: float = 0.0
    load_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    cached_tokens: int = 0
    host_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    drafts: tuple[DraftCounts, ...] = ()
    members: tuple[MemberLoad, ...] = ()


@dataclass(slots=True)  # not frozen: made twice a token, in a third of the time
class Tokens:
    """New tokens of one choice, in order.

    finish: reason why the choice ended; set on the choice's last output only.
    logprobs: one entry for each of token_ids, if requested.
    timings: set on the first and the last output of a choice.
    """

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    timings: EngineTimings | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of prompt tokens, each given the tokens before it.

    A prompt may have several such outputs. They come in order, from the prompt's second token to
    its last, and before the first tokens of the answer.

    choice: index of the prompt's first choice.
    """

    request_id: str
    choice: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Pooled:
    """Values that represent one prompt: one for each label of the head of its adapter or base
    model or, without a head, its pooled hidden states.

    choice: index of the prompt.
    values: float32.
    """

    request_id: str
    choice: int
    values: "array[float]"


@dataclass(frozen=True, slots=True)
class Failed:
    """Error that ended a whole request; no output of the request follows."""

    request_id: str
    error: EngineError


Output = Tokens | PromptLogprobs | Pooled | Failed


def _require(holds: bool, param: str, value: object, want: str) -> None:
    if not holds:
        raise InvalidRequest(f"{param}={value!r}: want {want}", param=param)
