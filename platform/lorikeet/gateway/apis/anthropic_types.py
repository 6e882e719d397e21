"""The answers of /v1/messages, as types: the OpenAPI document is made of them.

The bytes are formed in answer_stream/anthropic_format.py, those of errors in lorikeet/dialects.py.
"""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict


class TextBlock(TypedDict):
    """What the model says."""

    type: Literal["text"]
    text: str


class ThinkingBlock(TypedDict):
    """What the model thought before. signature: says nothing here."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(TypedDict):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageTokensDetails(TypedDict):
    """thinking_tokens: thought before the answer, with the closing tag."""

    thinking_tokens: int


class MessageUsage(TypedDict):
    """What a message took. input_tokens: of the prompt, without those that were found computed."""

    input_tokens: int
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: MessageTokensDetails
    service_tier: NotRequired[Literal["standard"]]


_StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class MessageObject(TypedDict):
    """The answer of a message without `stream`, or as it begins. stop_reason: null at its begin."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ThinkingBlock | TextBlock | ToolUseBlock]
    stop_reason: _StopReason | None
    stop_sequence: str | None
    stop_details: None
    usage: MessageUsage


class MessageDelta(TypedDict):
    """What is new of a message: of a block (a tool's input is JSON text), or why it stopped."""

    type: NotRequired[
        Literal["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    ]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    text: NotRequired[str]
    partial_json: NotRequired[str]
    stop_reason: NotRequired[_StopReason]
    stop_sequence: NotRequired[str | None]
    stop_details: NotRequired[None]


class MessageStreamEvent(TypedDict):
    """An event of a message with `stream`; `type` says which fields it has."""

    type: Literal[
        "message_start",
        "content_block_start",
        "ping",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message: NotRequired[MessageObject]
    index: NotRequired[int]
    content_block: NotRequired[ThinkingBlock | TextBlock | ToolUseBlock]
    delta: NotRequired[MessageDelta]
    usage: NotRequired[MessageUsage]


class TokenCount(TypedDict):
    """How many tokens a message's prompt has."""

    input_tokens: int


class ModelInfo(TypedDict):
    """A base model or a fine-tune, as Anthropic's clients get it. created_at: RFC 3339."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]


class ModelInfoList(TypedDict):
    """Every model that the key may ask for, on one page."""

    data: list[ModelInfo]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None


class MessageErrorDetails(TypedDict):
    """error_code: what went wrong, as `code` in the errors of other routes."""

    error_code: str


class MessageErrorObject(TypedDict):
    """An error and its kind."""

    type: str
    message: str
    details: MessageErrorDetails


class MessageError(TypedDict):
    """Any answer that is no success; and, as a last event, how a stream failed."""

    type: Literal["error"]
    error: MessageErrorObject
    request_id: str | None
