"""Traces of ended requests for an OpenTelemetry collector (OTLP over HTTP).

exporter.py   TraceExporter, which gets every RequestRecord of a gateway, and sends spans
spans.py      which requests are traced, and the spans of one

Only imported when LORIKEET_OTLP_TRACES_ENDPOINT is set: its libraries take memory and time to load.
"""
