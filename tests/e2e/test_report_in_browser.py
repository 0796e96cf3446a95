"""The report of real runs in a real browser: charts are drawn, tables sort, misses open, the keyboard suffices."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command_line import Shell
from support.places import new_place
from support.program_files import program_text

# The page itself is in tests/xcache/cli/report.
pytestmark = [pytest.mark.once, pytest.mark.thorough]

ON = {"XCACHE": "1", "PYTHONHASHSEED": "0"}
# Each changes one thing, so that there are misses with causes, hits, and a function with several shapes.
WAYS = ("", "shape", "number", "", "operation")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
CHARTS = {"where", "timeline", "comparison", "shapes", "over-time", "hit-rate", "causes", "composition", "ages"}
# Charts whose marks take room on the page.
DRAWN = """return [...document.querySelectorAll('[data-chart]')].filter(chart => [...chart.querySelectorAll(
  'svg rect, svg circle')].some(mark => { const box = mark.getBoundingClientRect(); return box.width && box.height; }))
  .map(chart => chart.dataset.chart)"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write the report of some real runs."""
    target = tmp_path_factory.mktemp("report") / "report.html"
    with new_place() as place:
        for way in WAYS:
            done = place.run(program_text("compile_one_way"), **ON, WAY=way)
            assert (done.returncode, done.stderr) == (0, "")
        shell = Shell(place)
        runs = shell.json("runs")["runs"]
        # Programs that take this long to compile would make the test slow, and shorter ones are told as small.
        key = shell.put("jit_train")
        for number in range(3):
            spans = json.dumps([("compile", 1.0, 5.0, "MainThread")])
            shapes = f"f32[{8 + number},8]"
            shell.record_run(key, run=f"{number:016x}", module_name="jit_train", shapes=shapes, spans=spans)
        # The one that was compiled first is the last in the list.
        said = shell.run("report", "--compare", runs[-1]["run"], runs[0]["run"], "--with-programs", "-o", str(target))
        assert said.returncode == 0, said.stderr
        yield target


@pytest.fixture
def open_page(report, tmp_path, monkeypatch):
    """A function that opens the report in a browser of some width, with or without JavaScript."""
    webdriver = pytest.importorskip("selenium.webdriver")
    if not CHROMIUM or not DRIVER:
        pytest.skip("Debian's chromium and chromium-driver are not installed")
    # Nothing is to be downloaded or reported by selenium.
    monkeypatch.setenv("SE_OFFLINE", "true")
    with contextlib.ExitStack() as stack:

        def open_page(width: int = 1200, *, javascript: bool = True, theme: str = "light"):
            options = webdriver.ChromeOptions()
            options.binary_location = CHROMIUM
            for argument in (
                *("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-first-run"),
                *("--disable-background-networking", f"--user-data-dir={tmp_path / 'profile'}"),
                f"--window-size={width},1000",
            ):
                options.add_argument(argument)
            if not javascript:
                options.add_experimental_option("prefs", {"profile.managed_default_content_settings.javascript": 2})
            options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
            driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
            stack.callback(driver.quit)
            driver.set_page_load_timeout(60)
            features = [{"name": "prefers-color-scheme", "value": theme}]
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            if width < 500:
                # A window cannot be that narrow.
                size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": True}
                driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            driver.get(report.as_uri())
            return driver

        yield open_page


def test_the_page_draws_its_charts_sorts_its_tables_and_opens_its_misses(open_page):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    driver = open_page()
    assert set(driver.execute_script(DRAWN)) >= CHARTS
    assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0
    # The verdict and what to do are seen without scrolling.
    for name in ("#verdict h1", ".actions .do"):
        assert driver.find_element(By.CSS_SELECTOR, name).location["y"] < 900

    def seconds() -> list[float]:
        cells = driver.find_elements(By.CSS_SELECTOR, "#table-programs tbody tr td:nth-child(4)")
        return [float(cell.get_attribute("data-v")) for cell in cells]

    title = driver.find_element(By.CSS_SELECTOR, "#table-programs th:nth-child(4) button")
    assert len(seconds()) > 1
    for key, order in ((Keys.ENTER, True), (Keys.SPACE, False)):
        title.send_keys(key)
        assert seconds() == sorted(seconds(), reverse=order)
    heading = driver.find_element(By.CSS_SELECTOR, "#table-programs th:nth-child(4)")
    assert heading.get_attribute("aria-sort") == "ascending"

    # A miss opens by a key, and by a link to it.
    misses = driver.find_elements(By.CSS_SELECTOR, ".miss")
    assert not any(miss.get_attribute("open") for miss in misses)
    misses[0].find_element(By.TAG_NAME, "summary").send_keys(Keys.ENTER)
    assert misses[0].get_attribute("open")
    of_step = next(miss for miss in misses if "jit_step" in miss.text)
    driver.execute_script("location.hash = arguments[0]", of_step.get_attribute("id"))
    driver.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0]))")
    assert of_step.get_attribute("open")
    assert "tanh" in of_step.text

    # The first key goes to the link past the navigation.
    driver.execute_script("document.activeElement.blur(); scrollTo(0, 0)")
    driver.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
    assert driver.execute_script("return getComputedStyle(document.activeElement).outlineStyle") != "none"
    assert driver.get_log("browser") == []


def colors(driver) -> list[str]:
    return driver.execute_script("const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]")


def test_it_is_light_and_dark_and_narrow(open_page):
    from selenium.webdriver.common.by import By

    driver = open_page(400, theme="dark")
    dark = colors(driver)
    driver.find_element(By.ID, "theme").click()
    assert colors(driver) != dark
    # Nothing but the tables scrolls sideways.
    assert driver.execute_script("return document.documentElement.scrollWidth") <= 400
    assert set(driver.execute_script(DRAWN)) >= CHARTS
    assert driver.get_log("browser") == []


def test_without_javascript_everything_is_there(open_page):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    driver = open_page(javascript=False)
    assert driver.find_element(By.ID, "theme").is_displayed() is False
    assert "jit_step" in driver.find_element(By.CSS_SELECTOR, "#table-programs tbody").text
    driver.find_element(By.CSS_SELECTOR, ".miss summary").send_keys(Keys.ENTER)
    assert driver.find_element(By.CSS_SELECTOR, ".miss").get_attribute("open")
    assert "called at" in driver.find_element(By.CSS_SELECTOR, ".miss").text
