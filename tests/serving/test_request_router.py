"""Part of a request that the router reads."""

from lorikeet.protocol.messages import Call, Endpoint
from lorikeet.routing.locations import MAX_HASHED_CHARACTERS
from lorikeet.serving.request_router import routing_request_of


class _Unread(dict[str, str]):
    def __getitem__(self, name: str) -> str:
        raise AssertionError(f"{name} is read of a message behind what is hashed")


def _hashes(*messages: dict[str, str]) -> tuple[int, ...]:
    call = Call("r", Endpoint.CHAT, 0, "acme", "tiny", None, messages=messages)
    return tuple(routing_request_of(call).prefix_hashes)


def test_only_the_hashed_part_of_a_prompt_is_read() -> None:
    long = {"role": "user", "content": "word " * MAX_HASHED_CHARACTERS}
    assert _hashes(long, _Unread()) == _hashes(long)
    assert _hashes({"role": "user", "content": "words"}, long) != _hashes(long)
