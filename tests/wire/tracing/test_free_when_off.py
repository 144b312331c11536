"""Without tracing no service imports OpenTelemetry.

Of its API, which does nothing alone, FastAPI imports parts by itself.
"""

import subprocess
import sys

import pytest

from tests.test_repository import ROOT
from wire.tracing.opener import open_tracer
from wire.tracing.options import TracingOptions

MODULES = {
    "gateway": "gateway.__main__, gateway.process.server",
    "scheduler": "scheduler_svc.__main__",
    "worker": "worker_svc.__main__, worker_svc.serving.server",
}


@pytest.mark.parametrize("service", MODULES)
def test_opentelemetry_is_not_imported(service: str) -> None:
    code = (
        f"import sys, {MODULES[service]}\n"
        "from wire.tracing.opener import open_tracer\n"
        "from wire.tracing.options import TracingOptions\n"
        "assert open_tracer(TracingOptions(), 'x') is None\n"
        "parts = ('opentelemetry.sdk', 'opentelemetry.exporter', 'opentelemetry.proto')\n"
        "found = [name for name in sys.modules if name.startswith(parts)]\n"
        "assert not found, found[:3]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_there_is_no_tracer() -> None:
    assert open_tracer(TracingOptions(), "gateway") is None
