from lorikeet.placement.plan import Keep, PinnedAdapter, make_plan
from lorikeet.rendezvous import by_preference
from lorikeet_engine.adapter import AdapterRef, Residency

REPLICAS = ["r0", "r1", "r2"]
SUPPORT = AdapterRef("acme", "support", 1, "a" * 64)
LEGAL = AdapterRef("acme", "legal", 2, "b" * 64)


def test_a_pin_on_all_replicas_reaches_each():
    plan = make_plan([PinnedAdapter(SUPPORT, Residency.GPU, None)], REPLICAS)
    assert plan == {replica: {SUPPORT.digest: Keep(SUPPORT, Residency.GPU)} for replica in REPLICAS}


def test_a_pin_on_n_replicas_takes_those_its_requests_prefer():
    plan = make_plan([PinnedAdapter(SUPPORT, Residency.HOST, 2)], REPLICAS)
    holders = {replica for replica, adapters in plan.items() if SUPPORT.digest in adapters}
    assert holders == set(by_preference(SUPPORT.digest, REPLICAS)[:2])


def test_the_nearer_of_two_tiers_holds():
    pins = [
        PinnedAdapter(SUPPORT, Residency.GPU, None),
        PinnedAdapter(SUPPORT, Residency.DISK, None),
        PinnedAdapter(LEGAL, Residency.DISK, None),
    ]
    for adapters in make_plan(pins, REPLICAS).values():
        assert adapters == {
            SUPPORT.digest: Keep(SUPPORT, Residency.GPU),
            LEGAL.digest: Keep(LEGAL, Residency.DISK),
        }


def test_two_names_of_the_same_weights_are_kept_once_at_the_nearer_tier():
    twin = AdapterRef("globex", "twin", 1, SUPPORT.digest)
    pins = [PinnedAdapter(SUPPORT, Residency.GPU, None), PinnedAdapter(twin, Residency.DISK, None)]
    for order in (pins, pins[::-1]):
        plan = make_plan(order, REPLICAS)
        assert all(
            adapters == {SUPPORT.digest: Keep(SUPPORT, Residency.GPU)} for adapters in plan.values()
        )


def test_a_replica_without_pins_is_in_the_plan_so_that_it_lets_go_of_old_ones():
    assert make_plan([], REPLICAS) == {replica: {} for replica in REPLICAS}


def test_more_replicas_asked_for_than_there_are_means_all():
    plan = make_plan([PinnedAdapter(LEGAL, Residency.GPU, 9)], REPLICAS)
    assert all(LEGAL.digest in adapters for adapters in plan.values())
