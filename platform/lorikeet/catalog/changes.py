"""Changes of the catalog, and the log entry that commits several changes together.

A change holds its author's decision; the entry holds time and author once for all of its changes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainSerializer

from lorikeet.catalog.names import DEFAULT_ALIAS
from lorikeet.catalog.records import Scope
from lorikeet.catalog.rules.limits import KeyOptions, TenantOptions
from lorikeet.parity.figures import Parity
from lorikeet.request_defaults import RequestDefaults
from lorikeet_engine.adapter import Embedder, Head, Residency, TouchedModules

SCHEMA = 2
"""Newest format version; increased whenever an older reader could misread new entries.

Schema 2 adds fields that a reader of schema 1 would ignore: invocation tokens, so that an activated
LoRA would change whole prompts; heads, so that a classification adapter would generate; embedders,
so that texts would be embedded as the base model embeds them; patterns of keys that infer, so that
such a key could use all adapters; budgets in money; tenants' limits on files and batches; and
prompts of pins.
"""
_NEW_OPTIONS = frozenset(
    ("cost_per_month", "files_bytes", "max_files", "open_batches", "batch_lines")
)  # options of tenants that schema 1 lacks


def _parse_tier(value: object) -> object:
    return Residency[value.upper()] if isinstance(value, str) else value


Tier = Annotated[Residency, BeforeValidator(_parse_tier), PlainSerializer(str, return_type=str)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogCreated:
    """Creation of the catalog: the first change of every log."""

    type: Literal["catalog_created"] = "catalog_created"


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantCreated:
    """Creation of a tenant."""

    name: str
    type: Literal["tenant_created"] = "tenant_created"


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantOptionsSet:
    """Change of some options of a tenant; options that are not in `options` stay."""

    tenant: str
    options: TenantOptions
    type: Literal["tenant_options_set"] = "tenant_options_set"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyCreated:
    """Creation of a key.

    tenant: owner; None for an admin's key.
    sha256: SHA-256 of the key's secret, 64 hex digits.
    """

    id: str
    tenant: str | None
    scopes: tuple[Scope, ...]
    sha256: str
    type: Literal["key_created"] = "key_created"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyOptionsSet:
    """Change of some options of a key; options that are not in `options` stay.

    An expiry, once set, is never removed.
    """

    id: str
    options: KeyOptions
    type: Literal["key_options_set"] = "key_options_set"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyReplaced:
    """Rotation of a key.

    id: the old key.
    by: id of the new key.
    expires: end of the old key, Unix seconds.
    """

    id: str
    by: str
    expires: float
    type: Literal["key_replaced"] = "key_replaced"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRevoked:
    """Revocation of a key, for ever."""

    id: str
    type: Literal["key_revoked"] = "key_revoked"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterChange:
    """Base of all changes of one adapter."""

    tenant: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRegistered(AdapterChange):
    """Registration of a version; the first version creates the adapter.

    version: number, from 1.
    The fields from digest on are facts about the version's blob (file of weights), as in BlobFacts.
    """

    version: int
    digest: str
    size_bytes: int
    max_rank: int
    base_model: str
    gpu_bytes: int
    touches: TouchedModules | None = None
    trained_on: str | None = None
    invocation_tokens: tuple[int, ...] = ()
    parity: Parity | None = None
    head: Head | None = None
    embedder: Embedder | None = None
    vocabulary: int = 0
    type: Literal["version_registered"] = "version_registered"


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultsSet(AdapterChange):
    """Setting of a version's own request defaults (chat template, system prompt, stops, sampling).

    It is in the log entry that registers the version.

    Releases that do not know request defaults refuse the entry, instead of serving the version
    without them.
    """

    version: int
    defaults: RequestDefaults
    type: Literal["defaults_set"] = "defaults_set"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShared(AdapterChange):
    """Change of an adapter's visibility: to every tenant, or to its own tenant alone."""

    shared: bool
    type: Literal["adapter_shared"] = "adapter_shared"


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasMoved(AdapterChange):
    """Move of an alias to a version.

    The alias's share (second version that gets a fraction of its requests) ends. The version that
    the alias pointed to joins the alias's history, along which rollbacks go back.
    """

    alias: str
    version: int
    type: Literal["alias_moved"] = "alias_moved"


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasRolledBack(AdapterChange):
    """Move of an alias back along its history, to an earlier version."""

    alias: str
    version: int
    type: Literal["alias_rolled_back"] = "alias_rolled_back"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareGiven(AdapterChange):
    """Routing of a fraction of an alias's requests to a second version; 0 < fraction < 1."""

    alias: str
    version: int
    fraction: float
    type: Literal["share_given"] = "share_given"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareEnded(AdapterChange):
    """End of an alias's share: all requests get the version that the alias points to."""

    alias: str
    type: Literal["share_ended"] = "share_ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRetired(AdapterChange):
    """Retirement of one version: requests can no longer use it."""

    version: int
    type: Literal["version_retired"] = "version_retired"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRestored(AdapterChange):
    """Restoration of a retired version."""

    version: int
    type: Literal["version_restored"] = "version_restored"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRetired(AdapterChange):
    """Retirement of an adapter: all versions are retired; aliases, pin and sharing are removed."""

    type: Literal["adapter_retired"] = "adapter_retired"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """Pinning of an adapter, or of all adapters of a tenant; replaces an earlier pin.

    name: adapter; None: every adapter of the tenant, now and later.
    selector: alias or version number to keep loaded.
    tier: lowest tier to keep it on; the GPU is the highest.
    replicas: number of replicas; None: all replicas of the base model.
    priority: if not all pins fit, higher priorities are kept first.
    expires: Unix seconds; None: never.
    prompt: system prompt whose KV pages replicas compute before users ask; None: no prompt.
    draft: whether the adapter drafts tokens of all answers of its base model; None in
        an order to pin: as the earlier pin says.
    """

    tenant: str
    name: str | None
    selector: str = DEFAULT_ALIAS
    tier: Tier = Residency.GPU
    replicas: int | None = None
    priority: int = 0
    reason: str = ""
    expires: float | None = None
    prompt: str | None = None
    draft: bool | None = None
    type: Literal["pinned"] = "pinned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpinned:
    """Removal of the pin of an adapter, or of a tenant if name is None."""

    tenant: str
    name: str | None
    type: Literal["unpinned"] = "unpinned"


