"""Keep selectors on the RayCluster that serves: python -m lorikeet.active_cluster, in a pod.

While KubeRay upgrades, there are two RayClusters, and their pods' labels differ only in the name of
the cluster, which KubeRay makes up. What is meant for the pods that serve names their cluster for
as long as there are two. While there is one, nothing names it and nothing depends on this process.
"""

import logging
import ssl
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from lorikeet.logs import log_to_stderr

log = logging.getLogger("lorikeet.active_cluster")  # run as __main__

_LABEL = "ray.io/cluster"
# The RayService, and the Service that KubeRay keeps on the cluster that serves.
_NAME = "lorikeet"
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_INTERVAL_S = 2  # KubeRay's own
_REST_S = 10
"""Between two attempts where the first failed."""
_TIMEOUT_S = 30


@dataclass(frozen=True, slots=True)
class Selector:
    """The labels by which an object selects pods: the object's path in the API, their field."""

    api: str
    path: str
    field: tuple[str, ...]


SELECTORS = (
    Selector("api/v1", "services/lorikeet-admin", ("spec", "selector")),
    *(
        Selector(
            "apis/policy/v1", f"poddisruptionbudgets/{name}", ("spec", "selector", "matchLabels")
        )
        for name in ("gateways", "engines")
    ),
)


class KubernetesRefusal(Exception):
    """Kubernetes' API did not do what it was asked."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(
            f"Kubernetes answered {response.status_code} to {response.request.method} "
            f"{response.request.url.path}: {response.text}. See the Role `active-cluster` and the "
            "cluster's admission webhooks."
        )
        self.may_pass = response.status_code == 429 or response.is_server_error


class ServiceAccountToken(httpx.Auth):
    """A pod's token, which Kubernetes renews in its file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Send the token with a request."""
        request.headers["authorization"] = f"Bearer {self._file.read_text()}"
        yield request


def follow(api: httpx.Client, namespace: str) -> bool:
    """Let every selector name the cluster that serves if there are two, and else none.

    Return whether all of it was done. What was not is logged, for another attempt, and keeps
    nothing else from being done. Raises KubernetesRefusal where the clusters are refused for good.
    """
    try:
        cluster = _one_of_two(api, namespace)
    except (httpx.TransportError, KubernetesRefusal) as error:
        if isinstance(error, KubernetesRefusal) and not error.may_pass:
            raise
        _log_failure("rayclusters", error)
        return False
    done = [_follow_with(api, namespace, selector, cluster) for selector in SELECTORS]
    return all(done)


def _follow_with(
    api: httpx.Client, namespace: str, selector: Selector, cluster: str | None
) -> bool:
    """Let one selector name the cluster; whether that was done."""
    try:
        _name_cluster(api, namespace, selector, cluster)
    except (httpx.TransportError, KubernetesRefusal) as error:
        _log_failure(selector.path, error)
        return False
    return True


def _name_cluster(
    api: httpx.Client, namespace: str, selector: Selector, cluster: str | None
) -> None:
    path = f"/{selector.api}/namespaces/{namespace}/{selector.path}"
    labels = _read(api, path)
    for key in selector.field:
        labels = labels.get(key, {})
    if labels and labels.get(_LABEL) != cluster:
        change: dict[str, Any] = {_LABEL: cluster}  # None removes it
        for key in reversed(selector.field):
            change = {key: change}
        _patch(api, path, change)
        log.info("selector_changed", extra={"object": selector.path, "cluster": cluster})


def _log_failure(path: str, error: httpx.TransportError | KubernetesRefusal) -> None:
    """Log what was not done for an object, and what to look at."""
    problem = f"{type(error).__name__}: {error}"
    if isinstance(error, httpx.ConnectTimeout):
        problem = (
            f"no connection to Kubernetes' API in {_TIMEOUT_S} s: the NetworkPolicy "
            "`kubernetes-api-from-active-cluster` must let this pod reach the address and port "
            "that `kubectl get endpoints kubernetes` shows"
        )
    log.error("kubernetes_failed", extra={"object": path, "error": problem})


def _one_of_two(api: httpx.Client, namespace: str) -> str | None:
    """Return the cluster that has the tenants' requests; None if it is the only one."""
    found = _read(
        api,
        f"/apis/ray.io/v1/namespaces/{namespace}/rayclusters",
        labelSelector=f"ray.io/originated-from-cr-name={_NAME}",
    )
    clusters = {each["metadata"]["name"] for each in found["items"]}
    service = _read(api, f"/api/v1/namespaces/{namespace}/services/{_NAME}")
    serving = service.get("spec", {}).get("selector", {}).get(_LABEL)
    return serving if serving in clusters and len(clusters) > 1 else None


def _read(api: httpx.Client, path: str, **params: str) -> dict[str, Any]:
    """Return an object; {} if it is not there."""
    response = api.get(path, params=params)
    if response.status_code == httpx.codes.NOT_FOUND and not params:
        return {}
    return _answer(response)


def _patch(api: httpx.Client, path: str, change: dict[str, Any]) -> None:
    headers = {"content-type": "application/merge-patch+json"}
    params = {"fieldManager": "lorikeet-active-cluster"}
    _answer(api.patch(path, json=change, headers=headers, params=params))


def _answer(response: httpx.Response) -> dict[str, Any]:
    if response.is_error:
        raise KubernetesRefusal(response)
    answer: dict[str, Any] = response.json()
    return answer


def main() -> None:
    """Follow for ever. An error that `follow` raises ends the process: Kubernetes restarts it."""
    log_to_stderr()
    namespace = (_ACCOUNT / "namespace").read_text()
    with httpx.Client(
        base_url="https://kubernetes.default.svc",
        auth=ServiceAccountToken(_ACCOUNT / "token"),
        verify=ssl.create_default_context(cafile=_ACCOUNT / "ca.crt"),
        timeout=_TIMEOUT_S,
        trust_env=False,
    ) as api:
        while True:
            time.sleep(_INTERVAL_S if follow(api, namespace) else _REST_S)


if __name__ == "__main__":
    main()
