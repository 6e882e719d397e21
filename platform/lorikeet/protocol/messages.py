"""Messages of one request: the call, as a gateway parses it and as a replica gets it, and the items
of its answer.

Classes that are sent once per request, and the classes of their fields, have no slots: Python
pickles slotted dataclasses field by field in Python code, which takes 1.5 times as long.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from lorikeet.protocol.status_update import StatusUpdate
from lorikeet.request_defaults import RequestDefaults, TokenizerChanges
from lorikeet_engine.adapter import Adapter, AdapterRef, Embedder, Head, Residency
from lorikeet_engine.errors import LoadFault
from lorikeet_engine.request import EngineTimings, SamplingParams, SchedulingParams

R = TypeVar("R")

TokenIds: TypeAlias = "array[int]"
"""Token ids of a prompt, in four bytes each."""


class Endpoint(Enum):
    """Called endpoint, which decides the shape of the answer.

    COUNT_TOKENS and INPUT_TOKENS use no replica: the answer is the number of the prompt's tokens.
    CLASSIFY, SCORE and POOLING answer with the values of a head for each prompt, RERANK with the
    documents by falling score, EMBEDDINGS with a vector for each prompt.
    """

    CHAT = "chat.completions"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    COUNT_TOKENS = "messages/count_tokens"
    INPUT_TOKENS = "responses/input_tokens"
    CLASSIFY = "classify"
    SCORE = "score"
    POOLING = "pooling"
    RERANK = "rerank"
    EMBEDDINGS = "embeddings"

    @property
    def counts(self) -> bool:
        """Whether the answer is only the number of the prompt's tokens."""
        return self in (Endpoint.COUNT_TOKENS, Endpoint.INPUT_TOKENS)

    @property
    def pools(self) -> bool:
        """Whether prompts are pooled and no answer is generated."""
        return self in _POOLING

    @property
    def writes_messages(self) -> bool:
        """Whether answers are messages of an assistant, and not mere texts or numbers."""
        return self is not Endpoint.COMPLETIONS and not self.pools


_POOLING = (
    *(Endpoint.CLASSIFY, Endpoint.SCORE, Endpoint.POOLING, Endpoint.RERANK),
    Endpoint.EMBEDDINGS,
)


class Ranking(NamedTuple):
    """Documents that an answer puts in the order of their scores.

    documents: the documents, as the client sent them; (): the answer leaves them out.
    top_n: number of documents in the answer; None: all.
    """

    documents: tuple[str, ...]
    top_n: int | None


class Thinking(Enum):
    """State of the thinking at the end of a prompt.

    NEVER: the answer begins at once.
    POSSIBLE: the model may begin to think.
    BEGUN: the prompt has the opening tag of thinking.
    """

    NEVER = "never"
    POSSIBLE = "possible"
    BEGUN = "begun"


class FormatKind(Enum):
    """Language in which a required answer format is written."""

    JSON_SCHEMA = "JSON schema"
    REGEX = "regular expression"
    CHOICES = "list of choices"


@dataclass(frozen=True, slots=True)
class Format:
    """Required format of an answer.

    text: a JSON schema ({} allows any object), a regular expression for the whole answer, or a JSON
        list of allowed answers.
    kind: language of `text`.
    param: field of the request that holds the format.
    strict: False: the grammar leaves out keywords of the schema that it cannot enforce, and the
        finished answer is checked against the schema.
    """

    text: str
    kind: FormatKind = FormatKind.JSON_SCHEMA
    param: str = "response_format"
    strict: bool = True


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that a chat may call.

    tools: as the client wrote them, for the chat template.
    forced: names of tools; the model must call one of them, or at least one with `parallel`. Empty
        if the model may also answer with text.
    parallel: several calls in one answer are allowed.
    functions: the tools were sent as OpenAI's deprecated `functions`, for which tool calls have
        another shape in the answer.
    """

    tools: tuple[Mapping[str, Any], ...]
    forced: tuple[str, ...] = ()
    parallel: bool = True
    functions: bool = False

    @property
    def strict(self) -> bool:
        """Whether any tool is strict: arguments of its calls must match its schema."""
        return any(tool["function"].get("strict") for tool in self.tools)

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of the arguments of each tool; None for a tool without arguments."""
        functions = (tool["function"] for tool in self.tools)
        return {function["name"]: function.get("parameters") for function in functions}


