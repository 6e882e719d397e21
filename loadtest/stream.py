"""The client's side: one streamed chat completion, with the time at which each piece arrived."""

import http.client
import ipaddress
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

SILENCE_S = 120.0
"""A server that says nothing for so long has failed the request."""


class RequestFailed(Exception):
    """A request without a complete answer; the message is short, so that failures group."""


@dataclass(slots=True)
class Answer:
    """What came back. residency: where the adapter was when the request arrived; none: base model.

    pieces_s: time.perf_counter() at every piece of text. A piece is one event with text in it:
    as a rule one token, more where a token ends inside a character.
    """

    residency: str = "none"
    pieces_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Server:
    """An OpenAI-compatible server on this machine, reached with one connection a request."""

    host: str
    port: int

    @classmethod
    def at(cls, url: str) -> "Server":
        """Raises ValueError for anything but http on a loopback address."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url}: want http://127.0.0.1:<port>")
        for *_, address in socket.getaddrinfo(parts.hostname, parts.port or 80):
            if not ipaddress.ip_address(address[0]).is_loopback:
                raise ValueError(f"{url} is not this machine: forward a local port to it")
        return cls(parts.hostname, parts.port or 80)

    def models(self, key: str) -> dict[str, str | None]:
        """GET /v1/models: each model's base model, None if it is one. Raises RequestFailed."""
        with self._request("GET", "/v1/models", key) as response:
            return {model["id"]: model["parent"] for model in json.load(response)["data"]}

    def chat(self, key: str, model: str, text: str, output_tokens: int) -> Answer:
        """Stream one answer of exactly output_tokens tokens. Raises RequestFailed."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": output_tokens,
            "min_tokens": output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with self._request("POST", "/v1/chat/completions", key, body) as response:
            return _read(response)

    @contextmanager
    def _request(
        self, method: str, path: str, key: str, body: dict[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        connection = http.client.HTTPConnection(self.host, self.port, timeout=SILENCE_S)
        try:
            connection.request(method, path, json.dumps(body) if body else None, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise RequestFailed(_reason(response.status, response.read()))
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise RequestFailed(type(error).__name__) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RequestFailed(f"not the OpenAI protocol: {error!r}") from error
        finally:
            connection.close()


def _read(response: http.client.HTTPResponse) -> Answer:
    answer = Answer(residency=response.headers.get("x-lorikeet-residency", "none"))
    for event in _events(response):
        if "error" in event:
            raise RequestFailed(f"mid-stream: {event['error'].get('code')}")
        if any(choice["delta"].get("content") for choice in event["choices"]):
            answer.pieces_s.append(time.perf_counter())
        if usage := event.get("usage"):
            answer.prompt_tokens = usage["prompt_tokens"]
            answer.completion_tokens = usage["completion_tokens"]
    if not answer.pieces_s:
        raise RequestFailed("an answer without text")
    return answer


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON of every server-sent event up to [DONE]. Raises RequestFailed if that is missing."""
    while line := response.readline():
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        yield json.loads(data)
    raise RequestFailed("the stream broke off")


def _reason(status: int, body: bytes) -> str:
    try:
        return f"{status} {json.loads(body)['error']['code']}"
    except (ValueError, KeyError, TypeError):
        return str(status)
