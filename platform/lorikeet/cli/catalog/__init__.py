"""Commands about the whole catalog, a file each: init, snapshot, log and gc.

init and gc work directly on the catalog's store. The others call the admin API.
"""
