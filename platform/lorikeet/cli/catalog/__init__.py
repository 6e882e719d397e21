"""Commands about the catalog as a whole, a file each: init, snapshot, log and gc.

init and gc work on the catalog's store themselves; the others ask the admin API.
"""
