"""Answers that another replica goes on with, as clients, `why` and metrics see them."""

import json
from collections.abc import Iterator

import pytest

from lorikeet.errors import Unavailable
from lorikeet.gateway.replica_response import RESUMED_HEADER
from lorikeet.protocol.messages import Attempt, Call, Resumed, ResumeReason
from tests.gateway.conftest import Gateway, Items, chat, header, repeat
from tests.gateway.test_bad_requests import CHAT
from tests.waiting import eventually

LOST, DRAINED = ResumeReason.REPLICA_LOST, ResumeReason.DRAINED
WORDS = "every word comes once"
COMMENT = f": {RESUMED_HEADER}: replica_lost\n\n"


@pytest.fixture
def gateway(shared: Gateway) -> Iterator[Gateway]:
    shared.engines.replay = resumed_after_each_item
    return shared


async def resumed_after_each_item(call: Call) -> Items:
    """Replay `repeat`, with a lost replica behind the first bytes and a drained one behind those
    that follow.
    """
    reasons = [LOST, DRAINED]
    async for item in repeat(call):
        yield item
        if isinstance(item, bytes) and reasons:
            reason = reasons.pop(0)
            yield Attempt(f"{call.request_id}-{reason}", "replica-7", 0.0, failure="it was lost")
            yield Resumed(reason)
            yield header(call)


async def resumed_before_the_first_byte(call: Call) -> Items:
    yield header(call)
    yield Resumed(LOST)
    yield Resumed(DRAINED)
    async for item in repeat(call):
        yield item


async def lost_for_good(call: Call) -> Items:
    async for item in resumed_after_each_item(call):
        yield item
        if isinstance(item, Resumed):
            raise Unavailable("no replica took the answer over")


def test_openais_client_reads_one_stream(gateway: Gateway) -> None:
    client = gateway.openai()
    chunks = client.chat.completions.create(**chat(content=WORDS, stream=True))
    said = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(said).split() == WORDS.split()
    events = list(client.responses.create(model="tiny", input=WORDS, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    texts = client.completions.create(model="tiny", prompt=WORDS, stream=True)
    assert "".join(chunk.choices[0].text for chunk in texts).split() == WORDS.split()


def test_anthropics_client_reads_one_stream(gateway: Gateway) -> None:
    asked = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": WORDS}]}
    with gateway.anthropic().messages.stream(**asked) as stream:
        assert stream.get_final_text().split() == WORDS.split()


def test_a_stream_tells_of_its_replicas_in_comments(gateway: Gateway) -> None:
    answer = gateway.post(CHAT, chat(content=WORDS, stream=True))
    assert RESUMED_HEADER not in answer.headers
    events = answer.text.split("\n\n")
    comments = [event for event in events if event.startswith(":")]
    assert comments == [f": {RESUMED_HEADER}: {reason}" for reason in ("replica_lost", "drained")]
    gateway.engines.replay = repeat
    undisturbed = gateway.post(CHAT, chat(content=WORDS, stream=True)).text
    assert len(events) - len(comments) == len(undisturbed.split("\n\n"))


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_has_not_begun_tells_of_its_replicas_in_a_header(
    gateway: Gateway, stream: bool
) -> None:
    gateway.engines.replay = resumed_before_the_first_byte
    answer = gateway.post(CHAT, chat(content=WORDS, stream=stream))
    assert answer.headers[RESUMED_HEADER] == "replica_lost, drained"
    assert not any(event.startswith(":") for event in answer.text.split("\n\n"))


def test_a_failure_behind_a_comment_has_the_next_sequence_number(gateway: Gateway) -> None:
    gateway.engines.replay = lost_for_good
    body = {"model": "tiny", "input": WORDS, "stream": True}
    text = gateway.post("/v1/responses", body).text
    assert COMMENT in text
    events = [line for line in text.splitlines() if line.startswith("data: ")]
    numbers = [json.loads(each.removeprefix("data: "))["sequence_number"] for each in events]
    assert numbers == list(range(len(numbers)))


def test_why_and_metrics_tell_of_it(gateway: Gateway) -> None:
    request_id = gateway.post(CHAT, chat(content=WORDS, stream=True)).headers["x-request-id"]

    def found() -> dict[str, object]:
        answer = gateway.admin("GET", f"/requests/{request_id}")
        return dict(answer.json()) if answer.is_success else {}

    assert eventually(lambda: found().get("outcome", "running") != "running")
    assert found()["resumed"] == ["replica_lost", "drained"]
    assert found()["retries"] == 2
    page = gateway.request("GET", "/metrics", gateway.admin_key).text
    for reason in ("replica_lost", "drained"):
        line = f'reason="{reason}"'
        (counter,) = [
            each
            for each in page.splitlines()
            if each.startswith("lorikeet_request_resumes_total{")
            and line in each
            and "tiny" in each
        ]
        assert float(counter.split()[-1]) >= 1
