"""A browser that is refused the network, and pages to open in it.

Chromium is Debian's, driven by playwright: nothing is downloaded. Every request that is not for a file or
for this machine is refused and remembered, so a page that wants the network both lacks it and is caught.
"""

from __future__ import annotations

import os
import shutil

import pytest

LOCAL = (
    "file:",
    "data:",
    "blob:",
    "about:",
    "http://127.0.0.1:",
    "http://localhost:",
    "ws://127.0.0.1:",
    "ws://localhost:",
)


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of the browser; `MOELAB_CHROMIUM` names another one."""
    found = os.environ.get("MOELAB_CHROMIUM") or shutil.which("chromium")
    if not found:
        pytest.skip("chromium absent")
    return found


@pytest.fixture(scope="session")
def browser(chromium):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # In a container root has no sandbox to give away, and /dev/shm is small.
        launched = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield launched
        launched.close()


@pytest.fixture
def page(browser):
    """A page with `page.refused`: what it asked the network for, and `page.complaints`: errors of its own."""
    context = browser.new_context(viewport={"width": 1100, "height": 900})
    opened = context.new_page()
    opened.refused, opened.complaints = [], []

    def guard(route):
        if route.request.url.startswith(LOCAL):
            route.continue_()
        else:
            opened.refused.append(route.request.url)
            route.abort()

    context.route("**/*", guard)
    opened.on("pageerror", lambda error: opened.complaints.append(str(error)))
    yield opened
    context.close()
