"""What a gateway sends to a replica, and what comes back.

What each request brings has no slots, here and where these messages get their parts: dataclasses
that have are pickled by Python's code, field by field, in half as long again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, NamedTuple, TypeVar

from lorikeet.protocol.status_update import StatusUpdate
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.request import EngineTimings, SamplingParams, SchedulingParams

R = TypeVar("R")


class Endpoint(Enum):
    """Which endpoint was called; it decides the form of the answer.

    COUNT_TOKENS asks no engine: its answer is the number of the prompt's tokens.
    """

    CHAT = "chat.completions"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    COUNT_TOKENS = "messages/count_tokens"


class FormatKind(Enum):
    """The language of a Format's text."""

    JSON_SCHEMA = "JSON schema"
    REGEX = "regular expression"
    CHOICES = "list of choices"


@dataclass(frozen=True, slots=True)
class Format:
    """What an answer must be.

    text: a JSON schema ({} is any object), a regular expression that matches all of the answer, or
    a JSON list of strings of which it is one. param: the field of the request that asks for it.
    """

    text: str
    kind: FormatKind = FormatKind.JSON_SCHEMA
    param: str = "response_format"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that a chat may call.

    tools: as the client wrote them, for the chat template. forced: names of those of which one
    must be called, or, with `parallel`, several may be; with none of them the model may also say
    something. parallel: more than one call is welcome. functions: they were sent as OpenAI's
    deprecated `functions`, whose answer has another form.
    """

    tools: tuple[Mapping[str, Any], ...]
    forced: tuple[str, ...] = ()
    parallel: bool = True
    functions: bool = False

    @property
    def strict(self) -> bool:
        """Whether calls of some of them must have arguments that its schema allows."""
        return any(tool["function"].get("strict") for tool in self.tools)


class Work(NamedTuple):
    """The work that a request is for a replica. rank and adapter_bytes: 0 for the base model.

    sequences: how many will decode for it, which share what of the prompts they can.
    """

    prompt_tokens: int
    rank: int = 0
    adapter_bytes: int = 0
    sequences: int = 1


@dataclass(frozen=True)
class Call:
    """One HTTP request, parsed: everything a replica needs to answer it.

    model: as the client wrote it, echoed in the answer. is_recorded: whether the adapter's version
    is in the catalog's log: else its number may yet be another's, and is not told. Either
    `messages` (chats of any API) or `prompts` (completions: texts or token ids) is set. max_tokens:
    None for as many as the context allows, 0 for none; it, min_tokens and the grammar are left at
    their defaults in `sampling`: the replica adds them. stop: strings that end a choice.
    continuous_usage: each event of a stream says what its choice has taken until then. format,
    tools: None asks for neither. echo: each text begins with its prompt. prompt_logprobs: how many
    the field of that name has, vLLM's; `sampling` has the most that it or an echo needs.
    return_token_ids: the prompt's and the answer's are told. template_args: further variables for
    the chat template, and template_defaults those that nobody asked for. thinking_shown: what the
    model thinks is told. generation_prompt: the template begins the assistant's message.
    continue_final: the answer goes on with the last message. request_fields: JSON members that a
    response repeats of its request. left_out: what was asked for and is not served, which the
    answer's header names. scheduling: for the engine. max_context: what a prompt and an answer to
    it may have together, beside the model's own limit. work: for the router, and to tell short
    prompts from long ones; what they take is an estimate. created: Unix time, seconds.
    """

    request_id: str
    endpoint: Endpoint
    created: int
    tenant: str
    model: str
    adapter: AdapterRef | None
    is_recorded: bool = True
    messages: tuple[Mapping[str, Any], ...] = ()
    prompts: tuple[str | tuple[int, ...], ...] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    format: Format | None = None
    tools: ToolUse | None = None
    echo: bool = False
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    template_args: Mapping[str, Any] = field(default_factory=dict)
    template_defaults: Mapping[str, Any] = field(default_factory=dict)
    thinking_shown: bool = True
    generation_prompt: bool = True
    continue_final: bool = False
    request_fields: bytes = b""
    left_out: tuple[str, ...] = ()
    scheduling: SchedulingParams = field(default_factory=SchedulingParams)
    max_context: int | None = None
    work: Work = field(default_factory=lambda: Work(prompt_tokens=1))


@dataclass(frozen=True)
class AnswerHeader:
    """Where an answer runs, and where its adapter was found. An answer has two of them.

    The first is the answer's first item: the replica has taken the call, and status is its own as
    it did. The second comes with the first token, before the first bytes: load_s is how long the
    adapter took to load, 0.0 if it was on the GPU. Only the first has no load_s. ignored: names of
    template_args that the chat template does not read, and what the call leaves out.
    """

    replica: str
    digest: str | None
    residency: Residency | None
    status: StatusUpdate | None = None
    load_s: float | None = None
    ignored: tuple[str, ...] = ()

    @property
    def is_first(self) -> bool:
        """Whether the replica has just taken the call; if not, the first token is there."""
        return self.load_s is None


@dataclass(frozen=True)
class FinalUsage:
    """What an answer took that was made to its end.

    It comes just before the last bytes: clients go away once they have those. Each prompt is
    counted once, the output of all choices is summed; cached_tokens are those of the prompts that
    were found computed. timings: of each choice. reasoning_tokens: of the output, thought before
    the answers.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    timings: tuple[EngineTimings, ...] = ()
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RunningUsage:
    """The tokens that all choices of an answer have until now.

    One comes for every few dozen of them, whether or not any bytes do: of an answer that is never
    whole its limits know by it what was made.
    """

    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """The request failed before its first byte; `code` is a LorikeetError's.

    own_disk: the replica could not store the adapter, which another may.
    """

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    own_disk: bool = False


