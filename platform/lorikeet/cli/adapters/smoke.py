"""The command smoke: compares answers of an adapter and its base model."""

from typing import Annotated, Any

import typer

from lorikeet.cli.admin_client import Json, admin
from lorikeet.cli.arguments import AdapterOrVersion
from lorikeet.cli.output import AsJson, print_json, print_line, print_table, print_warning


def smoke(
    ctx: typer.Context,
    adapter: AdapterOrVersion,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="A prompt; can be repeated. Default: four general questions."),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of each answer.")] = None,
    as_json: AsJson = False,
) -> None:
    """Try an adapter: show its answers beside its base model's.

    One replica answers the same prompts both ways in one batch, without sampling. You see how far
    the answers differ, and a warning if they are equal or the adapter's look broken.

    Example: `lorikeet smoke acme/support@3 --prompt "Where is my order?"`
    """
    body = {"selector": adapter.selector, "prompts": prompt or None, "max_tokens": max_tokens}
    answer = admin(ctx).post(f"/adapters/{adapter.path}/smoke", body)
    if as_json:
        print_json(answer)
        return
    print_line(f"[cyan]{answer['adapter']}@{answer['version']}[/cyan]")
    print_smoke(answer)


def print_smoke(seen: Json) -> None:
    """Print the answers of an adapter beside its base model's, and warnings on stderr.

    seen: result of the smoke test, as the admin API's JSON.
    """
    print_table(
        ["Prompt", "Base model", "Adapter", "#Equal"],
        [_row(prompt) for prompt in seen["prompts"]],
        empty="No prompts.",
    )
    first = seen["first_difference"]
    differs = "none differs" if first is None else f"the first that differs is number {first + 1}"
    print_line(
        f"{seen['equal_share']:.0%} of {seen['tokens']} tokens equal the base model's, {differs}"
        f" (replica {seen['replica']}, adapter came from {seen['residency']})"
    )
    for warning in seen["warnings"]:
        print_warning(warning)


def _row(prompt: dict[str, Any]) -> list[Any]:
    return [prompt["prompt"], prompt["base"], prompt["adapter"], f"{prompt['equal_share']:.0%}"]
