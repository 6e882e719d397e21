"""Options of `lorikeet serve` that are settings: one for each field of Settings."""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from lorikeet.settings import PREFIX, Settings

T = TypeVar("T")

MODELS = "base_models"
"""Setting that is the command's argument."""
_COMMON = (
    "catalog",
    "replicas",
    "tensor_parallel",
    "weight_dtype",
    "max_context",
    "device",
    "adapter_host_memory",
    "admin_address",
)
_SHORT = {"weight_dtype": "--weights"}
_MEANINGS = {
    "catalog": "catalog of adapters, tenants and keys, made if missing: a folder, or "
    "s3://bucket/prefix",
    "weight_dtype": "storage of the linears' weights: fp8, 4bit (as in the checkpoint), nf4 or "
    "auto",
}
"""Meanings of settings in the command's help, where docs/settings.md needs the rest of theirs."""
_FURTHER = "Further settings, described in docs/settings.md"


def takes_settings(command: Callable[..., T]) -> Callable[..., T]:
    """Decorate a command with an option for each setting.

    The command receives the given settings as `settings`: texts by the names of their variables.
    """

    @functools.wraps(command)
    def run(**given: Any) -> T:
        names = [name for name in Settings.model_fields if name != MODELS]
        values = {name: text for name in names if (text := given.pop(name)) is not None}
        if "weight_dtype" in values:
            values["weight_dtype"] = re.sub(r"\b4bit\b", "packed", values["weight_dtype"])
        settings = {f"{PREFIX}{name.upper()}": text for name, text in values.items()}
        return command(**given, settings=settings)

    own = inspect.signature(command, eval_str=True)
    first = [each for name, each in own.parameters.items() if name != "settings"]
    rest = [name for name in Settings.model_fields if name not in (*_COMMON, MODELS)]
    parameters = [*first, *map(_parameter, (*_COMMON, *rest))]
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def flags(name: str) -> list[str]:
    """Return the command-line options of a setting, the short one first."""
    return [*filter(None, [_SHORT.get(name)]), f"--{name.replace('_', '-')}"]


def _parameter(name: str) -> inspect.Parameter:
    described = re.split(r"[;:] ", str(Settings.model_fields[name].description))[0]
    meaning = _MEANINGS.get(name, described)
    option = typer.Option(
        *flags(name),
        metavar="VALUE",
        help=f"{_capitalised(meaning)}.",
        show_default=False,
        rich_help_panel=None if name in _COMMON else _FURTHER,
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, option],
    )


def _capitalised(text: str) -> str:
    return text if "://" in text.split()[0] else text[0].upper() + text[1:]
