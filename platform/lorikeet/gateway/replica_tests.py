"""Wait for the result of a smoke test or a parity proof, which a replica runs for a gateway."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from lorikeet.errors import Unavailable
from lorikeet.gateway.error_responses import Refused
from lorikeet.gateway.services import Services
from lorikeet.protocol.messages import Refusal

Result = TypeVar("Result")


async def result_of(
    services: Services, base_model: str, work: str, test: Awaitable[Result | Refusal]
) -> Result:
    """Return the result of a replica's test. Wait for it services.first_item_timeout_s at most.

    work: what the replica does, in the past tense, for the error message: "tried …".
    test: call of the replica that runs the test.

    Raises Unavailable if no replica answers in time, Refused if the replica refuses the test, and
    the errors of `test`.
    """
    try:
        async with asyncio.timeout(services.first_item_timeout_s):
            result = await test
    except TimeoutError as error:
        raise Unavailable(
            f"no replica of {base_model} {work} within {services.first_item_timeout_s:g} s: see "
            "`lorikeet status`, then try again"
        ) from error
    if isinstance(result, Refusal):
        raise Refused(result)
    return result
