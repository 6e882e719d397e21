"""Base models given to `lorikeet serve`: folders, or repositories of the Hugging Face Hub."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from lorikeet.cli.adapters.sources.hub import reading_the_hub
from lorikeet.errors import InvalidInput
from lorikeet.interrupts import killed_by_sigint
from lorikeet_engine.adapter_format import last_part

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Files of a repository's top folder alone; Mistral's consolidated files hold the weights again.
_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
_LEFT_OUT = ("*/*", "consolidated*")


def name_base_models(given: Iterable[str]) -> dict[str, str]:
    """Give each base model a name: its folder's or repository's, or NAME for NAME=FOLDER.

    Returns folders and repositories by name. Raises InvalidInput for a folder that does not exist,
    or a name that is given twice.
    """
    found: dict[str, str] = {}
    for text in given:
        name, source = _named(text)
        if name in found:
            raise InvalidInput(
                f"two base models are named {name!r}: name one of them, as in other={source}"
            )
        _check(source)
        found[name] = source
    return found


def fetch_base_models(named: Mapping[str, str], *, quiet: bool) -> dict[str, str]:
    """Download the repositories among base models; return all folders by name.

    named: folders and repositories by name.
    quiet: show no progress bars.

    Raises LorikeetError if a repository cannot be read.
    """
    return {
        name: source if Path(source).exists() else _download(source, quiet=quiet)
        for name, source in named.items()
    }


def as_setting(named: Mapping[str, str]) -> str:
    """Return the value of LORIKEET_BASE_MODELS for these base models.

    named: folders by name.
    """
    return ",".join(f"{name}={source}" for name, source in named.items())


def _named(text: str) -> tuple[str, str]:
    name, marker, source = text.partition("=")
    if not marker or "/" in name:
        name, source = "", text
    there = Path(source)
    if not name:
        name = last_part(str(there.resolve() if there.exists() else source))
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-") or "model"
    return name, source


def _check(source: str) -> None:
    folder = Path(source)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").exists():
        raise InvalidInput(f"{source} is an adapter: give its base model, and --adapters {source}")
    if folder.is_dir():
        return
    if folder.exists():
        raise InvalidInput(f"{source} is no folder: give the folder of a base model")
    if not _REPOSITORY.fullmatch(source):
        raise InvalidInput(
            f"there is no folder {source}: give the folder of a base model, or a repository of the "
            "Hugging Face Hub, such as Qwen/Qwen3-0.6B"
        )


def _download(repository: str, *, quiet: bool) -> str:
    where = f"{repository} (there is no such folder, so it is looked up on the Hugging Face Hub)"
    with reading_the_hub(where, quiet=quiet), killed_by_sigint():  # threads would end their files
        from huggingface_hub import snapshot_download

        return str(
            snapshot_download(
                repository, allow_patterns=list(_FILES), ignore_patterns=list(_LEFT_OUT)
            )
        )
