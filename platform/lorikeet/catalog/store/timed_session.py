"""HTTP session for boto3 that gives up answers whose body arrives too slowly.

boto3's own timeout is for silence: a server that sends a byte now and then would hold a read for
ever.
"""

import time
from collections.abc import Iterator
from typing import Any

from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.exceptions import ReadTimeoutError, ResponseStreamingError
from botocore.httpsession import URLLib3Session
from urllib3.exceptions import ProtocolError
from urllib3.exceptions import ReadTimeoutError as NoByte

LEAST_BYTES_PER_S = 8 * 2**10
WINDOW_S = 5.0
"""Length, in seconds, of the windows in which the rate of a response body is checked.

Only seconds spent waiting for the body count. At the end of a window, the bytes received in it are
compared with LEAST_BYTES_PER_S, and a new window begins.
"""
_CHUNK_BYTES = 2**16


class SlowBody(ReadTimeoutError):
    """Raised when less than LEAST_BYTES_PER_S of a body arrived in a window of WINDOW_S."""

    fmt = "Read timeout on endpoint URL: {endpoint_url}: {received} bytes in {seconds:.1f} s"


class TimedSession:
    """HTTP session for a boto3 client that gives up bodies arriving too slowly. It wraps the
    client's own session.
    """

    def __init__(self, session: URLLib3Session) -> None:
        self._session = session

    def send(self, request: AWSPreparedRequest) -> AWSResponse:
        """Send a request and return the answer, whose body is read later if the request asks for a
        stream. Raises HTTPClientError if the connection fails or the body arrives too slowly.
        """
        streamed = request.stream_output
        request.stream_output = True  # URLLib3Session would read the body otherwise
        answer = self._session.send(request)
        answer.raw = TimedBody(answer.raw, request.url)
        if not streamed:
            answer._content = answer.raw.read()  # type: ignore[attr-defined]
        return answer

    def close(self) -> None:
        """Close the session."""
        self._session.close()


class TimedBody:
    """Body of an answer, read by botocore's StreamingBody, that must arrive at LEAST_BYTES_PER_S.

    Only time spent waiting for the server counts, not the time between two reads.

    raw: urllib3's response.
    """

    def __init__(self, raw: Any, url: str) -> None:
        self._raw, self._url = raw, url
        self._waited_s, self._received = 0.0, 0  # in this window

    def read(self, amount: int | None = None) -> bytes:
        """Return `amount` bytes, or fewer at the end; None: all of them.

        Raises SlowBody if they arrive too slowly, and another HTTPClientError if the connection
        breaks or is silent.
        """
        pieces, missing = [], amount
        while missing is None or missing > 0:
            piece = self._read_some(_CHUNK_BYTES if missing is None else missing)
            if not piece:
                break
            pieces.append(piece)
            if missing is not None:
                missing -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def stream(self) -> Iterator[bytes]:
        """Yield the bytes as they arrive.

        Raises SlowBody if they arrive too slowly, and another HTTPClientError if the connection
        breaks or is silent.
        """
        while piece := self._read_some(_CHUNK_BYTES):
            yield piece

    def close(self) -> None:
        """Close the connection."""
        self._raw.close()

    def _read_some(self, most: int) -> bytes:
        """Return what has arrived, `most` bytes at most; b"" at the end."""
        began_s = time.monotonic()
        try:
            piece: bytes = self._raw.read1(most)
        except NoByte as error:
            raise ReadTimeoutError(endpoint_url=self._url, error=error) from error
        except ProtocolError as error:
            raise ResponseStreamingError(error=error) from error
        self._waited_s += time.monotonic() - began_s
        self._received += len(piece)
        if self._waited_s > WINDOW_S:
            if piece and self._received < LEAST_BYTES_PER_S * self._waited_s:
                self.close()
                raise SlowBody(
                    endpoint_url=self._url, received=self._received, seconds=self._waited_s
                )
            self._waited_s, self._received = 0.0, 0
        return piece
