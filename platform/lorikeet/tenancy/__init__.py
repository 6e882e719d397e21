"""Who may do what, and how much of it at once."""

from lorikeet.tenancy.authentication import Principal, authenticate
from lorikeet.tenancy.budget import Budget
from lorikeet.tenancy.rate_limiter import RateLimiter, RateLimitHold
from lorikeet.tenancy.shares import Shares, Statement

__all__ = [
    "Budget",
    "Principal",
    "RateLimitHold",
    "RateLimiter",
    "Shares",
    "Statement",
    "authenticate",
]
