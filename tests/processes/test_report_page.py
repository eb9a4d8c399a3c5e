"""The report page in a real browser: charts, sorting, PNG, themes, phone width, errors and network, in headless Chromium.

The browser is driven through the DevTools protocol over a pipe (file descriptors 3 and 4), which needs no library.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crosscut.report.html import render
from report_samples import bench_record, collectives_record, linear_record

CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.chromium, pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH")]
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
]
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\">"
SORTED = "[...document.querySelectorAll('table.sortable')[0].tBodies[0].rows].map(r => r.cells[0].textContent)"


class Browser:
    """One page of one Chromium. Every wait ends within ``deadline`` seconds."""

    def __init__(self, profile: Path, deadline: float = 60.0) -> None:
        self.deadline = deadline
        self.events: list[dict[str, Any]] = []
        self._buffer, self._last = b"", 0
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (theirs_in, theirs_out)]
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = ours_in, ours_out
        script = 'exec 3<&"$0" 4>&"$1"; shift; exec "$@"'
        assert CHROMIUM is not None
        command = ["bash", "-c", script, *map(str, ends), CHROMIUM, *FLAGS, f"--user-data-dir={profile}"]
        self.process = subprocess.Popen(command, pass_fds=ends, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for end in ends:
            os.close(end)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    _session: str | None = None

    def call(self, method: str, **params: Any) -> Any:
        """The result of one protocol call; events that arrive meanwhile are kept."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + self.deadline
        while True:
            answer = self._receive(end)
            if answer.get("id") == self._last:
                assert "error" not in answer, f"{method}: {answer}"
                return answer["result"]
            self.events.append(answer)

    def _receive(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"Chromium did not answer within {self.deadline} s"
            chunk = os.read(self._in, 1 << 20)
            assert chunk, "Chromium has gone"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)  # type: ignore[no-any-return]

    def js(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        """Until ``expression`` is true."""
        end = time.monotonic() + self.deadline
        while not self.js(expression):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.05)

    def open(self, path: Path) -> None:
        """Load a file and wait until its charts are drawn."""
        self.call("Page.navigate", url=path.as_uri())
        self.wait("document.readyState === 'complete' && document.querySelectorAll('.plot').length > 0")
        self.wait("[...document.querySelectorAll('.plot')].every(p => p.querySelector('svg.main-svg'))")

    def screen(self, width: int, height: int = 900, scheme: str = "light") -> None:
        """The size of the window and the colour scheme of the system."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def close(self) -> None:
        os.close(self._out)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        os.close(self._in)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def page(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Browser:
    """A page of three records, the first one hostile, open in a wide light window."""
    records = [
        linear_record(notes=[f"verdict {HOSTILE}"], commit=HOSTILE),
        collectives_record(notes=["second"]),
        bench_record(notes=["third"]),
    ]
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render(records, [f"first {HOSTILE}", "second", f"third {HOSTILE}"]), encoding="utf-8")
    browser.screen(1200)
    browser.open(path)
    return browser


def background(page: Browser, selector: str) -> int:
    """The sum of red, green and blue of an element's background (0 black, 765 white)."""
    color = page.js(f"getComputedStyle(document.querySelector({selector!r})).backgroundColor")
    return sum(int(part) for part in color.removeprefix("rgb(").removesuffix(")").split(","))


def test_every_chart_is_drawn_with_its_marks(page: Browser) -> None:
    charts = page.js("document.querySelectorAll('.plot').length")
    assert charts >= 14 + 5
    drawn = "[...document.querySelectorAll('.plot')].filter(p => p.querySelector('.trace path, .point path, .hm image')).length"
    assert page.js(drawn) == charts
    assert page.js("document.querySelectorAll('button.png').length") == charts


def test_a_pair_matrix_has_its_numbers_and_the_steps_their_arrows(page: Browser) -> None:
    cells = page.js("[...document.querySelectorAll('[id^=map-pair-latency-one] .heatmap-label text')].map(t => t.textContent)")
    assert len(cells) == 12
    assert set(cells) == {"6"}
    assert page.js("document.querySelectorAll('[id^=map-steps] .point').length") >= 24


def test_nothing_from_a_record_runs_or_is_lost(page: Browser) -> None:
    assert page.js("document.title") != "owned"
    assert page.js("document.querySelectorAll('img[src=x]').length") == 0
    assert HOSTILE in page.js("document.querySelector('.verdict').textContent")
    assert page.js("JSON.parse(document.getElementById('record-1').textContent).commit") == HOSTILE


def test_a_heading_sorts_by_click_and_by_key(page: Browser) -> None:
    button = "document.querySelectorAll('table.sortable')[0].querySelector('th button')"
    state = f"{button}.parentElement.getAttribute('aria-sort')"
    assert page.js(state) is None
    page.js(f"{button}.click()")
    assert (page.js(state), page.js(SORTED)) == ("ascending", ["1", "32", "512", "4096"])
    page.js(f"{button}.focus()")
    for kind in ("keyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", text="\r", windowsVirtualKeyCode=13)
    assert (page.js(state), page.js(SORTED)) == ("descending", ["4096", "512", "32", "1"])
    page.js("document.querySelectorAll('table.sortable')[0].querySelectorAll('th button')[1].click()")
    assert page.js(state) is None, "only the column that sorts says so"


