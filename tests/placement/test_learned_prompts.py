"""Beginnings of prompts: learned per adapter and tenant, joined, forgotten, sent to GPUs."""

from array import array
from dataclasses import replace

from lorikeet.placement.learned_prompts import Found, LearnedPrompts, SharedPrefixes
from lorikeet_engine.adapter import AdapterRef, Residency
from tests.placement.builders import held, ref, report

A, B = ref("a"), ref("b")
SYSTEM = list(range(1000, 1600))
HOUR_S = 3600.0


def chat(which: int, system: list[int] = SYSTEM) -> list[int]:
    return [*system, *range(10 * which, 10 * which + 9)]


def found_in(*asked: tuple[AdapterRef, str, list[int]], adapters: int = 8) -> Found:
    prefixes = SharedPrefixes(adapters)
    for adapter, tenant, prompt in asked:
        prefixes.count(adapter, tenant, prompt, 0.0)
    return prefixes.take(0.0)


def learned(*found: Found, now_s: float = 0.0) -> LearnedPrompts:
    prompts = LearnedPrompts(8)
    for each in found:
        prompts.add(each, now_s)
    return prompts


def tokens_of(prompts: LearnedPrompts, now_s: float = 0.0) -> list[list[int]]:
    there = report("r0", adapters=(held(A, Residency.GPU, 10),))
    return [list(array("i", each.tokens)) for each in prompts.wanted([there], now_s).get("r0", ())]


def test_the_beginning_that_most_prompts_share_is_learned_and_nothing_behind_it():
    chats = [(A, "acme", chat(which)) for which in range(9)]
    other = [(A, "acme", chat(which, SYSTEM[::-1])) for which in range(5)]
    assert tokens_of(learned(found_in(*chats, *other))) == [SYSTEM]


def test_a_prompt_that_shares_little_does_not_shorten_what_others_share():
    chats = [(A, "acme", chat(which)) for which in range(9)]
    short = [(A, "acme", chat(which, [*SYSTEM[:260], *range(300)])) for which in range(3)]
    assert tokens_of(learned(found_in(*chats, *short))) == [SYSTEM]


def test_nor_does_it_shorten_what_the_controller_has_taken():
    prefixes = SharedPrefixes(8)
    for which in range(2):
        prefixes.count(A, "acme", chat(which), 0.0)
    assert prefixes.take(0.0)
    prefixes.count(A, "acme", chat(0, [*SYSTEM[:260], *range(300)]), 60.0)
    prefixes.count(A, "acme", chat(0), 60.0)
    ((found,),) = prefixes.take(60.0).values()
    assert list(array("i", found.tokens)) == SYSTEM


def test_replicas_counts_are_joined_and_few_requests_are_not_learned():
    found = found_in(*((A, "acme", chat(which)) for which in range(6)))
    assert tokens_of(learned(found)) == []
    assert tokens_of(learned(found, found)) == [SYSTEM]


def test_an_adapter_with_a_request_now_and_then_is_learned():
    prefixes, prompts = SharedPrefixes(8), LearnedPrompts(8)
    for minute in range(12):
        prefixes.count(A, "acme", chat(minute), 60.0 * minute)
        prompts.add(prefixes.take(60.0 * minute), 60.0 * minute)
    assert tokens_of(prompts, 720.0) == [SYSTEM]


def test_one_tenants_requests_teach_another_tenants_adapter_nothing():
    assert not found_in(*((A, "globex", chat(which)) for which in range(9)))


def test_a_text_of_one_request_alone_does_not_leave_the_replica():
    assert not found_in((A, "acme", chat(0)), (B, "acme", chat(1)))


def test_activated_loras_and_short_prompts_are_left_out():
    activated = replace(A, invocation_tokens=(1, 2))
    assert not found_in(*((activated, "acme", chat(which)) for which in range(9)))
    assert not found_in(*((A, "acme", chat(which, SYSTEM[:200])) for which in range(9)))


def test_a_prompt_is_forgotten_after_a_day_and_counts_less_before():
    prompts = learned(found_in(*((A, "acme", chat(which)) for which in range(20))))
    assert tokens_of(prompts, 6 * HOUR_S) == [SYSTEM]
    assert tokens_of(prompts, 12 * HOUR_S) == []
    again = found_in(*((A, "acme", chat(which)) for which in range(6)))
    prompts.add(again, 12 * HOUR_S)
    assert tokens_of(prompts, 12 * HOUR_S) == [SYSTEM]
    prompts.add({}, 37 * HOUR_S)
    assert not prompts._prefixes.found


def test_a_replica_forgets_a_prompt_after_a_day():
    prefixes = SharedPrefixes(8)
    prefixes.count(A, "acme", chat(0), 0.0)
    assert not prefixes.take(25 * HOUR_S)
    prefixes.count(A, "acme", chat(1), 25 * HOUR_S)
    assert not prefixes.take(25 * HOUR_S), "no other prompt is known"


def test_only_replicas_with_the_adapter_on_the_gpu_compute_it_for_whichever_version():
    prompts = learned(found_in(*((A, "acme", chat(which)) for which in range(9))))
    pushed = replace(A, version=2, digest="pushed")
    reports = [
        report("r0", adapters=(held(pushed, Residency.GPU, 10), held(B, Residency.GPU, 10))),
        report("r1", adapters=(held(A, Residency.HOST, 10),)),
    ]
    wanted = prompts.wanted(reports, 0.0)
    assert [each.ref for each in wanted["r0"]] == [pushed]
    assert wanted["r1"] == ()


def test_the_adapters_asked_for_last_are_remembered():
    refs = [ref(str(number)) for number in range(9)]
    asked = [(each, "acme", chat(which)) for each in refs for which in range(3)]
    assert {name for _, name in found_in(*asked, adapters=4)} == {"5", "6", "7", "8"}


def test_without_the_setting_nothing_is_counted():
    prefixes = SharedPrefixes(0)
    prefixes.count(A, "acme", chat(0), 0.0)
    assert not prefixes._found
