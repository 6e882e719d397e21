"""Who may do what, and how much of it at once."""

from lorikeet.tenancy.authentication import Principal, authenticate
from lorikeet.tenancy.limit_shares import GatewayClaims, LimitShares
from lorikeet.tenancy.monthly_budget import MonthlyBudget
from lorikeet.tenancy.rate_limiter import RateLimiter, RateLimitHold

__all__ = [
    "GatewayClaims",
    "LimitShares",
    "MonthlyBudget",
    "Principal",
    "RateLimitHold",
    "RateLimiter",
    "authenticate",
]
