"""Text to tokens: chat templates and plain prompts."""

from pathlib import Path

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from lorikeet.api.messages import Call, Endpoint
from lorikeet.errors import InvalidInput


class PromptEncoder:
    """The base model's tokenizer, applied as its chat template says."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(str(model), trust_remote_code=False)
        self.backend: Tokenizer = self._tokenizer.backend_tokenizer

    def encode(self, call: Call) -> tuple[tuple[int, ...], ...]:
        """Token ids of every prompt of a call. Raises InvalidInput."""
        if call.endpoint is Endpoint.CHAT:
            return (self._encode_chat(call),)
        return tuple(
            prompt if isinstance(prompt, tuple) else tuple(self._tokenizer(prompt).input_ids)
            for prompt in call.prompts
        )

    def _encode_chat(self, call: Call) -> tuple[int, ...]:
        if self._tokenizer.chat_template is None:
            raise InvalidInput(
                "this base model has no chat template: use /v1/completions", param="messages"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in call.messages],
                add_generation_prompt=True,
                tokenize=False,
            )
        except TemplateError as error:
            raise InvalidInput(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        return tuple(self._tokenizer(text, add_special_tokens=False).input_ids)
