"""Records of the catalog: tenants, keys, adapters with their versions, and pins."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase

from lorikeet.catalog.names import is_digest
from lorikeet.parity.figures import Parity
from lorikeet.request_defaults import RequestDefaults
from lorikeet_engine.adapter import AdapterRef, Embedder, Head, Residency, TouchedModules


class Scope(Enum):
    """Permission of a key.

    INFER: send a tenant's requests to models.
    ADMIN: change the catalog.
    READ_ONLY: read everything that an admin, or the key's tenant, may read.
    PUBLISH: push versions of a tenant's adapters, and nothing else.
    """

    INFER = "infer"
    ADMIN = "admin"
    READ_ONLY = "read-only"
    PUBLISH = "publish"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a tenant, or of one key in addition to its tenant's. None: no limit.

    requests_per_min: average rate of requests.
    tokens_per_min: average rate of tokens; prompt and answer count alike.
    burst_s: amount that may arrive at once, in seconds of the average rate.
    max_concurrent: maximum number of requests at once.
    max_context: maximum number of tokens of one prompt plus its answer.
    tokens_per_month: maximum number of tokens in a calendar month, UTC.
    cost_per_month: maximum cost in a calendar month, UTC, in the currency of LORIKEET_PRICES.
    bytes_per_min: average rate of pushed adapters' bytes.
    """

    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    burst_s: float = 60.0
    max_concurrent: int | None = None
    max_context: int | None = None
    tokens_per_month: int | None = None
    cost_per_month: float | None = None
    bytes_per_min: int | None = None


@dataclass(frozen=True, slots=True)
class TenantRecord:
    """A tenant, which owns adapters and keys, and the limits on the tenant.

    created: Unix seconds.
    weight: weight of the tenant's requests against other tenants' on a busy replica, > 0; default
        1.
    max_adapters: limit on the number of the tenant's usable (not retired) adapters; None: no limit.
    max_total_bytes: limit on the total size of the blobs (files) of all usable versions of the
        tenant's adapters; None: no limit.
    pin_budget_bytes: limit on the total bytes that the tenant's pinned adapters take on a GPU, each
        counted once; None: no limit.
    max_rank: limit on the LoRA rank of each of the tenant's adapters; None: only the service's
        limit applies.
    max_adapter_bytes: limit on the size of each of the tenant's adapters; None: only the service's
        limit applies.
    files_bytes: limit on the bytes of the tenant's files together; None: the service's.
    max_files: limit on the number of the tenant's files; None: the service's.
    open_batches: limit on the tenant's batches that have not ended; None: the service's.
    batch_lines: limit on the lines of the tenant's batches that are answered at once; None: as many
        as the engines run at once.
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
    files_bytes: int | None = None
    max_files: int | None = None
    open_batches: int | None = None
    batch_lines: int | None = None


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """An API key. Its secret is not stored.

    tenant: owner; None for an admin's key.
    sha256: SHA-256 of the secret, 64 hex digits.
    created: Unix seconds.
    name: label for display; "" for none.
    limits: the key's limits, which apply in addition to the tenant's; never monthly ones.
    priority: among a tenant's requests, those with the highest priority begin first.
    expires: end of the key, Unix seconds; None: never.
    replaced_by: id of the key that a rotation made.
    adapters: patterns of adapter names, in which * matches any characters. A publish key may push
        only adapters that match one; a key that infers or reads may use only those, or all if
        there is no pattern.
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
        """Whether the key may push versions of the adapter of this name."""
        allowed = any(fnmatchcase(name, pattern) for pattern in self.adapters)
        return Scope.PUBLISH in self.scopes and allowed

    def may_use(self, owner: str, name: str) -> bool:
        """Whether the key's patterns allow requests for an adapter.

        owner: tenant of the adapter. A pattern without a tenant is for the key's own tenant.
        name: name of the adapter.
        """
        patterns = (each if "/" in each else f"{self.tenant}/{each}" for each in self.adapters)
        label = f"{owner}/{name}"
        return not self.adapters or any(fnmatchcase(label, pattern) for pattern in patterns)

    def expired(self, now: float) -> bool:
        """Whether the key ended at or before `now`, Unix seconds."""
        return self.expires is not None and self.expires <= now


