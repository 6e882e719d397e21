"""Load programs: benchmarks of the service, of its parts and of a simulated fleet.

Serve reads this as it is imported, and a handle keeps what it was made with in the process that
deploys it: without it gateways would call replicas as actors, at twice the CPU of gRPC calls. So
it has to stand before any module of this package imports Serve, however that module is started.
"""

import os

os.environ.setdefault("RAY_SERVE_THROUGHPUT_OPTIMIZED", "1")
