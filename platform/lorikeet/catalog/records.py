"""What the catalog knows: tenants, keys, adapters with their versions, and pins."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase

from lorikeet.catalog.names import is_digest
from lorikeet_engine.adapter import AdapterRef, Residency, TouchedModules


class Scope(Enum):
    """What a key allows.

    READ_ONLY: to look at all that an admin or its tenant may look at. PUBLISH: to push versions of
    a tenant's adapters, and nothing else.
    """

    INFER = "infer"
    ADMIN = "admin"
    READ_ONLY = "read-only"
    PUBLISH = "publish"


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a tenant, or of one key beside its tenant's. None is no limit.

    requests_per_min, tokens_per_min: on the average; burst_s: how many seconds' worth may come at
    once. A prompt's tokens and an answer's count alike. max_concurrent: requests at once.
    max_context: tokens of prompt and answer. tokens_per_month: the budget, by UTC's calendar.
    bytes_per_min: of pushed adapters, averaged as the first two.
    """

    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    burst_s: float = 60.0
    max_concurrent: int | None = None
    max_context: int | None = None
    tokens_per_month: int | None = None
    bytes_per_min: int | None = None


@dataclass(frozen=True, slots=True)
class TenantRecord:
    """Who is authenticated and limited. created: Unix seconds.

    weight: how much of a busy replica it gets beside others, > 0; 1 is the common one.
    max_adapters: of its own that are usable at once; max_total_bytes: of the blobs of all their
    usable versions. pin_budget_bytes: what the images of its pinned adapters may take on one
    replica. None is no limit. max_rank, max_adapter_bytes: of one adapter of its own; None is the
    service's limit, which holds besides.
    """

    name: str
    created: float
    limits: Limits = Limits()
    weight: float = 1.0
    max_adapters: int | None = None
    max_total_bytes: int | None = None
    pin_budget_bytes: int | None = None
    max_rank: int | None = None
    max_adapter_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """An API key without its secret, of which only the SHA-256 is kept (64 hex digits).

    tenant None: an administrator's key that belongs to no tenant. limits: hold beside the tenant's,
    and are of one key all but tokens_per_month. priority: of its tenant's requests those of the
    higher one begin first. name: what people call it, "" is nothing. expires: Unix seconds, None is
    never. replaced_by: the id of the key that a rotation put into its place. adapters: patterns of
    the names that a publish key may push, in which * stands for any characters.
    """

    id: str
    tenant: str | None
    scopes: frozenset[Scope]
    sha256: str
    created: float
    revoked: bool = False
    name: str = ""
    limits: Limits = Limits()
    priority: int = 0
    expires: float | None = None
    replaced_by: str | None = None
    adapters: tuple[str, ...] = ()

    def may_push(self, name: str) -> bool:
        """Whether it is a publish key for adapters of this name."""
        allowed = any(fnmatchcase(name, pattern) for pattern in self.adapters)
        return Scope.PUBLISH in self.scopes and allowed

    def expired(self, now: float) -> bool:
        """Whether it ended at or before `now`, Unix seconds."""
        return self.expires is not None and self.expires <= now


