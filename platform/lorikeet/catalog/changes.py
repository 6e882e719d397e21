"""What one log entry can change.

A change holds what its author decided; when and by whom stands once in the entry.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainSerializer

from lorikeet.catalog.names import DEFAULT_ALIAS
from lorikeet.catalog.records import Scope
from lorikeet.catalog.terms import KeyTerms, TenantTerms
from lorikeet_engine.adapter import Residency

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
class TenantSaved:
    """A tenant was made."""

    name: str
    type: Literal["tenant_saved"] = "tenant_saved"


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantTermsSet:
    """Some of a tenant's terms are as these say from now on."""

    tenant: str
    terms: TenantTerms
    type: Literal["tenant_terms_set"] = "tenant_terms_set"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyCreated:
    """A key became valid."""

    id: str
    tenant: str | None
    scopes: tuple[Scope, ...]
    sha256: str
    type: Literal["key_created"] = "key_created"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyTermsSet:
    """Some of a key's terms are as these say from now on. A key that expires never lasts again."""

    id: str
    terms: KeyTerms
    type: Literal["key_terms_set"] = "key_terms_set"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyReplaced:
    """Another key came into a key's place, which itself is valid until then, Unix seconds."""

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
class VersionRegistered:
    """An adapter has one more version; the first one makes the adapter."""

    tenant: str
    name: str
    version: int
    digest: str
    size_bytes: int
    max_rank: int
    base_model: str
    gpu_bytes: int = 0
    type: Literal["version_registered"] = "version_registered"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShared:
    """An adapter was opened to every tenant, or closed again."""

    tenant: str
    name: str
    shared: bool
    type: Literal["adapter_shared"] = "adapter_shared"


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasMoved:
    """An alias points to another version, for all requests; the one before joins its history."""

    tenant: str
    name: str
    alias: str
    version: int
    type: Literal["alias_moved"] = "alias_moved"


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasRolledBack:
    """An alias went back along its history to this version."""

    tenant: str
    name: str
    alias: str
    version: int
    type: Literal["alias_rolled_back"] = "alias_rolled_back"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareGiven:
    """A second version gets this part of an alias's requests; 0 < part < 1."""

    tenant: str
    name: str
    alias: str
    version: int
    part: float
    type: Literal["share_given"] = "share_given"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareEnded:
    """An alias gives all its requests to the version it points to."""

    tenant: str
    name: str
    alias: str
    type: Literal["share_ended"] = "share_ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRetired:
    """One version can be used no more."""

    tenant: str
    name: str
    version: int
    type: Literal["version_retired"] = "version_retired"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRestored:
    """A retired version can be used again."""

    tenant: str
    name: str
    version: int
    type: Literal["version_restored"] = "version_restored"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRetired:
    """No version so far can be used any more; aliases and pin are gone, and it is private."""

    tenant: str
    name: str
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


Change = Annotated[
    CatalogCreated
    | TenantSaved
    | TenantTermsSet
    | KeyCreated
    | KeyTermsSet
    | KeyReplaced
    | KeyRevoked
    | VersionRegistered
    | AdapterShared
    | AliasMoved
    | AliasRolledBack
    | ShareGiven
    | ShareEnded
    | VersionRetired
    | VersionRestored
    | AdapterRetired
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
