"""Requests that are over, told as OpenTelemetry traces to a collector (OTLP over HTTP).

`spans.py` says which ones, and makes the spans of each; `export.py` sends them. Nothing here is
imported unless LORIKEET_OTLP_TRACES_ENDPOINT is set.
"""
