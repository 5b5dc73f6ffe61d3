"""The check of the built pages finds what it is for."""

import shutil
from pathlib import Path

import pytest

from docs import check_site

GOOD = """<html><head><link rel="stylesheet" href="site.css"><title>a</title></head>
<body><h1 id="top">a</h1><a href="#top">here</a> <a href="https://pytorch.org">there</a>
<code>\\(x\\)</code> a dollar, $5 <img src="data:,"></body></html>"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "site.css").write_text("body { background: url(data:,) }")
    (tmp_path / "index.html").write_text(GOOD)
    return tmp_path


def test_a_good_page_has_no_faults(site: Path) -> None:
    assert list(check_site.faults_in_files(site)) == []


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('<a href="nowhere.html">x</a>', "nowhere.html is not there"),
        ('<a href="index.html#bottom">x</a>', "index.html#bottom is not there"),
        ('<img src="missing.png">', "missing.png is not there"),
        ('<img src="//host/a.png">', "loads //host/a.png"),
        ('<script src="https://cdn.example/x.js"></script>', "loads https://cdn.example/x.js"),
        ('<link rel="stylesheet" href="https://x.example/y.css">', "loads https://x.example/y.css"),
        ("<p>\\(w\\)</p>", "raw LaTeX, \\("),
        ("<p>a \\frac of it</p>", "raw LaTeX, \\frac"),
        ("<p>of $w^2$ weights</p>", "raw LaTeX, $w^2$"),
    ],
)
def test_a_fault_is_found(site: Path, line: str, fault: str) -> None:
    (site / "index.html").write_text(GOOD.replace("</body>", f"{line}</body>"))
    found = list(check_site.faults_in_files(site))
    assert f"index.html: {fault}" in found


def test_a_font_from_elsewhere_is_found(site: Path) -> None:
    (site / "site.css").write_text("@font-face { src: url('https://fonts.example/a.woff2') }")
    assert list(check_site.faults_in_files(site)) == [
        "site.css: loads https://fonts.example/a.woff2"
    ]


PROGRAM = next(filter(None, map(shutil.which, check_site.BROWSERS)), None)
# What a script does shows in a browser alone.
SCRIPTS = {
    "throw new Error('x')": "script: Uncaught",
    "console.error('bad')": "console: ['bad']",
    "fetch('http://elsewhere.invalid/').catch(() => 0)": "requests http://elsewhere.invalid/",
    "document.body.append(Object.assign(new Image(), {src: 'data:image/png,'}))": "is not drawn",
    "document.body.style.width = '900px'": "pixels wide on a screen of 390",
}


@pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium here")
def test_faults_of_a_page_that_runs_are_found(site: Path, tmp_path_factory) -> None:
    dark = "<style>@media (prefers-color-scheme: dark) { body { background: #000 } }</style>"
    icon = '<link rel="icon" href="data:,">'
    (site / "search.html").write_text(f'{icon}<ul id="search-results"><li>found</li></ul>')
    pages = {"good.html": ""} | {f"{i}.html": script for i, script in enumerate(SCRIPTS)}
    for name, script in pages.items():
        view = '<meta name="viewport" content="width=device-width">'
        body = f"{icon}{view}{dark}<body><script>{script}</script></body>"
        (site / name).write_text(body)
    with check_site.served(site) as host:
        browser = check_site.Browser(PROGRAM, str(tmp_path_factory.mktemp("profile")))
        try:
            found = list(check_site.faults_in_browser(browser, host, list(pages), None))
        finally:
            browser.close()
    for i, fault in enumerate(SCRIPTS.values()):
        assert any(one.startswith(f"{i}.html: ") and fault in one for one in found), fault
    assert [one for one in found if one.startswith(("good", "search"))] == []
