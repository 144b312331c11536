"""GuideLLM: a benchmark of streamed requests."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pace import patience

pytest.importorskip("guidellm", reason="guidellm is not here: make test-clients")

NUM_REQUESTS = 4


@pytest.mark.parametrize("request_format", ["/v1/chat/completions", "/v1/completions"])
def test_a_benchmark_streams_and_counts(url: str, tmp_path: Path, request_format: str) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"Tell me of {number}.", "output_tokens_count": 8} for number in range(8)]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    report = tmp_path / "report.json"
    options = [
        *("--backend", f"kind=openai_http,target={url},request_format={request_format}"),
        *("--profile", "kind=synchronous"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--data", f"kind=json_file,path={prompts}"),
        *("--output", f"kind=json,path={report}"),
        "--disable-progress",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "guidellm", "run", *options],
        capture_output=True,
        text=True,
        timeout=patience(300),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert not requests["errored"], requests["errored"][:1]
    assert len(requests["successful"]) == NUM_REQUESTS
    assert all(one["output_tokens"] for one in requests["successful"])
