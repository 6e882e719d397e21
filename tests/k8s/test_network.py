"""Network policies in both directions, and the Service of the admin listener."""

from typing import Any

import pytest

from lorikeet.settings import Settings
from tests.k8s.manifests import (
    OVERLAYS,
    Manifest,
    containers,
    of_kind,
    peers,
    pods,
    selects,
    settings,
)

EVERY = OVERLAYS[-1]
both = pytest.mark.parametrize("overlay", OVERLAYS)


@both
def test_traffic_is_denied_unless_allowed(overlay: str) -> None:
    (deny,) = [
        p
        for p in of_kind(overlay, "NetworkPolicy")
        if not p["spec"]["podSelector"] and set(p["spec"]["policyTypes"]) == {"Ingress", "Egress"}
    ]
    assert list(peers(deny, "from")) == list(peers(deny, "to")) == []


@both
def test_only_the_operator_and_the_cluster_reach_rays_dashboard(overlay: str) -> None:
    head = pods(overlay)["head"]["metadata"]["labels"]
    open_ports = {
        policy["metadata"]["name"]
        for policy in of_kind(overlay, "NetworkPolicy")
        if selects(policy["spec"]["podSelector"], head)
        for rule in policy["spec"].get("ingress", [])
        if 8265 in [port["port"] for port in rule.get("ports", [{"port": 8265}])]
    }
    assert open_ports == {"ray-internal", "dashboard-from-kuberay"}
    assert all(
        port["port"] != 8265
        for service in of_kind(overlay, "Service")
        for port in service["spec"]["ports"]
    )
    assert not of_kind(overlay, "Ingress")


def comers(overlay: str, group: str, port: int) -> list[dict[str, Any]]:
    """Return the peers that policies, without the cluster's own, let in at a pod's port."""
    labels = pods(overlay)[group]["metadata"]["labels"]
    return [
        peer
        for policy in of_kind(overlay, "NetworkPolicy")
        if selects(policy["spec"]["podSelector"], labels)
        and policy["metadata"]["name"] != "ray-internal"
        for rule in policy["spec"].get("ingress", [])
        if port in [each["port"] for each in rule["ports"]]
        for peer in rule["from"]
    ]


def namespace(name: str) -> dict[str, Any]:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


@both
def test_ingress_reaches_only_the_public_listener(
    overlay: str,
) -> None:
    labelled = {"namespaceSelector": {"matchLabels": {"lorikeet-ingress": "true"}}}
    outside = [{"ipBlock": {"cidr": "10.0.0.0/24"}}] if overlay == EVERY else []
    for group, pod in pods(overlay).items():
        for port in (port["containerPort"] for c in containers(pod) for port in c.get("ports", [])):
            expected = port == 8000 and group != "head"
            found = comers(overlay, group, port)
            assert [peer for peer in found if peer in (labelled, *outside)] == (
                [labelled, *outside] if expected else []
            )
    assert comers(overlay, "gateways", 8000) == [labelled, *outside]


@both
def test_only_monitoring_and_labelled_pods_reach_the_admin_listener(
    overlay: str,
) -> None:
    label = {"matchLabels": {"lorikeet-admin": "true"}}
    assert comers(overlay, "gateways", 8001) == [
        {"namespaceSelector": label, "podSelector": label},
        namespace("monitoring"),
    ]


@both
def test_the_admin_service_selects_the_gateways_admin_listener(overlay: str) -> None:
    (service,) = of_kind(overlay, "Service")
    (port,) = service["spec"]["ports"]
    assert service["spec"]["type"] == "ClusterIP"
    address = Settings.from_env(settings(overlay)).admin_address
    assert address.host == "0.0.0.0"  # Prometheus and port-forward connect to different addresses
    for group, pod in pods(overlay).items():
        found = {
            each["name"]: each["containerPort"]
            for container in containers(pod)
            for each in container.get("ports", [])
        }
        assert selects({"matchLabels": service["spec"]["selector"]}, pod["metadata"]["labels"]) == (
            group == "gateways"
        )
        assert found.get(port["targetPort"]) == (address.port if group == "gateways" else None)


def policy(overlay: str, name: str) -> Manifest:
    (found,) = [p for p in of_kind(overlay, "NetworkPolicy") if p["metadata"]["name"] == name]
    return found


@both
def test_dns_in_pods_and_on_the_node_is_reachable(overlay: str) -> None:
    """NodeLocal DNSCache and GKE's Cloud DNS answer at addresses that no selector matches."""
    allowed = list(peers(policy(overlay, "dns"), "to"))
    on_node = {peer["ipBlock"]["cidr"] for peer in allowed if "ipBlock" in peer}
    assert on_node == {"169.254.20.10/32", "169.254.169.254/32"}
    (in_pods,) = [peer["podSelector"] for peer in allowed if "podSelector" in peer]
    for name in ("kube-dns", "node-local-dns"):
        assert selects(in_pods, {"k8s-app": name})
    assert {p["port"] for r in policy(overlay, "dns")["spec"]["egress"] for p in r["ports"]} == {53}


@both
@pytest.mark.parametrize("name", ["kuberay", "kuberay-operator"])
def test_the_operator_is_admitted_from_every_documented_namespace(overlay: str, name: str) -> None:
    labels = {
        "app.kubernetes.io/name": name,
        "app.kubernetes.io/component": "kuberay-operator",
    }
    (operator,) = peers(policy(overlay, "dashboard-from-kuberay"), "from")
    assert selects(operator["podSelector"], labels)
    assert not selects(operator["podSelector"], {"app.kubernetes.io/name": name})
    let_in = {"default", "kuberay-system", "ray-system"}
    for place in (*let_in, "monitoring"):
        place_labels = {"kubernetes.io/metadata.name": place}
        assert selects(operator["namespaceSelector"], place_labels) == (place in let_in)


def test_pod_identity_is_reachable_on_eks() -> None:
    (peer,) = peers(policy("eks", "pod-identity"), "to")
    assert peer["ipBlock"]["cidr"] == "169.254.170.23/32"
    for pod in pods("eks").values():
        assert selects(
            policy("eks", "pod-identity")["spec"]["podSelector"], pod["metadata"]["labels"]
        )


@pytest.mark.parametrize("overlay", ["eks", "gke"])
def test_a_clouds_overlay_has_a_gateway(overlay: str) -> None:
    assert len(of_kind(overlay, "Gateway")) == len(of_kind(overlay, "HTTPRoute")) == 1
