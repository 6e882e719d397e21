"""The demo's tasks: prompts that training held out, and right answers."""

import pytest

from demo.tasks import TASKS, Task, held_out, pig_latin, reverse, rot13, spell, upper


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.model)
def test_held_out_pairs_are_distinct_held_out_and_the_same_for_a_seed(task: Task) -> None:
    pairs = task.held_out_pairs(100)
    assert len({pair.prompt for pair in pairs}) == 100
    assert all(held_out(pair.prompt) for pair in pairs)
    assert task.held_out_pairs(100) == pairs


def test_the_transforms() -> None:
    assert upper("blue kettle 7") == "BLUE KETTLE 7"
    assert rot13("kettle") == "xrggyr"
    assert reverse("kettle") == "elttek"
    assert pig_latin("plain egg shh") == "ainplay eggway shhway"
    assert spell("KX4") == "Kilo X-ray Four"
