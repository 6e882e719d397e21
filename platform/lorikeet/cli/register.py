"""Registering: an adapter, wherever it is, becomes one file and goes to the catalog."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from lorikeet.cli.adapters import Adapter
from lorikeet.cli.output import AsJson, print_json, print_line, size
from lorikeet.cli.server import admin
from lorikeet.cli.sources import check_source, open_source
from lorikeet.errors import InvalidInput
from lorikeet_engine.adapter_format import write_blob

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A PEFT adapter, as save_pretrained wrote it: its folder, a .tar or .tar.gz of it, "
        "s3://bucket/prefix (of LORIKEET_IMPORT_FROM), or hf:organisation/name on the Hugging "
        "Face Hub.",
        show_default=False,
    ),
]

_CHUNK_BYTES = 1 << 20


def register(
    ctx: typer.Context,
    source: Source,
    adapter: Adapter,
    promote: Annotated[
        bool, typer.Option("--promote", help="Point the alias prod at the new version.")
    ] = False,
    shared: Annotated[
        bool | None,
        typer.Option("--shared/--private", help="Whether every tenant may use it."),
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="The served base model it is for, if not the one it names.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="The branch, tag or commit of an hf: source.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Add an adapter, or a new version of one.

    The first version becomes prod at once, later ones with --promote. The same weights again are
    the same version.

    Example: `lorikeet register ./my-adapter acme/support --promote`
    """
    try:
        check_source(source, revision)
    except InvalidInput as error:
        raise typer.BadParameter(error.message) from error
    with tempfile.TemporaryDirectory(prefix="lorikeet-") as scratch:
        blob = Path(scratch) / "adapter.safetensors"
        with open_source(source, revision) as folder:
            write_blob(folder, blob)
        answer, is_new = admin(ctx).upload(
            f"/adapters/{adapter.path}/versions",
            _read(blob, quiet=as_json),
            blob.stat().st_size,
            {"promote": _flag(promote), "shared": _flag(shared), "base_model": base_model},
        )
    if as_json:
        print_json(answer)
    else:
        _print_version(answer, is_new=is_new)


def add_to(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command()(register)


def _print_version(answer: dict[str, Any], *, is_new: bool) -> None:
    aliases = f", now {', '.join(answer['aliases'])}" if answer["aliases"] else ""
    already = "" if is_new else "already is "
    print_line(
        f"[cyan]{answer['adapter']}[/cyan] {already}version {answer['version']}{aliases}:"
        f" {size(answer['size_bytes'])}, rank {answer['max_rank']},"
        f" {size(answer['gpu_bytes'])} on a GPU\n"
        f"digest {answer['digest']}"
    )


def _read(blob: Path, *, quiet: bool) -> Iterator[bytes]:
    """The file in chunks, with a bar on stderr where a person watches."""
    console = Console(stderr=True)
    columns = (TextColumn("Uploading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with (
        Progress(
            *columns, console=console, transient=True, disable=quiet or not console.is_terminal
        ) as progress,
        blob.open("rb") as file,
    ):
        task = progress.add_task("upload", total=blob.stat().st_size)
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk
            progress.advance(task, len(chunk))


def _flag(value: bool | None) -> str | None:
    return None if value is None else str(value).lower()
