"""JSON of the catalog's records, of pins' statuses and of replicas' reports."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter
from starlette.responses import Response

from lorikeet.base_warning import base_warning
from lorikeet.catalog.changes import Entry
from lorikeet.catalog.records import (
    AdapterRecord,
    KeyRecord,
    PinRecord,
    TenantRecord,
    VersionRecord,
)
from lorikeet.catalog.rules.limits import LimitOptions
from lorikeet.gateway.admin.adapter_defaults import defaults_json
from lorikeet.gateway.parity import parity_json
from lorikeet.gateway.services import ServedModel
from lorikeet.placement.pin_dry_run import PinDryRun
from lorikeet.placement.pin_placement import Shortfall
from lorikeet.placement.pin_status import PinStatus
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.telemetry.status import AdapterStatus

Json = dict[str, Any]

_ENTRY = TypeAdapter(Entry)
_KEY_LIMITS = LimitOptions.__annotations__


def list_response(rows: Iterable[Json], **more: Any) -> Response:
    """Return {"data": rows, …} as a JSON response. A long list takes long to serialize: call this
    function in the thread that made the rows.

    more: further members of the JSON.
    """
    return Response(json.dumps({"data": list(rows), **more}), media_type="application/json")


def version_json(adapter: AdapterRecord, version: VersionRecord) -> Json:
    """Return one version of an adapter as JSON."""
    return {
        "adapter": adapter.label,
        "version": version.version,
        "digest": version.digest,
        "size_bytes": version.size_bytes,
        "max_rank": version.max_rank,
        "gpu_bytes": version.gpu_bytes,
        "touches": None if version.touches is None else asdict(version.touches),
        "base_model": version.base_model,
        "trained_on": version.trained_on,
        "invocation_tokens": list(version.invocation_tokens),
        "head": None if version.head is None else asdict(version.head),
        "embedder": None if version.embedder is None else asdict(version.embedder),
        "vocabulary": version.vocabulary,
        "parity": parity_json(version.parity),
        "created": version.created,
        "retired": version.retired,
        "aliases": list(adapter.aliases_of(version.version)),
    }


def described_version_json(
    adapter: AdapterRecord, version: VersionRecord, base_models: Mapping[str, ServedModel]
) -> Json:
    """Return one version of an adapter as JSON, with the served base model's quantization and the
    version's own request defaults.

    base_warning: difference between the served weights and the weights that the version was
    trained on, in words; null: no known difference.
    """
    served = base_models.get(version.base_model)  # None if no longer served
    quantization = served.quantization if served else None
    return version_json(adapter, version) | {
        "defaults": defaults_json(version.defaults),
        "base_quantization": quantization,
        "base_warning": base_warning(version.trained_on, version.base_model, quantization),
    }


def adapter_json(adapter: AdapterRecord) -> Json:
    """Return an adapter with all its versions as JSON."""
    return {
        "adapter": adapter.label,
        "shared": adapter.shared,
        "retired": adapter.retired,
        "aliases": dict(sorted(adapter.aliases.items())),
        "shares": {
            alias: {"version": share.version, "share": share.fraction}
            for alias, share in sorted(adapter.shares.items())
        },
        "versions": [version_json(adapter, version) for version in adapter.versions],
    }


def pin_json(pin: PinRecord) -> Json:
    """Return a pin as JSON.

    adapter: null for a pin of a whole tenant.
    expires: Unix seconds; null: never.
    prompt: size of the pin's system prompt; null: the pin has none.
    """
    return {
        "tenant": pin.tenant,
        "adapter": None if pin.name is None else f"{pin.tenant}/{pin.name}",
        "selector": pin.selector,
        "tier": str(pin.tier),
        "replicas": pin.replicas,
        "priority": pin.priority,
        "reason": pin.reason,
        "expires": pin.expires,
        "created": pin.created,
        "actor": pin.actor,
        "prompt": None if pin.prompt is None else {"bytes": len(pin.prompt.encode())},
        "draft": pin.draft,
    }


def pin_status_json(found: PinStatus) -> Json:
    """Return a pin and its state as JSON.

    image_bytes: total size on one replica of all the pin's adapters, packed for the GPU.
    shortfalls: versions on fewer replicas than the pin wants, with reasons.
    prompt: size and progress of the pin's system prompt; null: the pin has none.
    """
    pin = pin_json(found.pin)
    return {
        **pin,
        "prompt": None if found.prompt is None else {**pin["prompt"], **asdict(found.prompt)},
        "state": found.state.value,
        "versions": found.versions,
        "image_bytes": found.image_bytes,
        "shortfalls": list(map(_shortfall_json, found.shortfalls)),
    }


def dry_run_json(moves: PinDryRun) -> Json:
    """Return the dry run of a pin as JSON: the loads and releases that the pin would cause.

    Members unmet, lost: versions of this pin, and of other pins, that would be on fewer replicas
    than wanted.
    """
    return {
        "loads": [
            {
                "replica": load.replica,
                **_ref_json(load.ref),
                "from": str(load.now),
                "to": str(load.to),
                "image_bytes": load.image_bytes,
            }
            for load in moves.loads
        ],
        "releases": [
            {"replica": each.replica, **_ref_json(each.ref), "tier": str(each.tier)}
            for each in moves.releases
        ],
        "unmet": list(map(_shortfall_json, moves.unmet)),
        "lost": list(map(_shortfall_json, moves.lost)),
    }


def tenant_json(tenant: TenantRecord) -> Json:
    """Return a tenant with its limits as JSON."""
    return {
        "tenant": tenant.name,
        **asdict(tenant.limits),
        "weight": tenant.weight,
        "max_adapters": tenant.max_adapters,
        "max_total_bytes": tenant.max_total_bytes,
        "pin_budget_bytes": tenant.pin_budget_bytes,
        "max_rank": tenant.max_rank,
        "max_adapter_bytes": tenant.max_adapter_bytes,
        "files_bytes": tenant.files_bytes,
        "max_files": tenant.max_files,
        "open_batches": tenant.open_batches,
        "batch_lines": tenant.batch_lines,
        "created": tenant.created,
    }


def key_json(key: KeyRecord) -> Json:
    """Return an API key's record as JSON, without its secret and hash.

    expires: Unix seconds; null: never.
    """
    return {
        "id": key.id,
        "tenant": key.tenant,
        "name": key.name,
        "scopes": sorted(scope.value for scope in key.scopes),
        **{name: value for name, value in asdict(key.limits).items() if name in _KEY_LIMITS},
        "priority": key.priority,
        "adapters": list(key.adapters),
        "created": key.created,
        "expires": key.expires,
        "replaced_by": key.replaced_by,
        "revoked": key.revoked,
    }


def entry_json(entry: Entry) -> Json:
    """Return an entry of the catalog's log as JSON, without the hashes of keys.

    Request defaults are shown by the names of those that are set, a pin's prompt by its size.
    """
    body: Json = _ENTRY.dump_python(entry, mode="json")
    for change in body["changes"]:
        change.pop("sha256", None)
        if "defaults" in change:
            change["defaults"] = [
                name for name, value in change["defaults"].items() if value not in (None, [], {})
            ]
        if change.get("prompt") is not None:
            change["prompt"] = {"bytes": len(change["prompt"].encode())}
    return body


def replica_json(report: ReplicaReport) -> Json:
    """Return a replica's adapters and load as JSON."""
    live, gpu = report.status.live, report.status.tiers[Residency.GPU]
    return {
        "replica": report.replica,
        "base_model": report.base_model,
        "base_quantization": report.quantization,
        "tensor_parallel": report.status.tensor_parallel,
        "running": live.running,
        "waiting": live.waiting,
        "kv_pages_used": live.kv_pages_used,
        "kv_pages_total": live.kv_pages_total,
        "fp8_kv": report.fp8_kv,
        "states": states_json(report),
        "host_pages": host_pages_json(report),
        "prompts": {
            "pinned": len(report.prompts),
            "computed": sum(failure is None for failure in report.prompts.values()),
        },
        "arena_bytes_used": gpu.used_bytes,
        "arena_bytes_total": gpu.capacity_bytes,
        "adapters": [_resident_json(adapter) for adapter in report.adapters],
    }


def states_json(report: ReplicaReport) -> Json | None:
    """Return as JSON a replica's slots for states of delta nets (linear attention): their use now,
    and counts since its start. None for a model without delta nets.
    """
    states = report.status.states
    return None if states is None else states._asdict()


def host_pages_json(report: ReplicaReport) -> Json | None:
    """Return as JSON a replica's KV pages in host memory: their use now, and counts since its
    start. None if it keeps none there.
    """
    pages = report.status.host_pages
    return None if pages is None else pages._asdict()


def _shortfall_json(shortfall: Shortfall) -> Json:
    version = (
        {"adapter": None, "version": None} if shortfall.ref is None else _ref_json(shortfall.ref)
    )
    return {"pin": shortfall.pin.label, **version, "reason": shortfall.reason}


def _ref_json(ref: AdapterRef) -> Json:
    return {"adapter": f"{ref.tenant}/{ref.name}", "version": ref.version}


def _resident_json(adapter: AdapterStatus) -> Json:
    return {
        **_ref_json(adapter.ref),
        "digest": adapter.digest,
        "residency": str(adapter.residency),
        "gpu_bytes": adapter.gpu_bytes,
        "leases": adapter.leases,
        "pinned": adapter.pinned,
    }
