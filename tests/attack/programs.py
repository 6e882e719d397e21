"""Attacks of a tenant with a valid key, one program for each kind.

python -m tests.attack.programs NAME URL SECONDS [MODEL ...]

The key is in ATTACK_KEY; MODELs are adapters that no replica holds. Prints the outcomes as JSON.
"""

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.gateway.test_costly_bodies import FULL, list_of, with_padding, with_tools

BASE = "lorikeet-demo"
CHAT = "/v1/chat/completions"
CONNECTIONS = 1300
SPACE = "38"
"""The demo tokenizer's token for a space."""
_PATIENCE_S = 60.0
_KEPT_OPEN_S = 10.0
_UNREAD_S = 30.0
_BETWEEN_REFUSALS_S = 0.05
_BETWEEN_LOOKS_S = 1.0

Sending = Callable[[], Awaitable[None]]


@dataclass
class Attacker:
    """Tenant that sends requests until a deadline.

    seen: number of requests by status or exception.
    """

    url: str
    key: str
    cold_models: Sequence[str]
    until_s: float
    client: httpx.AsyncClient
    seen: Counter[str] = field(default_factory=Counter)

    async def repeat(self, clients: int, send: Sending) -> None:
        """Run `clients` clients that send one request after the other."""
        await asyncio.gather(*(self._repeat(send) for _ in range(clients)))

    async def post(self, body: Any, **headers: str) -> None:
        """Send a request and read its whole answer."""
        answer = await self.client.post(
            self.url + CHAT, content=_encoded(body), headers=self._headers(headers)
        )
        self.seen[str(answer.status_code)] += 1
        if answer.status_code in (429, 503):
            await asyncio.sleep(_BETWEEN_REFUSALS_S)

    async def hang_up(self, body: Any) -> None:
        """Send a request and disconnect at the first byte of its answer."""
        request = {"content": _encoded(body), "headers": self._headers({})}
        async with self.client.stream("POST", self.url + CHAT, **request) as answer:  # type: ignore[arg-type]
            self.seen[str(answer.status_code)] += 1
            async for _ in answer.aiter_raw():
                return

    async def send_half(self) -> None:
        """Send a request whose body never comes; wait for the service to answer or disconnect."""
        url = httpx.URL(self.url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: {url.host}\r\nauthorization: Bearer {self.key}\r\n"
        try:
            writer.write(f"{head}content-length: 1000\r\n\r\n{{".encode())
            line = (await asyncio.wait_for(reader.readline(), _PATIENCE_S)).decode()
            self.seen[line.split()[1] if line else "closed"] += 1
            left_s = self.until_s - time.monotonic()
            await asyncio.sleep(min(_KEPT_OPEN_S, left_s))  # pause: a flood would be another attack
        finally:
            writer.close()

    async def leave_unread(self, body: Any) -> None:
        """Send a request, check that its answer begins, and read no more of it for a while."""
        url, content = httpx.URL(self.url), _encoded(body)
        asking = socket.socket()
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)  # kernel takes little
        asking.setblocking(False)
        with asking:
            loop = asyncio.get_running_loop()
            await loop.sock_connect(asking, (url.host, url.port))
            head = f"POST {CHAT} HTTP/1.1\r\nhost: {url.host}\r\nauthorization: Bearer {self.key}"
            head += f"\r\ncontent-length: {len(content)}\r\n\r\n"
            await loop.sock_sendall(asking, head.encode() + content)
            line = await asyncio.wait_for(loop.sock_recv(asking, 12), _PATIENCE_S)
            self.seen[line[9:].decode() or "closed"] += 1
            await asyncio.sleep(min(_UNREAD_S, self.until_s - time.monotonic()))

    def _headers(self, more: Mapping[str, str]) -> dict[str, str]:
        named = {name.replace("_", "-"): value for name, value in more.items()}
        return {"authorization": f"Bearer {self.key}", **named}

    async def _repeat(self, send: Sending) -> None:
        while (left_s := self.until_s - time.monotonic()) > 0:
            try:
                await asyncio.wait_for(send(), left_s + 1)
            except TimeoutError:
                self.seen["under way at the end"] += 1
            except (httpx.HTTPError, OSError) as error:
                self.seen[type(error).__name__] += 1

    async def upload(self, content: bytes) -> str | None:
        """Upload the input of a batch; return its id, None if it is refused."""
        answer = await self.client.post(
            f"{self.url}/v1/files",
            files={"file": ("input.jsonl", content)},
            data={"purpose": "batch"},
            headers=self._headers({}),
        )
        self.seen[f"file {answer.status_code}"] += 1
        if answer.is_success:
            file_id: str = answer.json()["id"]
            return file_id
        await asyncio.sleep(_BETWEEN_REFUSALS_S)
        return None

    async def run_batch(self, file_id: str) -> None:
        """Create a batch, and wait until it ends."""
        asked = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        answer = await self.client.post(
            f"{self.url}/v1/batches", json=asked, headers=self._headers({})
        )
        self.seen[f"batch {answer.status_code}"] += 1
        status = "" if answer.is_success else "refused"
        while status not in ("completed", "failed", "cancelled", "refused"):
            await asyncio.sleep(_BETWEEN_LOOKS_S)
            at = f"{self.url}/v1/batches/{answer.json()['id']}"
            shown = await self.client.get(at, headers=self._headers({}))
            if shown.is_success:
                status = shown.json()["status"]
        self.seen[f"batch {status}"] += 1
        if status == "refused":
            await asyncio.sleep(_BETWEEN_LOOKS_S)

    async def delete(self, file_id: str) -> None:
        """Delete a file."""
        await self.client.delete(f"{self.url}/v1/files/{file_id}", headers=self._headers({}))


