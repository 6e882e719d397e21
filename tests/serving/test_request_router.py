"""Part of a request that the router reads."""

from array import array

from lorikeet.protocol.messages import Call, EncodedCall, Endpoint, TokenIds, Work
from lorikeet.routing.locations import BLOCK_TOKENS, MAX_HASHED_BLOCKS
from lorikeet.serving.request_router import routing_request_of
from lorikeet_engine.adapter import AdapterRef

REF = AdapterRef("acme", "support", 1, "d" * 64)
HASHED = MAX_HASHED_BLOCKS * BLOCK_TOKENS


def encoded(*prompts: TokenIds) -> EncodedCall:
    call = Call("r", Endpoint.CHAT, 0, "acme", "tiny", REF, 8, 4096, n=2)
    return EncodedCall(call, prompts)


def test_the_work_is_of_all_prompts_tokens_and_choices() -> None:
    two = routing_request_of(encoded(array("i", [1] * 30), array("i", [2] * 12)))
    assert two.work == Work(42, rank=8, adapter_bytes=4096, sequences=4)
    assert (two.adapter, two.tenant) == (REF, "acme")


def test_the_prefix_is_the_first_prompts_beginning() -> None:
    long = array("i", [7] * (HASHED + BLOCK_TOKENS))
    hashes = routing_request_of(encoded(long)).prefix_hashes
    assert len(hashes) == MAX_HASHED_BLOCKS
    assert routing_request_of(encoded(long[:HASHED], long)).prefix_hashes == hashes
    assert routing_request_of(encoded(array("i", [8]) + long)).prefix_hashes != hashes