def secret_sha256(secret: str) -> str:
    """Return the SHA-256 (64 hex digits) under which the catalog finds the key of a secret.

    A secret holds 256 random bits, so a plain SHA-256 protects it: guessing is hopeless without the
    cost of a slow hash.
    """
    return hashlib.sha256(secret.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class BlobFacts:
    """Facts about an adapter's blob (file of weights and config), found when it was validated.

    digest: SHA-256 of the bytes, 64 lower-case hex digits.
    base_model: served name of the base model.
    gpu_bytes: size on a GPU, in the service's adapter dtype at the time of validation.
    touches: linear layers and tokens that the adapter changes; None if an older release registered
        it.
    trained_on: base model's name in the blob, "" if absent; None if an older release registered it.
    parity: result of comparing log-probabilities of a replica with the trainer's; None if the
        trainer's were not sent.
    invocation_tokens: tokens from which on an activated LoRA changes a prompt; () for others.
    head: classification or reward head; None for adapters that generate.
    embedder: the adapter's own way of embedding texts; None: the base model's.
    vocabulary: number of tokens of an adapter that has more than its base model; 0 for others.
    """

    digest: str
    size_bytes: int
    max_rank: int
    base_model: str
    gpu_bytes: int
    touches: TouchedModules | None = field(default=None, kw_only=True)
    trained_on: str | None = field(default=None, kw_only=True)
    parity: Parity | None = field(default=None, kw_only=True)
    invocation_tokens: tuple[int, ...] = field(default=(), kw_only=True)
    head: Head | None = field(default=None, kw_only=True)
    embedder: Embedder | None = field(default=None, kw_only=True)
    vocabulary: int = field(default=0, kw_only=True)

    def ref(self, tenant: str, name: str, version: int) -> AdapterRef:
        """Return the AdapterRef that names this blob as version `version` of an adapter."""
        known = self.digest, self.invocation_tokens, self.head, self.embedder, self.vocabulary
        return AdapterRef(tenant, name, version, *known)


@dataclass(frozen=True, slots=True)
class VersionRecord(BlobFacts):
    """One immutable version of an adapter.

    version: number, from 1.
    created: Unix seconds.
    defaults: chat template, system prompt, stops and sampling of requests that set none; None: the
        base model's.
    """

    version: int
    created: float
    retired: bool = False
    defaults: RequestDefaults | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class AliasShare:
    """Second version of an alias, and the fraction of the alias's requests that the second version
    gets.

    0 < fraction < 1.
    """

    version: int
    fraction: float


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """An adapter with every version it ever had.

    Aliases and their shares always point to usable (not retired) versions.

    shared: every tenant may use the adapter.
    versions: versions[i].version is i + 1.
    aliases: version number by alias.
    alias_history: earlier version numbers of each alias, oldest first; rollbacks go back along it.
    shares: by alias, a second version and the fraction of the alias's requests that it gets.
    retired_at: number of the log entry that last retired the whole adapter.
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
        """Label of the adapter: tenant/name."""
        return f"{self.tenant}/{self.name}"

    @property
    def retired(self) -> bool:
        """Whether no version is usable; registering a new version brings the adapter back."""
        return all(version.retired for version in self.versions)

    def retired_since(self, seq: int) -> bool:
        """Whether the whole adapter was retired after entry `seq` of the log."""
        return self.retired_at is not None and self.retired_at > seq

    def version(self, number: int) -> VersionRecord | None:
        """Return the version with this number, retired or not; None if there is none."""
        return self.versions[number - 1] if 1 <= number <= len(self.versions) else None

    def select(self, selector: str, session: str | None = None) -> VersionRecord | None:
        """Return the usable version that an alias, a version number or a digest selects, or None.

        session: name of the request's session, which decides between the two versions of an alias
            with a share. A session always gets the same version, and keeps the second version while
            its share grows. None: the version that the alias points to.
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
        """Return every usable version that requests for this selector may get: two for an alias
        that splits its requests between two versions.
        """
        numbers = [share.version] if (share := self.shares.get(selector)) else []
        found = (self.select(selector), *map(self.version, numbers))
        return tuple(version for version in found if version is not None)

    def with_digest(self, digest: str) -> VersionRecord | None:
        """Return the newest usable version with this blob, or None."""
        found = (v for v in reversed(self.versions) if v.digest == digest and not v.retired)
        return next(found, None)

    def registered(self, digest: str, defaults: RequestDefaults | None) -> VersionRecord | None:
        """Return the newest usable version with this blob and these request defaults, or None."""
        found = (v for v in reversed(self.versions) if v.digest == digest and not v.retired)
        return next((v for v in found if v.defaults == defaults), None)

    def aliases_of(self, number: int) -> tuple[str, ...]:
        """Return the aliases, sorted, that send all or some of their requests to this version."""
        shared = (alias for alias, share in self.shares.items() if share.version == number)
        return tuple(sorted({*shared, *(a for a, at in self.aliases.items() if at == number)}))

    def ref(self, version: VersionRecord) -> AdapterRef:
        """Return the AdapterRef that names this version of the adapter."""
        return version.ref(self.tenant, self.name, version.version)


@dataclass(frozen=True, slots=True)
class TenantState:
    """A tenant with all its adapters by name, retired or not, and the ids of its keys."""

    record: TenantRecord
    adapters: Mapping[str, AdapterRecord] = field(default_factory=dict)
    key_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PinKey:
    """Key of a pin: one adapter, or all adapters of a tenant if name is None."""

    tenant: str
    name: str | None

    def __lt__(self, other: "PinKey") -> bool:
        """Order by tenant and name; the pin of a whole tenant precedes those of its adapters."""
        return (self.tenant, self.name or "") < (other.tenant, other.name or "")


@dataclass(frozen=True, slots=True)
class PinRecord:
    """A promise that an adapter stays loaded at `tier` (disk, host or gpu) or nearer to the GPU.

    name: adapter; None: every adapter of the tenant, now and later.
    selector: an alias, which the pin follows as it moves, or a version number.
    replicas: number of replicas; None: all replicas of the base model.
    priority: if not all pins fit, higher priorities are kept first, then older pins.
    expires: Unix seconds; None: never.
    created: Unix seconds; a change of options does not change it.
    actor: author, such as a key's id.
    prompt: system prompt of the adapter's chats, whose KV pages replicas compute before users ask;
        None: no prompt.
    draft: whether the adapter drafts tokens of all answers of its base model.
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
    prompt: str | None = None
    draft: bool = False

    @property
    def key(self) -> PinKey:
        """Key of the pin."""
        return PinKey(self.tenant, self.name)

    @property
    def label(self) -> str:
        """Label of the pin: tenant/name@selector, or the tenant alone."""
        return self.tenant if self.name is None else f"{self.tenant}/{self.name}@{self.selector}"

    def expired(self, now: float) -> bool:
        """Whether the pin ended at or before `now`, Unix seconds."""
        return self.expires is not None and self.expires <= now


def _hash_fraction(name: str) -> float:
    """Hash a name to a fraction in [0, 1)."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48
