"""The commands `list` and `show`: print adapters and their versions."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import typer
from rich.markup import escape

from lorikeet.cli.adapters.parity import print_version_parity
from lorikeet.cli.admin_client import admin
from lorikeet.cli.arguments import Adapter, AsOf, Tenant
from lorikeet.cli.output import AsJson, moment, percent, print_json, print_line, print_table
from lorikeet.sizes import show_size
from lorikeet_engine.adapter_format import OUTER_MODULES

_SHOWN_CHARACTERS = 60
_SHOWN_TOKENS = 5
_SHOWN_LABELS = 8


def list_adapters(
    ctx: typer.Context,
    tenant: Tenant = None,
    as_of: AsOf = None,
    as_json: AsJson = False,
) -> None:
    """List adapters, with their aliases, ranks and sizes.

    Blob is the size of the newest version's file in the catalog.

    Example: `lorikeet list --tenant acme`
    """
    query = {"tenant": tenant, **(as_of or {})}
    page = admin(ctx).get("/adapters", query)
    adapters = page["data"]
    while page["next"] is not None:
        page = admin(ctx).get("/adapters", {**query, "after": page["next"]})
        adapters += page["data"]
    if as_json:
        print_json({"data": adapters})
        return
    print_table(
        ["Adapter", "Aliases", "#Versions", "#Rank", "#Blob", "#On GPU", "Base model", "State"],
        list(map(_summary, adapters)),
        empty="No adapters yet: `lorikeet register FOLDER tenant/name` adds one.",
    )


def show(ctx: typer.Context, adapter: Adapter, as_of: AsOf = None, as_json: AsJson = False) -> None:
    """Show one adapter and its versions.

    Example: `lorikeet show acme/support`
    """
    answer = admin(ctx).get(f"/adapters/{adapter.path}", as_of)
    if as_json:
        print_json(answer)
        return
    print_line(f"[bold]{answer['adapter']}[/bold]{_state(answer, ' · ')}")
    print_table(
        [
            "Version",
            "Aliases",
            "#Rank",
            "#Blob",
            "#On GPU",
            "Base model",
            "Registered (UTC)",
            "Digest",
        ],
        [_version_row(version) for version in reversed(answer["versions"])],
        empty="No versions.",
    )
    touched: dict[str, list[str]] = {}
    for version in reversed(answer["versions"]):
        touched.setdefault(show_touched(version), []).append(str(version["version"]))
    for what, versions in touched.items():
        print_line(f"Version {', '.join(versions)} changes {what}")
    for version in reversed(answer["versions"]):
        if (defaults := version.get("defaults")) is not None:  # 0.1.0 has neither
            own = show_defaults(defaults)
            print_line(f"Version {version['version']} has its own {own}")
        if (parity := version.get("parity")) is not None:
            print_version_parity(version["version"], parity)
    for version in reversed(answer["versions"]):
        for line in (*show_kind(version), *_base_lines(version)):
            print_line(f"Version {version['version']} {line}")


def show_ranks(version: dict[str, Any]) -> str:
    """Format a version's ranks: 16, or 4–16 if linears differ.

    version: the version as the admin API's JSON.
    """
    most, touches = version["max_rank"], version["touches"]
    least = most if touches is None else touches["min_rank"]
    return str(most) if least == most else f"{least}–{most}"


def show_touched(version: dict[str, Any]) -> str:
    """Describe the linears, layers and parameters that a version changes.

    version: the version as the admin API's JSON.
    """
    touches = version["touches"]
    if touches is None:
        return "linears that the release at its registration did not record"
    inner = [name for name in touches["linears"] if name not in OUTER_MODULES]
    outer = [name for name in touches["linears"] if name in OUTER_MODULES]
    layers = f"{touches['layers']} layer{'s' * (touches['layers'] != 1)}"
    changed = [f"{', '.join(inner)} of {layers}"] * bool(inner) + outer
    if count := touches["tokens"]:
        changed.append(f"{count} trained token{'s' * (count != 1)}")
    return f"{', '.join(changed)}, {touches['parameters']:,} parameters"


def show_kind(version: dict[str, Any]) -> Iterator[str]:
    """Describe a version that is more than a plain LoRA: its own pooling, the labels of its head,
    or its invocation tokens. Yields nothing for a plain LoRA.

    version: the version as the admin API's JSON; that of 0.1.0 tells of plain LoRA alone.
    """
    if (embedder := version.get("embedder")) is not None:
        scaled = ", normalised" if embedder["normalizes"] else ""
        yield f"embeds texts by pooling {embedder['pooling']}{scaled}"
    if (head := version.get("head")) is not None:
        labels = head["labels"]
        more = ", …" if len(labels) > _SHOWN_LABELS else ""
        shown = escape(", ".join(labels[:_SHOWN_LABELS]) + more)
        count = f"{len(labels)} label{'s' * (len(labels) != 1)}"
        yield f"classifies texts by a head of {count}: {shown}"
    if tokens_in_all := version.get("vocabulary"):
        yield f"has {tokens_in_all} tokens, more than its base model"
    if tokens := version.get("invocation_tokens"):
        shown = ", ".join(map(str, tokens))
        yield f"is an activated LoRA: it changes a prompt from the last tokens {shown} on"


def show_defaults(defaults: dict[str, Any]) -> str:
    """Describe a version's own request defaults, in Rich markup."""
    return ", ".join(map(escape, _defaults(defaults)))


