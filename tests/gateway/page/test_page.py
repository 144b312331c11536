"""The page's files: who gets them, under which headers, and what may not be in them."""

import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest

from gateway.page.files import FOLDER, HEADERS, page_files
from tests.gateway.http_calls import error_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
NAMES = sorted(path.name for path in FOLDER.iterdir())
SCRIPTS = [name for name in NAMES if name.endswith(".js")]
MAX_LINES = 400
MAX_BYTES = 120_000  # of all files: what a first visit costs
IMPORT = re.compile(r'^import .*?"\./([\w.-]+)";$', re.MULTILINE | re.DOTALL)
# Ways from a string to markup or code.
SINKS = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc"
    r"|DOMParser|createContextualFragment|setHTMLUnsafe|javascript:"
)
# A namespace is a name, not an address.
ELSEWHERE = re.compile(r"(?:https?:)?//(?!www\.w3\.org/2000/svg)[a-z0-9.-]+\.[a-z]{2,}", re.I)


class Elements(HTMLParser):
    """The start tags of a document."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def elements() -> list[tuple[str, dict[str, str | None]]]:
    return Elements((FOLDER / "index.html").read_text()).found


async def test_the_page_and_its_files_need_no_key_and_bring_their_policy(
    start: Callable[..., Any],
) -> None:
    running = await start(api_key="secret")
    for path in ("/", *(f"/page/{name}" for name in NAMES)):
        answer = await running.http.get(path)
        assert answer.status_code == 200, path
        for name, value in HEADERS.items():
            assert answer.headers[name] == value
        assert answer.headers["etag"]
    error_of(await running.http.get("/v1/models"), 401)
    error_of(await running.http.get("/page"), 401)


async def test_the_policy_lets_in_nothing_but_files_of_this_server() -> None:
    rules = dict(rule.split(" ", 1) for rule in HEADERS["content-security-policy"].split("; "))
    assert rules["default-src"] == "'none'" and rules["frame-ancestors"] == "'none'"
    assert {rules[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
    assert "unsafe" not in str(rules) and "*" not in str(rules) and "data:" not in str(rules)


async def test_a_browser_that_has_a_file_is_not_sent_it_again(running: Any) -> None:
    first = await running.http.get("/page/main.js")
    tag = first.headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = await running.http.get("/page/main.js", headers={"if-none-match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == tag
    other = await running.http.get("/page/main.js", headers={"if-none-match": '"other"'})
    assert other.status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/page/none.js", "/page/", "/page/..%2ffiles.py", "/page/%2e%2e/files.py", "/page/../files.py",
     "/page/files.py", "/page/main.js%00"],
)  # fmt: skip
async def test_what_is_no_file_of_the_page_is_not_found(running: Any, path: str) -> None:
    error_of(await running.http.get(path), 404)


async def test_without_the_page_there_is_none(start: Callable[..., Any]) -> None:
    running = await start(no_page=True)
    for path in ("/", "/page/main.js"):
        error_of(await running.http.get(path), 404)


async def test_the_document_has_no_inline_code_and_names_only_files_that_exist() -> None:
    served = page_files()
    for tag, attributes in elements():
        assert tag not in ("style", "iframe", "object", "embed", "base"), tag
        assert "style" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        if tag == "script":
            assert attributes["src"]
        for name in ("src", "href"):
            target = attributes.get(name)
            if target and not target.startswith("#"):
                assert target.removeprefix("page/") in served


async def test_every_field_and_button_has_a_name() -> None:
    found = elements()
    labelled = {attributes.get("for") for tag, attributes in found if tag == "label"}
    ids = [attributes["id"] for _, attributes in found if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in found:
        if tag in ("input", "textarea"):
            assert attributes.get("id") in labelled
        for reference in ("aria-controls", "aria-labelledby", "for"):
            if reference in attributes:
                assert attributes[reference] in ids


@pytest.mark.parametrize("name", SCRIPTS)
async def test_a_module_makes_no_markup_of_text_and_asks_nothing_elsewhere(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert not SINKS.search(text)
    assert not ELSEWHERE.search(text)
    assert len(text.splitlines()) <= MAX_LINES
    assert all(len(line) <= 240 for line in text.splitlines())
    assert set(IMPORT.findall(text)) <= set(NAMES)
    assert len(re.findall(r"^import\b", text, re.MULTILINE)) == len(IMPORT.findall(text))
    assert "import(" not in text


async def test_styles_load_nothing() -> None:
    for name in NAMES:
        if name.endswith(".css"):
            assert not re.search(r"url\(|@import|expression", (FOLDER / name).read_text())


async def test_the_whole_page_is_small() -> None:
    assert sum(len(file.body) for file in page_files().values()) < MAX_BYTES
    assert set(page_files()) == set(NAMES)
