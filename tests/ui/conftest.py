"""A real server, Debian's Chromium, and short words for what one does on the page. Every test ends with a look into the
browser's console: an error there is a failure, unless the test has said that it will come."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium.common.exceptions import (
    ElementClickInterceptedException,
    ElementNotInteractableException,
    NoSuchElementException,
    StaleElementReferenceException,
    TimeoutException,
)
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from tests.http.server import DEADLINE, Child, child
from tests.live_clients.conftest import chrome

__all__ = ["chrome"]

SCREENSHOTS = Path(os.environ.get("CI_ARTIFACTS") or Path(__file__).parents[2] / "build" / "screenshots")
_numbers = itertools.count(1)
# What a page that lives meets: it was drawn again, or is not there yet.
_PASSING = (
    NoSuchElementException,
    StaleElementReferenceException,
    ElementNotInteractableException,
    ElementClickInterceptedException,
)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    with child(tmp_path_factory.mktemp("data")) as started:
        yield started.wait_until_ready()


@pytest.fixture
def client(server: Child) -> Iterator[httpx.Client]:
    with server.client() as opened:
        yield opened


@pytest.fixture
def topic() -> str:
    """A name that no other test uses."""
    return f"ui.{next(_numbers)}"


class Page:
    def __init__(self, driver: Chrome, url: str) -> None:
        self.driver = driver
        self.url = url
        self._expected: list[str] = []
        self.resize(1440, 1000)
        self.prefer("light")

    # -- going somewhere ---------------------------------------------------------------------------------------------

    def open(self, place: str = "topics") -> Page:
        """Loads the page anew."""
        self.driver.get("about:blank")
        self.driver.get(f"{self.url}/ui#/{place}")
        return self

    def go(self, place: str) -> Page:
        """Goes on in the page that is open."""
        self.run("location.hash = arguments[0]", f"#/{place}")
        return self

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    # -- looking -----------------------------------------------------------------------------------------------------

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, holds: Callable[[], Any], what: str = "") -> Any:
        """Asks again and again until something holds; returns what it was."""
        waiting = WebDriverWait(self.driver, DEADLINE, poll_frequency=0.03, ignored_exceptions=_PASSING)
        try:
            return waiting.until(lambda _: holds())
        except TimeoutException:
            shown = self.run("return document.body.innerText").replace("\n", " | ")[:1500]
            raise AssertionError(f"never came: {what}; the page shows: {shown}") from None

    def find(self, selector: str) -> WebElement:
        found: WebElement = self.until(
            lambda: next((each for each in self.all(selector) if each.is_displayed()), None), selector
        )
        return found

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        texts: list[str] = self.run(
            "return [...document.querySelectorAll(arguments[0])].map(node => node.textContent)", selector
        )
        return texts

    def text(self, selector: str) -> str:
        return " ".join(self.texts(selector))

    def see(self, selector: str, *words: str) -> None:
        """Until these words stand there."""
        self.until(lambda: all(word in self.text(selector) for word in words), f"{words} in {selector}")

    def gone(self, selector: str) -> None:
        self.until(lambda: not self.all(selector), f"{selector} gone")

    # -- doing ---------------------------------------------------------------------------------------------------------

    def click(self, selector: str, word: str = "") -> None:
        """Clicks on the first such thing in sight, with this word on it if there is one."""

        def press() -> bool:
            for each in self.all(selector):
                if each.is_displayed() and word in each.text:
                    each.click()
                    return True
            return False

        self.until(press, f"{selector} {word!r} to click")

    def fill(self, selector: str, text: str) -> None:
        field = self.find(selector)
        field.clear()
        field.send_keys(text)

    def press(self, *keys: str) -> None:
        """Types into whatever has the focus."""
        for key in keys:
            self.driver.switch_to.active_element.send_keys(key)

    def choose(self, selector: str, value: str) -> None:
        self.run(
            "const [node, value] = [document.querySelector(arguments[0]), arguments[1]];"
            "node.value = value; node.dispatchEvent(new Event('change', {bubbles: true}))",
            selector,
            value,
        )

    def shoot(self, name: str) -> None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        assert self.driver.save_screenshot(str(SCREENSHOTS / f"{name}.png"))

    # -- the console ---------------------------------------------------------------------------------------------------

    def expect(self, *parts: str) -> None:
        """Lines that the browser itself writes into the console when an answer is an error."""
        self._expected += parts

    def problems(self) -> list[str]:
        lines = [entry["message"] for entry in console(self.driver) if entry["level"] == "SEVERE"]
        return [line for line in lines if not any(part in line for part in self._expected)]

    def ranges(self) -> list[tuple[int, int, str]]:
        """What is drawn on the axis, in the order of the seqs."""
        drawn = self.run(
            "return [...document.querySelectorAll('.lane .range')].map(g =>"
            " [Number(g.dataset.first), Number(g.dataset.last), g.dataset.look])"
        )
        return sorted((first, last, look) for first, last, look in drawn)


def console(driver: Chrome) -> list[dict[str, str]]:
    """What was written into the console since the last look."""
    entries: list[dict[str, str]] = driver.get_log("browser")  # type: ignore[no-untyped-call]  # selenium leaves it out
    return entries


MakesPage = Callable[[str], Page]


@pytest.fixture
def make_page(chrome: Chrome) -> Iterator[MakesPage]:
    console(chrome)
    made: list[Page] = []

    def make(url: str) -> Page:
        made.append(Page(chrome, url))
        return made[-1]

    yield make
    problems = [problem for page in made for problem in page.problems()]
    # Ends what the page has open.
    chrome.get("about:blank")
    assert problems == []


@pytest.fixture
def page(make_page: MakesPage, server: Child) -> Page:
    return make_page(server.url)


# What stands between the ends of a range, and where there is nothing to say.
DASH = "\N{EN DASH}"
ENTER, ESCAPE, DOWN, UP, END, HOME = Keys.ENTER, Keys.ESCAPE, Keys.ARROW_DOWN, Keys.ARROW_UP, Keys.END, Keys.HOME
