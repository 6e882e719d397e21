"""Client for trainers: pushes versions of an adapter, and samples from one exact version.

lorikeet = Client("http://127.0.0.1:8000", key="lk_…", publish_key="lk_…")
version = lorikeet.push(Path("checkpoint-500"), "policy")
choices = lorikeet.sample(version, prompt_ids, n=8, max_tokens=64)
"""

import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import httpx

from lorikeet.errors import InvalidInput, LorikeetError, Unavailable
from lorikeet.parity.peft_probes import peft_probes as peft_probes  # for trainers to import
from lorikeet.parity.probes import Probes
from lorikeet_engine.adapter_format import write_blob

_RETRY_PAUSE_S = 0.5
_WHOLE_DISTRIBUTION = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
_SAMPLE_RETRIES_S = 60.0
"""Seconds for which a request for samples is repeated while the service is busy or down."""
_AWAY = frozenset({429, 502, 503, 504})

Wait = Literal["none", "ready", "durable"]


class TrainersConfig(Protocol):
    """Interface of PEFT's LoraConfig that a push uses."""

    def save_pretrained(self, folder: str) -> None:
        """Write adapter_config.json into a folder."""


@dataclass(frozen=True, slots=True)
class PushResult:
    """State of a pushed version, by the service's last answer.

    adapter: tenant/name.
    model: value of `model` in requests for this version.
    digest: SHA-256 of the adapter's file of weights and config, in hex.
    version: number of the version; None until the version is durable.
    ready: whether every replica has the version.
    durable: whether the catalog's store has the version, so that restarts keep it.
    parity: differences of a replica's log-probabilities from the trainer's, as JSON; None if it
        was pushed without probes.
    """

    adapter: str
    model: str
    digest: str
    version: int | None
    ready: bool
    durable: bool
    parity: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class SampledChoice:
    """Answer that `sample` returned.

    logprobs: log probability of each of token_ids, including the token that ended the answer.
    digest: SHA-256 of the adapter that generated the answer; None if the base model generated it.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: str
    digest: str | None


class Client:
    """Client of one service. Threads may share it. Close it with `close`."""

    def __init__(
        self, address: str, key: str, publish_key: str | None = None, timeout_s: float = 600.0
    ) -> None:
        """Make a client. Raises InvalidInput for a malformed address or key.

        address: URL of the tenants' API.
        key: API key for samples.
        publish_key: API key for pushes; `lorikeet keys create --publish` makes one.
        timeout_s: seconds to wait for each answer.
        """
        if not address.startswith(("http://", "https://")):
            raise InvalidInput(
                f"{address!r}: want an address such as http://127.0.0.1:8000", param="address"
            )
        for name, given in {"key": key, "publish_key": publish_key or ""}.items():
            if not (given.isascii() and given.isprintable()):
                raise InvalidInput(
                    f"{name} holds characters that no key has: copy it again, as it was printed",
                    param=name,
                )
        self._key, self._publish_key = key, publish_key
        self._http = httpx.Client(base_url=address, timeout=timeout_s)

    def push(
        self,
        weights: str | Path | Mapping[str, Any],
        name: str,
        *,
        config: TrainersConfig | None = None,
        alias: str | None = None,
        wait: Wait = "ready",
        lifetime_s: int | None = None,
        keep: int | None = None,
        defaults_of: str | None = None,
        timeout_s: float = 60.0,
        probes: Probes | None = None,
        warn_above: float | None = None,
        refuse_above: float | None = None,
    ) -> PushResult:
        """Send a version of an adapter, and return once it has reached a state.

        Repeats the request while the service is busy or unavailable. Repeats are safe: equal bytes
        make one version.

        weights: PEFT's folder, or get_peft_model_state_dict's tensors with their `config`.
        name: the adapter's name, without its tenant.
        alias: alias to point at the version.
        wait: the state: ready (every replica has the version), durable (the catalog's store has
            it) or none (it is checked).
        lifetime_s: seconds after which the version is deleted; such an ephemeral version never
            becomes durable. None: the version is kept.
        keep: maximum number of ephemeral versions of the adapter; older ones are deleted.
        defaults_of: alias or number of the adapter's version whose own chat template, system prompt
            and other request defaults the version gets; None: the base model's.
        timeout_s: seconds until the version must have reached the state.
        probes: the trainer's log-probabilities, from `peft_probes`, with which a replica's are
            compared before the version is accepted.
        warn_above, refuse_above: mean differences, in nats, above which the comparison gives a
            Python warning, and above which the version is refused; None: the service's defaults.

        Raises AdapterRejected if the weights are no acceptable adapter, LorikeetError with the
        service's code if the service refuses them, and Unavailable after timeout_s.
        """
        deadline_s = time.monotonic() + timeout_s
        with tempfile.TemporaryDirectory() as work:
            blob, folder = Path(work, "blob"), Path(work)
            if isinstance(weights, Mapping):
                _save(weights, config, folder)
            else:
                folder = Path(weights)
            path = _path(
                name, write_blob(folder, blob, lambda said: warnings.warn(said, stacklevel=3))
            )
            wanted: dict[str, object] = {
                "wait": wait,
                "timeout_s": f"{timeout_s:g}",
                "alias": alias,
            }
            wanted |= {"lifetime_s": lifetime_s, "keep": keep, "defaults_of": defaults_of}
            if probes is not None:
                head = probes.model_dump_json(exclude_defaults=True).encode()
                blob.write_bytes(head + blob.read_bytes())
                wanted |= {"probes_bytes": len(head), "warn_above": warn_above}
                wanted["refuse_above"] = refuse_above
            query = {field: str(value) for field, value in wanted.items() if value is not None}
            version = _version(self._ask("PUT", path, deadline_s, self._publishing(), query, blob))
        if version.parity is not None and version.parity["verdict"] == "warned":
            warnings.warn(f"{version.model}: {version.parity['reason']}", stacklevel=2)
        if wait != "none" and not getattr(version, wait):
            raise Unavailable(f"{version.model} is not {wait} yet: ask for its status later")
        return version

    def status(self, version: PushResult) -> PushResult:
        """Return the current state of a version. Raises LorikeetError if it no longer exists."""
        path = _path(version.adapter.partition("/")[2], version.digest)
        return _version(self._ask("GET", path, time.monotonic(), self._publishing()))

    def sample(
        self, model: PushResult | str, prompt: str | Sequence[int], **fields: Any
    ) -> list[SampledChoice]:
        """Return the n choices that the service samples for a prompt, with token ids and log
        probabilities.

        The choices are drawn from the model's whole distribution at temperature 1 unless `fields`
        say otherwise, whatever defaults the base model's generation_config.json has.

        Repeats the request for a minute while the service is busy or unavailable.

        model: a pushed version, or the value of `model` in requests.
        prompt: text or token ids.
        fields: fields of a completion request, such as n, max_tokens and temperature; fields whose
            value is None are left out.

        Raises LorikeetError with the service's code if the service answers with an error.
        """
        if fields.get("stream"):
            raise InvalidInput("samples are not streamed: leave stream out", param="stream")
        name = model if isinstance(model, str) else model.model
        given = {field: value for field, value in fields.items() if value is not None}
        asked = {"model": name, "prompt": prompt, "logprobs": 0, "return_token_ids": True}
        body = {**asked, **_WHOLE_DISTRIBUTION, **given}
        deadline_s = time.monotonic() + _SAMPLE_RETRIES_S
        answer = self._ask("POST", "/v1/completions", deadline_s, self._key, body=body)
        digest = answer.get("adapter", {}).get("digest")
        return [
            SampledChoice(
                prompt_ids=tuple(choice["prompt_token_ids"]),
                token_ids=tuple(choice["token_ids"]),
                logprobs=tuple(choice["logprobs"]["token_logprobs"]),
                text=choice["text"],
                finish_reason=choice["finish_reason"],
                digest=digest,
            )
            for choice in answer["choices"]
        ]

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def _publishing(self) -> str:
        if self._publish_key is None:
            raise InvalidInput(
                "a push needs a publish_key, which `lorikeet keys create --publish` makes",
                param="publish_key",
            )
        return self._publish_key

    def _ask(
        self,
        method: str,
        path: str,
        deadline_s: float,
        key: str,
        query: Mapping[str, str] | None = None,
        blob: Path | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Send a request, and repeat it until the deadline while the service is busy or down.

        Returns the answer's JSON. Raises LorikeetError if the service answers with an error, and
        Unavailable if it is still down at the deadline.

        deadline_s: time.monotonic() after which the request is not repeated.
        key: API key.
        blob: file to send as the body.
        body: JSON to send as the body.
        """
        headers = {"authorization": f"Bearer {key}"}
        while True:
            content = blob.open("rb") if blob else None
            try:
                answer = self._http.request(
                    method, path, params=query, headers=headers, content=content, json=body
                )
                failure, retry_s = _failure(answer), float(answer.headers.get("retry-after", 0))
                away = answer.status_code in _AWAY or isinstance(failure, Unavailable)
            except httpx.TransportError as error:
                failure, retry_s, away = self._no_answer(error), 0.0, True
            finally:
                if content is not None:
                    content.close()
            if failure is None:
                return dict(answer.json())
            pause_s = max(retry_s, _RETRY_PAUSE_S)
            if not away or time.monotonic() + pause_s > deadline_s:
                raise failure
            time.sleep(pause_s)

    def _no_answer(self, error: httpx.TransportError) -> Unavailable:
        return Unavailable(f"no answer from {self._http.base_url}: {error or type(error).__name__}")


