"""Request that makes a batch: POST /v1/batches."""

from typing import Annotated, Literal

from pydantic import Field

from lorikeet.file_store import LIFETIME_S, SHORTEST_S
from lorikeet.gateway.apis.fields import Metadata
from lorikeet.gateway.body import Body


class ExpiresAfter(Body):
    """Lifetime of a batch's output file, from the file's creation.

    anchor: start of the lifetime; only the file's creation is supported.
    """

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=SHORTEST_S, le=LIFETIME_S)]


class BatchRequest(Body):
    """Request of POST /v1/batches.

    input_file_id: uploaded file with the requests, one a line.
    endpoint: path of the API that answers all requests, such as /v1/chat/completions.
    completion_window: time after which unanswered requests expire.
    metadata: the client's own key-value pairs, shown with the batch.
    output_expires_after: lifetime of the output file; None: the longest.
    """

    input_file_id: Annotated[str, Field(max_length=256)]
    endpoint: Annotated[str, Field(max_length=256)]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None
