"""The console in headless Chromium: what a person sees, and can do without a mouse."""

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from deployments.telemetry import Statistics
from deployments.view import RouterView
from tests.deployments.console_stub import ANSWER, DeskBackend
from tests.deployments.http_stub import serving

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason=f"no browser: install {NAMES[0]}, or name one in CHROMIUM"),
    pytest.mark.timeout(120),
]

PHONE = {"width": 360, "height": 740}
DESK = {"width": 1280, "height": 900}
SOURCES = ("accepted", "bonus", "classic")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # it refuses to be root's otherwise
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[DeskBackend, str]]:
    backend = DeskBackend(pace_s=0.01)
    with serving(backend) as url:
        yield backend, url


@contextmanager
def console(browser: Browser, url: str, *, allowed: str = "", **options: object) -> Iterator[Page]:
    """The page, and at the end nothing in the browser's console but what is ``allowed``."""
    context = browser.new_context(**{"viewport": DESK, **options})  # type: ignore[arg-type]
    page = context.new_page()
    page.set_default_timeout(20_000)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.type != "log" else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    try:
        page.goto(f"{url}/console")
        yield page
    finally:
        context.close()
    assert [text for text in said if not allowed or allowed not in text] == []


def ask(page: Page, text: str = "What is the capital of France?") -> None:
    page.locator("#prompt").fill(text)
    page.locator("#prompt").press("Enter")


def is_wider_than_its_window(page: Page) -> bool:
    return page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")


def test_a_chat_shows_where_each_token_came_from_and_its_window_moves(
    browser: Browser, served: tuple[DeskBackend, str]
) -> None:
    with console(browser, served[1]) as page:
        expect(page.locator("#status")).to_have_text("Live")
        ask(page)
        expect(page.locator(".summary")).to_contain_text("of the target’s own")
        assert page.locator(".said").evaluate("node => node.textContent") == ANSWER
        looks = set()
        for source in SOURCES:
            token = page.locator(f".said [data-source={source}]").first
            looks.add(token.evaluate("node => getComputedStyle(node).textDecorationStyle"))
            assert source in (token.get_attribute("title") or "")
        assert len(looks) == len(SOURCES)  # a line of its own, not the colour alone
        window = page.locator("[data-window]").first
        expect(window.locator(".own")).to_have_text("▸ you")
        for mark in ("accepted", "bonus", "dropped", "classic"):
            assert window.locator(f".mark-{mark}").count() == 1
        expect(window).to_have_attribute("data-round", re.compile("^[1-9]"))
        before = int(window.get_attribute("data-round") or 0)
        ask(page, "And again?")
        expect(window).not_to_have_attribute("data-round", str(before))
        assert int(window.get_attribute("data-round") or 0) > before
        expect(page.locator("#announce")).to_contain_text("That is all.")
        expect(page.locator("[data-chart=rate] strong")).not_to_have_text("–")
        expect(page.locator("[data-chart=kept] strong")).not_to_have_text("–")
        assert not is_wider_than_its_window(page)
        page.get_by_text("Round by round").first.click()
        assert page.locator(".answer").first.locator("tbody tr").count() > 5


def test_on_a_dark_phone_all_is_done_by_keys(browser: Browser, served: tuple[DeskBackend, str]) -> None:
    with console(browser, served[1], viewport=PHONE, color_scheme="dark", reduced_motion="reduce") as page:
        expect(page.locator("#status")).to_have_text("Live")
        page.keyboard.press("Tab")
        expect(page.locator(".skip")).to_be_focused()
        assert page.locator(".skip").evaluate("node => node.getBoundingClientRect().left") >= 0
        page.keyboard.press("Enter")
        expect(page.locator("#prompt")).to_be_focused()
        assert page.locator("#prompt").evaluate("node => getComputedStyle(node).outlineStyle") == "solid"
        page.keyboard.type("One")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("Two")
        page.keyboard.press("Enter")
        expect(page.locator(".question")).to_have_text("One\nTwo")
        expect(page.locator(".summary")).to_contain_text("tokens in")
        page.keyboard.press("Tab")
        expect(page.locator("#send")).to_be_focused()
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert max(map(int, re.findall(r"\d+", colour))) < 60
        assert not is_wider_than_its_window(page)
        assert page.locator("[data-window]").count() >= 1


def test_escape_stops_an_answer(browser: Browser) -> None:
    backend = DeskBackend(pace_s=0.4)
    with serving(backend) as url, console(browser, url) as page:
        expect(page.locator("#status")).to_have_text("Live")
        ask(page)
        expect(page.locator("#send")).to_have_text("Stop")
        expect(page.locator(".said .token").first).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator(".summary")).to_contain_text("Stopped.")
        expect(page.locator("#send")).to_have_text("Send")
        until = time.monotonic() + 10
        while backend.desk.num_running and time.monotonic() < until:
            page.wait_for_timeout(20)
        assert backend.desk.num_running == 0


def test_a_key_is_asked_for_and_kept_in_memory_alone(browser: Browser) -> None:
    backend = DeskBackend()
    refused = "401 (Unauthorized)"  # the browser notes it by itself
    with serving(backend, api_keys=("zwö",)) as url, console(browser, url, allowed=refused) as page:
        dialog = page.locator("#key-dialog")
        expect(dialog).to_be_visible()
        expect(page.locator("#key")).to_be_focused()
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key-error")).to_have_text("That key is not one of this server’s.")
        page.locator("#key").fill("zwö")
        page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        expect(page.locator("#status")).to_have_text("Live")
        ask(page)
        expect(page.locator(".summary")).to_contain_text("tokens in")
        page_itself = "document.documentElement.outerHTML"
        kept = f"JSON.stringify([localStorage, sessionStorage, document.cookie, {page_itself}])"
        assert "zwö" not in page.evaluate(kept)
        page.reload()
        expect(dialog).to_be_visible()


def test_several_routers_are_told_apart_and_a_silent_one_is_named(browser: Browser) -> None:
    backend = DeskBackend()
    other = Statistics("stub-model", "router-1")
    other.observe_waiting(3)
    backend.siblings, backend.num_missing = (RouterView.now(other.snapshot()),), 1
    with serving(backend) as url, console(browser, url) as page:
        titles = page.locator(".router h3")
        expect(titles).to_have_text(
            [
                "Router router-0 · 0 windows · 0 playing · 0 waiting",
                "Router router-1 · 0 windows · 0 playing · 3 waiting",
            ]
        )
        expect(page.locator("#missing")).to_have_text("1 router did not answer and is left out.")
        expect(page.locator("[data-chart=waiting] strong")).to_have_text("3")