def _save(weights: Mapping[str, Any], config: TrainersConfig | None, folder: Path) -> None:
    """Write an adapter's tensors and their config into a folder, as PEFT does."""
    from safetensors.torch import save_file  # imports torch, which pushing a folder does not need

    if config is None:
        raise LorikeetError("tensors need their config: give model.peft_config['default']")
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()},
        folder / "adapter_model.safetensors",
    )
    config.save_pretrained(str(folder))


def _path(name: str, digest: str) -> str:
    if "/" in name:
        raise InvalidInput(
            f"{name!r}: want the adapter's name without its tenant, which follows from the key",
            param="name",
        )
    return f"/v1/adapters/{name}/versions/{digest}"


def _version(answer: Mapping[str, Any]) -> PushResult:
    return PushResult(**{name: answer[name] for name in PushResult.__slots__ if name in answer})


def _failure(answer: httpx.Response) -> LorikeetError | None:
    """Return the error in an answer, with the service's message; None if the answer has no
    error.
    """
    if not answer.is_error:
        return None
    try:
        problem = answer.json()["error"]
        failure = LorikeetError(problem["message"], param=problem.get("param"))
        failure.code = problem["code"]
    except (ValueError, KeyError, TypeError):  # the answer of a proxy without a gateway
        failure = Unavailable(f"{answer.request.url} answered {answer.status_code}")
    return failure
