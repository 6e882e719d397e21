"""Client that pushes versions of one adapter to the real service, and times them."""

import asyncio
import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import httpx

from loadtest.client import Server, Session, encode_requests, send_all
from loadtest.report import all_whole
from loadtest.streamed_answer import LoadRequest
from lorikeet.protocol.pushing import ExpectPushed, HoldPushed, HoldState, PushMessage
from lorikeet.serving.deployments import EngineReplica

NAME = "policy"
FIRST_ALPHA = 32.00001
"""Alpha of the first version; versions count its last five digits up."""
_PROBE_TOKENS = 256
_PIECE_BYTES = 2**20
_LIFETIME_S, _KEEP = 600, 2


class NewVersions:
    """Blob of an adapter in memory; `renew` turns it into the next version."""

    def __init__(self, blob: bytes) -> None:
        self._blob, self._number = bytearray(blob), 1
        self._at = blob.index(str(FIRST_ALPHA).encode())
        self.size = len(blob)

    def renew(self) -> str:
        """Change alpha to the next version's; return the new digest."""
        self._number += 1
        alpha = f"{FIRST_ALPHA + (self._number - 1) * 1e-5:.5f}".encode()
        self._blob[self._at : self._at + len(alpha)] = alpha
        return hashlib.sha256(self._blob).hexdigest()

    def pieces(self) -> Iterator[bytes]:
        """Yield the blob in pieces for sending."""
        whole = memoryview(self._blob)
        for at in range(0, self.size, _PIECE_BYTES):
            yield bytes(whole[at : at + _PIECE_BYTES])


@dataclass(frozen=True, slots=True)
class PushTimes:
    """Times of one push, in seconds. Fields after `sent` are consecutive stages.

    first_token: from the first byte sent to the first token of the slowest replica.
    sent: from the first byte until the last byte was handed to the socket; overlaps `receive`.
    receive, check, deliver, announce: stages of the gateway.
    network: time of the PUT outside the gateway's stages.
    answer: from the answer to the PUT to the first token of the slowest replica.
    """

    first_token: float
    sent: float
    receive: float
    check: float
    deliver: float
    announce: float
    network: float
    answer: float


class FarReplica(EngineReplica):
    """Replica that sees none of its gateways' files, as on another machine."""

    async def push(self, message: PushMessage) -> HoldState:
        """Do what a gateway asks, except taking the gateway's file."""
        if isinstance(message, ExpectPushed):
            return HoldState.LACKING
        if isinstance(message, HoldPushed):
            message = HoldPushed(message.ref, "/of/another/machine")
        return await super().push(message)


class Pusher:
    """Client that pushes versions to one service, and requests them from each of its replicas."""

    def __init__(
        self,
        server: Server,
        publish_key: str,
        versions: NewVersions,
        base_model: str,
        replicas: int,
    ) -> None:
        self._server, self._replicas, self._versions = server, replicas, versions
        self._query: dict[str, str | float] = {
            "base_model": base_model,
            "lifetime_s": _LIFETIME_S,
            "keep": _KEEP,
        }
        self._http = httpx.Client(base_url=server.url, timeout=120)
        self._publish = {
            "authorization": f"Bearer {publish_key}",
            "content-length": str(versions.size),
        }
        self._seeds = count()
        self._model = ""

    def push(self) -> PushTimes:
        """Push the next version; return its times.

        Raises RuntimeError if the service refuses the push or an answer is incomplete,
        httpx.HTTPError if it does not answer.
        """
        digest = self._versions.renew()
        sent_s = 0.0

        def body() -> Iterator[bytes]:
            nonlocal sent_s
            yield from self._versions.pieces()
            sent_s = time.monotonic()

        began_s = time.monotonic()
        answer = self._http.put(
            f"/v1/adapters/{NAME}/versions/{digest}",
            params=self._query,
            headers=self._publish,
            content=body(),
        )
        ready_s = time.monotonic()
        if answer.status_code != 201:
            raise RuntimeError(f"a push was answered {answer.status_code}: {answer.text}")
        self._model = answer.json()["model"]
        ended_s = self.ask()
        stages = self._stages(answer.headers["x-request-id"])
        told_s = sum(stages.values())
        return PushTimes(
            first_token=ended_s - began_s,
            sent=sent_s - began_s,
            **{name: stages[name] for name in ("receive", "check", "deliver", "announce")},
            network=ready_s - began_s - told_s + stages["rest"],
            answer=ended_s - ready_s,
        )

    def ask(self) -> float:
        """Request the newest version from each replica; return time.monotonic() of the slowest
        one's first token.

        The seeds of the requests count up and so choose the replicas. Raises RuntimeError.
        """
        began_s = time.monotonic()
        sessions = [Session(0.0, (self._probe(),)) for _ in range(self._replicas)]
        requests = encode_requests(self._server, sessions)
        answers = all_whole(asyncio.run(send_all(self._server.url, sessions, requests, began_s)))
        answered = {answer.replica for answer in answers}
        if len(answered) < self._replicas:
            raise RuntimeError(f"only {sorted(answered)} answered for {self._model}")
        return began_s + max(answer.deltas_s[0] for answer in answers)

    def _probe(self) -> LoadRequest:
        return LoadRequest(self._model, _PROBE_TOKENS, 1, seed=next(self._seeds))

    def _stages(self, request_id: str) -> dict[str, float]:
        headers = {"authorization": f"Bearer {self._server.key}"}
        told = self._http.get(f"/v1/requests/{request_id}", headers=headers).raise_for_status()
        return {each["stage"]: each["ms"] / 1000 for each in told.json()["stages"]}