AnyAdapterChange = (
    VersionRegistered
    | DefaultsSet
    | AdapterShared
    | AliasMoved
    | AliasRolledBack
    | ShareGiven
    | ShareEnded
    | VersionRetired
    | VersionRestored
    | AdapterRetired
)
Change = Annotated[
    CatalogCreated
    | TenantCreated
    | TenantOptionsSet
    | KeyCreated
    | KeyOptionsSet
    | KeyReplaced
    | KeyRevoked
    | AnyAdapterChange
    | Pinned
    | Unpinned,
    Field(discriminator="type"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One commit: changes that take effect together.

    seq: number of the entry, from 1.
    nonce: random mark by which a writer recognizes its own entry.
    actor: author, such as a key's id.
    time: Unix seconds, by the writer's clock.
    schema: oldest format version whose readers understand the changes.
    """

    seq: int
    nonce: str
    actor: str
    time: float
    changes: tuple[Change, ...]
    schema: int = 1


def schema_of(changes: Iterable[Change]) -> int:
    """Return the oldest format version whose readers understand these changes."""
    restricts, pushes = False, False
    for change in changes:
        match change:
            case VersionRegistered() if (
                change.invocation_tokens or change.head or change.embedder or change.vocabulary
            ):
                return SCHEMA
            case TenantOptionsSet(options=options) if not _NEW_OPTIONS.isdisjoint(options):
                return SCHEMA
            case Pinned(prompt=str()) | Pinned(draft=True):
                return SCHEMA
            case KeyCreated(scopes=scopes):
                pushes = pushes or Scope.PUBLISH in scopes
            case KeyOptionsSet(options=options):
                restricts = restricts or bool(options.get("adapters"))
    return SCHEMA if restricts and not pushes else 1
