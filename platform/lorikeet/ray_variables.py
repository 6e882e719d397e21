"""Environment variables that Ray's processes read when they start, and the values that Lorikeet
needs.
"""

import re
from dataclasses import dataclass

LARGEST_MESSAGE = 128 * 2**20
"""Limit on the bytes of a message of Ray Serve.

The largest messages are the largest request, and the largest answer without `stream` (with all log
probabilities that a request may ask for), which the proxy receives as one message.
"""

_NUMBER = re.compile(r"-?[0-9]+")


@dataclass(frozen=True, slots=True)
class RayVariable:
    """A variable that Ray reads.

    value: wanted value. If it is a number, larger ones are accepted too, or smaller ones if `most`
        is true.
    harm: effect of an unaccepted value.
    """

    name: str
    value: str
    harm: str
    most: bool = False

    def accepts(self, given: str | None) -> bool:
        """Whether a value is accepted; None: the variable is not set."""
        if given is None or not _NUMBER.fullmatch(self.value) or not _NUMBER.fullmatch(given):
            return given == self.value
        number, bound = int(given), int(self.value)
        return number <= bound if self.most else number >= bound


RAY_VARIABLES = (
    RayVariable("RAY_SERVE_THROUGHPUT_OPTIMIZED", "1", "streams are several times slower"),
    RayVariable("RAY_SERVE_PROXY_USE_GRPC", "1", "Serve's own proxy adds 2 ms to a first token"),
    RayVariable(
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH",
        str(LARGEST_MESSAGE),
        "requests and answers above 4 MiB fail",
    ),
    RayVariable(
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH",
        "lorikeet.serving.proxy_middleware:middlewares",
        "answers that clients do not read fill memory, and clients can choose request ids",
    ),
    RayVariable(
        "RAY_worker_niceness",
        "0",
        "engines and gateways run at niceness 15, and lose their cores to any other program",
        most=True,
    ),
)
