"""docs/errors.md lists each kind of error in the form that clients get."""

from pathlib import Path

from gateway.errors.request_errors import WIRE

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"


def test_the_page_lists_every_form_and_no_other() -> None:
    rows = [line.split("|")[1:5] for line in PAGE.read_text().splitlines() if line[:3] == "| 4"]
    rows += [line.split("|")[1:5] for line in PAGE.read_text().splitlines() if line[:3] == "| 5"]
    listed = {tuple(cell.strip() for cell in row) for row in rows}
    forms = {(str(w.http_status), w.grpc_code.name, w.type, w.code) for w in WIRE.values()}
    assert listed == forms
