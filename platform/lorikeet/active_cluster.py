"""Program that keeps Kubernetes selectors on the RayCluster that serves.

Run it in a pod: python -m lorikeet.active_cluster.

During a KubeRay upgrade there are two RayClusters, and the labels of their pods differ only in the
cluster's name, which KubeRay generates. While there are two, this program adds the serving
cluster's name to the selectors in SELECTORS. While there is one, the selectors name no cluster, and
nothing depends on this program.
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
# Name of the RayService, and of the Service that KubeRay points at the serving cluster.
_NAME = "lorikeet"
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_INTERVAL_S = 2  # KubeRay's own
_REST_S = 10
"""Seconds to pause after a failed attempt."""
_TIMEOUT_S = 30


@dataclass(frozen=True, slots=True)
class Selector:
    """A selector of pods in a Kubernetes object.

    api: API group and version of the object.
    path: kind and name of the object, as in its URL.
    field: path of the selector's labels in the object.
    """

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
    """Error answer of Kubernetes' API.

    is_transient: whether the same request may succeed later.
    """

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(
            f"Kubernetes answered {response.status_code} to {response.request.method} "
            f"{response.request.url.path}: {response.text}. See the Role `active-cluster` and the "
            "cluster's admission webhooks."
        )
        self.is_transient = response.status_code == 429 or response.is_server_error


class ServiceAccountToken(httpx.Auth):
    """Authentication by a pod's token, read for each request because Kubernetes renews its file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Add the token to a request."""
        request.headers["authorization"] = f"Bearer {self._file.read_text()}"
        yield request


def update_selectors(api: httpx.Client, namespace: str) -> bool:
    """Make every selector name the Ray cluster that serves tenants if there are several, else none.

    Returns whether all selectors are right; a failure is logged, and does not affect the other
    selectors. Raises KubernetesRefusal if Kubernetes permanently refuses to list the clusters.
    """
    try:
        cluster = _serving_cluster(api, namespace)
    except (httpx.TransportError, KubernetesRefusal) as error:
        if isinstance(error, KubernetesRefusal) and not error.is_transient:
            raise
        _log_failure("rayclusters", error)
        return False
    done = [_update_selector(api, namespace, selector, cluster) for selector in SELECTORS]
    return all(done)


def _update_selector(
    api: httpx.Client, namespace: str, selector: Selector, cluster: str | None
) -> bool:
    """Update one selector; log a failure. Return whether the selector is right.

    cluster: name of the cluster that the selector must have; None: the selector must have no
        cluster's name.
    """
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
    """Log a failed update of a Kubernetes object; say what to do if the API cannot be reached.

    path: the object, as in its URL.
    """
    problem = f"{type(error).__name__}: {error}"
    if isinstance(error, httpx.ConnectTimeout):
        problem = (
            f"no connection to Kubernetes' API in {_TIMEOUT_S} s: the NetworkPolicy "
            "`kubernetes-api-from-active-cluster` must let this pod reach the address and port "
            "that `kubectl get endpoints kubernetes` shows"
        )
    log.error("kubernetes_failed", extra={"object": path, "error": problem})


def _serving_cluster(api: httpx.Client, namespace: str) -> str | None:
    """Return the name of the Ray cluster that serves tenants if there are several clusters.

    Returns None if there is only one, or if the service's selector names no existing cluster.
    """
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
    """Read an object from Kubernetes' API, or a list of objects if `params` are given.

    path: path of the object or list in the URL, below the API's root.

    Returns {} if the object does not exist.
    """
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
    """Run update_selectors forever. An error ends the process, and Kubernetes restarts it."""
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
            time.sleep(_INTERVAL_S if update_selectors(api, namespace) else _REST_S)


if __name__ == "__main__":
    main()
