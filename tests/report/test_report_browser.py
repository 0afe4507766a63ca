"""The page in a real browser: everything is drawn, switches and filters work, nothing a model wrote does harm."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sample_runs import row, step_rows, with_metrics, with_timeline, write_comparison, write_run

from hacrl.report.page import write_report

pytestmark = pytest.mark.slow

FLAGS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
    ),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)
WAIT_S = 120
TESTBED_REPORT = Path(__file__).parents[2] / "benchmarks/results/testbed/model.html"
DRAW_ALL = "return Promise.all(plots.filter(plot => plot.place.offsetParent).map(draw)).then(() => true)"
DRAW_FIRST = "return draw(plots[0]).then(() => true)"

HOSTILE = (
    "<script>window.harm = 1</script>",
    "</script><script>window.harm = 2</script><!-- <script>",
    "--><img src=x onerror='window.harm = 3'><svg onload='window.harm = 4'>",
    "lone \ud800 and \udfff surrogates",
    "null \x00 bell \x07 escape \x1b[31m",
    "{{data}} ${window.harm = 5} `\\u003cscript>`",
    "right-to-left \u202etxt.exe \u2028 line \u2029 end",
    "<a href='javascript:window.harm = 6'>link</a><b>bold</b>",
    "x" * 100_000,
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium, driver = shutil.which("chromium") or shutil.which("chromium-browser"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium and chromedriver here; on Debian: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    made.set_script_timeout(WAIT_S)
    made.set_page_load_timeout(WAIT_S)
    yield made
    made.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods that share, one that does not, two seeds each, a comparison's table, and timelines of two runs."""
    folder = tmp_path_factory.mktemp("report")
    comparison = write_comparison(folder / "compared", steps=8, tasks=4)
    naive = [write_run(folder / f"naive-{seed}", algorithm="naive", seed=seed, steps=8) for seed in range(2)]
    spans = [span for step in range(1, 9) for span in step_rows(step, 10.0 * step)]
    with_timeline(comparison / "hacpo" / "seed-1", [*spans, row(8, None, "loop", "<b>odd</b>", 88, 89)])
    with_metrics(with_timeline(naive[0], spans), *[{"agent/qwen/time/wait": 3.0}] * 8)
    return write_report([comparison, *naive], folder / "report.html")


def show(browser: Any, page: Path, *, width: int = 1280, dark: bool = False, draw: bool = False) -> None:
    """Open the page; `draw` every chart that is in a shown panel, which takes seconds."""
    for kind in ("browser", "performance"):
        browser.get_log(kind)
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    browser.get(page.as_uri())
    end = time.monotonic() + WAIT_S
    while not browser.execute_script("return document.documentElement.dataset.ready"):
        assert time.monotonic() < end, browser.execute_script("return document.body.innerText.slice(0, 500)")
        time.sleep(0.1)
    if draw:
        assert browser.execute_script(DRAW_ALL)


