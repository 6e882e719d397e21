"""What became of each request: one record, and all who read it.

trace.py          follows a request as it goes by and fills its record
│
record.py         RequestRecord: numbers and names, never what was said
│  when it is over, explanations.py hands it to
├── archive.py, why.py    an hour of them, packed, for `lorikeet why`
├── live_stats.py         the last minutes in numbers, for the page at /ui
├── ../metrics.py         counters, for Prometheus
└── ../tracing/           spans, for OpenTelemetry
"""
