"""Who may do what, and how much of it at once."""

from lorikeet.tenancy.authentication import Principal, authenticate
from lorikeet.tenancy.budget import Budget
from lorikeet.tenancy.rate_limiter import Admission, RateLimitHold
from lorikeet.tenancy.shares import Shares, Statement

__all__ = [
    "Admission",
    "Budget",
    "Principal",
    "RateLimitHold",
    "Shares",
    "Statement",
    "authenticate",
]