class Work(NamedTuple):
    """Amount of work that a request makes for a replica.

    prompt_tokens: number of tokens of all prompts, and of the answer so far that the replica is to
        go on with.
    rank, adapter_bytes: rank of the adapter and its bytes on a GPU; 0 for the base model.
    sequences: number of sequences that will decode; sequences of one prompt share the prompt's KV
        pages.
    """

    prompt_tokens: int
    rank: int = 0
    adapter_bytes: int = 0
    sequences: int = 1


class AnswerMarks(NamedTuple):
    """Marks of tool calls and of thinking in answers with an adapter's own chat template, which may
    differ from the base model's.

    syntax: name of the syntax of tool calls (text/tools/syntax.py); None if it has no known
        one.
    tags: tags of thinking, the fields of ThinkTags (text/reasoning.py).
    """

    syntax: str | None
    tags: tuple[str, ...]


@dataclass(frozen=True)
class Call:
    """One parsed HTTP request.

    created: Unix time, in seconds, that the answer shows.
    model: name of the model as the client wrote it; the answer repeats the name.
    adapter: None for the base model.
    adapter_rank, adapter_bytes: rank of the adapter and its bytes on a GPU, sums over a
        composition; 0 for the base model.
    is_recorded: the adapter's version is in the catalog's log. Another version may still get the
        number of an unrecorded version, so answers omit it.
    messages: messages of a chat, in any API; empty where there are `prompts`.
    prompts: prompts of completions, or to pool, as texts or token ids; empty for chats.
    max_tokens: None for as many as the context allows, 0 for none.
    min_tokens: tokens before which no choice may end.
    sampling: parameters for the engine without max_tokens, min_tokens and grammar, which the
        replica sets.
    stop: strings that end a choice.
    n: number of choices for each prompt.
    stream: the answer is server-sent events.
    include_usage: a stream ends with its usage.
    continuous_usage: each event of a stream has the usage of its choice so far.
    format: required format of the answer.
    tools: tools that the model may call.
    echo: each choice's text begins with its prompt.
    prompt_logprobs: number of alternatives that vLLM's field of this name asks for; `sampling` has
        the larger of this number and the number for an echo.
    return_token_ids: the answer has token ids of prompts and choices.
    tokens_as_ids: log probabilities name each token by its id, as "token_id:17".
    template_args: the client's variables for the chat template.
    template_defaults: values of variables of the chat template that `template_args` does not set.
    thinking_shown: the answer includes the model's thinking.
    generation_prompt: the template opens the assistant's message.
    continue_final: the answer continues the last message.
    request_fields: JSON members of the request that a response (Responses API) repeats.
    left_out: requested features that are not served; the answer's header names them.
    scheduling: parameters for the engine's scheduler.
    max_context: limit on the tokens of prompt and answer together, beside the model's own limit.
    defaults: the adapter's own request defaults, for the prompt; None: the base model's.
    own_stop: the adapter's own strings that end a choice as its end-of-sequence tokens do.
    head: head of the adapter, or else of the base model; None without one.
    embedder: way in which prompts are embedded; None if they are not.
    dimensions: number of first values to which embeddings are cut; None for all.
    raw_scores: where prompts are pooled, the answer has the head's own values, not probabilities,
        and embeddings keep their lengths.
    base64: numbers in the answer are float32 in base64.
    ranking: documents to rank by the values of their prompts; None: the answer ranks nothing.
    prompt_field: request field to blame for prompts to pool; None: the endpoint's usual field.
    """

    request_id: str
    endpoint: Endpoint
    created: int
    tenant: str
    model: str
    adapter: Adapter | None
    adapter_rank: int = 0
    adapter_bytes: int = 0
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
    tokens_as_ids: bool = False
    template_args: Mapping[str, Any] = field(default_factory=dict)
    template_defaults: Mapping[str, Any] = field(default_factory=dict)
    thinking_shown: bool = True
    generation_prompt: bool = True
    continue_final: bool = False
    request_fields: bytes = b""
    left_out: tuple[str, ...] = ()
    scheduling: SchedulingParams = field(default_factory=SchedulingParams)
    max_context: int | None = None
    defaults: RequestDefaults | None = None
    own_stop: tuple[str, ...] = ()
    head: Head | None = None
    embedder: Embedder | None = None
    dimensions: int | None = None
    raw_scores: bool = False
    base64: bool = False
    ranking: Ranking | None = None
    prompt_field: str | None = None

    @property
    def service_tier(self) -> str:
        """Tier at which the call is served, in OpenAI's terms."""
        return "flex" if self.scheduling.background else "default"


