"""The command register: packs an adapter into one file, and uploads it to the catalog."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from lorikeet.chat_template import template_digest
from lorikeet.cli.adapters.list_and_show import (
    show_defaults,
    show_kind,
    show_ranks,
    show_touched,
)
from lorikeet.cli.adapters.parity import print_parity, read_probes
from lorikeet.cli.adapters.request_defaults import (
    ChatTemplate,
    DefaultsOptions,
    GenerationConfig,
    Stop,
    SystemPrompt,
    UseChatTemplate,
    UseGenerationConfig,
    UseTokenizer,
)
from lorikeet.cli.adapters.smoke import print_smoke
from lorikeet.cli.adapters.sources import check_source, open_source
from lorikeet.cli.adapters.upload import send_blob, with_retries
from lorikeet.cli.admin_client import AdminClient, admin
from lorikeet.cli.arguments import Adapter, AdapterName
from lorikeet.cli.output import AsJson, print_json, print_line, print_warning
from lorikeet.errors import InvalidInput, LorikeetError, RequestTooLarge
from lorikeet.sizes import show_size
from lorikeet.tokenizer_vocabulary import read_vocabulary
from lorikeet_engine.adapter_format import write_blob

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="An adapter, as PEFT's save_pretrained or mlx_lm.lora wrote it: its folder, a .tar, "
        ".tar.gz or .zip of the folder, s3://bucket/prefix (below LORIKEET_IMPORT_FROM), or "
        "hf:organisation/name on the Hugging Face Hub.",
        show_default=False,
    ),
]
Promote = Annotated[
    bool, typer.Option("--promote", help="Point the alias prod at the new version.")
]
Shared = Annotated[
    bool | None, typer.Option("--shared/--private", help="Whether every tenant may use it.")
]
ForBaseModel = Annotated[
    str | None,
    typer.Option(help="Name of the served base model, if not the one that the adapter names."),
]
Smoke = Annotated[
    bool,
    typer.Option(
        "--smoke", help="Generate with it on a replica first; if that fails, do not register."
    ),
]
ProbesFile = Annotated[
    Path | None,
    typer.Option(
        "--probes",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="Compare a replica's log-probabilities with these, from `lorikeet parity`, first; if "
        "they differ too much, do not register.",
    ),
]
WarnAbove = Annotated[
    float | None, typer.Option(help="Mean difference in nats above which --probes warn (0.05).")
]
RefuseAbove = Annotated[
    float | None, typer.Option(help="Mean difference in nats above which they refuse (0.5).")
]
Revision = Annotated[str | None, typer.Option(help="The branch, tag or commit of an hf: source.")]


def register(
    ctx: typer.Context,
    source: Source,
    adapter: Adapter,
    promote: Promote = False,
    shared: Shared = None,
    base_model: ForBaseModel = None,
    smoke: Smoke = False,
    probes: ProbesFile = None,
    warn_above: WarnAbove = None,
    refuse_above: RefuseAbove = None,
    revision: Revision = None,
    chat_template: ChatTemplate = None,
    use_chat_template: UseChatTemplate = False,
    use_tokenizer: UseTokenizer = False,
    system_prompt: SystemPrompt = None,
    stop: Stop = None,
    generation_config: GenerationConfig = None,
    use_generation_config: UseGenerationConfig = False,
    as_json: AsJson = False,
) -> None:
    """Add an adapter, or a new version of one.

    The first version becomes prod at once, later ones with --promote. Registering the same weights
    with the same chat template, tokenizer and other defaults again gives the same version. To
    resume an interrupted upload, repeat the command.

    Example: `lorikeet register ./my-adapter acme/support --promote`
    """
    try:
        check_source(source, revision)
    except InvalidInput as error:
        raise typer.BadParameter(error.message) from error
    proof = {} if probes is None else _proof(probes, warn_above, refuse_above)
    options = DefaultsOptions(
        chat_template,
        use_chat_template,
        system_prompt,
        stop,
        generation_config,
        use_generation_config,
        use_tokenizer,
    )
    options.check()
    answer, is_new = register_source(
        admin(ctx),
        source,
        adapter,
        options,
        revision=revision,
        quiet=as_json,
        promote=promote,
        shared=shared,
        base_model=base_model,
        smoke=smoke,
        **proof,
    )
    if as_json:
        print_json(answer)
    else:
        _print_version(answer, is_new=is_new)


def register_source(
    server: AdminClient,
    source: str,
    adapter: AdapterName,
    defaults: DefaultsOptions,
    *,
    revision: str | None = None,
    quiet: bool,
    base_model: str | None,
    **options: Any,
) -> tuple[dict[str, Any], bool]:
    """Upload an adapter, register it, and print the server's warnings.

    Returns the version as JSON, and whether it is new. Raises LorikeetError if the source cannot be
    read or the server refuses it.

    source: a folder, a tar or zip file, s3://bucket/prefix, or hf:organisation/name.
    defaults: options that set request defaults.
    revision: branch, tag or commit of an hf: source.
    quiet: show no progress.
    base_model: name of the served base model; None: the one that the adapter names.
    options: further fields of the admin API's request: promote, shared, smoke, probes, warn_above
        and refuse_above.
    """
    about = {"tenant": adapter.tenant, "base_model": base_model}
    sent = _send(server, source, revision, about, defaults, quiet=quiet)
    wanted = {**sent, "base_model": base_model, **options}
    path = f"/adapters/{adapter.path}/versions"
    answer, is_new = with_retries(lambda: server.post_new(path, wanted))
    for kind in ("base_warning", "template_warning", "vocabulary_warning"):
        if answer[kind] is not None:
            print_warning(answer[kind])
    return answer, is_new


def _send(
    server: AdminClient,
    source: str,
    revision: str | None,
    about: dict[str, str | None],
    options: DefaultsOptions,
    *,
    quiet: bool,
) -> dict[str, Any]:
    """Pack a source into one file and upload it; return the fields of the registration that depend
    on the source.

    source: a folder, a tar or zip file, s3://bucket/prefix, or hf:organisation/name.
    revision: branch, tag or commit of an hf: source.
    quiet: show no progress.
    about: tenant and base model, which the server checks before any byte is sent.
    options: options that set request defaults.
    """
    with tempfile.TemporaryDirectory(prefix="lorikeet-") as scratch:
        blob = Path(scratch) / "adapter.safetensors"
        with open_source(source, revision, quiet=quiet) as folder:
            defaults, digest = options.read(folder), pack(folder, blob)
            template, vocabulary = template_digest(folder), read_vocabulary(folder)
            try:
                send_blob(server, blob, digest, about, quiet=quiet)
            except LorikeetError as error:
                if error.code != RequestTooLarge.code:
                    raise
                # Hashes of the base model's matrices may do instead of copies.
                larger, digest = digest, pack(folder, blob, 0, warn=lambda _: None)
                if digest == larger:
                    raise
                send_blob(server, blob, digest, about, quiet=quiet)
    return {
        "digest": digest,
        "chat_template": template,
        "vocabulary": vocabulary and vocabulary._asdict(),
        "defaults": defaults,
    }


def _proof(probes: Path, warn_above: float | None, refuse_above: float | None) -> dict[str, Any]:
    """Return the fields of a registration that ask for a comparison with the trainer.

    probes: file that `lorikeet parity` wrote.
    warn_above, refuse_above: mean differences of log-probabilities, in nats; None: the defaults.
    """
    read = read_probes(probes).model_dump(mode="json", exclude_defaults=True)
    return {"probes": read, "warn_above": warn_above, "refuse_above": refuse_above}


def pack(
    folder: Path,
    blob: Path,
    most_copied: int | None = None,
    warn: Callable[[str], None] = print_warning,
) -> str:
    """Write an adapter's folder to one file, and return its SHA-256.

    most_copied: limit on the bytes of the base model's matrices in the file; see `write_blob`.
    warn: gets warnings about the folder.

    Raises LorikeetError if the folder cannot be read or the file cannot be written.
    """
    try:
        return write_blob(folder, blob, warn, most_copied)
    except PermissionError as error:
        raise LorikeetError(
            f"{error.filename or folder} may not be read: `chmod -R u+rX {folder}` as its owner"
        ) from error
    except OSError as error:
        raise LorikeetError(
            f"cannot pack {folder} into {blob.parent} ({error.strerror}): free some space there, "
            "or set TMPDIR to another folder"
        ) from error


def _print_version(answer: dict[str, Any], *, is_new: bool) -> None:
    aliases = f", now {', '.join(answer['aliases'])}" if answer["aliases"] else ""
    already = "" if is_new else "already is "
    print_line(
        f"[cyan]{answer['adapter']}[/cyan] {already}version {answer['version']}{aliases}:"
        f" {show_size(answer['size_bytes'])}, rank {show_ranks(answer)},"
        f" {show_size(answer['gpu_bytes'])} on a GPU\n"
        f"changes {show_touched(answer)}"
    )
    for line in show_kind(answer):
        print_line(line)
    print_line(f"digest {answer['digest']}")
    if answer["defaults"] is not None:
        print_line(f"has its own {show_defaults(answer['defaults'])}")
    if answer["parity"] is not None:
        print_parity(answer["parity"])
    if "smoke" in answer:
        print_smoke(answer["smoke"])
