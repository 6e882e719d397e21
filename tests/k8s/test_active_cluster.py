"""While KubeRay switches clusters, budgets and the admin Service select the serving cluster."""

import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from lorikeet.active_cluster import (
    SELECTORS,
    KubernetesRefusal,
    ServiceAccountToken,
    update_selectors,
)
from tests.k8s.manifests import (
    DIGEST,
    OVERLAYS,
    Manifest,
    of_kind,
    peers,
    pods,
    ray_service,
    selects,
)

both = pytest.mark.parametrize("overlay", OVERLAYS)
PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/v1/namespaces/lorikeet/(?P<resource>\w+)(?:/(?P<name>[\w-]+))?"
)
VERBS = {"GET": "get", "PATCH": "patch"}
FOLLOWING = (
    "services/lorikeet-admin",
    "poddisruptionbudgets/gateways",
    "poddisruptionbudgets/engines",
)
Failure = Callable[[httpx.Request], httpx.Response]


class ApiServer:
    """Kubernetes' API with an overlay's objects, for an account with an overlay's Role."""

    def __init__(self, overlay: str) -> None:
        self._overlay = overlay
        self.clusters: list[str] = []
        self.asked: set[tuple[str, str, str, str]] = set()
        self.patches = 0
        self.objects = {
            f"{kind.lower()}s/{each['metadata']['name']}": json.loads(json.dumps(each))
            for kind in ("Service", "PodDisruptionBudget")
            for each in of_kind(overlay, kind)
        }

    def client(self, handler: Any = None) -> httpx.Client:
        transport = httpx.MockTransport(handler or self.answer)
        return httpx.Client(base_url="https://kubernetes.default.svc", transport=transport)

    def serves(self, cluster: str) -> None:
        """KubeRay moves its Service, which has the name that the RayService gives it."""
        name = ray_service(self._overlay)["spec"]["serveService"]["metadata"]["name"]
        selector = {"ray.io/cluster": cluster, "ray.io/serve": "true"}
        self.objects[f"services/{name}"] = {"spec": {"selector": selector}}

    def selected(self, path: str) -> set[str]:
        """The clusters of which pods are selected: each has every pod that the overlay names."""
        selector = self.objects[path]["spec"]["selector"]
        if path.startswith("services/"):
            selector = {"matchLabels": selector}
        return {
            cluster
            for cluster in self.clusters
            for pod in pods(self._overlay).values()
            if selects(selector, pod["metadata"]["labels"] | {"ray.io/cluster": cluster})
        }

    def answer(self, request: httpx.Request) -> httpx.Response:
        found = PATH.fullmatch(request.url.path)
        assert found, request.url.path
        group, resource, name = found["group"] or "", found["resource"], found["name"] or ""
        verb = VERBS[request.method] if name else "list"
        self.asked.add((group, resource, name, verb))
        if not allowed(self._overlay, group, resource, name, verb):
            return httpx.Response(403, json={"message": "forbidden"})
        if verb == "list":
            origin = ray_service(self._overlay)["metadata"]["name"]
            assert request.url.params["labelSelector"] == f"ray.io/originated-from-cr-name={origin}"
            return httpx.Response(
                200, json={"items": [{"metadata": {"name": c}} for c in self.clusters]}
            )
        if f"{resource}/{name}" not in self.objects:
            return httpx.Response(404, json={"message": "not found"})
        target = self.objects[f"{resource}/{name}"]
        if verb == "patch":
            assert request.headers["content-type"] == "application/merge-patch+json"
            self.patches += 1
            merge(target, json.loads(request.content))
        return httpx.Response(200, json=target)


def merge(target: Manifest, change: Manifest) -> None:
    """A JSON merge patch (RFC 7396) of objects."""
    for key, value in change.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict):
            merge(target.setdefault(key, {}), value)
        else:
            target[key] = value


def allowed(overlay: str, group: str, resource: str, name: str, verb: str) -> bool:
    (role,) = of_kind(overlay, "Role")
    return any(
        group in rule["apiGroups"]
        and resource in rule["resources"]
        and verb in rule["verbs"]
        and name in rule.get("resourceNames", [name])
        for rule in role["rules"]
    )


