"""All new items for a gateway travel in one message, complete and in order."""

import asyncio
import pickle

import pytest

from lorikeet.protocol import response_stream as response_stream_module
from lorikeet.protocol.messages import AnswerHeader, FinalUsage
from lorikeet.protocol.response_stream import DeltaGroup, ResponseStream, ResponseStreams, joined
from lorikeet_engine.errors import EngineClosed

HEADER, USAGE = AnswerHeader("r0", None, None), FinalUsage(1, 0, 2)


def test_items_put_before_a_take_form_one_message() -> None:
    async def scenario() -> None:
        stream = ResponseStream()
        stream.put("a", (HEADER,), b"l")
        stream.put("b", (b"1",))
        stream.put("b", (b"2",))
        stream.put("a", (b"3", USAGE, b"4"), b"m", ended=True)
        message = pickle.loads(pickle.dumps(await stream.take()))
        assert message == [
            ("a", [HEADER, b"3", USAGE, b"4"], b"lm", True),
            ("b", [b"12"], b"", False),
        ]
        stream.put("b", (), ended=True)
        assert await stream.take() == [("b", [], b"", True)]
        taking = asyncio.create_task(stream.take())
        await asyncio.sleep(0.01)
        assert not taking.done()
        stream.put("c", (b"5",))
        assert await taking == [("c", [b"5"], b"", False)]

    asyncio.run(scenario())


def test_messages_stay_within_the_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_stream_module, "_MESSAGE_BYTES", 100)

    async def scenario() -> list[int]:
        stream = ResponseStream()
        for number in range(10):
            stream.put(f"{number}", (b"x" * 40,))
        return [len(await stream.take()) for _ in range(4)]

    assert asyncio.run(scenario()) == [3, 3, 3, 1]


def test_a_large_answer_is_split_and_delays_no_other() -> None:
    """gRPC carries 16 MiB at most; a larger message would cut every answer to its gateway."""
    body = b"".join(b"%09d," % number for number in range(2_000_000))  # 20 MB

    async def scenario() -> None:
        stream = ResponseStream()
        stream.put("large", (HEADER, USAGE, body), b"log", ended=True)
        stream.put("small", (b"1",), ended=True)
        messages = list[list[DeltaGroup]]()
        async with asyncio.timeout(60):
            while sum(ended for message in messages for _, _, _, ended in message) < 2:
                messages.append(await stream.take())
        assert all(len(pickle.dumps(message)) < 2**20 for message in messages)
        groups = [group for message in messages for group in message]
        assert [request_id for request_id, _, _, _ in groups[:2]] == ["large", "small"]
        large = [group[1:] for group in groups if group[0] == "large"]
        assert all((log, ended) == (None, False) for _, log, ended in large[:-1])
        assert large[-1][1:] == (b"log", True)
        items = [item for some, _, _ in large for item in some]
        assert items[:2] == [HEADER, USAGE]
        assert b"".join(item for item in items if isinstance(item, bytes)) == body

    asyncio.run(scenario())


def test_an_answer_on_a_stream_that_closes_is_lost_and_others_go_on() -> None:
    async def scenario() -> None:
        streams, loop = ResponseStreams(), asyncio.get_running_loop()
        with streams.opened("well"), streams.opened("lost") as before:
            well = asyncio.create_task((await streams.to("well")).wait_for(loop.create_future()))
            lost = asyncio.create_task(before.wait_for(loop.create_future()))
            ended = loop.create_future()
            ended.set_result(None)
            await before.wait_for(ended)
            with streams.opened("lost") as again:
                with pytest.raises(EngineClosed):
                    await lost
                assert await before.take() == []  # so who listened there stops
                assert await streams.to("lost") is again
            assert not well.done()
            well.cancel()

    asyncio.run(scenario())


def test_a_call_waits_for_its_gateway_to_open_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        streams = ResponseStreams()
        early = asyncio.create_task(streams.to("g0"))
        await asyncio.sleep(0.05)
        with streams.opened("g0") as stream:
            assert await early is stream
        monkeypatch.setattr(response_stream_module, "_OPENING_S", 0.1)
        with pytest.raises(EngineClosed):
            await streams.to("g0")

    asyncio.run(scenario())


def test_only_consecutive_bytes_are_joined() -> None:
    assert joined([b"1", b"2", HEADER, HEADER, b"3", USAGE, b"4", b"5"]) == (
        [b"12", HEADER, HEADER, b"3", USAGE, b"45"]
    )
    assert joined([]) == []
