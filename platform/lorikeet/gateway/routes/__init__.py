"""Routes that do not generate: models, stored responses, usage, explained requests, metrics,
health.

Tenants get their own data. Routes of the same subjects under /admin/v1, which show all tenants, are
here too; gateway/admin/routes.py puts them behind an admin's key.
"""
