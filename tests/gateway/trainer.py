"""Client of a trainer with a publish key."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from lorikeet.catalog.records import Scope
from tests.gateway.conftest import Gateway, make_blob


class Trainer:
    """Trainer with a publish key for acme's adapters whose names begin with policy."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.key_id, self.key = self.new_key()

    def new_key(self, **limits: Any) -> tuple[str, str]:
        record, secret = self.gateway.catalog.create_key(
            "acme", {Scope.PUBLISH}, adapters=("policy*",), actor="test", **limits
        )
        return record.id, secret

    def blob(self, seed: int = 1, **peft: Any) -> bytes:
        return make_blob(self.gateway.folder / "pushed", seed=seed, **peft)

    def push(
        self,
        blob: bytes | Iterator[bytes],
        name: str = "policy",
        key: str | None = None,
        digest: str | None = None,
        headers: Mapping[str, str] = {},
        **query: Any,
    ) -> httpx.Response:
        if digest is None:
            assert isinstance(blob, bytes)
            digest = hashlib.sha256(blob).hexdigest()
        path = f"/v1/adapters/{name}/versions/{digest}"
        return self.gateway.request(
            "PUT", path, key or self.key, content=blob, params=query, more_headers=headers
        )

    def show(self, digest: str, name: str = "policy") -> httpx.Response:
        return self.gateway.request("GET", f"/v1/adapters/{name}/versions/{digest}", self.key)


def digest_of(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()
