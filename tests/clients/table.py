"""The fields that docs/api.md lists."""

from pathlib import Path


def fields_of(section: str) -> set[str]:
    """The fields in the table below a heading."""
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    lines = text.split(f"\n## {section}\n")[1].split("\n## ")[0].splitlines()
    return {line.split("`")[1] for line in lines if line.startswith("| `")}