def complaints(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser")]


def test_every_chart_is_drawn(browser: Any, page: Path) -> None:
    show(browser, page, draw=True)
    drawn = browser.execute_script(
        """return plots.filter(plot => plot.place.offsetParent).map(plot => [
             plot.chart.id, plot.place.querySelectorAll('svg.main-svg').length,
             plot.place.querySelectorAll('.scatterlayer .trace path, .barlayer .point path').length,
             plot.place.getBoundingClientRect().width])"""
    )
    ids = {chart for chart, *_ in drawn}
    assert {"held-out-0", "reward", "capability", "omega", "ratios", "shares", "weight", "ess", "work", "time"} <= ids
    for chart, pictures, marks, width in drawn:
        assert pictures > 0, chart
        assert marks > 0, chart
        assert width > 200, chart
    assert complaints(browser) == []
    ids = browser.execute_script(
        "return [...document.querySelectorAll('[id]')].filter(node => !node.closest('.plot')).map(node => node.id)"
    )
    assert len(ids) == len(set(ids))
    # The curves' colours are an agent's, their strokes a method's.
    lines = browser.execute_script(
        """return plots.find(plot => plot.chart.id === 'held-out-0').place.data
             .filter(trace => trace.name !== 'band').map(trace => [trace.name, trace.line.color, trace.line.dash])"""
    )
    assert [name for name, *_ in lines] == ["hacpo", "naive", "gspo"]
    assert len({colour for _, colour, _ in lines}) == 1
    assert len({dash for *_, dash in lines}) == 3


def test_the_test_beds_report_is_small_and_whole(browser: Any) -> None:
    """The page of 25 real runs, as benchmarks/README.md has it made."""
    assert TESTBED_REPORT.stat().st_size < 5e6
    show(browser, TESTBED_REPORT, draw=True)
    drawn = browser.execute_script(
        """return plots.filter(plot => plot.place.offsetParent).map(plot => [
             plot.chart.id, plot.place.querySelectorAll('.scatterlayer .trace path, .barlayer .point path').length])"""
    )
    assert {"held-out-0", "reward", "omega", "ratios", "shares", "weight", "memory", "time"} <= {
        name for name, _ in drawn
    }
    assert all(marks > 0 for _, marks in drawn)
    text = browser.execute_script("return document.body.innerText")
    assert all(method in text for method in ("truncated", "hacpo", "naive", "gspo-x2", "gspo"))
    assert complaints(browser) == []


def test_plots_are_drawn_when_they_come_into_sight(browser: Any, page: Path) -> None:
    show(browser, page)
    drawn = "return !!document.querySelector('#chart-time .barlayer .point path')"
    assert not browser.execute_script(drawn)
    browser.execute_script("document.getElementById('chart-time').scrollIntoView()")
    end = time.monotonic() + WAIT_S
    while not browser.execute_script(drawn):
        assert time.monotonic() < end
        time.sleep(0.1)


def test_no_request_leaves_the_page(browser: Any, page: Path) -> None:
    show(browser, page)
    asked = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [
        message["params"].get("request", message["params"]).get("url", "")
        for message in asked
        if message["method"] in ("Network.requestWillBeSent", "Network.webSocketCreated")
    ]
    assert page.as_uri() in urls
    assert [url for url in urls if url.startswith(("http", "ws", "ftp"))] == []
    # And none could: a picture from elsewhere is refused by the page's own policy.
    browser.execute_script("document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:9/x.png'}))")
    end = time.monotonic() + WAIT_S
    while not (found := complaints(browser)):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert "Content Security Policy" in found[0]


def test_the_axis_can_be_switched(browser: Any, page: Path) -> None:
    show(browser, page)
    seen = {}
    for axis in ("steps", "rollouts", "tokens", "seconds"):
        browser.find_element("css selector", f"button[data-axis={axis}]").click()
        browser.execute_script(DRAW_FIRST)
        seen[axis] = browser.execute_script(
            """const place = plots[0].place;
               return [place.layout.xaxis.title.text, place.data.at(-1).x.at(-1),
                       place.querySelector('.xtitle').textContent]"""
        )
        assert seen[axis][0] == seen[axis][2]
    # 8 steps of 4 tasks x 2 answers, of 20 tokens each; a step takes 6 seconds.
    assert [value for _, value, _ in seen.values()] == [8, 64, 1280, 48]
    assert len({title for title, *_ in seen.values()}) == 4
    assert complaints(browser) == []


def test_methods_can_be_hidden_and_chosen(browser: Any, page: Path) -> None:
    show(browser, page)
    names = "return plots[0].place.data.map(trace => trace.name).filter(name => name !== 'band')"
    browser.find_element("css selector", "button[data-method=gspo]").click()
    browser.execute_script(DRAW_FIRST)
    assert browser.execute_script(names) == ["hacpo", "naive"]
    shown = """return [...new Set([...document.querySelectorAll('#sharing .panel')]
                 .filter(box => box.offsetParent).map(box => box.dataset.method))]"""
    assert browser.execute_script(shown) == ["hacpo"]
    browser.execute_script(DRAW_ALL)
    browser.find_element("css selector", "button[data-choose=naive]").click()
    assert browser.execute_script(shown) == ["naive"]
    browser.execute_script(DRAW_ALL)
    assert browser.execute_script(
        """return [...document.querySelectorAll('#sharing .plot')].filter(place => place.offsetParent)
             .every(place => Math.abs(place.querySelector('svg.main-svg').getBoundingClientRect().width
                                      - place.getBoundingClientRect().width) < 2)"""
    )


@pytest.mark.parametrize("width", [1280, 390])
def test_the_last_steps_are_drawn_in_lanes(browser: Any, page: Path, width: int) -> None:
    show(browser, page, width=width, draw=True)
    text = "return [...document.querySelectorAll('#chart-work ' + arguments[0])].map(node => node.textContent)"
    assert browser.execute_script(text, ".keys .agent") == ["sample", "update", "<b>odd</b>"]
    shown = ".panel:not([hidden]) "
    lanes = ["qwen", "sampler-0", "llama", "sampler-0", "loop"]
    assert browser.execute_script(text, shown + "h4") == ["hacpo/seed-1, steps 4 to 8"]
    assert browser.execute_script(text, shown + ".ytick text") == lanes
    assert browser.execute_script(text, shown + ".annotation-text") == [f"step {step}" for step in range(4, 9)]
    cells = browser.execute_script("return [...document.querySelectorAll('#time td')].map(cell => cell.textContent)")
    assert cells == ["naive", "qwen", "50 %", "0 %", "0 %", "0 %"]
    # The first bar of the topmost lane is qwen's update, from the 5th to the 7th of 50 seconds.
    left, width_of_bar, told = browser.execute_script(
        """const { place } = plots.find(plot => plot.chart.id === 'work'), axis = place._fullLayout.xaxis;
           const bars = [...place.querySelectorAll('.barlayer .point path')].map(bar => bar.getBoundingClientRect());
           const top = Math.min(...bars.map(bar => bar.top));
           const [first] = bars.filter(bar => bar.top - top < 1).sort((a, b) => a.left - b.left);
           return [(first.left - place.getBoundingClientRect().left - axis._offset) / axis._length,
                   first.width / axis._length, place.data[0].customdata[0]]"""
    )
    assert left == pytest.approx(5 / 50, abs=0.01)
    assert width_of_bar == pytest.approx(2 / 50, abs=0.01)
    assert told == ["qwen.sampler-0", 4, 2]
    browser.find_element("css selector", "#time button[data-choose=naive]").click()
    browser.execute_script(DRAW_ALL)
    assert browser.execute_script(text, shown + "h4") == ["naive-0, steps 4 to 8"]
    assert browser.execute_script(text, shown + ".ytick text") == lanes
    assert complaints(browser) == []


def choose(browser: Any, name: str, value: str) -> None:
    browser.execute_script(
        """const field = document.getElementById('filter-' + arguments[0]);
           field.value = arguments[1];
           field.dispatchEvent(new Event(field.tagName === 'SELECT' ? 'change' : 'input'));""",
        name,
        value,
    )


def shown_rollouts(browser: Any) -> list[dict[str, str]]:
    return browser.execute_script(
        """return [...document.querySelectorAll('.rollout')].map(box => ({
             author: box.querySelector('.agent').textContent, verdict: box.querySelector('.verdict').textContent,
             text: box.querySelector('.answer').textContent, parts: box.querySelector('.parts').textContent,
             about: box.closest('.task').querySelector('.head').textContent}))"""
    )


def test_rollouts_can_be_searched_and_filtered(browser: Any, page: Path) -> None:
    show(browser, page)
    everything = shown_rollouts(browser)
    assert len(everything) == 20
    browser.find_element("id", "more").click()
    assert len(shown_rollouts(browser)) == 40

    choose(browser, "search", "QWEN at step 8")
    found = shown_rollouts(browser)
    assert found
    assert all("of qwen at step 8" in rollout["text"] for rollout in found)
    assert browser.execute_script("return document.querySelector('.answer mark').textContent") == "qwen at step 8"
    choose(browser, "search", "nowhere to be found")
    assert shown_rollouts(browser) == []
    assert browser.find_element("id", "count").text.startswith("0 of ")
    choose(browser, "search", "")

    choose(browser, "author", "llama")
    choose(browser, "score", "positive")
    found = shown_rollouts(browser)
    assert found
    assert all(rollout["author"] == "llama" and rollout["verdict"] == "reward 1" for rollout in found)
    choose(browser, "author", "")
    choose(browser, "score", "")

    choose(browser, "order", "size")
    assert all("7.00" in rollout["parts"] and "step 3" in rollout["about"] for rollout in shown_rollouts(browser)[:4])
    choose(browser, "task", "train/33")
    assert all("train/33" in rollout["about"] for rollout in shown_rollouts(browser))
    choose(browser, "task", "")
    choose(browser, "method", "gspo")
    assert all("method gspo" in rollout["about"] for rollout in shown_rollouts(browser))
    choose(browser, "method", "")
    choose(browser, "agreement", "all agents")
    assert all("solved by all agents" in rollout["about"] for rollout in shown_rollouts(browser))
    foreign = next(rollout for rollout in shown_rollouts(browser) if "inside the band" in rollout["parts"])
    assert "Scores: exact" in foreign["parts"]
    assert complaints(browser) == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_is_legible_and_fits(browser: Any, page: Path, width: int, dark: bool) -> None:
    show(browser, page, width=width, dark=dark, draw=True)
    assert browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]") == [width, width]
    faults = browser.execute_script(
        """
        const rgb = text => text.match(/[\\d.]+/g).map(Number);
        const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
          .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
          .reduce((sum, v, place) => sum + v * [0.2126, 0.7152, 0.0722][place], 0);
        const ground = node => {
          for (let at = node; at; at = at.parentElement) {
            const colour = rgb(getComputedStyle(at).backgroundColor);
            if (colour.length === 3 || colour[3] > 0.99) return colour;
          }
          return [255, 255, 255];
        };
        const faults = [], seen = new Set();
        const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
        for (let text = walker.nextNode(); text; text = walker.nextNode()) {
          const node = text.parentElement;
          if (!text.data.trim() || !node.offsetParent || node.closest('svg, script, :disabled')) continue;
          const style = getComputedStyle(node);
          const [a, b] = [light(rgb(style.color)), light(ground(node))].sort((x, y) => y - x);
          const what = `${node.tagName}.${node.className} ${((a + 0.05) / (b + 0.05)).toFixed(2)} ${style.fontSize}`;
          if (((a + 0.05) / (b + 0.05) < 4.5 || parseFloat(style.fontSize) < 12) && !seen.has(what)) {
            seen.add(what);
            faults.push(what);
          }
        }
        for (const text of document.querySelectorAll('.plot svg text'))
          if (parseFloat(getComputedStyle(text).fontSize) < 11) faults.push(`plot text ${text.textContent}`);
        return faults;
        """
    )
    assert faults == []
    assert complaints(browser) == []
    wanted = "rgb(18, 22, 28)" if dark else "rgb(255, 255, 255)"
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == wanted


