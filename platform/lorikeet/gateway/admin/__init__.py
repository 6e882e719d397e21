"""The admin API under /admin/v1, which the `lorikeet` command speaks.

routes.py            all routes, behind one check of the key
adapters.py, pins.py, tenants.py, keys.py, history.py   the catalog's records
upload_routes.py     a blob's way in: registration.py, blob_validation.py, smoke.py
status.py, fleet_view.py   what replicas hold and do, for `lorikeet status` and the page at /ui
serializers.py       records as JSON
"""
