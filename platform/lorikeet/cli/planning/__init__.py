"""Commands that size and measure a service: capacity and bench.

capacity.py asks the simulator how many replicas some traffic needs, which capacity_file.py reads.
bench.py has `lorikeet bench isolation`, whose requests isolation.py sends and measures.
"""
