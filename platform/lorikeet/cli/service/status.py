"""The command status: prints the load of every replica, and its adapters by tier."""

from collections import defaultdict
from typing import Any

import typer

from lorikeet.cli.admin_client import admin
from lorikeet.cli.output import AsJson, print_json, print_line, print_table
from lorikeet.sizes import show_size

_TIERS = ("gpu", "host", "disk")
_FRESH_S = 10.0  # gateways ask the store every second


def status(ctx: typer.Context, as_json: AsJson = False) -> None:
    """Show replicas, and which adapters are on which tier.

    A * marks pinned adapters. Arena is the memory that an adapter takes on a GPU. A base model's
    name is followed by the format of its linears if they are quantised, and by the number of GPUs
    if a replica has several (LORIKEET_TENSOR_PARALLEL); sizes are then those of one GPU. Versions
    with equal weights share a copy, which is listed under one of their names.

    Example: `lorikeet status`
    """
    answer = admin(ctx).get("/status")
    if as_json:
        print_json(answer)
        return
    replicas = answer["replicas"]
    print_line(f"Catalog at entry {answer['catalog_seq']}{_staleness(answer['catalog_age_s'])}")
    print_line(_pins(answer["pins"]) + _prompts(replicas))
    has_states = any(replica.get("states") for replica in replicas)  # 0.1.0 has neither
    has_host = any(replica.get("host_pages") for replica in replicas)
    more = [*(["#States"] if has_states else []), *(["#Host KV"] if has_host else [])]
    print_table(
        ["Replica", "Base model", "#Running", "#Waiting", "#KV pages", *more, "#Slot pool"],
        [_replica_row(replica, has_states=has_states, has_host=has_host) for replica in replicas],
        empty="No replica has reported.",
    )
    print_table(
        ["Adapter", "GPU", "Host", "Disk", "#Arena", "#Leases"],
        _adapter_rows(replicas),
        empty="No adapter is resident.",
    )


def _staleness(age_s: float) -> str:
    """Describe the age of the gateway's view of the catalog, if it is older than usual."""
    return f", stale: the store last answered {age_s:.0f} s ago" if age_s > _FRESH_S else ""


def _pins(counts: dict[str, int] | None) -> str:
    if counts is None:
        return "Pins: not known while the catalog does not answer"
    shown = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    why = " (`lorikeet pins` says why)" if "unmet" in counts else ""
    return f"Pins: {shown or 'none'}{why}"


def _prompts(replicas: list[dict[str, Any]]) -> str:
    """Return the number of pinned prompts that replicas have computed; "" if none are pinned."""
    told = [replica["prompts"] for replica in replicas if "prompts" in replica]  # not 0.1.0
    pinned, computed = (sum(each[which] for each in told) for which in ("pinned", "computed"))
    return f"; prompts: {computed} of {pinned} computed" if pinned else ""


def _replica_row(replica: dict[str, Any], *, has_states: bool, has_host: bool) -> list[Any]:
    quantization, gpus = replica["base_quantization"], replica["tensor_parallel"]
    return [
        replica["replica"],
        replica["base_model"]
        + (f" ({quantization})" if quantization else "")
        + (f" × {gpus}" if gpus > 1 else ""),
        replica["running"],
        replica["waiting"],
        f"{replica['kv_pages_used']} of {replica['kv_pages_total']}"
        + (" in FP8" if replica["fp8_kv"] else ""),
        *([_states(replica.get("states"))] if has_states else []),
        *([_host_pages(replica.get("host_pages"))] if has_host else []),
        f"{show_size(replica['arena_bytes_used'])} of {show_size(replica['arena_bytes_total'])}",
    ]


def _states(states: dict[str, int] | None) -> str | None:
    if states is None:
        return None
    return f"{states['running']} and {states['cached']} cached of {states['slots']}"


def _host_pages(pages: dict[str, int] | None) -> str | None:
    if pages is None:
        return None
    prompts = f", {pages['of_prompts']} of prompts" if pages["of_prompts"] else ""
    disk = f"; disk: {pages['on_disk']} of {pages['disk_pages']}" if pages["disk_pages"] else ""
    return f"{pages['used']} of {pages['pages']}{prompts}{disk}"


def _adapter_rows(replicas: list[dict[str, Any]]) -> list[list[Any]]:
    held: dict[str, list[tuple[str, dict[str, Any]]]] = defaultdict(list)
    for replica in replicas:
        for adapter in replica["adapters"]:
            held[f"{adapter['adapter']}@{adapter['version']}"].append((replica["replica"], adapter))
    return [
        [
            name,
            *(_holders(places, tier) for tier in _TIERS),
            show_size(max(adapter["gpu_bytes"] for _, adapter in places) or None),
            sum(adapter["leases"] for _, adapter in places),
        ]
        for name, places in sorted(held.items())
    ]


def _holders(places: list[tuple[str, dict[str, Any]]], tier: str) -> str | None:
    names = [
        replica + ("*" if adapter["pinned"] else "")
        for replica, adapter in places
        if adapter["residency"] == tier
    ]
    return " ".join(sorted(names)) or None
