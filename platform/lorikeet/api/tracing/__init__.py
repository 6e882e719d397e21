"""Requests that are over, told as OpenTelemetry traces to a collector (OTLP over HTTP).

`sampling.py` says which ones and where each trace begins, `spans.py` makes the spans of one, and
`export.py` sends them. Nothing here is imported unless LORIKEET_TRACES is set.
"""
