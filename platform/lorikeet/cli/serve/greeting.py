"""Text that `lorikeet serve` prints once the service is ready."""

import json
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

import typer

from lorikeet.cli.admin_client import DEFAULT_SERVER
from lorikeet.cli.serve.run import Planned

HOW_TO_STOP = "`lorikeet stop` in this folder stops the service, Ctrl-C one without --detach."


def ready_line(planned: Planned) -> str:
    """Return the line that says that the service is ready, with the addresses of both listeners."""
    return f"\nLorikeet is ready at {planned.url}, for administrators at {planned.admin_url}"


def curl(url: str, key: str, model: str, prompt: str, **options: int) -> str:
    """Return a shell command that asks a model.

    key: the tenant's key, or a shell's expression of it.
    options: further fields of the request.
    """
    message = {"role": "user", "content": prompt}
    body = json.dumps({"model": model, "messages": [message], **options})
    return (
        f'  curl {url}/v1/chat/completions -H "Authorization: Bearer {key}" \\\n'
        f"    -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    )


def for_administrators(planned: Planned, key_file: Path, lorikeet: str) -> Iterator[str]:
    """Yield the shell commands with which an administrator uses the service in another terminal.

    key_file: file with the admin's key.
    lorikeet: the command, as the shell finds it.
    """
    yield "\nAs an administrator, in another terminal:\n"
    if planned.admin_url != DEFAULT_SERVER:
        yield f"  export LORIKEET_SERVER={planned.admin_url}"
    yield f"  export LORIKEET_ADMIN_KEY=$(cat {shlex.quote(str(key_file))})"
    yield f"  {lorikeet} list"


def print_lines(lines: Iterable[str]) -> None:
    """Print lines as they are, not wrapped, so that a terminal's user can copy a command."""
    typer.echo("\n".join(lines))
