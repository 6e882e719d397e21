"""How much tenants and keys may do: rate limits and budgets in a gateway.

rate_limiter.py takes each request through its limits (`RateLimitHold`): allowance.py counts what a
tenant or key may still do, with token buckets; monthly_budget.py knows what is left of the month's
tokens, and queue_time.py estimates how long requests wait for their first token. A gateway enforces
its share of each limit, which limit_shares.py agrees on with the other gateways.

The gateway's request handling calls it; what limits there are stands in the catalog.
"""