def upgrade(server: ApiServer) -> list[dict[str, set[str]]]:
    """Return the selected clusters before an upgrade, around its switch, and after its end."""
    seen = []
    stages = ((["old"], "old"), (["old", "new"], "old"), (["old", "new"], "new"), (["new"], "new"))
    for server.clusters, serving in stages:
        server.serves(serving)
        update_selectors(server.client(), "lorikeet")
        seen.append({path: server.selected(path) for path in FOLLOWING})
    return seen


def test_during_an_upgrade_budgets_and_admin_service_select_the_serving_cluster() -> None:
    seen = upgrade(ApiServer("gpu"))
    assert seen == [{path: {each} for path in FOLLOWING} for each in ("old", "old", "new", "new")]
    assert {selector.path for selector in SELECTORS} == set(FOLLOWING)


@both
def test_selectors_name_no_cluster_while_only_one_exists(overlay: str) -> None:
    server = ApiServer(overlay)
    before = json.dumps({path: server.objects[path] for path in FOLLOWING})
    upgrade(server)
    assert json.dumps({path: server.objects[path] for path in FOLLOWING}) == before


def test_nothing_is_written_where_nothing_changes() -> None:
    server = ApiServer("gpu")
    server.clusters = ["old", "new"]
    server.serves("old")
    for _ in range(3):
        update_selectors(server.client(), "lorikeet")
    assert server.patches == len(FOLLOWING)


def test_no_cluster_is_named_before_one_serves() -> None:
    """A corrected first start has two clusters, and no Service of KubeRay yet."""
    server = ApiServer("gpu")
    server.clusters = ["wrong", "right"]
    update_selectors(server.client(), "lorikeet")
    assert server.patches == 0


def test_a_service_of_a_deleted_cluster_names_none() -> None:
    server = ApiServer("gpu")
    server.clusters = ["one", "other"]
    server.serves("gone")
    update_selectors(server.client(), "lorikeet")
    assert server.patches == 0


def test_a_missing_budget_is_no_error() -> None:
    server = ApiServer("gpu")
    del server.objects["poddisruptionbudgets/gateways"]
    server.clusters = ["old", "new"]
    server.serves("new")
    update_selectors(server.client(), "lorikeet")
    assert server.selected("poddisruptionbudgets/engines") == {"new"}