def _defaults(defaults: dict[str, Any]) -> Iterator[str]:
    if (template := defaults["chat_template"]) is not None:
        digest = hashlib.sha256(template.encode()).hexdigest()[:12]
        yield f"chat template ({show_size(len(template.encode()))}, SHA-256 {digest}…)"
    if (tokenizer := defaults.get("tokenizer")) is not None:  # older services have none
        names = [token["content"] for token in tokenizer["added"]]
        more = ", …" if len(names) > _SHOWN_TOKENS else ""
        shown = f": {', '.join(names[:_SHOWN_TOKENS])}{more}" if names else ""
        yield f"tokenizer ({len(names)} token{'s' * (len(names) != 1)} of its own{shown})"
    if (prompt := defaults["system_prompt"]) is not None:
        shown = prompt if len(prompt) <= _SHOWN_CHARACTERS else f"{prompt[:_SHOWN_CHARACTERS]}…"
        yield f"system prompt {json.dumps(shown, ensure_ascii=False)}"
    if stop := defaults["stop"]:
        yield f"stop strings {json.dumps(stop, ensure_ascii=False)}"
    if ids := defaults["stop_token_ids"]:
        yield f"stop tokens {', '.join(map(str, ids))}"
    yield from (f"{name} {value}" for name, value in defaults["sampling"].items())


def _base_lines(version: dict[str, Any]) -> Iterator[str]:
    """Describe how the served base model's weights differ from the weights used in training, if at
    all.
    """
    served, trained_on = version["base_quantization"], version["trained_on"]
    if warning := version["base_warning"]:
        yield f"[yellow]differs from its training[/yellow]: {escape(warning)}"
    elif served:
        known = escape(trained_on) if trained_on else "an unnamed base model"
        yield f"was trained on {known}; the weights of {version['base_model']} are {served}"


def _summary(adapter: dict[str, Any]) -> list[Any]:
    newest: dict[str, Any] = adapter["versions"][-1] if adapter["versions"] else {}
    return [
        adapter["adapter"],
        ", ".join(_alias(adapter, alias) for alias in sorted(adapter["aliases"])),
        len(adapter["versions"]),
        newest.get("max_rank"),
        show_size(newest.get("size_bytes")),
        show_size(newest.get("gpu_bytes")),
        newest.get("base_model"),
        _state(adapter),
    ]


def _alias(adapter: dict[str, Any], alias: str) -> str:
    """Format an alias: prod→3, or prod→3 (4: 10%) if version 4 has a share."""
    share = adapter["shares"].get(alias)
    second = f" ({share['version']}: {percent(share['share'])})" if share else ""
    return f"{alias}→{adapter['aliases'][alias]}{second}"


def _state(adapter: dict[str, Any], before: str = "") -> str:
    words = [word for word in ("shared", "retired") if adapter[word]]
    return "".join(before + word for word in words) if before else ", ".join(words)


def _version_row(version: dict[str, Any]) -> list[Any]:
    aliases = ", ".join(version["aliases"])
    return [
        version["version"],
        "retired" if version["retired"] else aliases,
        show_ranks(version),
        show_size(version["size_bytes"]),
        show_size(version["gpu_bytes"]),
        version["base_model"],
        moment(version["created"]),
        version["digest"][:12],
    ]
