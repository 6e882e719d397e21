"""Adapters in repositories of the Hugging Face Hub, or of the server that HF_ENDPOINT names."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lorikeet.adapter_files import adapter_files
from lorikeet.cli.output import is_shown
from lorikeet.errors import InvalidInput, LorikeetError

PREFIX = "hf:"


@contextmanager
def reading_the_hub(where: str, *, quiet: bool) -> Iterator[None]:
    """Turn errors of the Hub's client within the block into LorikeetErrors that say what to do.

    where: what is read, for the errors.
    quiet: show no progress bars; otherwise they are shown if stderr is a terminal.
    """
    try:
        from huggingface_hub.utils.tqdm import disable_progress_bars

        if quiet or not is_shown(sys.stderr):
            disable_progress_bars()
        yield
    except LorikeetError:
        raise
    except ImportError as error:
        raise LorikeetError(
            "reading from the Hugging Face Hub needs huggingface_hub: pip install huggingface_hub"
        ) from error
    except Exception as error:  # huggingface_hub passes on undocumented errors of HTTP libraries
        raise _explained(error, where) from error


def fetch(repository: str, revision: str | None = None, *, quiet: bool = False) -> Path:
    """Download only the adapter's files to the Hub's cache; return their folder.

    repository: organisation/name.
    revision: a branch, tag or commit; None: the default branch.
    quiet: show no progress bars.

    Raises LorikeetError if the Hub cannot be read, or the repository holds no adapter.
    """
    where = f"{PREFIX}{repository}" + (f" at {revision}" if revision else "")
    with reading_the_hub(where, quiet=quiet):
        from huggingface_hub import HfApi, snapshot_download

        info = HfApi().model_info(repository, revision=revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}

        def fetched(*names: str) -> Path:
            # By commit: the files that were checked are the files that are downloaded.
            return Path(
                snapshot_download(repository, revision=info.sha, allow_patterns=list(names))
            )

        return fetched(
            *adapter_files(where, sizes, lambda name: (fetched(name) / name).read_bytes())
        )


def _explained(error: Exception, where: str) -> LorikeetError:
    """Turn an error of the Hub's client into one that says what to do.

    where: source as the admin gave it, for the message.
    """
    from huggingface_hub import errors as hub

    if isinstance(error, hub.GatedRepoError):
        return LorikeetError(
            f"{where} is gated: ask for access on its page, and log in with `hf auth login`"
        )
    if isinstance(error, hub.RevisionNotFoundError):
        return InvalidInput(f"{where}: there is no such revision", param="revision")
    if isinstance(error, hub.RepositoryNotFoundError):
        return InvalidInput(
            f"{where}: there is no such repository, or it is private: check the name, or log in "
            "with `hf auth login`",
            param="source",
        )
    if isinstance(error, hub.HFValidationError):
        return InvalidInput(
            f"{where}: want {PREFIX}organisation/name, for instance {PREFIX}acme/support-lora",
            param="source",
        )
    reason = str(error).partition("\n")[0] or type(error).__name__
    return LorikeetError(
        f"{where} could not be read: {reason}. If this machine cannot reach the Hub, download it "
        "on one that can, and give the folder"
    )