@both
def test_the_role_allows_exactly_the_requests(overlay: str) -> None:
    server = ApiServer(overlay)
    upgrade(server)
    (role,) = of_kind(overlay, "Role")
    granted = {
        (group, resource, name, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames", [""])
        for verb in rule["verbs"]
    }
    assert server.asked == granted
    (binding,) = of_kind(overlay, "RoleBinding")
    (subject,) = binding["subjects"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert deployment(overlay)["serviceAccountName"] == subject["name"]
    assert subject["namespace"] == role["metadata"]["namespace"]
    assert (subject["kind"], subject["name"]) in {
        (each["kind"], each["metadata"]["name"]) for each in of_kind(overlay, "ServiceAccount")
    }


def test_a_refusal_names_the_request_and_kubernetes_message() -> None:
    server = ApiServer("gpu")
    client = server.client(lambda _: httpx.Response(403, text="rayclusters.ray.io is forbidden"))
    with pytest.raises(
        KubernetesRefusal, match=r"403 to GET .*/rayclusters: rayclusters.ray.io is"
    ):
        update_selectors(client, "lorikeet")


def test_rayclusters_that_kubernetes_does_not_know_are_an_error() -> None:
    server = ApiServer("gpu")
    with pytest.raises(KubernetesRefusal, match="404"):
        update_selectors(
            server.client(lambda _: httpx.Response(404, text="page not found")), "lorikeet"
        )


def refused(status: int) -> Failure:
    return lambda _: httpx.Response(status, text="admission webhook denied the request")


def broken(kind: type[httpx.TransportError]) -> Failure:
    def answer(request: httpx.Request) -> httpx.Response:
        raise kind("broken", request=request)

    return answer


PASSING = (refused(429), refused(503), broken(httpx.ReadError), broken(httpx.ConnectTimeout))


@pytest.mark.parametrize("failure", [refused(403), *PASSING])
@pytest.mark.parametrize("method", ["GET", "PATCH"])
@pytest.mark.parametrize("failing", FOLLOWING)
def test_a_failing_object_delays_no_other_and_is_retried(
    failing: str, method: str, failure: Failure, caplog: pytest.LogCaptureFixture
) -> None:
    server = ApiServer("gpu")
    server.clusters = ["old", "new"]
    server.serves("new")

    def answer(request: httpx.Request) -> httpx.Response:
        fails = request.method == method and request.url.path.endswith(failing)
        return failure(request) if fails else server.answer(request)

    assert not update_selectors(server.client(answer), "lorikeet")
    assert {path for path in FOLLOWING if server.selected(path) == {"new"}} == {*FOLLOWING} - {
        failing
    }
    (failed,) = [vars(each) for each in caplog.records if each.levelname == "ERROR"]
    assert failed["object"] == failing
    assert update_selectors(server.client(), "lorikeet")
    assert server.selected(failing) == {"new"}


@pytest.mark.parametrize("failure", PASSING)
@pytest.mark.parametrize("failing", ["rayclusters", "services/lorikeet"])
def test_unreadable_clusters_change_nothing_and_are_retried(failing: str, failure: Failure) -> None:
    server = ApiServer("gpu")
    server.clusters = ["old", "new"]
    server.serves("new")

    def answer(request: httpx.Request) -> httpx.Response:
        fails = request.url.path.endswith(failing)
        return failure(request) if fails else server.answer(request)

    assert not update_selectors(server.client(answer), "lorikeet")
    assert server.patches == 0
    assert update_selectors(server.client(), "lorikeet")
    assert server.patches == len(FOLLOWING)


def test_a_timeout_to_connect_names_the_network_policy(caplog: pytest.LogCaptureFixture) -> None:
    update_selectors(ApiServer("gpu").client(broken(httpx.ConnectTimeout)), "lorikeet")
    (failed,) = [vars(each) for each in caplog.records]
    named = set(re.findall("`([a-z-]+)`", failed["error"]))
    policies = {each["metadata"]["name"] for each in of_kind("gpu", "NetworkPolicy")}
    assert named & policies == {"kubernetes-api-from-active-cluster"}


def test_a_renewed_token_is_used(tmp_path: Any) -> None:
    sent = []
    file = tmp_path / "token"
    transport = httpx.MockTransport(
        lambda request: sent.append(request.headers["authorization"]) or httpx.Response(200)
    )
    with httpx.Client(auth=ServiceAccountToken(file), transport=transport) as api:
        for token in ("first", "second"):
            file.write_text(token)
            api.get("https://kubernetes.default.svc/")
    assert sent == ["Bearer first", "Bearer second"]


def deployment(overlay: str) -> Manifest:
    (found,) = of_kind(overlay, "Deployment")
    spec: Manifest = found["spec"]["template"]["spec"]
    return spec


@both
def test_the_active_cluster_pod_is_as_restricted_as_the_others(overlay: str) -> None:
    (container,) = deployment(overlay)["containers"]
    other = pods(overlay)["gateways"]["spec"]
    assert container["securityContext"] == other["containers"][0]["securityContext"]
    assert deployment(overlay)["securityContext"].items() <= other["securityContext"].items()
    assert deployment(overlay)["securityContext"]["runAsNonRoot"] is True
    assert container["image"] == other["containers"][0]["image"]
    assert not re.search(DIGEST, container["image"])
    assert "env" not in container
    assert "envFrom" not in container
    assert {"cpu", "memory", "ephemeral-storage"} <= container["resources"]["requests"].keys()


@both
def test_the_active_cluster_pod_reaches_kubernetes_and_is_unreachable(overlay: str) -> None:
    (found,) = of_kind(overlay, "Deployment")
    labels = found["spec"]["template"]["metadata"]["labels"]
    assert selects(found["spec"]["selector"], labels)
    policies = [
        each
        for each in of_kind(overlay, "NetworkPolicy")
        if selects(each["spec"]["podSelector"], labels)
    ]
    names = {each["metadata"]["name"] for each in policies}
    assert names == {"default-deny", "dns", "kubernetes-api-from-active-cluster"}
    assert [peer for each in policies for peer in peers(each, "from")] == []
    (own,) = [each for each in policies if each["metadata"]["name"].startswith("kubernetes-api")]
    assert {peer["ipBlock"]["cidr"] for peer in peers(own, "to")} == {"0.0.0.0/0", "::/0"}
    for budget in of_kind(overlay, "PodDisruptionBudget"):
        assert not selects(budget["spec"]["selector"], labels)
