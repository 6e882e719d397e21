"""Admin API under /admin/v1, the API of the `lorikeet` command.

routes.py            all routes, behind one check of the key
adapters.py, pins.py, tenants.py, keys.py, history.py   routes of the catalog's records
upload_routes.py     routes of uploads: registration.py, blob_validation.py, smoke.py
status.py, fleet_view.py   adapters and load of replicas, for `lorikeet status` and the page at /ui
serializers.py       records as JSON
"""
