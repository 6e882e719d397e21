"""The page at /ui: files for a browser (static/), and the routes that serve them (routes.py).

With the key that the user enters, the page calls GET /admin/v1/fleet
(gateway/admin/fleet_view.py), or GET /v1/limits, /v1/requests, /v1/models and /v1/usage.
"""
