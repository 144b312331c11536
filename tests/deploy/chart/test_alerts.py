"""promtool takes the alerts, and each fires on series written for it and is quiet on others."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart.alert_cases import CASES, NAMES, AlertCase, Series
from tests.deploy.chart.rendering import ROOT, Object, of_kind, rendered, run, tool

DOCUMENT = ROOT / "docs" / "deploy.md"


def rules() -> list[Object]:
    (found,) = of_kind(rendered("monitoring"), "PrometheusRule")
    (group,) = found["spec"]["groups"]
    alerts: list[Object] = group["rules"]
    return alerts


@pytest.fixture(scope="module")
def rules_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (found,) = of_kind(rendered("monitoring"), "PrometheusRule")
    path = tmp_path_factory.mktemp("rules") / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": found["spec"]["groups"]}))
    return path


def named(series: str) -> str:
    """A series with the labels of the release."""
    name, _, labels = series.partition("{")
    return f"{name}{{{NAMES}{',' + labels if labels else '}'}"


def inputs(series: Series) -> list[dict[str, str]]:
    return [{"series": named(name), "values": values} for name, values in series.items()]


def test_of(alert: str, case: AlertCase, *, fires: bool) -> dict[str, Any]:
    """One of promtool's tests."""
    (rule,) = (rule for rule in rules() if rule["alert"] == alert)
    labels = {**case.labels, "severity": rule["labels"]["severity"]}
    expected = [{"exp_labels": labels, "exp_annotations": {"summary": case.summary}}]
    return {
        "interval": "1m",
        "input_series": inputs(case.fires if fires else case.quiet),
        "alert_rule_test": [
            {"alertname": alert, "eval_time": case.at, "exp_alerts": expected if fires else []}
        ],
    }


test_of.__test__ = False  # type: ignore[attr-defined]


def said_by_promtool(rules_file: Path, test: dict[str, Any]) -> str:
    """Nothing where the test holds."""
    path = rules_file.with_name("test.yaml")
    path.write_text(yaml.safe_dump({"rule_files": [rules_file.name], "tests": [test]}))
    done = run(tool("promtool"), "test", "rules", str(path))
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_promtool_takes_the_rules(rules_file: Path) -> None:
    done = run(tool("promtool"), "check", "rules", "--lint=all", "--lint-fatal", str(rules_file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules())} rules found" in done.stdout


def test_every_alert_has_a_case() -> None:
    assert [rule["alert"] for rule in rules()] == sorted(CASES)


@pytest.mark.parametrize("alert", CASES)
def test_it_fires(alert: str, rules_file: Path) -> None:
    assert said_by_promtool(rules_file, test_of(alert, CASES[alert], fires=True)) == ""


@pytest.mark.parametrize("alert", CASES)
def test_it_is_quiet(alert: str, rules_file: Path) -> None:
    assert said_by_promtool(rules_file, test_of(alert, CASES[alert], fires=False)) == ""


def test_it_does_not_fire_for_another_release(rules_file: Path) -> None:
    """The scheduler is another's; only alerts of absence fire, and say so of this one."""
    case = CASES["PagewireQueue"]
    test = test_of("PagewireQueue", case, fires=False)
    test["input_series"] = [
        {"series": named(name).replace("demo-pagewire", "other"), "values": values}
        for name, values in case.fires.items()
    ]
    assert said_by_promtool(rules_file, test) == ""


def test_thresholds_are_those_of_the_values() -> None:
    (rule,) = (rule for rule in rules() if rule["alert"] == "PagewireFirstToken")
    assert rule["expr"].endswith("> 2.5")


def test_the_document_says_what_to_do_about_each() -> None:
    text = DOCUMENT.read_text()
    assert [alert for alert in sorted(CASES) if f"| `{alert}` |" not in text] == []
