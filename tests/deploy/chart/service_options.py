"""The options of the three services as a part of the chart's schema, and their real parsers.

`python -m tests.deploy.chart.service_options` writes them into it.
"""

import argparse
import json
from enum import EnumType
from pathlib import Path
from typing import Any

import gateway.process.config
import scheduler_svc.config
import worker_svc.config

SCHEMA = Path(__file__).parents[3] / "deploy/k8s/chart/values.schema.json"
PARSERS = {
    "gateway": gateway.process.config.make_parser,
    "scheduler": scheduler_svc.config.make_parser,
    "worker": worker_svc.config.make_parser,
}
# What the chart itself decides: workers are found by DNS, and a key on the command line would show
# in the list of processes.
OWNED = {
    "accept-registrations", "advertise", "api-key", "api-keys", "config", "device", "disk-tier",
    "drain-timeout-s", "failpoint", "grpc-port", "health-port", "help", "host", "http-port",
    "insecure", "metrics-port", "model", "peer-token-file", "port", "register", "scheduler",
    "scheduler-dns", "share-ports", "standby-delay-s", "tensor-parallel-size", "tls-ca", "tls-cert",
    "tls-client-ca",
    "tls-client-cert", "tls-client-key", "tls-key", "worker", "worker-dns",
}  # fmt: skip
# The worker's is model.servedName; the gateway takes it from the worker unless it is told another.
OWNED_BY_TIER = {"worker": {"served-model-name"}}
JSON_TYPES = {int: "integer", float: "number"}


def long_options(tier: str) -> dict[str, argparse.Action]:
    """The options of a service, by name without dashes."""
    return {
        option.removeprefix("--"): action
        for action in PARSERS[tier]()._actions
        for option in action.option_strings
        if option.startswith("--")
    }


def schema_of(action: argparse.Action) -> dict[str, Any]:
    """The schema of a value in the chart."""
    described: dict[str, Any] = {}
    if action.help and action.help != argparse.SUPPRESS:
        described["description"] = action.help % {**vars(action), "prog": ""}
    if action.nargs == 0:
        return {**described, "type": "boolean"}
    one: dict[str, Any] = {"type": JSON_TYPES.get(action.type, "string")}  # type: ignore[arg-type]
    if action.choices:
        one = {"enum": [str(choice) for choice in action.choices]}
    elif isinstance(action.type, EnumType):
        one = {"enum": [member.value for member in action.type]}
    if isinstance(action, argparse._AppendAction):
        return {**described, "type": "array", "items": one}
    return {**described, **one}


def definition(tier: str) -> dict[str, Any]:
    """The schema of a tier's `options`."""
    kept = {
        name: schema_of(action)
        for name, action in sorted(long_options(tier).items())
        if name not in OWNED | OWNED_BY_TIER.get(tier, set())
    }
    return {"type": "object", "additionalProperties": False, "properties": kept}


def main() -> None:
    """Writes the options of all tiers into the chart's schema."""
    schema = json.loads(SCHEMA.read_text())
    for tier in PARSERS:
        schema["definitions"][f"{tier}Options"] = definition(tier)
    SCHEMA.write_text(json.dumps(schema, indent=2) + "\n")


if __name__ == "__main__":
    main()
