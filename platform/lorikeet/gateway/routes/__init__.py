"""Routes that do not generate: models, stored responses, usage, explanations of requests, metrics,
health.

A tenant gets its own data. The routes under /admin/v1 that show the same data of all tenants are
also defined here; gateway/admin/routes.py requires an admin's key for them.
"""