def secret_sha256(secret: str) -> str:
    """64 hex digits by which the catalog finds the key of a secret.

    A secret holds 256 random bits, so a plain SHA-256 protects it: there is nothing to guess that a
    slow hash would make dearer.
    """
    return hashlib.sha256(secret.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class BlobFacts:
    """What was found out about an adapter's blob when it was validated.

    digest: SHA-256 of its bytes, 64 lower-case hex digits. gpu_bytes: what it takes on a GPU, in
    the adapter dtype that the service had then. base_model: as it is served here; trained_on: as
    the blob calls it, "" if it does not. touches, trained_on: None of what was registered by a
    release that did not record them.
    """

    digest: str
    size_bytes: int
    max_rank: int
    base_model: str
    gpu_bytes: int
    touches: TouchedModules | None = field(default=None, kw_only=True)
    trained_on: str | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class VersionRecord(BlobFacts):
    """One immutable version of an adapter. created: Unix seconds."""

    version: int
    created: float
    retired: bool = False


@dataclass(frozen=True, slots=True)
class AliasShare:
    """The fraction of an alias's requests that a second version gets: 0 < fraction < 1."""

    version: int
    fraction: float


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """An adapter with every version it ever had.

    versions[i].version is i + 1. An alias always points to a version that is not retired, and so
    does its share. alias_history: what each alias pointed to before, oldest first; a rollback goes
    back along it. shared: every tenant may use it. retired_at: the number of the log entry that
    last retired the whole adapter.
    """

    tenant: str
    name: str
    shared: bool = False
    versions: tuple[VersionRecord, ...] = ()
    aliases: Mapping[str, int] = field(default_factory=dict)
    alias_history: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    shares: Mapping[str, AliasShare] = field(default_factory=dict)
    retired_at: int | None = None

    @property
    def label(self) -> str:
        """The adapter as people write it: tenant/name."""
        return f"{self.tenant}/{self.name}"

    @property
    def retired(self) -> bool:
        """Whether no version is left to use; registering a new one brings the adapter back."""
        return all(version.retired for version in self.versions)

    def retired_since(self, seq: int) -> bool:
        """Whether the whole adapter was retired after this entry of the log."""
        return self.retired_at is not None and self.retired_at > seq

    def version(self, number: int) -> VersionRecord | None:
        """The version of this number, retired or not."""
        return self.versions[number - 1] if 1 <= number <= len(self.versions) else None

    def select(self, selector: str, session: str | None = None) -> VersionRecord | None:
        """The usable version that an alias, a version number or a digest names.

        session: where an alias shares its requests, the same session always gets the same version,
        and one that is with the second stays there while its share grows. None: the first.
        """
        if is_digest(selector):
            return self.with_digest(selector)
        number = int(selector) if selector.isdecimal() else self.aliases.get(selector)
        share = self.shares.get(selector) if session is not None else None
        if share and _hash_fraction(f"{self.label}@{selector} {session}") < share.fraction:
            number = share.version
        version = None if number is None else self.version(number)
        return None if version is None or version.retired else version

    def selected(self, selector: str) -> tuple[VersionRecord, ...]:
        """Every usable version that requests for this selector get."""
        numbers = [share.version] if (share := self.shares.get(selector)) else []
        found = (self.select(selector), *map(self.version, numbers))
        return tuple(version for version in found if version is not None)

    def with_digest(self, digest: str) -> VersionRecord | None:
        """The newest usable version that holds this blob."""
        found = (v for v in reversed(self.versions) if v.digest == digest and not v.retired)
        return next(found, None)

    def aliases_of(self, number: int) -> tuple[str, ...]:
        """The aliases that point to this version or give it a share, sorted."""
        shared = (alias for alias, share in self.shares.items() if share.version == number)
        return tuple(sorted({*shared, *(a for a, at in self.aliases.items() if at == number)}))

    def ref(self, version: VersionRecord) -> AdapterRef:
        """What this version is called everywhere else."""
        return AdapterRef(self.tenant, self.name, version.version, version.digest)


@dataclass(frozen=True, slots=True)
class TenantState:
    """A tenant with its adapters by name, retired ones too, and the ids of its keys."""

    record: TenantRecord
    adapters: Mapping[str, AdapterRecord] = field(default_factory=dict)
    key_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PinKey:
    """What there is one pin of: an adapter, or with name None all of a tenant."""

    tenant: str
    name: str | None

    def __lt__(self, other: "PinKey") -> bool:
        """Order by tenant and name; all of a tenant comes before each of its adapters."""
        return (self.tenant, self.name or "") < (other.tenant, other.name or "")


@dataclass(frozen=True, slots=True)
class PinRecord:
    """A promise that an adapter stays at least as near to the GPU as `tier`.

    name None: every adapter of the tenant, now and later. selector: an alias, which is followed as
    it moves, or a version number. replicas None: on all replicas of its base model. priority:
    where not all pins fit, the higher one is kept, then the older one. expires: Unix seconds, None
    is never. created: since when there was a pin, however often its options have changed.
    """

    tenant: str
    name: str | None
    selector: str
    tier: Residency
    replicas: int | None
    priority: int
    reason: str
    expires: float | None
    created: float
    actor: str

    @property
    def key(self) -> PinKey:
        """What there is one pin for: an adapter, or a tenant."""
        return PinKey(self.tenant, self.name)

    @property
    def label(self) -> str:
        """tenant/name@selector, or the tenant alone."""
        return self.tenant if self.name is None else f"{self.tenant}/{self.name}@{self.selector}"

    def expired(self, now: float) -> bool:
        """Whether the promise ended at or before `now`, Unix seconds."""
        return self.expires is not None and self.expires <= now


def _hash_fraction(name: str) -> float:
    """A fraction in [0, 1) that is always the same for one name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48
