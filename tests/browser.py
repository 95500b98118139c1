"""A real browser for the tests that need one: Debian's chromium in headless mode, driven by selenium.

Every test run imports this file, so selenium, which takes half a second, is imported where it is used.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.node import NotAvailable
from tests.waiting import wait_until

if TYPE_CHECKING:
    from selenium.webdriver import Chrome
    from selenium.webdriver.remote.webelement import WebElement

CSS = "css selector"
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--force-color-profile=srgb",
    # Nothing outside this machine can be reached, so a page that works needs nothing from outside.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


def find_browser() -> Path:
    """The browser; raises `NotAvailable` where it or its driver is missing."""
    found = shutil.which("chromium")
    if found is None or shutil.which("chromedriver") is None:
        raise NotAvailable(
            "there is no chromium with its driver here (Debian: apt-get install chromium chromium-driver)"
        )
    return Path(found)


class Browser:
    """One browser window; elements are found by CSS selectors, usually by the page's own ids."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        """Opens the page and waits until it has asked the server for its models."""
        self.driver.get(url)
        self.wait(lambda: self.run("return document.getElementById('model').length > 0"))

    def element(self, selector: str) -> WebElement:
        return self.driver.find_element(CSS, selector)

    def elements(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(CSS, selector)

    def text(self, selector: str) -> str:
        """The text of the last element that matches; empty if none does."""
        script = "return [...document.querySelectorAll(arguments[0])].at(-1)?.innerText ?? ''"
        return str(self.run(script, selector))

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait(self, holds: Callable[[], bool]) -> None:
        wait_until(holds)

    def wait_text(self, selector: str, part: str) -> None:
        self.wait(lambda: part in self.text(selector))

    def errors(self) -> list[str]:
        """The console's messages since the last call, policy violations and failed requests included."""
        return [str(entry["message"]) for entry in self.driver.get_log("browser")]


@contextmanager
def open_browser(folder: Path, width: int = 1360, height: int = 860) -> Iterator[Browser]:
    """The browser with its own profile in an empty folder."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = str(find_browser())
    for flag in (*FLAGS, f"--user-data-dir={folder}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "INFO"})
    driver = Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
