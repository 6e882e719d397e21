from collections import Counter

from lorikeet.rendezvous import by_preference
from lorikeet.routing.ranking import SPILL_SLACK, Candidate, rank_replicas

REPLICAS = ["r0", "r1", "r2", "r3"]


def candidates(queues=(0, 0, 0, 0), resident=()):
    return [
        Candidate(name, queue, name in resident)
        for name, queue in zip(REPLICAS, queues, strict=True)
    ]


def test_a_replica_that_has_the_adapter_comes_first():
    for resident in REPLICAS:
        assert rank_replicas("digest", candidates(resident=[resident]))[0] == [resident]


def test_the_home_comes_first_when_nobody_has_the_adapter():
    home = by_preference("digest", REPLICAS)[0]
    assert rank_replicas("digest", candidates())[0] == [home]


def test_a_home_that_does_not_answer_is_followed_by_the_home_without_it():
    home = by_preference("digest", REPLICAS)[0]
    heir = by_preference("digest", [name for name in REPLICAS if name != home])[0]
    assert rank_replicas("digest", candidates())[:2] == [[home], [heir]]


def test_a_busy_home_gives_way_to_everyone():
    home = by_preference("digest", REPLICAS)[0]
    queues = [4 * SPILL_SLACK if name == home else 0 for name in REPLICAS]
    assert rank_replicas("digest", candidates(queues)) == [REPLICAS]


def test_a_busy_resident_gives_way_to_the_home():
    home, *others = by_preference("digest", REPLICAS)
    busy = others[0]
    queues = [4 * SPILL_SLACK if name == busy else 0 for name in REPLICAS]
    assert rank_replicas("digest", candidates(queues, resident=[busy]))[0] == [home]


def test_equal_load_is_never_busy():
    home = by_preference("digest", REPLICAS)[0]
    assert rank_replicas("digest", candidates((300, 300, 300, 300)))[0] == [home]


def test_everyone_is_always_the_last_group():
    for resident in ([], ["r2"], REPLICAS):
        assert rank_replicas("digest", candidates(resident=resident))[-1] == REPLICAS


def test_a_request_without_adapter_goes_to_the_least_loaded():
    assert rank_replicas(None, candidates()) == [REPLICAS]


def test_homes_are_spread_evenly():
    homes = Counter(by_preference(f"adapter-{i}", REPLICAS)[0] for i in range(4000))
    assert all(850 < homes[name] < 1150 for name in REPLICAS)  # 1000 ± 5 standard deviations


def test_a_lost_replica_moves_only_its_own_adapters():
    keys = [f"adapter-{i}" for i in range(500)]
    before = {key: by_preference(key, REPLICAS)[0] for key in keys}
    after = {key: by_preference(key, REPLICAS[:-1])[0] for key in keys}
    assert all(after[key] == before[key] for key in keys if before[key] != "r3")
