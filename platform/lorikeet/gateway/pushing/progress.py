"""How far a pushed version is, as a client is told."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from lorikeet.catalog.records import AdapterRecord, BlobFacts, VersionRecord
from lorikeet.gateway.admin.serializers import Json
from lorikeet.gateway.pushing.pushed_versions import PushedVersion

Wait = Literal["none", "ready", "durable"]


class Progress(NamedTuple):
    """How far a version is. number: its own in the catalog's log; None until it is durable.

    expires: when it goes by itself, Unix seconds; None is never.
    """

    adapter: AdapterRecord
    version: VersionRecord
    number: int | None
    ready: bool
    expires: float | None

    def reached(self, wanted: Wait) -> bool:
        """Whether this is as far as a client wants to wait."""
        states = {"none": True, "ready": self.ready, "durable": self.number is not None}
        return states[wanted]


def progress_json(progress: Progress) -> Json:
    """Return a version that requests can name."""
    record, version = progress.adapter, progress.version
    aliases = record.aliases_of(version.version)
    return _version_json(
        record.label,
        version,
        version.created,
        aliases,
        version=progress.number,
        ready=progress.ready,
        expires=progress.expires,
    )


def taken_json(version: PushedVersion) -> Json:
    """Return a version that is carried, and that no request can name yet."""
    label = f"{version.tenant}/{version.name}"
    reached = version.facts, version.created, ()
    return _version_json(label, *reached, version=None, ready=False, expires=version.expires)


def _version_json(
    label: str,
    facts: BlobFacts,
    created: float,
    aliases: Sequence[str],
    *,
    version: int | None,
    ready: bool,
    expires: float | None,
) -> Json:
    return {
        "object": "adapter.version",
        "model": f"{label}@{facts.digest}",
        "adapter": label,
        "digest": facts.digest,
        "version": version,
        "ready": ready,
        "durable": version is not None,
        "aliases": list(aliases),
        "base_model": facts.base_model,
        "size_bytes": facts.size_bytes,
        "max_rank": facts.max_rank,
        "gpu_bytes": facts.gpu_bytes,
        "created": created,
        "expires": expires,
    }
