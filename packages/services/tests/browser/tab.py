"""A page of Chromium that records everything it logs and loads."""

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.async_api import BrowserContext, ConsoleMessage, Dialog, Page, Request, Response

__all__ = ["BROWSER_TEST", "Tab"]

# One process has the browser and the server; their fixtures live in the loop of the session.
BROWSER_TEST = [pytest.mark.xdist_group("browser"), pytest.mark.asyncio(loop_scope="session")]
# Only detects a hang.
LIMIT_MILLISECONDS = 60_000

# Ratios of WCAG 2.1 AA: 3 for large text (24 px, or 18.66 px in bold), 4.5 for all other text.
CONTRAST = """
() => {
  const parse = (text) => {
    const [r, g, b, a] = text.match(/[\\d.]+/g).map(Number);
    return [r, g, b, a === undefined ? 1 : a];
  };
  const over = (front, back) =>
    [0, 1, 2].map((i) => front[i] * front[3] + back[i] * (1 - front[3])).concat(1);
  const light = (color) => {
    const [r, g, b] = color.slice(0, 3).map((value) => value / 255)
      .map((value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const backOf = (element) => {
    const layers = [];
    for (let each = element; each; each = each.parentElement) {
      layers.push(parse(getComputedStyle(each).backgroundColor));
    }
    return layers.reverse().reduce((back, front) => over(front, back), [255, 255, 255, 1]);
  };
  const found = [];
  let counted = 0;
  const check = (element, color, what) => {
    const style = getComputedStyle(element);
    const back = backOf(element);
    const [one, other] = [light(over(parse(color), back)), light(back)];
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    const size = parseFloat(style.fontSize);
    const needed = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
    counted += 1;
    if (ratio < needed) found.push(`${what}: ${ratio.toFixed(2)} of ${color} on ${back}`);
  };
  for (const element of document.querySelectorAll("body *")) {
    if (!element.checkVisibility()) continue;
    const text = [...element.childNodes].filter((each) => each.nodeType === Node.TEXT_NODE)
      .map((each) => each.textContent.trim()).join(" ").trim();
    if (text) check(element, getComputedStyle(element).color, text.slice(0, 40));
    if (element.placeholder) {
      check(element, getComputedStyle(element, "::placeholder").color, element.placeholder);
    }
  }
  return [counted, found];
}
"""

# What a screen reader and a keyboard need.
STRUCTURE = """
() => {
  const found = [];
  const one = (selector) => {
    const number = document.querySelectorAll(selector).length;
    if (number !== 1) found.push(`${number} of ${selector}`);
  };
  ["h1", "main", "header", "title", "html[lang]", ".skip"].forEach(one);
  if (!document.querySelector("h1").textContent.trim()) found.push("empty h1");
  for (const field of document.querySelectorAll("input:not([type=hidden]), select, textarea")) {
    const isNamed = field.labels.length || field.getAttribute("aria-label");
    if (!isNamed) found.push(`no label: ${field.name}`);
  }
  for (const each of document.querySelectorAll("a, button, summary")) {
    if (!each.textContent.trim()) found.push(`no text: ${each.outerHTML.slice(0, 80)}`);
  }
  for (const each of document.querySelectorAll("svg")) {
    if (!each.getAttribute("aria-label") && !each.ariaHidden) found.push("chart without a label");
  }
  const ids = [...document.querySelectorAll("[id]")].map((each) => each.id);
  if (new Set(ids).size !== ids.length) found.push(`ids used twice: ${ids}`);
  let level = 1;
  for (const each of document.querySelectorAll("main h1, main h2, main h3, main h4")) {
    const next = Number(each.tagName[1]);
    if (next > level + 1) found.push(`heading ${next} after ${level}`);
    level = next;
  }
  return found;
}
"""


class Tab:
    """``problems`` is what no page of the console may cause."""

    def __init__(self, context: BrowserContext, page: Page, url: str) -> None:
        self.context = context
        self.page = page
        self.url = url
        # Messages of the browser's console, uncaught errors, dialogs, requests to other hosts.
        self.problems: list[str] = []
        self.loaded: list[str] = []
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.problems.append(f"uncaught: {error}"))
        page.on("dialog", self._on_dialog)
        page.on("request", self._on_request)

    @classmethod
    async def open(cls, context: BrowserContext, url: str) -> "Tab":
        page = await context.new_page()
        page.set_default_timeout(LIMIT_MILLISECONDS)
        return cls(context, page, url)

    async def go(self, path: str, *, status: int = 200) -> Response:
        """Open a page of the console."""
        response = await self.page.goto(f"{self.url}/console/{path}")
        assert response is not None
        assert response.status == status, (path, await self.page.inner_text("body"))
        if status >= 400:  # which the browser reports
            self.problems = [each for each in self.problems if "Failed to load" not in each]
        return response

    async def sign_in(self, token: str) -> None:
        await self.go("sign-in")
        await self.page.fill("#token", token)
        async with self.page.expect_navigation():
            await self.page.click("main button")

    async def text(self) -> str:
        """Return what a person can read."""
        return await self.page.inner_text("body")

    async def act(self, label: str, *, is_download: bool = False, **fields: str) -> None:
        """Open an action, fill in its fields, send it, and wait for the page that follows."""
        action = self.page.locator("details.action", has=self.page.get_by_text(label, exact=True))
        await action.locator("summary").click()
        for name, value in fields.items():
            await action.locator(f"[name={name}]").fill(value)
        if is_download:
            await action.locator("button").click()
            return
        # The click itself ends before the page is replaced.
        async with self.page.expect_navigation():
            await action.locator("button").click()

    async def check_looks(self) -> None:
        """Check structure, contrast in both schemes, and widths of a phone and a desktop."""
        wrong = await self.page.evaluate(STRUCTURE)
        assert wrong == [], (self.page.url, wrong)
        for scheme in ("dark", "light"):
            await self.page.emulate_media(color_scheme=scheme)
            counted, unreadable = await self.page.evaluate(CONTRAST)
            assert unreadable == [], (self.page.url, scheme, unreadable)
            assert counted > 3
        for width, height in ((390, 844), (1280, 800)):
            await self.page.set_viewport_size({"width": width, "height": height})
            wide = await self.page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, (self.page.url, width, wide)

    async def save(self, path: Path, *, scheme: Any = "light", width: int = 1280) -> None:
        """Save a picture of the page."""
        await self.page.emulate_media(color_scheme=scheme)
        await self.page.set_viewport_size({"width": width, "height": 844 if width < 800 else 720})
        await self.page.screenshot(path=path, animations="disabled")

    def check_problems(self) -> None:
        """Nothing was blocked, nothing failed, nothing came from another host."""
        assert self.problems == [], self.problems

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self.problems.append(f"{message.type}: {message.text}")

    async def _on_dialog(self, dialog: Dialog) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        await dialog.dismiss()

    def _on_request(self, request: Request) -> None:
        self.loaded.append(request.url)
        if urlsplit(request.url)[:2] != urlsplit(self.url)[:2]:
            self.problems.append(f"request to another host: {request.url}")