def chat(**more: Any) -> dict[str, Any]:
    return {"model": BASE, "messages": [{"role": "user", "content": "a few words"}], **more}


def schema(number: int, fields: int = 2000) -> dict[str, Any]:
    """Request with a large JSON schema; each number gives another schema.

    fields: number of properties in the schema.
    """
    properties = {f"field_{number}_{i}": {"type": "string", "maxLength": 9} for i in range(fields)}
    form = {"type": "object", "properties": properties, "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "f", "schema": form}}
    return chat(response_format=wanted, max_tokens=1)


async def bodies_that_never_come(attacker: Attacker) -> None:
    await attacker.repeat(CONNECTIONS, attacker.send_half)


async def no_wait_for_cold_adapters(attacker: Attacker) -> None:
    models = itertools.cycle(attacker.cold_models)

    async def ask() -> None:
        body = chat(max_tokens=4) | {"model": next(models)}
        await attacker.post(body, x_lorikeet_max_adapter_wait_ms="0")

    await attacker.repeat(10, ask)


async def cold_adapters(attacker: Attacker) -> None:
    models = itertools.cycle(attacker.cold_models)
    clients = len(attacker.cold_models) // 2
    await attacker.repeat(
        clients, lambda: attacker.post(chat(max_tokens=4) | {"model": next(models)})
    )


async def unknown_keys(attacker: Attacker) -> None:
    async def ask() -> None:
        await attacker.post(chat(), authorization=f"Bearer lk_{secrets.token_urlsafe(32)}")

    await attacker.repeat(20, ask)


async def unread_streams(attacker: Attacker) -> None:
    body = chat(n=16, max_tokens=900, logprobs=True, top_logprobs=20, ignore_eos=True, stream=True)
    await attacker.repeat(16, lambda: attacker.leave_unread(body))


async def large_answers(attacker: Attacker) -> None:
    body = chat(n=16, max_tokens=920, logprobs=True, top_logprobs=20, ignore_eos=True)
    await attacker.repeat(2, lambda: attacker.post(body))


async def a_hundred_schemas(attacker: Attacker) -> None:
    bodies = itertools.cycle([_encoded(schema(number)) for number in range(100)])
    await attacker.repeat(100, lambda: attacker.post(next(bodies)))


async def costly_schemas(attacker: Attacker) -> None:
    numbers = itertools.count()

    async def ask() -> None:
        await attacker.post(schema(next(numbers), fields=10_000))

    await attacker.repeat(10, ask)


async def tools_of_8_mib(attacker: Attacker) -> None:
    lists = list_of("[]", FULL)
    made = (make(lists).replace("acme/support", BASE) for make in (with_tools, with_padding))
    bodies = itertools.cycle(list(map(_encoded, made)))
    await attacker.repeat(4, lambda: attacker.post(next(bodies)))


async def whitespace_in_calls(attacker: Attacker) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = chat(tools=[tool], logit_bias={SPACE: 100}, ignore_eos=True, max_tokens=900, stream=True)
    await attacker.repeat(10, lambda: attacker.post(body))


async def hang_ups(attacker: Attacker) -> None:
    body = chat(max_tokens=900, ignore_eos=True, stream=True)
    await attacker.repeat(20, lambda: attacker.hang_up(body))


def batch_line(number: int, **more: Any) -> bytes:
    body = chat(max_tokens=4) | more
    line = {"custom_id": f"{number}", "method": "POST", "url": CHAT, "body": body}
    return json.dumps(line).encode() + b"\n"


async def inputs(attacker: Attacker, content: bytes) -> None:
    """Upload an input, run it as a batch and delete it, again and again."""

    async def run() -> None:
        file_id = await attacker.upload(content)
        if file_id is not None:
            try:
                await attacker.run_batch(file_id)
            finally:
                await attacker.delete(file_id)

    await attacker.repeat(4, run)


async def a_million_lines(attacker: Attacker) -> None:
    first, last = batch_line(-1).split(b"-1")
    await inputs(attacker, b"".join(b"%b%d%b" % (first, i, last) for i in range(10**6)))


async def a_million_blank_lines(attacker: Attacker) -> None:
    await inputs(attacker, b"\n" * (64 * 2**20))


async def one_huge_line(attacker: Attacker) -> None:
    await inputs(attacker, batch_line(0, user="a" * (150 * 2**20)))


async def lines_of_many_values(attacker: Attacker) -> None:
    line = batch_line(0, tools=0).replace(
        b'"tools": 0', b'"tools": ' + list_of("[]", FULL).encode()
    )
    await inputs(attacker, 20 * line)


async def a_hundred_batches(attacker: Attacker) -> None:
    content = b"".join(batch_line(number, max_tokens=200) for number in range(2000))
    while (file_id := await attacker.upload(content)) is None:
        pass
    await attacker.repeat(100, lambda: attacker.run_batch(file_id))


ATTACKS: dict[str, Callable[[Attacker], Awaitable[None]]] = {
    each.__name__: each
    for each in (
        bodies_that_never_come,
        no_wait_for_cold_adapters,
        large_answers,
        a_hundred_schemas,
        costly_schemas,
        tools_of_8_mib,
        whitespace_in_calls,
        hang_ups,
        unread_streams,
        cold_adapters,
        unknown_keys,
        a_million_lines,
        a_million_blank_lines,
        one_huge_line,
        lines_of_many_values,
        a_hundred_batches,
    )
}


def _encoded(body: Any) -> bytes:
    if isinstance(body, bytes):
        return body
    return (body if isinstance(body, str) else json.dumps(body)).encode()


def give_way() -> None:
    """Lower this process's priority, as a real attacker would compute on another machine.

    Starts a session of its own: Linux shares cores between sessions before it compares niceness
    within one.
    """
    os.nice(19)
    with contextlib.suppress(OSError):  # started by hand, or a kernel that does not group sessions
        os.setsid()
        Path("/proc/self/autogroup").write_text("19", encoding="ascii")


async def main(name: str, url: str, seconds: float, cold_models: Sequence[str]) -> None:
    give_way()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=_PATIENCE_S, limits=limits) as client:
        until_s = time.monotonic() + seconds
        attacker = Attacker(url, os.environ["ATTACK_KEY"], cold_models, until_s, client)
        await ATTACKS[name](attacker)
    print(json.dumps(attacker.seen))


if __name__ == "__main__":
    _, name, url, seconds, *cold_models = sys.argv
    asyncio.run(main(name, url, float(seconds), cold_models))