def test_missing_values_sort_last_both_ways(page: Browser) -> None:
    """In the table of all rows the collectives have no error, and single rows have no busbw."""
    find = "[...document.querySelectorAll('table.sortable th')].find(h => h.textContent.trim() === 'busbw')"
    column = (
        f"(() => {{ const h = {find}; h.firstElementChild.click();"
        " return [...h.closest('table').tBodies[0].rows].map(r => r.cells[h.cellIndex].dataset.value ?? null) })()"
    )
    for descending in (False, True):
        values = page.js(column)
        known = [float(value) for value in values if value is not None]
        assert 0 < len(known) < len(values)
        assert values[len(known) :] == [None] * (len(values) - len(known))
        assert known == sorted(known, reverse=descending)


def test_the_png_button_saves_that_chart_with_its_title(page: Browser) -> None:
    page.js("window.saved = []; window.original = Plotly.downloadImage; Plotly.downloadImage = (...a) => saved.push(a)")
    page.js("document.querySelectorAll('button.png')[1].click()")
    page.js("Plotly.downloadImage = window.original")
    assert page.js("saved[0][1].filename") == page.js("document.querySelectorAll('.plot')[1].id")
    assert page.js("saved[0][0].layout.title.text").startswith("Speed-up over one device: linear, column split")
    assert page.js("saved[0][0].data.length") == page.js("document.querySelectorAll('.plot')[1].data.length")
    image = page.js("Plotly.toImage(...saved[0])")
    assert image.startswith("data:image/png;base64,")
    assert len(image) > 10_000


def test_the_record_button_saves_the_record(page: Browser) -> None:
    page.js("window.blobs = []; const make = URL.createObjectURL; URL.createObjectURL = b => (blobs.push(b), make(b))")
    page.js("HTMLAnchorElement.prototype.click = function () { window.saved = this.download }")
    page.js("document.querySelectorAll('button.record')[1].click()")
    assert page.js("saved") == "record-2.json"
    assert json.loads(page.js("blobs[0].text()")) == json.loads(collectives_record(notes=["second"]).to_json())


def test_dark_follows_the_system_live_and_the_button_wins(page: Browser) -> None:
    paper = "document.querySelector('.plot')._fullLayout.paper_bgcolor"
    page.screen(1200, scheme="light")
    page.wait("document.getElementById('theme').textContent === 'Dark'")
    light = page.js(paper)
    assert background(page, "body") > 600
    page.screen(1200, scheme="dark")
    page.wait("document.getElementById('theme').textContent === 'Light'")
    assert background(page, "body") < 200
    assert page.js(paper) != light, "the charts follow"
    page.js("document.getElementById('theme').click()")
    assert background(page, "body") > 600
    assert page.js(paper) == light
    page.js("document.getElementById('theme').click()")
    assert background(page, "body") < 200


def test_a_phone_scrolls_tables_not_the_page(page: Browser) -> None:
    page.screen(390, 844)
    page.wait("window.innerWidth === 390")
    page.wait("[...document.querySelectorAll('.plot svg.main-svg')].every(s => s.getBoundingClientRect().width <= 390)")
    assert page.js("document.documentElement.scrollWidth") == 390
    assert page.js("[...document.querySelectorAll('.scroll')].some(s => s.scrollWidth > s.clientWidth)")


def test_no_errors_and_no_network(page: Browser) -> None:
    page.js("1")  # collects what has arrived
    problems = [event for event in page.events if event["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")]
    problems += [
        event
        for event in page.events
        if event["method"] == "Runtime.consoleAPICalled" and event["params"]["type"] in ("error", "warning", "assert")
    ]
    assert problems == []
    urls = [event["params"]["request"]["url"] for event in page.events if event["method"] == "Network.requestWillBeSent"]
    assert urls, "the page itself is a request"
    assert [url for url in urls if not url.startswith(("file:", "data:", "blob:"))] == []


def test_a_click_on_a_name_hides_the_curve_with_its_span_and_fit(browser: Browser, tmp_path: Path) -> None:
    """Last in this file, because it opens another page."""
    path = tmp_path / "one.html"
    path.write_text(render([bench_record()], ["only"]), encoding="utf-8")
    browser.screen(1200)
    browser.open(path)
    plot = "document.querySelector('.plot[id^=latency]')"
    hidden = f"{plot}._fullData.filter(t => t.visible === 'legendonly').length"
    assert browser.js(hidden) == 0
    x, y = browser.js(
        f"(() => {{ {plot}.scrollIntoView({{block: 'center'}}); const r = [...{plot}.querySelectorAll('.legend .traces')]"
        ".find(t => t.textContent === 'crosscut').getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2] })()"
    )
    for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
        browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    browser.wait(f"{hidden} === 3")
