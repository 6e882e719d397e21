"""Which replicas count as there."""

from lorikeet.serving.replica_reconciler import Liveness
from tests.placement.given import report


def test_a_replica_that_misses_an_answer_is_there_until_it_was_silent_for_too_long() -> None:
    now_s = [0.0]
    liveness = Liveness(5.0, lambda: now_s[0])
    assert liveness.answered([report("r1"), report("r0")]) == [report("r0"), report("r1")]
    now_s[0] = 5.0
    assert liveness.answered([report("r1", gpu=7)]) == [report("r0"), report("r1", gpu=7)]
    now_s[0] = 6.0
    assert liveness.answered([]) == [report("r1", gpu=7)]
    assert liveness.answered([report("r0")]) == [report("r0"), report("r1", gpu=7)]
