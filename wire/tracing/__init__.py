"""Traces of requests by OpenTelemetry: how a context travels, when spans are made, who exports.

`context` and `options` import no part of OpenTelemetry; `spans` does, and is imported by
`opener` alone, when tracing is on.
"""