def test_nothing_a_model_wrote_does_harm(browser: Any, tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "<img src=x onerror='window.harm = 7'>",
        steps=len(HOSTILE),
        tasks=1,
        group=2,
        text=lambda step, author, index: HOSTILE[step - 1],
        prompt=[{"role": "<b>user", "content": HOSTILE[1] + HOSTILE[2]}],
        task_id=HOSTILE[2],
        detail=HOSTILE[1],
    )
    page = write_report([run, write_run(tmp_path / "gspo", algorithm="gspo")], tmp_path / "r.html")
    show(browser, page)
    for _ in range(3):
        if browser.find_element("id", "more").is_displayed():
            browser.find_element("id", "more").click()
    texts = [rollout["text"] for rollout in shown_rollouts(browser)]
    for hostile in (HOSTILE[0], HOSTILE[1], HOSTILE[2], HOSTILE[5], HOSTILE[7]):
        assert hostile in texts
    # What cannot be seen is named.
    assert "null \u2400 bell \u2407 escape \u241b[31m" in texts
    assert any("right-to-left ‹U+202E›txt.exe" in text for text in texts)
    assert "lone ‹U+D800› and ‹U+DFFF› surrogates" in texts
    longest = max(texts, key=len)
    assert len(longest) < 7000
    assert browser.execute_script("return document.querySelector('#answers').innerText.includes('94,000 characters')")

    state = browser.execute_script(
        """return [window.harm ?? null, document.querySelectorAll('main script, main img, main iframe').length,
                   document.querySelectorAll('#answers a, #answers b, #answers svg').length,
                   document.querySelectorAll('[onerror], [onload]').length, document.title,
                   document.documentElement.scrollWidth <= innerWidth]"""
    )
    assert state == [None, 0, 0, 0, "hacrl report", True]
    assert complaints(browser) == []
    # Search copes with them, too.
    choose(browser, "search", "<script>")
    assert browser.execute_script(
        "return [...document.querySelectorAll('.answer mark')].every(m => m.textContent === '<script>')"
    )
    assert shown_rollouts(browser)


def test_a_run_with_little_in_it(browser: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", steps=1, planned=4, agents=["alone"], every=None)
    shutil.rmtree(run / "rollouts")
    show(browser, write_report([run], tmp_path / "r.html"), draw=True)
    assert "These runs hold no rollout files." in browser.execute_script("return document.body.innerText")
    assert browser.execute_script("return document.querySelectorAll('#sharing').length") == 0
    assert browser.execute_script("return document.querySelectorAll('.scatterlayer .point').length") > 0
    assert complaints(browser) == []