class Cost(NamedTuple):
    """What a request is expected to cost at a replica, part by part, seconds.

    prefill_s: of its own prompt. queue_s: the prompts before it, and a place in the batch. load_s:
    of its adapter from its tier; it overlaps with the queue. others_s: what other requests lose by
    it. copy_s: what it is worth not to make one more copy of the adapter, and of what goes for it.
    """

    prefill_s: float
    queue_s: float
    load_s: float
    others_s: float
    copy_s: float

    @property
    def total_s(self) -> float:
        """The total by which replicas are compared."""
        return self.prefill_s + self.others_s + max(self.queue_s, self.load_s) + self.copy_s


class Candidate(NamedTuple, Generic[R]):
    """A replica that was considered, where it had the adapter, and what was expected of it."""

    replica: R
    tier: Residency
    cost: Cost


@dataclass(frozen=True, slots=True)
class Attempt:
    """What the gateway adds to an answer when a replica has taken the call, or failed it.

    request_id: the call's; where another replica repeats it, with the attempt's number behind.
    replica: None where none took it. waited_s: until then. candidates: the replicas that the router
    considered, the best first. failure: why it ended without an answer; None as long as it has not.
    """

    request_id: str
    replica: str | None
    waited_s: float
    candidates: tuple[Candidate[str], ...] = ()
    failure: str | None = None


StreamItem = AnswerHeader | Refusal | RunningUsage | FinalUsage | Attempt | bytes
"""bytes: final SSE events when `stream` is set, else one JSON body."""


@dataclass(frozen=True, slots=True)
class SmokeTest:
    """One batch of a replica: every prompt with the adapter and with the base model alone.

    prompts: what a user says. Greedy, up to max_tokens each.
    """

    request_id: str
    adapter: AdapterRef
    prompts: tuple[str, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a model made of a prompt."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class SmokeResult:
    """A continuation of each prompt, in order. residency: where the adapter was before."""

    replica: str
    residency: Residency | None
    base: tuple[Continuation, ...]
    adapted: tuple[Continuation, ...]
