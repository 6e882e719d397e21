"""The answers of /v1/responses, as types: the OpenAPI document is made of them.

The bytes are formed in answer_stream/responses_format.py.
"""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from lorikeet.gateway.apis.response_types import ErrorDetails

_Status = Literal["in_progress", "completed", "incomplete", "failed"]
_ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ResponseTopLogprob(TypedDict):
    """A token and its log probability. bytes: none for a special token."""

    token: str
    logprob: float
    bytes: list[int]


class ResponseTokenLogprob(ResponseTopLogprob):
    """A token of a text, with the most likely ones of its place."""

    top_logprobs: list[ResponseTopLogprob]


class OutputText(TypedDict):
    """The part of a message."""

    type: Literal["output_text"]
    annotations: list[Any]
    logprobs: list[ResponseTokenLogprob]
    text: str


class OutputMessage(TypedDict):
    """What the model says."""

    id: str
    type: Literal["message"]
    status: _ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(TypedDict):
    """The part of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(TypedDict):
    """What the model thought before it answered; nothing sums it up."""

    id: str
    type: Literal["reasoning"]
    status: _ItemStatus
    summary: list[Any]
    content: list[ReasoningText]


class OutputFunctionCall(TypedDict):
    """A call of a function. arguments: the JSON text of an object. namespace: the function's."""

    id: str
    type: Literal["function_call"]
    status: _ItemStatus
    call_id: str
    name: str
    namespace: NotRequired[str]
    arguments: str


class InputTokensDetails(TypedDict):
    """cached_tokens: of the prompt, found computed."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    """reasoning_tokens: thought before the answer, with the closing tag."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """What a response took."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(TypedDict):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseObject(TypedDict):
    """A response; what is from `background` on repeats the request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: _Status
    incomplete_details: IncompleteDetails | None
    model: str
    usage: ResponseUsage | None
    error: ErrorDetails | None
    output: list[OutputReasoning | OutputMessage | OutputFunctionCall]
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, str]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None


class DeletedResponse(TypedDict):
    """A stored response that is gone."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItemList(TypedDict):
    """A page of the conversation that a stored response answers."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseStreamEvent(TypedDict):
    """An event of a response with `stream`; `type` says which fields it has beside its number."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    response: NotRequired[ResponseObject]
    output_index: NotRequired[int]
    content_index: NotRequired[int]
    item_id: NotRequired[str]
    item: NotRequired[OutputReasoning | OutputMessage | OutputFunctionCall]
    part: NotRequired[OutputText | ReasoningText]
    delta: NotRequired[str]
    text: NotRequired[str]
    arguments: NotRequired[str]
    logprobs: NotRequired[list[ResponseTokenLogprob]]
