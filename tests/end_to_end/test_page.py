"""The page at ``/``, as a browser shows it."""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra serve")

from pi2.serving.application import read_page
from tests.helpers.servers import describe_plan, make_chat_plan, serve

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

pytestmark = pytest.mark.slow


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = read_page().decode("utf-8")
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//""", text)
    assert not re.findall(r"@import|<link[^>]+stylesheet", text)
    assert "innerHTML = markdown(" in text, "answers are escaped before they are shown"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    with sync_api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    # Greedily, the model never ends.
    plan = make_chat_plan(tmp_path_factory.mktemp("page"), context=1024)
    with serve([describe_plan(plan)]) as address:
        yield address


@pytest.fixture
def open_page(browser: Any, address: str) -> Iterator[Callable[..., Any]]:
    """Opens the page; it is closed after the test, which ends the answers under way."""
    pages = []

    def open(*, width: int = 1200, height: int = 800, **more: Any) -> Any:
        # The test asks the page in ways that its own policy forbids.
        page = browser.new_page(
            viewport={"width": width, "height": height}, bypass_csp=True, **more
        )
        pages.append(page)
        page.failures = []
        page.on("pageerror", lambda error: page.failures.append(str(error)))
        page.goto(address)
        page.wait_for_selector("#model option", state="attached")
        return page

    yield open
    for page in pages:
        page.close()


def test_a_conversation_with_the_keyboard_alone(open_page: Callable[..., Any]) -> None:
    page = open_page()
    page.evaluate("document.getElementById('max_tokens').value = 12")
    page.evaluate("document.getElementById('temperature').value = 1")
    page.keyboard.type("hello")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("you")
    page.keyboard.press("Enter")
    page.wait_for_selector(".again")
    assert page.inner_text(".message.user") == "hello\nyou"
    assert "tokens/s" in page.inner_text(".note")
    first = page.inner_text(".message.assistant .text")
    page.click(".again")
    page.wait_for_function("!document.querySelector('.busy') && document.querySelector('.again')")
    assert len(page.query_selector_all(".message.assistant")) == 1
    assert page.inner_text(".message.assistant .text") != first
    page.keyboard.press("Control+Shift+O")
    assert page.query_selector_all(".message") == [] and page.failures == []


def test_an_answer_can_be_stopped(open_page: Callable[..., Any]) -> None:
    page = open_page()
    page.keyboard.type("go on")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelector('.busy .text')?.textContent.length > 3")
    page.keyboard.press("Escape")
    page.wait_for_selector(".again")
    assert "stopped" in page.inner_text(".note")
    assert page.inner_text("#send") == "Send"


def test_the_live_view_shows_what_the_model_does(open_page: Callable[..., Any]) -> None:
    page = open_page()
    page.keyboard.type("go on")
    page.keyboard.press("Enter")
    page.wait_for_function("parseFloat(document.getElementById('speed').textContent) > 0")
    assert page.inner_text("#queue").startswith(("0 of 1", "1 of 1"))
    assert "kv" in page.inner_text("#segments")
    assert page.inner_text("#flashall") != "–"
    assert "cpu" in page.inner_text("#lanes")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_light_or_dark_as_the_system_is(open_page: Callable[..., Any], scheme: str) -> None:
    page = open_page(color_scheme=scheme)
    brightness = (
        "(name, key) => getComputedStyle(document.querySelector(name))[key]"
        ".match(/[\\d.]+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0)"
    )
    back = page.evaluate(f"({brightness})('body', 'backgroundColor')")
    ink = page.evaluate(f"({brightness})('body', 'color')")
    assert (back > ink) == (scheme == "light")
    assert abs(back - ink) > 300, "text stands out"
    page.click("#theme")
    changed = page.evaluate(f"({brightness})('body', 'backgroundColor')")
    assert (changed > back) == (scheme == "dark")


def test_a_telephone_has_room_for_it(open_page: Callable[..., Any]) -> None:
    page = open_page(width=360, height=640)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert not page.is_visible("#state")
    page.click("#live")
    assert page.is_visible("#state")
    page.click("#live")
    page.fill("#input", "a" * 300)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_what_a_model_writes_is_text_and_never_a_program(open_page: Callable[..., Any]) -> None:
    page = open_page()
    shown = page.evaluate(
        "markdown('# T\\n<img src=x onerror=alert(1)> **b** `<i>`\\n- a\\n- b\\n```\\n<s>\\n```"
        "\\n[x](javascript:alert(1)) [y](https://a.b/\"onclick=alert(1))')"
    )
    assert "<img" not in shown and "<s>" not in shown and 'href="javascript' not in shown
    assert '"onclick' not in shown
    assert "<h1>T</h1>" in shown and "<strong>b</strong>" in shown and "<li>a</li>" in shown
    assert "<code>&#60;i&#62;</code>" in shown


def test_the_key_is_asked_for(browser: Any, tmp_path: Path) -> None:
    with serve([describe_plan(make_chat_plan(tmp_path, context=64))], keys=["secret"]) as address:
        page = browser.new_page()
        page.goto(address)
        page.wait_for_selector("#settings[open]")
        page.fill("#key", "secret")
        page.click("#settings button")
        page.wait_for_selector("#model option", state="attached")
        page.close()
