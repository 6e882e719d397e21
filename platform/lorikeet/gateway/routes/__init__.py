"""Routes beside generation: models, usage, one request's explanation, metrics.

Tenants see their own; the routes under /admin/v1 that show all tenants are here too, and
gateway/admin/routes.py puts them behind an admin's key.
"""
