"""The page in a real browser: it chats, shows the system, bears hostile text, asks no one else."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.e2e.page.browser import BrowserFailed, Tab
from tests.e2e.page.conftest import Demo
from tests.pace import patience

pytestmark = pytest.mark.slow

HOSTILE = '<img src=x onerror="window.broken=1"></script><script>window.broken=1</script>'
MAP = "document.querySelector('.block-map')"
PICTURE = f"{MAP} && {MAP}.width && {MAP}.toDataURL()"
READY = "document.querySelector('#workers li')?.dataset.state === 'ready'"
AWAY = "document.querySelector('#workers li')?.dataset.state === 'away'"
# An answer may be whole before the first look at the page.
ANSWERED = (
    "document.querySelector('.message.assistant .meta:not([hidden])')"
    " && document.querySelector('#stop').hidden"
)
NOTE_LENGTHS = """{
  window.lengths = [];
  const length = () => document.querySelector('.message.assistant > .text')?.textContent.length;
  const note = () => { if (length()) window.lengths.push(length()); };
  const changes = { childList: true, characterData: true, subtree: true };
  new MutationObserver(note).observe(document.querySelector('#messages'), changes);
}"""


def say(tab: Tab, text: str) -> None:
    tab.click("#prompt")
    tab.type(text)
    tab.press("Enter")


def limit(tab: Tab, num_tokens: int) -> None:
    """Sets the setting as a user does."""
    tab.click("#set-max_tokens")
    tab.evaluate("document.activeElement.select()")
    tab.type(str(num_tokens))


def answers(tab: Tab) -> list[str]:
    found: list[str] = tab.evaluate(
        "[...document.querySelectorAll('.message.assistant > .text')].map((e) => e.textContent)"
    )
    return found


@contextmanager
def streams(demo: Demo, count: int, num_tokens: int) -> Iterator[list[dict[str, Any]]]:
    """Requests that run during the block; their answers are complete after it."""
    found: list[dict[str, Any]] = []

    def run(index: int) -> None:
        body = {"prompt": f"{index} " * 40, "max_tokens": num_tokens, "ignore_eos": True}
        answer = httpx.post(f"{demo.url}v1/completions", json=body, timeout=patience(180))
        found.append(answer.json())

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    yield found
    for thread in threads:
        thread.join()
    assert [one["usage"]["completion_tokens"] for one in found] == [num_tokens] * count


def test_a_chat_streams_and_is_still_there_after_a_reload(tab: Tab, demo: Demo) -> None:
    limit(tab, 900)
    tab.evaluate(NOTE_LENGTHS)
    say(tab, "Hello")
    tab.until(ANSWERED)
    assert len(tab.evaluate("[...new Set(window.lengths)]")) > 2  # it grew while it came
    meta = tab.evaluate("document.querySelector('.message.assistant .meta').textContent")
    assert "first token" in meta and "tokens/s" in meta and "900 tokens" in meta
    assert "ended by length" in meta
    before = answers(tab)
    tab.open(f"{demo.url}?again")
    tab.click("#chats .title")
    assert answers(tab) == before
    tab.click("#chats .remove")
    assert tab.evaluate("localStorage.getItem('pagewire.chats')") == "[]"


def test_an_answer_can_be_stopped(tab: Tab) -> None:
    limit(tab, 1900)
    say(tab, "Hello")
    tab.until("document.querySelector('.message.assistant > .text').textContent.length > 0")
    tab.press("Escape")
    tab.until("document.querySelector('#stop').hidden")
    assert "ended by you" in tab.evaluate(
        "document.querySelector('.assistant .acts + span').textContent"
    )
    tab.until("document.querySelector('#strip-text').textContent.includes(' 0 running')")


def test_hostile_text_stays_text(tab: Tab, demo: Demo) -> None:
    """In what the user says, what the model says, titles, settings and request ids."""
    limit(tab, 5)
    say(tab, HOSTILE)
    tab.until(ANSWERED)
    kept = {"id": "1", "title": HOSTILE, "messages": [
        {"role": "user", "content": f"`{HOSTILE}` **{HOSTILE}**\n- {HOSTILE}\n```\n{HOSTILE}\n```"},
        {"role": "assistant", "content": f"# {HOSTILE}\n[x](javascript:window.broken=1)",
         "reasoning": HOSTILE, "problem": HOSTILE},
    ]}  # fmt: skip
    tab.evaluate(f"localStorage.setItem('pagewire.chats', {json.dumps(json.dumps([kept]))})")
    tab.open(f"{demo.url}?hostile")
    tab.click("#chats .title")
    assert HOSTILE in answers(tab)[0]
    tab.click(".message.assistant .acts button:nth-child(2)")
    assert "curl" in tab.evaluate("document.querySelector('#code').value")
    tab.press("Escape")
    elements = "document.querySelectorAll('main img, main script, main a').length"
    assert tab.evaluate(elements) == 0
    assert tab.evaluate("window.broken === undefined")


def test_the_policy_stops_what_gets_in_all_the_same(tab: Tab) -> None:
    with pytest.raises(BrowserFailed, match="TrustedHTML"):
        tab.evaluate("document.body.innerHTML = '<p>x</p>'")
    assert (
        tab.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', (error) => error.name)")
        == "TypeError"
    )
    tab.events.clear()  # both refusals are in the log, as they should be


def test_the_map_shows_blocks_that_are_taken_and_rows_that_run(tab: Tab, demo: Demo) -> None:
    tab.click("#tab-system")
    tab.until(PICTURE)
    before = tab.evaluate(PICTURE)
    with streams(demo, 4, 400):
        tab.until("document.querySelectorAll('#rows tr').length >= 4")
        tab.until(f"{PICTURE} !== {json.dumps(before)}")
        tab.until("document.querySelector('#rows td.state').textContent === 'decode'")
        tab.until("Number(document.querySelector('.tile .value span').textContent) > 0")
    tab.until("document.querySelectorAll('#rows tr').length === 0")
    assert tab.evaluate("document.querySelector('#steps-text').textContent").startswith("step ")


def test_a_session_is_seen_with_its_turns(tab: Tab, demo: Demo) -> None:
    tab.click("#tab-system")
    messages = [{"role": "user", "content": "word " * 60}]
    for _ in range(2):
        body = {"messages": messages, "max_tokens": 4, "session_id": HOSTILE[:60]}
        answer = httpx.post(
            f"{demo.url}v1/chat/completions", json=body, timeout=patience(60)
        ).json()
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "And?"}]
    cells, wanted = "[...document.querySelectorAll('#session-rows .id')]", json.dumps(HOSTILE[:60])
    cell = f"{cells}.find((cell) => cell.textContent === {wanted})"
    tab.until(f"{cell}?.parentNode.children[4].textContent === '2'")
    found = tab.evaluate(f"{cell}.parentNode.children[6].textContent")
    assert found.endswith(" %") and int(found.removesuffix(" %")) > 30
    assert not tab.evaluate("window.broken")


def test_a_killed_worker_is_seen_to_die_and_to_come_back(tab: Tab, demo: Demo) -> None:
    tab.click("#tab-system")
    tab.until(READY)
    with streams(demo, 4, 700):
        tab.until(
            "[...document.querySelectorAll('#rows .state')].some((e) => e.textContent === 'decode')"
        )
        tab.click("#kill")
        tab.until(AWAY, patience(60))
        tab.until("document.querySelector('#rows td.state').textContent === 'worker away'")
        assert "worker away" in tab.evaluate("document.querySelector('#strip-text').textContent")
        tab.until(READY, patience(120))
    told = tab.evaluate("document.querySelector('#events').textContent")
    assert "is lost" in told and "is back after" in told
    assert "1 recovery" in tab.evaluate("document.querySelector('#workers').textContent")
    assert "killing the worker: the page asked for it" in demo.log.read_text()


def test_everything_can_be_reached_and_done_with_the_keyboard(tab: Tab) -> None:
    seen = []
    for _ in range(40):
        tab.press("Tab")
        name = tab.evaluate("document.activeElement.id || document.activeElement.className")
        visible = tab.evaluate(
            "(() => { const r = document.activeElement.getBoundingClientRect();"
            "return r.width > 0 && r.height > 0 })()"
        )
        assert visible, f"the focus is lost at {name}"
        if name in seen:
            break
        seen.append(name)
    wanted = {"skip", "tab-chat", "open-key", "theme", "new-chat", "open-settings", "prompt"}
    assert wanted <= set(seen)
    tab.evaluate("document.querySelector('#tab-chat').focus()")
    tab.press("ArrowRight")
    assert tab.evaluate("document.activeElement.id") == "tab-system"
    assert tab.evaluate("document.querySelector('#view-chat').hidden")
    tab.press("ArrowLeft")
    limit(tab, 4)
    tab.evaluate("document.querySelector('#prompt').focus()")
    tab.type("Hi")
    tab.press("Enter")
    tab.until("document.querySelector('.message.assistant .meta:not([hidden])')")
    tab.evaluate("document.querySelector('.message.assistant .acts button:nth-child(3)').focus()")
    tab.press(" ")
    tab.until("document.querySelector('#code-dialog').open")
    assert "OpenAI(" in tab.evaluate("document.querySelector('#code').value")
    tab.press("Escape")
    tab.until("!document.querySelector('#code-dialog').open")
    assert tab.evaluate("document.activeElement.textContent") == "Python"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1440, 900), (390, 844)])
def test_axe_finds_no_serious_issue(
    tab: Tab, demo: Demo, axe: str, scheme: str, size: tuple[int, int]
) -> None:
    tab.prefer(scheme)
    tab.resize(*size)
    tab.open(f"{demo.url}?axe")
    say(tab, "Hello")
    tab.until("document.querySelector('.message.assistant > .text').textContent.length > 0")
    tab.press("Escape")
    tab.until("document.querySelector('#stop').hidden")
    tab.send("Page.setBypassCSP", enabled=True)  # axe makes a style element
    for view in ("chat", "system"):
        tab.click(f"#tab-{view}")
        with streams(demo, 3, 500):
            if view == "system":
                tab.until("document.querySelectorAll('#rows tr').length >= 1")
            tab.evaluate(axe)
            found = tab.evaluate(
                "axe.run().then((found) => found.violations.map((one) => "
                "[one.impact, one.id, one.nodes.map((node) => node.html).join(' ')]))"
            )
            assert [one for one in found if one[0] in ("serious", "critical")] == []
    tab.events.clear()


def test_a_page_that_narrow_needs_no_sideways_scrolling(tab: Tab, demo: Demo) -> None:
    tab.resize(390, 844, is_phone=True)
    for view in ("chat", "system"):
        tab.open(f"{demo.url}?narrow{view}#{view}")
        tab.until("document.querySelector('#lamp.good')")
        assert tab.evaluate("[innerWidth, document.documentElement.scrollWidth]") == [390, 390]