@dataclass(frozen=True)
class EncodedCall:
    """Call whose prompts are token ids, with all that a replica needs to answer it.

    call: the call; in a replica, without the texts of its prompts.
    prompts: token ids of each prompt.
    thinking: state of the model's thinking at the end of the prompt.
    echoed: text of each prompt, with which the answer begins; () without `echo`.
    ignored: names of template_args unknown to the chat template, and the call's `left_out`.
    marks: marks of tool calls and thinking in the answer, if the adapter has its own chat template
        or tokenizer; None: the base model's.
    tokenizer: differences of the adapter's tokenizer from the base model's; None: no difference.
    attempt: number of replicas that were sent the call before.
    lost: replicas that were lost with the call; it is sent to one of them again only if there is no
        other.
    log: what the lost replicas have generated (protocol/response_stream.py), after which the answer
        goes on; b"" for a new answer.
    made_tokens: number of tokens in `log`.
    """

    call: Call
    prompts: tuple[TokenIds, ...]
    thinking: Thinking = Thinking.NEVER
    echoed: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    marks: AnswerMarks | None = None
    tokenizer: TokenizerChanges | None = None
    attempt: int = 0
    lost: tuple[str, ...] = ()
    log: bytes = b""
    made_tokens: int = 0

    @property
    def attempt_id(self) -> str:
        """Id of the attempt: the call's id, from the second attempt on with a number.

        Each attempt has its own, since a lost replica may still be running an earlier one.
        """
        return self.call.request_id + (f"-{self.attempt}" if self.attempt else "")

    @property
    def work(self) -> Work:
        """Amount of work that the call makes for a replica."""
        call, tokens = self.call, sum(map(len, self.prompts)) + self.made_tokens
        sequences = len(self.prompts) * call.n
        return Work(tokens, call.adapter_rank, call.adapter_bytes, sequences)

    def to_send(self) -> "EncodedCall":
        """Return the call without the texts that its prompts were made from."""
        call = replace(
            self.call,
            messages=(),
            prompts=(),
            template_args={},
            template_defaults={},
            defaults=None,
        )
        return replace(self, call=call)


@dataclass(frozen=True)
class AnswerHeader:
    """Header of an answer: its replica and its adapter's tier. An answer has two headers.

    The first header is the answer's first item and shows that the replica has taken the call. The
    second header comes with the first token, before the first bytes.

    digest: SHA-256 of the adapter's blob, or a composition's key of digests and weights; None for
        the base model.
    residency: tier at which the adapter was found.
    status: the replica's status when it took the call; only in the first header.
    load_s: seconds that the adapter's load took, 0.0 if it was on the GPU; only in the second
        header.
    ignored: what has no effect: variables unknown to the chat template, the call's `left_out`, and
        keywords of its schemas that the grammar does not enforce.
    """

    replica: str
    digest: str | None
    residency: Residency | None
    status: StatusUpdate | None = None
    load_s: float | None = None
    ignored: tuple[str, ...] = ()

    @property
    def is_first(self) -> bool:
        """Whether this is the first of the answer's two headers, sent before any token."""
        return self.load_s is None


