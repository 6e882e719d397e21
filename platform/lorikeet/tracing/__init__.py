"""Traces of ended requests for an OpenTelemetry collector (OTLP over HTTP).

exporter.py   TraceExporter, which receives each RequestRecord of a gateway and sends spans
spans.py      sampling of requests, and the spans of one request

Imported only if LORIKEET_OTLP_TRACES_ENDPOINT is set: its libraries take memory and time to load.
"""
