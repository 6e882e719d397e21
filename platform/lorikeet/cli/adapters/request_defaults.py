"""Options of `register` that set an adapter's own request defaults, and the files they name."""

import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from lorikeet.chat_template import bounded_text, read_template
from lorikeet.errors import InvalidInput
from lorikeet.request_defaults import MAX_SYSTEM_PROMPT_BYTES, MAX_TEMPLATE_BYTES
from lorikeet.tokenizer_vocabulary import read_tokenizer

_GENERATION_CONFIG = "generation_config.json"
_MAX_CONFIG_BYTES = 1 << 20
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

ChatTemplate = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Write its chats by this chat template, not by the base model's."
    ),
]
UseChatTemplate = Annotated[
    bool,
    typer.Option("--use-chat-template", help="Write its chats by the chat template in SOURCE."),
]
UseTokenizer = Annotated[
    bool,
    typer.Option(
        "--use-tokenizer",
        help="Write its prompts and read its answers by the tokenizer in SOURCE, which may add "
        "tokens to the base model's; its eos_token ends answers.",
    ),
]
SystemPrompt = Annotated[
    str | None,
    typer.Option(metavar="TEXT|@FILE", help="System message of chats that have none."),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="Text that ends its answers; can be repeated."),
]
GenerationConfig = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Take defaults of sampling, stop tokens and stop strings from this "
        "generation_config.json.",
    ),
]
UseGenerationConfig = Annotated[
    bool,
    typer.Option(
        "--use-generation-config", help="Take them from the generation_config.json in SOURCE."
    ),
]


class DefaultsOptions(NamedTuple):
    """Options of `lorikeet register` that set the request defaults of the version."""

    chat_template: Path | None = None
    use_chat_template: bool = False
    system_prompt: str | None = None
    stop: list[str] | None = None
    generation_config: Path | None = None
    use_generation_config: bool = False
    use_tokenizer: bool = False

    def check(self) -> None:
        """Raise BadParameter if two options exclude each other."""
        for name in ("chat-template", "generation-config"):
            given = name.replace("-", "_")
            if getattr(self, given) is not None and getattr(self, f"use_{given}"):
                raise typer.BadParameter(f"want either --{name} or --use-{name}")

    def read(self, folder: Path) -> dict[str, Any] | None:
        """Return the request defaults as `defaults` of a registration's JSON; None without any.

        folder: the adapter's folder.

        Raises InvalidInput for a file that is missing, too large or malformed.
        """
        wanted: dict[str, Any] = {}
        file = folder / _GENERATION_CONFIG if self.use_generation_config else self.generation_config
        if file is not None:
            wanted = _generation_defaults(file)
        if self.stop:
            wanted["stop"] = [*wanted.get("stop", []), *self.stop]
        if self.use_chat_template:
            wanted["chat_template"] = read_template(folder)
            if wanted["chat_template"] is None:
                raise InvalidInput("--use-chat-template: the source has no chat template")
        elif self.chat_template is not None:
            wanted["chat_template"] = _text(self.chat_template, MAX_TEMPLATE_BYTES)
        if self.system_prompt is not None:
            text, is_file = self.system_prompt, self.system_prompt.startswith("@")
            wanted["system_prompt"] = (
                _text(Path(text[1:]), MAX_SYSTEM_PROMPT_BYTES) if is_file else text
            )
        if self.use_tokenizer:
            wanted["tokenizer"] = read_tokenizer(folder)
        return wanted or None


def _generation_defaults(file: Path) -> dict[str, Any]:
    """Return the request defaults in a generation_config.json: sampling, stops and stop tokens."""
    try:
        config = json.loads(_text(file, _MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{file}: {error}") from None
    if not isinstance(config, dict):
        raise InvalidInput(f"{file}: want a JSON object")
    sampling = {name: config[name] for name in _SAMPLING if config.get(name) is not None}
    found: dict[str, Any] = {"sampling": sampling}
    for name, member in (("eos_token_id", "stop_token_ids"), ("stop_strings", "stop")):
        if (value := config.get(name)) is not None:
            found[member] = value if isinstance(value, list) else [value]
    return found


def _text(file: Path, max_bytes: int) -> str:
    try:
        return bounded_text(file, max_bytes)
    except OSError as error:
        raise InvalidInput(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise InvalidInput(str(error)) from None