@dataclass(frozen=True)
class FinalUsage:
    """Usage of a complete answer, sent just before the last bytes.

    prompt_tokens: number of prompt tokens, each prompt counted once whatever the number of choices.
    cached_tokens: prompt tokens found in the prefix cache.
    completion_tokens: tokens of all choices.
    timings: engine times of each choice.
    reasoning_tokens: completion tokens of thinking.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    timings: tuple[EngineTimings, ...] = ()
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RunningUsage:
    """Usage of an answer so far.

    The item is sent when a prompt has reached its first token and then every few tokens, even if
    the answer has no new bytes. Rate limits and usage count the last RunningUsage of an answer that
    never completes.

    completion_tokens: tokens of all choices.
    prompt_tokens: tokens of the prompts that have reached their first token.
    cached_tokens: those of them found in the prefix cache.
    """

    completion_tokens: int
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Error that a replica sends instead of the remaining items of an answer.

    code: code of a LorikeetError.
    param: field of the request at fault.
    retry_after_s: seconds after which a retry may succeed.
    fault: what is at fault (the adapter's file, the disk or the store) if the replica could not
        load the adapter.
    """

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    fault: LoadFault = LoadFault.ADAPTER


class Cost(NamedTuple):
    """Parts of the expected cost of a request at a replica, in seconds.

    prefill_s: prefill of the request's own prompt.
    queue_s: wait for earlier prompts and for a slot in the batch.
    load_s: load of the request's adapter from its tier; overlaps with the queue.
    others_s: delay that the request causes to other requests.
    copy_s: penalty for another copy of the adapter, and for the adapters that the copy evicts.
    """

    prefill_s: float
    queue_s: float
    load_s: float
    others_s: float
    copy_s: float

    @property
    def total_s(self) -> float:
        """Sum of the expected costs in seconds, by which the router compares replicas."""
        return self.prefill_s + self.others_s + max(self.queue_s, self.load_s) + self.copy_s


class Candidate(NamedTuple, Generic[R]):
    """Replica that the router considered, the tier of the request's adapter on it, and the expected
    cost.
    """

    replica: R
    tier: Residency
    cost: Cost


@dataclass(frozen=True, slots=True)
class Attempt:
    """Item that the gateway adds to an answer when a replica has taken or failed the call.

    request_id: the attempt's id: the call's id, from the second attempt on with a number.
    replica: name of the replica that took or failed the call; None if no replica took it.
    waited_s: seconds until a replica took the call or, if none did, until the attempt failed.
    candidates: replicas that the router considered, the best first.
    failure: reason why the attempt ended without an answer; None if it has not.
    """

    request_id: str
    replica: str | None
    waited_s: float
    candidates: tuple[Candidate[str], ...] = ()
    failure: str | None = None


class ResumeReason(StrEnum):
    """Reason why another replica goes on with an answer.

    REPLICA_LOST: the replica's process died or cannot be reached, or its stream to the gateway
        ended before the answer.
    ENGINE_CLOSED: the replica itself gave the answer up, since its engine is closed or hangs.
    SILENT: the replica sends no status.
    DRAINED: the replica is being stopped, and others serve the base model.
    """

    REPLICA_LOST = "replica_lost"
    ENGINE_CLOSED = "engine_closed"
    SILENT = "silent"
    DRAINED = "drained"


@dataclass(frozen=True, slots=True)
class Resumed:
    """Item that the gateway adds to an answer before another replica goes on with it."""

    reason: ResumeReason


StreamItem = AnswerHeader | Refusal | RunningUsage | FinalUsage | Attempt | Resumed | bytes
"""Item of an answer. Bytes are complete SSE events with `stream`, else one JSON body."""


@dataclass(frozen=True, slots=True)
class SmokeTest:
    """Request to run each prompt with an adapter and with the base model, by greedy sampling.

    prompts: token ids of each prompt.
    max_tokens: limit of each continuation.
    tokenizer: differences of the adapter's tokenizer from the base model's; None: no difference.
    """

    request_id: str
    adapter: AdapterRef
    prompts: tuple[TokenIds, ...]
    max_tokens: int
    tokenizer: TokenizerChanges | None = None


@dataclass(frozen=True, slots=True)
class Continuation:
    """Output of a model for one prompt of a smoke test."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class SmokeResult:
    """Result of a smoke test: the continuations of each prompt, in order.

    residency: the adapter's tier before the test.
    base: continuations by the base model alone.
    adapted: continuations with the adapter.
    """

    replica: str
    residency: Residency | None
    base: tuple[Continuation, ...]
    adapted: tuple[Continuation, ...]
