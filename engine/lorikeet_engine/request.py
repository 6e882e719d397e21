"""What goes into the engine and what comes out: plain, picklable messages about token ids."""

from dataclasses import dataclass, field
from enum import Enum, StrEnum

from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.errors import EngineError, InvalidRequest

MAX_LOGPROBS = 20
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
"""Beyond them logits of 32 bits would overflow."""


class FinishReason(Enum):
    """Why a choice ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


class LogprobsMode(StrEnum):
    """Which distribution log probabilities are of, in vLLM's words.

    RAW: the model's own. PROCESSED: the one that tokens are drawn from, behind penalties, biases,
    bans, grammar, temperature and filters; greedy tokens have neither temperature nor filters.
    """

    RAW = "raw_logprobs"
    PROCESSED = "processed_logprobs"


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens. Validated when built; raises InvalidRequest.

    temperature 0 is greedy. Filters follow it in this order: top_k (0 keeps the whole vocabulary),
    top_p, then min_p, which keeps tokens at least min_p times as likely as the likeliest. A seed
    makes a choice repeatable: choice i of a request samples from seed + i. stop_token_ids end a
    choice and are not part of its output, unless keep_stop_token; the model's own end-of-sequence
    ids are added unless ignore_eos. Neither can be sampled before the output has min_tokens tokens.

    presence_penalty is subtracted once from the logit of every token of the output, and
    frequency_penalty once for each time that it occurs; logit_bias is added to the logits of its
    ids. Before them, repetition_penalty divides the logit of every token of prompt and output where
    it is above 0, and multiplies it elsewhere. logprobs: how many of the most likely tokens to
    report at each step beside the sampled one; None reports none. logprobs_mode: of which
    distribution these are. prompt_logprobs: how many to
    report at each token of a prompt but its first, beside that token; None reports none, and the
    prompt may be found in the prefix cache, which a prompt that is scored is not. grammar: what the
    output must follow, in the language of the engine's Grammars.
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
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            want = f"an integer from 0 to {MAX_LOGPROBS}"
            _require(value is None or 0 <= value <= MAX_LOGPROBS, name, value, want)

    @property
    def has_repetition_penalty(self) -> bool:
        """Whether the prompt, too, changes the logits of what follows."""
        return self.repetition_penalty != 1.0

    @property
    def has_penalties(self) -> bool:
        """Whether the output so far changes the logits of what follows."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0)

    @property
    def changes_logits(self) -> bool:
        """Whether penalties or biases change logits before tokens are chosen."""
        return self.has_penalties or bool(self.logit_bias)


@dataclass(frozen=True)
class SchedulingParams:
    """How the scheduler treats a request. Raises InvalidRequest when built.

    tenant: requests of one tenant share its turn; the engine's time is divided between tenants that
    wait in proportion to their weight. priority: among requests of one tenant the higher goes
    first. max_queue_s: a request that has not begun to run by then fails with EngineOverloaded.
    max_load_s: a request whose adapter is not on the GPU by then fails with AdapterNotReady; the
    adapter goes on loading. None is no bound.
    """

    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    max_queue_s: float | None = None
    max_load_s: float | None = None

    def __post_init__(self) -> None:
        _require(self.weight > 0.0, "weight", self.weight, "above 0")


@dataclass(frozen=True)
class Request:
    """One call: n choices for each prompt; those of one prompt share its KV pages.

    Choice i continues prompts[i // n]. `salt` keeps tenants' cached prefixes apart.
    """

    request_id: str
    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    adapter: AdapterRef | None = None
    salt: str = ""
    scheduling: SchedulingParams = field(default_factory=SchedulingParams)

    def __post_init__(self) -> None:
        _require(self.n >= 1, "n", self.n, "an integer ≥ 1")
        _require(len(self.prompts) >= 1, "prompt", self.prompts, "at least one prompt")
        _require(all(self.prompts), "prompt", "[]", "prompts of at least one token")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of one token, sampled or a prompt's, and of the most likely in its place.

    top: (token id, log probability), the most likely first. They are of the distribution that
    LogprobsMode names, for a prompt's tokens of the model's own.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class EngineTimings:
    """How long each phase of one choice took until its newest token, in seconds.

    queued_s: from submit to its first step, of which its adapter was loading for load_s; prefill_s:
    from there to its first token; decode_s: from there to its newest. cached_tokens: tokens of its
    prompt that were in the KV cache. preemptions: how often it had to begin anew. steps: how many
    it took part in.
    """

    queued_s: float = 0.0
    load_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    cached_tokens: int = 0
    preemptions: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of one choice, in order. `finish` is set on the last one and only there.

    logprobs: one for each of token_ids, where they were asked for. timings: on the first and the
    last output of a choice.
    """

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    timings: EngineTimings | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """How likely the next tokens of a prompt are, each given those before it.

    A prompt's come in order, from its second token to its last. choice: the prompt's first, before
    whose own tokens they come.
    """

    request_id: str
    choice: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """The whole request ended with an error; nothing more follows."""

    request_id: str
    error: EngineError


Output = Tokens | PromptLogprobs | Failed


def _require(holds: bool, param: str, value: object, want: str) -> None:
    if not holds:
        raise InvalidRequest(f"{param}={value!r}: want {want}", param=param)
