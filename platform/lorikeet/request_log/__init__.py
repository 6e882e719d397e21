"""Request log: one record of each request, for several readers.

│
record.py             RequestRecord: numbers and names, never a prompt or an answer
│  request_log.py hands the record of an ended request to
├── ended_requests.py an hour of compressed records, which why.py explains for `lorikeet why`
├── recent_traffic.py statistics of the last minutes, for the page at /ui
├── ../metrics/       counters, for Prometheus
└── ../tracing/       spans, for OpenTelemetry
"""
