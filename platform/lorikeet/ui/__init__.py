"""The page at /ui: files for a browser (static/), and the routes that serve them (routes.py).

The page asks GET /admin/v1/fleet (gateway/admin/fleet_view.py) with the key that a person types in.
"""
