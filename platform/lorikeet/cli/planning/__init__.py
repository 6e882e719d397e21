"""Commands that size and measure a service: capacity and bench.

capacity.py simulates how many replicas given traffic needs; capacity_file.py parses its input file.
bench.py has `lorikeet bench isolation`, whose requests isolation.py sends and measures.
"""
