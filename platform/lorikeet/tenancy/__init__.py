"""How much tenants and keys may do: rate limits and budgets in a gateway.

rate_limiter.py takes each request through its limits (`RateLimitHold`): allowance.py counts what a
tenant or key may still do, with token buckets; monthly_budget.py knows what is left of the month's
tokens, and queue_time.py estimates how long requests wait for their first token. A gateway enforces
its share of each limit, which limit_shares.py agrees on with the other gateways.

The gateway's request handling calls it; what limits there are stands in the catalog.
"""

from lorikeet.tenancy.allowance import limit_headers
from lorikeet.tenancy.limit_shares import GatewayClaims, LimitShares
from lorikeet.tenancy.monthly_budget import MonthlyBudget
from lorikeet.tenancy.rate_limiter import RateLimiter, RateLimitHold

__all__ = [
    "GatewayClaims",
    "LimitShares",
    "MonthlyBudget",
    "RateLimitHold",
    "RateLimiter",
    "limit_headers",
]
