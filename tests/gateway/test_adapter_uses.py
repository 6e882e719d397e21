"""Requests in flight by adapter."""

from lorikeet.gateway.pushing.pushed_versions import AdapterUses
from lorikeet_engine.adapter import AdapterRef, Composition

A, B = (AdapterRef("acme", name, 1, 64 * name) for name in "ab")


def test_each_adapter_of_a_composition_is_used_until_the_last_request_ends() -> None:
    uses = AdapterUses()
    with uses.using(Composition((A, B), (0.5, 1.0))):
        with uses.using(A), uses.using(None):
            assert A.digest in uses
            assert B.digest in uses
        assert A.digest in uses
    assert A.digest not in uses
    assert B.digest not in uses
