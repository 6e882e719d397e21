"""The page at /ui: files for a browser (static/), and the routes that serve them (routes.py).

The page calls GET /admin/v1/fleet (gateway/admin/fleet_view.py) with the key that the user enters.
"""
