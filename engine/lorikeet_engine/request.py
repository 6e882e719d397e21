"""What goes into the engine and what comes out: plain, picklable messages about token ids."""

from dataclasses import dataclass, field
from enum import Enum

from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.errors import EngineError, InvalidRequest

MAX_LOGPROBS = 20


class FinishReason(Enum):
    """Why a choice ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Validated when built; raises InvalidRequest.

    temperature 0 is greedy. top_k 0 keeps the whole vocabulary. A seed makes a choice repeatable:
    choice i of a request draws from seed + i. stop_token_ids end a choice and are not part of its
    output; the model's own end-of-sequence ids are added unless ignore_eos. Neither can be drawn
    before min_tokens tokens have been made.

    presence_penalty is taken once from the logit of every token that the choice has made,
    frequency_penalty as often as it has made it; logit_bias is added to the logits of its ids.
    logprobs: how many of the most likely tokens to tell of at each step beside the drawn one; None
    tells of none. grammar: what the choice may say, in the language of the engine's Grammars.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
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
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(-2.0 <= value <= 2.0, name, value, "-2 to 2")
        for token, bias in self.logit_bias:
            _require(-100.0 <= bias <= 100.0, "logit_bias", {token: bias}, "biases of -100 to 100")
        _require(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            "logprobs",
            self.logprobs,
            f"an integer from 0 to {MAX_LOGPROBS}",
        )

    @property
    def penalises(self) -> bool:
        """Whether what the choice has made changes what it may say next."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class Terms:
    """How the scheduler treats a request.

    tenant: requests of one tenant share its turn; the engine's time is divided between tenants that
    wait in proportion to their weight. priority: among requests of one tenant the higher goes
    first. max_queue_s: a request that has not begun to run by then fails with EngineOverloaded.
    max_load_s: so long it waits for its adapter, then fails with AdapterNotReady; the adapter comes
    nevertheless. None is no bound.
    """

    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    max_queue_s: float | None = None
    max_load_s: float | None = None

    def __post_init__(self) -> None:
        _require(self.weight > 0.0, "weight", self.weight, "above 0")


@dataclass(frozen=True, slots=True)
class Request:
    """One call: every prompt is continued n times; the choices of a prompt share its prefix.

    Choice i continues prompts[i // n]. `salt` keeps tenants' cached prefixes apart.
    """

    request_id: str
    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    adapter: AdapterRef | None = None
    salt: str = ""
    terms: Terms = field(default_factory=Terms)

    def __post_init__(self) -> None:
        _require(self.n >= 1, "n", self.n, "an integer ≥ 1")
        _require(len(self.prompts) >= 1, "prompt", self.prompts, "at least one prompt")
        _require(all(self.prompts), "prompt", "[]", "prompts of at least one token")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the model thought of one step: the drawn token's log probability, and the likeliest.

    top: (token id, log probability), the likeliest first. Of the model's own distribution, before
    temperature, penalties, biases, bans and grammar.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Course:
    """What a choice went through so far; seconds.

    queued_s: from submit to its first step, of which load_s its adapter was on its way; prefill_s:
    from there to its first token; decode_s: from there until now. cached_tokens: of its prompt,
    found computed. preemptions: how often it had to begin anew. steps: it took part in.
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

    logprobs: one for each of token_ids, where they were asked for. course: on the first and the
    last of a choice.
    """

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    course: Course | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Failed:
    """The whole request ended with an error; nothing more follows."""

    request_id: str
    error: EngineError


Output = Tokens | Failed


def _require(holds: bool, param: str, value: object, want: str) -> None:
    if not holds:
        raise InvalidRequest(f"{param}={value!r}: want {want}", param=param)
