"""Rate limits and budgets of tenants and keys in one gateway.

rate_limiter.py admits each request within its limits and holds them until the request ends
(`RateLimitHold`). token_bucket.py counts one limit per minute, monthly_budget.py the month's
tokens, and queue_time_estimator.py estimates the wait for a first token. Each gateway enforces its
share of every limit; limit_shares.py agrees on the shares with the other gateways.

The gateway's request handling is the caller. The limits themselves are stored in the catalog.
"""
