"""Admission of a tenant's requests that generate nothing (reads): lists of models, usage, and
explanations of earlier requests.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import Request

from lorikeet.gateway.auth import Caller, RequestAuthenticator
from lorikeet.tenancy.read_limiter import ReadLimiter


class TenantReads:
    """Checks of each read request of a tenant: of the request's key, and of the tenant's limit on
    reads.

    limiter: counts the additional reads of a request that turns out to cost more than one read.
    """

    def __init__(self, authenticator: RequestAuthenticator, limiter: ReadLimiter) -> None:
        self._authenticator, self.limiter = authenticator, limiter

    @asynccontextmanager
    async def admitted(self, request: Request, reads: float = 1.0) -> AsyncGenerator[Caller, None]:
        """Count a request as running within the context; yield its tenant and key.

        reads: number of reads that the request counts as in the tenant's limit.

        Raises InvalidKey or Forbidden if the key does not allow the request, RateLimited beyond the
        limit, Unavailable if the catalog cannot be read.
        """
        caller = await self._authenticator.caller(request)
        with self.limiter.reading(caller.tenant.name, reads):
            yield caller
