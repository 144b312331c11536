"""What metrics are worth and what they cost: times compared with a client's, and one scrape.

    python -m bench.scrape [--requests 40] [--scrapes 100]

The three services of a tiny model run on this machine. One client streams requests one after the
other and times them; the means of what the histograms of the gateway grew by are printed next to
its own.
Then each service is scraped: the time until the text is there, and the CPU seconds of the service.
"""

import argparse
import http.client
import json
import os
import statistics
import time
import urllib.request
from dataclasses import dataclass
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

from bench.harness.services import commit, free_ports, hardware, settings
from bench.harness.stack import Stack, started, tiny_chat_model
from pagewire.cli.launcher import services

TOKENS = 48
TTFT = "pagewire_gateway_time_to_first_token_seconds"
ITL = "pagewire_gateway_inter_token_latency_seconds"


@dataclass(frozen=True, slots=True)
class Means:
    """Mean times, in milliseconds."""

    ttft_ms: float
    itl_ms: float


def metrics_of(url: str) -> dict[str, float]:
    """The sums of the samples of each name."""
    samples: dict[str, float] = {}
    with urllib.request.urlopen(url) as answer:
        text = answer.read().decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
    return samples


def stream(host: str, port: int, index: int) -> tuple[float, list[float]]:
    """Seconds until the first event of one output, and between its events."""
    body = {"prompt": f"{index} times", "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
    connection = http.client.HTTPConnection(host, port)
    connection.connect()
    began_s, arrivals = time.perf_counter(), []
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    while line := answer.readline():
        if line.startswith(b"data: {"):
            arrivals.append(time.perf_counter())
    connection.close()
    gaps_s = [later - sooner for sooner, later in pairwise(arrivals)]
    return arrivals[0] - began_s, gaps_s


def compare(stack: Stack, num_requests: int) -> tuple[Means, Means]:
    """The client's means, and those of the gateway's histograms."""
    host, port = stack.http
    url = f"http://{host}:{port}/metrics"
    before, ttft_s, gaps_s = metrics_of(url), [], list[float]()
    for index in range(num_requests):
        first_s, between_s = stream(host, port, index)
        ttft_s.append(first_s)
        gaps_s += between_s
    after = metrics_of(url)

    def mean_ms(name: str) -> float:
        count = after[f"{name}_count"] - before[f"{name}_count"]
        return 1e3 * (after[f"{name}_sum"] - before[f"{name}_sum"]) / count

    client = Means(1e3 * statistics.mean(ttft_s), 1e3 * statistics.mean(gaps_s))
    return client, Means(mean_ms(TTFT), mean_ms(ITL))


def scrape(url: str, pid: int, num_scrapes: int) -> str:
    """What one scrape of a service takes, in words."""
    times_ms, num_bytes = [], 0
    before_s = cpu_s(pid)
    for _ in range(num_scrapes):
        began_s = time.perf_counter()
        with urllib.request.urlopen(url) as answer:
            num_bytes = len(answer.read())
        times_ms.append(1e3 * (time.perf_counter() - began_s))
    own_ms = 1e3 * (cpu_s(pid) - before_s) / num_scrapes
    return (
        f"p50 {statistics.median(times_ms):.2f} ms, best {min(times_ms):.2f} ms, "
        f"CPU of the service {own_ms:.2f} ms, {num_bytes / 1024:.0f} KiB"
    )


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--scrapes", type=int, default=100)
    options = parser.parse_args()
    print(f"{hardware()}, commit {commit()}, load {os.getloadavg()[0]:.1f}")
    ports, (scheduler_port, worker_port) = free_ports(), services.free_ports(2)
    with tiny_chat_model() as model:
        wanted = settings(
            ports,
            ("--device", "cpu", "--kv-cache-gib", "0.3", "--metrics-port", str(worker_port)),
            ("--metrics-port", str(scheduler_port)),
        )
        with started(services.plan(wanted, model), ports) as stack:
            stream(*stack.http, -1)
            client, gateway = compare(stack, options.requests)
            print(f"TTFT ms: client {client.ttft_ms:.2f}, metrics {gateway.ttft_ms:.2f}")
            print(f"ITL ms: client {client.itl_ms:.3f}, metrics {gateway.itl_ms:.3f}")
            for name, port in (
                ("gateway", ports.gateway_http),
                ("scheduler", scheduler_port),
                ("worker", worker_port),
            ):
                url = f"http://127.0.0.1:{port}/metrics"
                print(f"{name}: {scrape(url, stack.pid(name), options.scrapes)}")


if __name__ == "__main__":
    main()
