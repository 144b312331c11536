"""hadolint finds nothing in the files that the images are built from."""

from tests.deploy.chart.rendering import ROOT, run, tool


def test_hadolint_finds_nothing() -> None:
    said = {
        path.parent.name: run(tool("hadolint"), str(path)).stdout
        for path in (ROOT / "deploy" / "images").glob("*/Dockerfile")
    }
    assert {name: text for name, text in said.items() if text} == {}


def test_hadolint_finds_something() -> None:
    """So that silence means something."""
    done = run(tool("hadolint"), "-", text="FROM debian\nRUN cd /tmp\n")
    assert done.returncode != 0
    assert "DL3006" in done.stdout
