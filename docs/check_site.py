"""Check the built pages as a reader without a network has them.

In the files: links and images lead somewhere, nothing is loaded from another host, and no LaTeX is
left in the text. In headless Chromium, where there is one: every page of the documentation is
opened, and scripts run without an error, each request goes to this machine, images are drawn, on a
telephone no page is wider than its screen, and the search finds something.

`--screenshots FOLDER` keeps a picture of each page, light, dark and narrow.
"""

import argparse
import base64
import contextlib
import functools
import html.parser
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Nothing that a browser does of its own accord: no updates, no accounts, no first-run pages.
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--remote-debugging-pipe"),
)
LATEX = re.compile(r"\\[()\[\]]|\\[A-Za-z]{2,}|\$[^$\s](?:[^$\n]{0,80}[^$\s])?\$|\$\$")
# Code may show LaTeX, and a formula keeps what it was made of out of sight.
NOT_TEXT = {"code", "math", "pre", "script", "style", "svg", "title"}
LOADED = {"audio": "src", "iframe": "src", "img": "src", "script": "src", "source": "src"}
NARROW, WIDE = (390, 844), (1280, 900)
SEARCHED = "laplace"
SECONDS = 60


class Page(html.parser.HTMLParser):
    """What a page links to, loads, is linked by, and says."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.names: set[str] = set()
        self.text: list[str] = []
        self._hidden: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        found = {name: value or "" for name, value in attrs}
        self.names |= {found[name] for name in ("id", "name") if name in found}
        if tag in LOADED and LOADED[tag] in found:
            self.loaded.append(found[LOADED[tag]])
        if tag == "link" and {"stylesheet", "icon", "preload"} & {*found.get("rel", "").split()}:
            self.loaded.append(found["href"])
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in NOT_TEXT:
            self._hidden.append(tag)

    def handle_endtag(self, tag):
        if self._hidden and self._hidden[-1] == tag:
            self._hidden.pop()

    def handle_data(self, data):
        if not self._hidden:
            self.text.append(data)


def faults_in_files(root: Path) -> Iterator[str]:
    """Yield what is wrong in the files of a built site."""
    pages = {path: Page(path) for path in sorted(root.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(root)
        for target in page.loaded:
            if not is_here(target):
                yield f"{name}: loads {target}"
        for target in filter(is_here, page.links + page.loaded):
            if not leads_somewhere(path, target, pages):
                yield f"{name}: {target} is not there"
        for found in LATEX.findall("".join(page.text)):
            yield f"{name}: raw LaTeX, {found}"
    for path in sorted(root.rglob("*.css")):
        for target in re.findall(r"(?:url\(|@import )\s*[\"']?([^\"')]+)", path.read_text()):
            if not is_here(target):
                yield f"{path.relative_to(root)}: loads {target}"


def is_here(target: str) -> bool:
    """Whether an address is one of this site, or holds its data itself."""
    parts = urllib.parse.urlsplit(target)
    return parts.scheme == "data" or not (parts.scheme or parts.netloc)


def leads_somewhere(path: Path, target: str, pages: dict[Path, Page]) -> bool:
    parts = urllib.parse.urlsplit(target)
    if parts.scheme == "data":
        return True
    file = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
    if file.is_dir():
        file /= "index.html"
    if not parts.fragment or file not in pages:
        return file.exists()
    return urllib.parse.unquote(parts.fragment) in pages[file].names


class Browser:
    """A headless Chromium, told what to do over a pair of pipes."""

    def __init__(self, program: str, profile: str) -> None:
        # It reads from its file descriptor 3 and writes to 4.
        read, self._write = os.pipe()
        self._read, write = os.pipe()
        command = [program, *OPTIONS, f"--user-data-dir={profile}"]
        line = f'exec "$@" 3<&{read} 4>&{write}'
        self._process = subprocess.Popen(
            ["bash", "-c", line, "bash", *command],
            pass_fds=(read, write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        self._answers = self._messages()
        self._number = 0
        self.session: str | None = None
        self.events: list[dict] = []
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.do(f"{domain}.enable")

    def _messages(self) -> Iterator[dict]:
        with open(self._read, "rb") as pipe:
            rest = b""
            while piece := pipe.read1(1 << 20):
                *whole, rest = (rest + piece).split(b"\0")
                yield from map(json.loads, whole)

    def _next(self) -> dict:
        # A browser that hangs is ended, and with it the pipe.
        watch = threading.Timer(SECONDS, self._process.kill)
        watch.start()
        try:
            return next(self._answers)
        except StopIteration:
            raise SystemExit("the browser has ended") from None
        finally:
            watch.cancel()

    def do(self, method: str, **parameters) -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def value(self, expression: str):
        """Return the value of an expression of JavaScript, awaited if it is a promise."""
        found = self.do(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        return found["result"].get("value")

    def open(self, address: str) -> None:
        self.events.clear()
        self.do("Page.navigate", url=address)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def look(self, size: tuple[int, int], scheme: str) -> None:
        width, height = size
        self.do(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == NARROW},
        )
        scheme_of_page = {"name": "prefers-color-scheme", "value": scheme}
        self.do("Emulation.setEmulatedMedia", features=[scheme_of_page])

    def picture(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.do("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._answers.close()
        os.close(self._write)


def faults_in_browser(browser: Browser, host: str, pages: list[str], folder: Path | None):
    """Yield what is wrong with pages as a browser shows them."""
    for page in pages:
        browser.look(WIDE, "light")
        browser.open(f"{host}/{page}")
        for name, size, scheme in (
            ("light", WIDE, "light"),
            ("dark", WIDE, "dark"),
            ("narrow", NARROW, "light"),
        ):
            browser.look(size, scheme)
            # A page is drawn anew at the next frame but one.
            browser.value("new Promise(f => requestAnimationFrame(() => requestAnimationFrame(f)))")
            width = browser.value("document.scrollingElement.scrollWidth")
            if width > size[0]:
                yield f"{page}: {width} pixels wide on a screen of {size[0]}"
            if folder:
                browser.picture(folder / f"{page.replace('/', '_')}_{name}.png")
        light, dark = (background(browser, scheme) for scheme in ("light", "dark"))
        if light == dark:
            yield f"{page}: light and dark have the same ground"
        for source in browser.value(
            "Promise.all([...document.images].map(i => { i.loading = 'eager'; return i.decode()"
            ".then(() => '', () => i.currentSrc || i.src) })).then(a => a.filter(Boolean))"
        ):
            yield f"{page}: {source} is not drawn"
        yield from (f"{page}: {fault}" for fault in faults_of_events(browser.events, host))
    browser.open(f"{host}/search.html?q={SEARCHED}")
    found = (
        "new Promise(f => { const t = Date.now(), i = setInterval(() => {"
        " const n = document.querySelectorAll('#search-results li').length;"
        " if (n || Date.now() - t > 20000) { clearInterval(i); f(n) } }, 100) })"
    )
    if not browser.value(found):
        yield f"search.html: finds nothing on {SEARCHED!r}"
    yield from (f"search.html: {fault}" for fault in faults_of_events(browser.events, host))


def background(browser: Browser, scheme: str) -> str:
    browser.look(WIDE, scheme)
    return browser.value("getComputedStyle(document.body).backgroundColor")


def faults_of_events(events: list[dict], host: str) -> Iterator[str]:
    """Yield errors of the console, and requests that left the machine."""
    for event in events:
        method, facts = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            yield f"script: {facts['exceptionDetails'].get('text')}"
        if method == "Runtime.consoleAPICalled" and facts["type"] in ("error", "assert"):
            yield f"console: {[one.get('value', one.get('description')) for one in facts['args']]}"
        if method == "Log.entryAdded" and facts["entry"]["level"] == "error":
            yield f"console: {facts['entry']['text']} {facts['entry'].get('url', '')}"
        if method == "Network.requestWillBeSent":
            address = facts["request"]["url"]
            if not address.startswith((host, "data:", "blob:", "about:")):
                yield f"requests {address}"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args) -> None:
        pass


@contextlib.contextmanager
def served(root: Path) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=root)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def pages_to_open(root: Path) -> list[str]:
    """Return the pages of the documentation: not those that Sphinx makes of code."""
    found = (path.relative_to(root) for path in sorted(root.rglob("*.html")))
    return [str(path) for path in found if path.parts[0] not in ("_modules", "_static")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("root", type=Path, nargs="?", default=Path("docs/_build/html"))
    parser.add_argument("--screenshots", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    root = options.root.resolve()
    faults = list(faults_in_files(root))
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    pages = pages_to_open(root)
    if program is None:
        print("no Chromium: the pages were checked, not opened")
    else:
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
            served(root) as host,
        ):
            browser = Browser(program, profile)
            with contextlib.closing(browser):
                faults += faults_in_browser(browser, host, pages, options.screenshots)
    if faults:
        raise SystemExit("\n".join(faults))
    print(f"{len(pages)} pages are in order", file=sys.stderr)


if __name__ == "__main__":
    main()
