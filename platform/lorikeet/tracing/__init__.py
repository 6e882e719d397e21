"""Traces of requests and the audit stream, for an OpenTelemetry collector (OTLP over HTTP).

exporter.py       TraceExporter, which receives each RequestRecord of a gateway and sends spans
spans.py          sampling of requests, and the spans of one request
log_exporter.py   handler of the audit stream (gateway/audit.py), which sends log records

Imported only if LORIKEET_OTLP_TRACES_ENDPOINT is set, or LORIKEET_AUDIT_LOG to a collector: its
libraries take memory and time to load.
"""
