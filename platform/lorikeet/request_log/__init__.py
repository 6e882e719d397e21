"""The request log: what became of each request, as one record that several readers read.

│
record.py             RequestRecord: numbers and names, never a prompt or an answer
│  when the request has ended, request_log.py hands it to
├── ended_requests.py an hour of records, packed, from which why.py makes `lorikeet why`
├── recent_traffic.py the last minutes in numbers, for the page at /ui
├── ../metrics/       counters, for Prometheus
└── ../tracing/       spans, for OpenTelemetry
"""
