"""Commands about adapters and their pins.

list_and_show.py, promote.py (and rollback), retire.py (and restore), register.py, smoke.py,
convert.py and pins.py (pin, unpin, pins) hold the commands of these names. register reads from
sources/ and sends with upload.py; convert reads pickled.py.
"""
