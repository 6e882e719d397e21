"""What one log entry can change.

A change holds what its author decided; when and by whom stands once in the entry.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainSerializer

from lorikeet.catalog.names import DEFAULT_ALIAS
from lorikeet.catalog.records import Scope
from lorikeet.catalog.rules.limits import KeyOptions, TenantOptions
from lorikeet_engine.adapter import Residency, TouchedModules

SCHEMA = 1
"""Raised whenever an older reader could misread what is written."""


def _parse_tier(value: object) -> object:
    return Residency[value.upper()] if isinstance(value, str) else value


Tier = Annotated[Residency, BeforeValidator(_parse_tier), PlainSerializer(str, return_type=str)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogCreated:
    """The first change of every log."""

    type: Literal["catalog_created"] = "catalog_created"


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantCreated:
    """A tenant was made."""

    name: str
    type: Literal["tenant_created"] = "tenant_created"


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantOptionsSet:
    """Some of a tenant's options were set; the others stay."""

    tenant: str
    options: TenantOptions
    type: Literal["tenant_options_set"] = "tenant_options_set"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyCreated:
    """A key became valid."""

    id: str
    tenant: str | None
    scopes: tuple[Scope, ...]
    sha256: str
    type: Literal["key_created"] = "key_created"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyOptionsSet:
    """Some of a key's options were set; the others stay. Once set, an expiry is never lifted."""

    id: str
    options: KeyOptions
    type: Literal["key_options_set"] = "key_options_set"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyReplaced:
    """A key was rotated: the key `by` takes its place. expires: its own end, Unix seconds."""

    id: str
    by: str
    expires: float
    type: Literal["key_replaced"] = "key_replaced"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRevoked:
    """A key is valid no more, for ever."""

    id: str
    type: Literal["key_revoked"] = "key_revoked"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterChange:
    """What all changes of one adapter say first."""

    tenant: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRegistered(AdapterChange):
    """An adapter has one more version; the first one makes the adapter."""

    version: int
    digest: str
    size_bytes: int
    max_rank: int
    base_model: str
    gpu_bytes: int
    touches: TouchedModules | None = None
    trained_on: str | None = None
    type: Literal["version_registered"] = "version_registered"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShared(AdapterChange):
    """An adapter was opened to every tenant, or closed again."""

    shared: bool
    type: Literal["adapter_shared"] = "adapter_shared"


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasMoved(AdapterChange):
    """An alias points to another version, for all requests; the one before joins its history."""

    alias: str
    version: int
    type: Literal["alias_moved"] = "alias_moved"


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasRolledBack(AdapterChange):
    """An alias went back along its history to this version."""

    alias: str
    version: int
    type: Literal["alias_rolled_back"] = "alias_rolled_back"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareGiven(AdapterChange):
    """A second version gets this fraction of an alias's requests; 0 < fraction < 1."""

    alias: str
    version: int
    fraction: float
    type: Literal["share_given"] = "share_given"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareEnded(AdapterChange):
    """An alias gives all its requests to the version it points to."""

    alias: str
    type: Literal["share_ended"] = "share_ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRetired(AdapterChange):
    """One version can be used no more."""

    version: int
    type: Literal["version_retired"] = "version_retired"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRestored(AdapterChange):
    """A retired version can be used again."""

    version: int
    type: Literal["version_restored"] = "version_restored"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRetired(AdapterChange):
    """No version so far can be used any more; aliases and pin are gone, and it is private."""

    type: Literal["adapter_retired"] = "adapter_retired"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """The pin of an adapter, or with name None of a tenant, was set or replaced; see PinRecord."""

    tenant: str
    name: str | None
    selector: str = DEFAULT_ALIAS
    tier: Tier = Residency.GPU
    replicas: int | None = None
    priority: int = 0
    reason: str = ""
    expires: float | None = None
    type: Literal["pinned"] = "pinned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpinned:
    """The pin of an adapter, or with name None of a tenant, was taken away."""

    tenant: str
    name: str | None
    type: Literal["unpinned"] = "unpinned"


AnyAdapterChange = (
    VersionRegistered
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
    """One commit: changes that happen together. time: Unix seconds; nonce: its writer's mark."""

    seq: int
    nonce: str
    actor: str
    time: float
    changes: tuple[Change, ...]
    schema: int = SCHEMA
