"""The responses of tenants' routes, as types: the OpenAPI document is made of them.

The bytes are formed in answer_stream/openai_format.py and logprobs.py, models.py and
lorikeet/errors.py.
"""

from typing import Literal, NotRequired

from typing_extensions import TypedDict


class PromptTokensDetails(TypedDict):
    """cached_tokens: of the prompts, found computed."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """reasoning_tokens: of the output, thought before the answers, with the closing tag."""

    reasoning_tokens: int


class Usage(TypedDict):
    """Each prompt counted once, the output of all choices summed. A chat tells details of both."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class TopLogprob(TypedDict):
    """A token and its log probability. bytes: null for a special token."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of an answer, with the most likely ones of its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Log probabilities of the content's tokens."""

    content: list[TokenLogprob]
    refusal: None


class CompletionLogprobs(TypedDict):
    """Log probabilities of the text's tokens. text_offset: the character at which each begins.

    null for the first token of a prompt that is echoed.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptTokenLogprob(TypedDict):
    """A token in a place of a prompt. rank: 1 for the likeliest; null beyond those asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptTokens = list[dict[str, PromptTokenLogprob] | None]
"""Each token of a prompt and the most likely ones in its place, by id; null for the first.
"""


class CalledFunction(TypedDict):
    """arguments: the JSON text of an object."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(TypedDict):
    """The model's message. content is null where it only calls tools.

    reasoning_content: what it thought before, where it did.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]
    function_call: NotRequired[CalledFunction]


class AnsweringAdapter(TypedDict):
    """Which weights answered; absent for a base model. digest: of the adapter's blob, SHA-256.

    version: None for a pushed one until it is durable.
    """

    name: str
    version: int | None
    digest: str


class ChatChoice(TypedDict):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    token_ids: NotRequired[list[int]]
    finish_reason: Literal["stop", "length", "tool_calls", "function_call"]


class ChatCompletion(TypedDict):
    """The answer of a chat without `stream`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    service_tier: Literal["default"]
    choices: list[ChatChoice]
    prompt_logprobs: NotRequired[PromptTokens]
    prompt_token_ids: NotRequired[list[int]]
    adapter: NotRequired[AnsweringAdapter]
    usage: Usage


class FunctionDelta(TypedDict):
    """More of a call; its first delta has the name."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """More of the call with this index; its first delta has id and type."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class Delta(TypedDict):
    """What is new of a message; its first one has the role."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    refusal: NotRequired[None]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]
    function_call: NotRequired[FunctionDelta]


class ChunkChoice(TypedDict):
    """What is new of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    token_ids: NotRequired[list[int]]
    finish_reason: Literal["stop", "length", "tool_calls", "function_call"] | None


class ChatCompletionChunk(TypedDict):
    """An event of a chat with `stream`. With include_usage the last one has usage and no choice."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    service_tier: Literal["default"]
    choices: list[ChunkChoice]
    prompt_token_ids: NotRequired[list[int]]
    adapter: NotRequired[AnsweringAdapter]
    usage: NotRequired[Usage | None]


class CompletionChoice(TypedDict):
    """One answer, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: NotRequired[PromptTokens]
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]
    finish_reason: Literal["stop", "length"] | None


class Completion(TypedDict):
    """The answer of a completion, or with `stream` an event of it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    adapter: NotRequired[AnsweringAdapter]
    usage: NotRequired[Usage | None]


class ModelCard(TypedDict):
    """A base model or a fine-tune. parent: the base model of a fine-tune."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    parent: str | None


class ModelList(TypedDict):
    """Every model that the key may ask for."""

    object: Literal["list"]
    data: list[ModelCard]


class ErrorDetails(TypedDict):
    """code: what went wrong; param: the field of the request that did."""

    message: str
    type: str
    param: str | None
    code: str


class Error(TypedDict):
    """Any answer that is no success; and, as a last event, how a stream failed."""

    error: ErrorDetails
