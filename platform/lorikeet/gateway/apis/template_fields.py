"""Fields of a chat that its base model's chat template reads, and those that change no answer."""

import json
import re
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from lorikeet.gateway.body import Body, misfit, unsupported

MAX_TEMPLATE_ARGS = 32
MAX_TEMPLATE_ARGS_LENGTH = 4096
"""Characters of their JSON text: replicas render short prompts beside their streams."""

_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]{0,63}")
_TAKEN = {
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("conversation", "chat_template", "tokenize", "padding", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    "sanitize_control_tokens",
    "self",
}
"""Names that say something else to transformers' apply_chat_template."""


def _parse_template_args(value: object) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > MAX_TEMPLATE_ARGS:
        raise ValueError(f"want an object of at most {MAX_TEMPLATE_ARGS} variables")
    if taken := sorted(_TAKEN.intersection(value)):
        raise unsupported(hint=f" with {taken[0]}")
    if not all(map(_NAME.fullmatch, value)):
        raise ValueError("want names of at most 64 letters, digits and _")
    if len(json.dumps(value, ensure_ascii=False)) > MAX_TEMPLATE_ARGS_LENGTH:
        raise ValueError(f"want at most {MAX_TEMPLATE_ARGS_LENGTH} characters of JSON")
    return value


TemplateArgs = Annotated[
    dict[str, Any],
    PlainValidator(_parse_template_args, json_schema_input_type=dict[str, Any]),
]


class TemplateFields(Body):
    """Fields for the chat template."""

    chat_template_kwargs: TemplateArgs = Field(default={})
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    verbosity: Literal["low", "medium", "high"] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    def check_continuation(self, last_role: str) -> None:
        """Check that the last message can be continued, if that is asked for. Raises a misfit."""
        if not self.continue_final_message:
            return
        if self.add_generation_prompt:
            raise misfit("continue_final_message", "want add_generation_prompt to be false with it")
        if last_role != "assistant":
            raise misfit("continue_final_message", "want the last message to be the assistant's")

    def generation_prompt(self) -> bool:
        """Return whether the template begins the assistant's message."""
        return self.add_generation_prompt is not False and not self.continue_final_message

    def template_args(self) -> dict[str, Any]:
        """Return further variables for the template; chat_template_kwargs win."""
        given = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        known = {name: value for name, value in given.items() if value is not None}
        return known | self.chat_template_kwargs


class IgnoredFields(Body):
    """Fields that are taken and change nothing; prefixes are cached by what they say."""

    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
