"""Load programs: benchmarks of the service and of its parts.

Ray Serve reads RAY_SERVE_THROUGHPUT_OPTIMIZED when it is imported, and a handle keeps the value of
the process that deploys the application. Without the variable gateways would call replicas as
actors, at twice the CPU of gRPC calls. The variable is therefore set here, before any module of
this package imports Serve.
"""

import os

os.environ.setdefault("RAY_SERVE_THROUGHPUT_OPTIMIZED", "1")
