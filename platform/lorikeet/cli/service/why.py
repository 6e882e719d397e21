"""The command why: prints a request's outcome, its time by stage, and the choice of replica."""

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.markup import escape

from lorikeet.cli.admin_client import admin
from lorikeet.cli.output import AsJson, print_json, print_line, print_table

Json = Mapping[str, Any]

_STAGES = {
    "validate": "key, limits, body and model checked",
    "route": "waited for a replica",
    "overhead": "text to tokens and back, and between processes",
    "queue": "waited in the engine's queue",
    "adapter": "waited for its adapter",
    "prefill": "prompt computed, to the first token",
    "decode": "generated, to the last token",
    "first bytes": "to the first bytes of the answer",
    "receive": "body received",
    "check": "checked",
    "deliver": "delivered to all replicas",
    "announce": "announced to all gateways",
    "rest": "afterwards, to its end",
}
_BAR = 32  # characters


def why(
    ctx: typer.Context,
    request_id: Annotated[
        str, typer.Argument(metavar="REQUEST_ID", help="x-request-id, or the answer's own id.")
    ],
    as_json: AsJson = False,
) -> None:
    """Explain a request: where its time went, and why that replica answered.

    Gateways remember requests for an hour; busy gateways remember them for less time.

    Example: `lorikeet why chatcmpl-0f3b5c1d7a894e20b6c1d2e3f4a5b6c7`
    """
    found = admin(ctx).get(f"/requests/{_safe(request_id)}")
    if as_json:
        print_json(found)
        return
    for line in _summary(found):
        print_line(line)
    print_table(
        ["Stage", "#ms", ""],
        list(_timeline(found["stages"])),
        empty="The request has only just arrived: no stage is complete.",
    )
    for number, attempt in enumerate(found["attempts"], 1):
        _print_attempt(number, attempt, found["adapter"] is not None)


def _safe(request_id: str) -> str:
    """Check that an id cannot lead to another route. Raises typer.BadParameter."""
    if not re.fullmatch("[A-Za-z0-9_-]+", request_id):
        raise typer.BadParameter(f"{request_id!r}: want x-request-id, or the answer's own id")
    return request_id


def _summary(found: Json) -> Iterator[str]:
    """Yield lines about the request's tenant, model, outcome, replica and tokens.

    found: the request as the admin API's JSON.
    """
    came = datetime.fromtimestamp(found["received"], tz=UTC).strftime("%Y-%m-%d %H:%M:%S")
    yield _plain(found["request"])
    yield f"Received {came} UTC from [cyan]{found['tenant']}[/cyan] with {found['key_id']}"
    if found.get("adapters"):  # 0.1.0 has neither this nor invoked, resumed and drafts
        yield f"Asked for {_plain(found['model'])}: {len(found['adapters'])} adapters added up"
        yield from map(_member, found["adapters"])
    elif found["adapter"]:
        yield f"Asked for {_plain(found['model'])}: {found['adapter']}, {found['digest'][:12]}"
    elif found["model"]:
        yield f"Asked for {_plain(found['model'])}"
    if found.get("invoked") is False:
        yield (
            "[yellow]The prompt does not have the adapter's invocation tokens: the base model "
            "computed the answer[/yellow]"
        )
    if found["base_quantization"]:
        yield f"Base model {_plain(found['base_model'])}, weights {found['base_quantization']}"
    if found["base_warning"]:
        yield f"[yellow]Note[/yellow] that {_plain(found['base_warning'])}"
    yield f"[bold]{_ending(found)}[/bold]"
    if found["replica"]:
        there = found["replica_status"]
        running, waiting = there["running"], there["waiting"]
        yield f"On {found['replica']}, beside {running} running and {waiting} waiting requests"
    if found.get("resumed"):
        reasons = ", ".join(found["resumed"])
        yield f"Its answer went on at another replica: {reasons}"
    if found["residency"]:
        waited = "" if found["load_ms"] is None else f"; it waited {_ms(found['load_ms'])} for it"
        farthest = "farthest " if found.get("adapters") else ""
        yield f"Its {farthest}adapter was on tier {found['residency']} when it came{waited}"
    tokens = found["tokens"]
    if tokens and any(tokens.values()):  # pushes and look-ups have none
        from_host = f" ({there} on the host)" if (there := tokens.get("from_host")) else ""
        yield (
            f"Tokens: {tokens['prompt']} in, {tokens['cached']} of them cached{from_host},"
            f" {tokens['output']} out; {found['preemptions']} preemptions"
        )
    if (drafts := found.get("drafts")) and drafts["drafted"]:
        sources = drafts.get("sources", {})  # gateways of 0.1.0 do not tell them
        each = [f"{name} {n['accepted']} of {n['drafted']}" for name, n in sources.items()]
        detail = f" ({', '.join(each)})" if len(each) > 1 else ""
        yield f"Drafted tokens: {drafts['drafted']}, {drafts['accepted']} of them accepted{detail}"


def _member(each: Json) -> str:
    """Describe one of several adapters that a request adds up: its weight, digest and wait.

    each: the adapter as the admin API's JSON.
    """
    told = f"  {each['weight']:g} · {each['adapter']}, {each['digest'][:12]}"
    if each["residency"] is None:
        return told
    return f"{told}: on tier {each['residency']}, waited {_ms(each['load_ms'])}"


def _ending(found: Json) -> str:
    outcome = found["outcome"].capitalize()
    code = f" ({found['code']}{_of(found['param'])})" if found["code"] else ""
    first = found["first_token_ms"]
    begun = "" if first is None else f", the first token after {_ms(first)}"
    verb = "for" if found["outcome"] == "running" else "after"
    return f"{outcome}{code} {verb} {_ms(found['total_ms'])}{begun}"


def _of(param: str | None) -> str:
    return "" if param is None else f", {_plain(param)}"


def _timeline(stages: Sequence[Json]) -> Iterator[tuple[str, str, str]]:
    """Yield each stage's name, milliseconds, and a bar at its place between start and end."""
    total = sum(stage["ms"] for stage in stages) or 1.0
    before = 0.0
    for stage in stages:
        begin = min(_BAR - 1, int(_BAR * before / total))
        before += stage["ms"]
        length = max(1, round(_BAR * before / total) - begin) if stage["ms"] else 0
        yield _STAGES[stage["stage"]], f"{stage['ms']:.1f}", " " * begin + "█" * length


def _print_attempt(number: int, attempt: Json, adapted: bool) -> None:
    went = attempt["replica"] or "no replica"
    best = next((each["replica"] for each in attempt["candidates"]), went)
    passed = "" if best == went else ", as the best was full or did not answer"
    failed = "" if attempt["failure"] is None else f", which failed: {_plain(attempt['failure'])}"
    print_line(f"Attempt {number} went to {went}{passed}{failed}; expected costs in ms:")
    tier = ["Adapter"] if adapted else []
    print_table(
        ["Replica", *tier, "#Cost", "#Prompt", "#Queue", "#Load", "#Others", "#Copy"],
        [
            [each["replica"], *([each["residency"]] if adapted else []), *_costs(each)]
            for each in attempt["candidates"]
        ],
        empty="The router considered none.",
    )


def _costs(candidate: Json) -> list[str]:
    parts = ("cost", "prefill", "queue", "load", "others", "copy")
    return [f"{candidate[f'{part}_ms']:.1f}" for part in parts]


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.1f} ms"


def _plain(text: str) -> str:
    """Escape Rich markup, and replace characters that could control a terminal."""
    return escape("".join(char if char.isprintable() else "?" for char in text))
