"""The command parity: makes probes of an adapter with PEFT, for `register --probes`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from lorikeet.cli.output import (
    AsJson,
    print_answer,
    print_line,
    print_table,
    print_warning,
    spinner,
)
from lorikeet.errors import InvalidInput
from lorikeet.parity.peft_probes import DEFAULT_PROMPTS, Messages, sampled_probes
from lorikeet.parity.probes import MAX_PROBES, Probes, parse_probes

_MAX_BYTES = 8 * 2**20


def parity(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            exists=True,
            file_okay=False,
            help="An adapter, as PEFT's save_pretrained wrote it.",
            show_default=False,
        ),
    ],
    model: Annotated[
        str, typer.Option(help="The base model that it was trained on: a folder or a Hub name.")
    ],
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("probes.json"),
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help='JSON lines, each {"messages": […]} or {"prompt": "…"}. Default: eight questions.',
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, max=4096, help="Most tokens of each completion.")
    ] = 128,
    dtype: Annotated[
        str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, …")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Make probes: completions that an adapter samples with PEFT, and their log-probabilities.

    Run it where the adapter was trained, with torch, transformers and PEFT; no server is asked.
    `lorikeet register --probes` compares a replica's log-probabilities with these.

    Example: `lorikeet parity ./my-adapter --model ./base-model --out probes.json`
    """
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise typer.BadParameter(f"--dtype {dtype}: want auto, float32, bfloat16 or float16")
    asked = DEFAULT_PROMPTS if prompts is None else read_prompts(prompts)
    with spinner("sampling completions with PEFT", quiet=as_json):
        probes = sampled_probes(source, model, asked, tokens, dtype, device)
    out.write_text(probes.model_dump_json(exclude_defaults=True))
    scored = sum(len(probe.logprobs) for probe in probes.probes)
    made = {"file": str(out), "probes": len(probes.probes), "tokens": scored}
    text = f"{out}: {scored} tokens of {len(probes.probes)} completions, in {probes.dtype}."
    print_answer(made, text, as_json)


def read_prompts(file: Path) -> list[Messages | str]:
    """Read prompts, of which probes are made, from JSON lines. Raises InvalidInput if malformed."""
    prompts: list[Messages | str] = []
    for number, line in enumerate(_text(file).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt = row["messages"] if "messages" in row else row["prompt"]
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidInput(
                f'{file}, line {number}: want {{"messages": […]}} or {{"prompt": "…"}}'
            ) from error
        prompts.append(prompt)
    if not 1 <= len(prompts) <= MAX_PROBES:
        raise InvalidInput(f"{file}: {len(prompts)} prompts; want 1 to {MAX_PROBES}")
    return prompts


def read_probes(file: Path) -> Probes:
    """Read the file of probes that `lorikeet parity` wrote: completions with log-probabilities.

    Raises InvalidInput for other content.
    """
    return parse_probes(_text(file))


def print_parity(found: dict[str, Any]) -> None:
    """Print how far a replica's log-probabilities differ from the trainer's.

    found: the comparison, as the admin API's JSON; its `reason`, if any, goes to stderr.
    """
    base = found["base_mean"]
    print_table(
        ["Parity", "#Tokens", "#Mean |Δ|", "#Max |Δ|", "#KL", "#Base model's mean |Δ|"],
        [
            [
                found["verdict"],
                found["tokens"],
                *(f"{found[name]:.2g}" for name in ("mean", "max", "kl")),
                None if base is None else f"{base:.2g}",
            ]
        ],
        empty="No proof.",
    )
    if found["reason"]:
        print_warning(found["reason"])


def print_version_parity(number: int, found: dict[str, Any]) -> None:
    """Print one line on how far a version's log-probabilities differ from its trainer's.

    number: number of the version.
    found: the comparison, as the admin API's JSON.
    """
    cause = f" ({found['cause']})" if found["cause"] else ""
    print_line(
        f"Version {number} has parity with its trainer {found['verdict']}{cause}: mean |Δ|"
        f" {found['mean']:.2g}, max {found['max']:.2g}, KL {found['kl']:.2g} nats over"
        f" {found['tokens']} tokens"
    )


def _text(file: Path) -> str:
    if file.stat().st_size > _MAX_BYTES:
        raise InvalidInput(f"{file} is over {_MAX_BYTES} bytes: make fewer or shorter probes")
    try:
        return file.read_text()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{file} is no text") from error
