"""``xcache report`` on real stores: hostile texts, large and odd stores, what goes wrong."""

from __future__ import annotations

import contextlib
import html.parser
import json
import re
import sqlite3
import sys

import pytest

from xcache.cli.report import page
from xcache.wire import ledger

HOSTILE = "jit_<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{ 7 * 7 }}"
SPANS = json.dumps([("compile", 1.0, 0.5, "MainThread")])
# Elements that end with their begin.
VOID = {"meta", "input", "br"}


class Page(html.parser.HTMLParser):
    """The elements, attributes and texts of a page; every element must be closed in its order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture
def write(shell, tmp_path):
    """A function that writes a report and returns its text."""

    def write(*arguments: str) -> str:
        target = tmp_path / "report.html"
        shell.say("report", "-o", str(target), *arguments)
        return target.read_text("utf-8")

    return write


def ids_and_links(text: str) -> tuple[list[str], set[str]]:
    elements = Page(text).elements
    links = {str(each["href"]) for _, each in elements if "href" in each}
    return [str(each["id"]) for _, each in elements if "id" in each], links


def test_the_texts_of_programs_are_texts_and_nothing_else(shell, write):
    key = shell.put(HOSTILE, program=b"no program")
    hostile = dict.fromkeys(("module_name", "site", "shapes", "cause", "stored"), HOSTILE)
    facts = {"arguments": json.dumps([HOSTILE]), "directory": HOSTILE, "XLA_FLAGS": HOSTILE, "host": HOSTILE}
    shell.record_run(key, facts=facts, **hostile)
    for arguments in ((), ("--compare", "last", "last"), ("--with-programs",), ("--redact",)):
        text = write(*arguments)
        made = Page(text)
        tags = {tag for tag, _ in made.elements}
        assert "img" not in tags
        # One script, its own.
        assert [tag for tag, _ in made.elements].count("script") == 1
        assert not any(name.startswith("on") for _, attributes in made.elements for name in attributes)
        assert not any("style" in attributes for _, attributes in made.elements)
        assert any(HOSTILE in data for data in made.texts) or arguments == ("--redact",)


def test_nothing_is_loaded_and_only_the_page_s_own_script_may_run(shell, write):
    shell.record_run(shell.put("jit_f"))
    text = write()
    (policy,) = [a["content"] for t, a in Page(text).elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    for name, directive in (("script", "script-src"), ("style", "style-src")):
        content = re.search(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)[1]
        assert f"{directive} '{page._hash(content)}'" in policy
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#)|url\(|@import|https?:""", text)


def test_every_link_leads_somewhere_and_every_name_is_one(shell, write):
    shell.record_run(shell.put("jit_f"))
    ids, links = ids_and_links(write("--compare", "last", "last"))
    assert len(ids) == len(set(ids))
    assert {link.removeprefix("#") for link in links} <= set(ids)


def test_programs_that_were_compiled_for_the_same_reason_share_a_place(shell, write):
    rows = [
        ledger.Row(number, "jit_f", "train.py:1", f"f32[{number}]", f"{number}" * 64, "miss", cause, "yes", "", SPANS)
        for number, cause in enumerate(["new", "new", "evicted: size", "new"])
    ]
    shell.record_rows(rows, run="a" * 16)
    text = write()
    made = Page(text)
    places = {str(each["id"]): tag for tag, each in made.elements if str(each.get("id")).startswith("miss-")}
    assert places == {"miss-0": "details", "miss-1": "li", "miss-3": "li", "miss-2": "details"}
    assert "and 2 alike" in text


def test_a_small_function_of_two_places_is_one_function(shell, write):
    key, short = shell.put("jit_f"), json.dumps([("compile", 1.0, 0.01, "MainThread")])
    for number, (site, size) in enumerate((site, size) for site in ("a.py:1", "a.py:2") for size in (8, 9)):
        shell.record_run(key, run=f"{number}" * 16, site=site, shapes=f"f32[{size}]", spans=short)
    assert "1 small function was compiled for several shapes, too, 40 ms in all: jit_f." in write()


def test_redacted_reports_hold_no_folder_host_or_argument(shell, write):
    key = shell.put("jit_f")
    facts = {
        "arguments": json.dumps(["--data=/srv/my secret/set", "hush"]),
        "directory": "/home/me/my work",
        "host": "host17",
        "XLA_FLAGS": "--xla_dump_to=/home/me/dumps",
    }
    shell.record_run(key, facts=facts, site="/home/me/my work/train.py:3 in main")
    secret = ("my secret", "hush", "my work", "/home/me", "host17")
    open_text, redacted = write(), write("--redact")
    for word in secret:
        assert word in open_text
        assert word not in redacted
    assert "…/train.py:3 in main" in redacted
    assert "(2 arguments)" in redacted


def test_the_text_of_programs_is_there_only_if_asked_for(shell, write):
    stablehlo = pytest.importorskip("xcache.keys.stablehlo")
    pytest.importorskip("jaxlib.mlir.ir")
    program = "func.func public @main(%x: tensor<3xf32>) -> tensor<3xf32> { return %x : tensor<3xf32> }"
    key = shell.put("jit_f", program=stablehlo.bytecode(stablehlo.parse(program)))
    shell.record_run(key)
    assert "tensor&lt;3xf32&gt;" not in write()
    text = write("--with-programs")
    assert "tensor&lt;3xf32&gt;" in text
    assert f'id="text-{key}"' in text


def test_a_large_store_makes_a_small_file(shell, tmp_path):
    shell.record_run(shell.put("jit_f"))
    shell.say("stop")
    spans = json.dumps([("trace", 1.0, 0.1, "MainThread"), ("compile", 2.0, 0.5, "MainThread")])
    with contextlib.closing(sqlite3.connect(shell.directory / "store.db")) as database, database:
        columns = [row[1] for row in database.execute("PRAGMA table_info(entries)")]
        others = ", ".join(name for name in columns if name not in ("key", "module_name"))
        database.execute(
            "WITH RECURSIVE n(i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n WHERE i < 9999) INSERT INTO entries"  # noqa: S608 - names of our own
            f" (key, module_name, {others}) SELECT printf('%064x', i), 'jit_function_' || i % 700, {others}"
            " FROM entries, n"
        )
        for number in range(1, 8):
            database.execute(
                "INSERT INTO runs SELECT id + ?, printf('%016x', ?), uid, pid, program, facts, began_at, reported_at,"
                " ended_at, size FROM runs WHERE id = 1",
                (number, number),
            )
            outcome = ("miss", "other program", "yes", "") if number % 2 else ("hit", "", "", "")
            rows = [
                (f"jit_function_{place % 300}", f"train.py:{place}", f"f32[{place % 90},512]" * 40, f"{place:064x}")
                for place in range(1000)
            ]
            database.executemany(
                "INSERT INTO ledger VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [(1 + number, place, *row, *outcome, spans) for place, row in enumerate(rows)],
            )
    target = tmp_path / "report.html"
    found = json.loads(shell.run("report", "-o", str(target), "--json").stdout)
    assert (found["runs"], found["bytes"]) == (8, target.stat().st_size)
    assert found["bytes"] < 3_000_000
    assert "700 more" in target.read_text()
    Page(target.read_text())


def test_a_store_without_runs_is_still_shown(shell, write):
    shell.put("jit_f")
    text = write()
    assert "No run is recorded" in text
    assert "Dearest entries" in text


def test_a_run_that_was_killed_while_it_compiled_is_shown(shell, write):
    shell.record_run(shell.put("jit_f"), outcome=ledger.COMPILING, cause="", spans="[]")
    assert "The process ended while it was compiling" in write()


def test_what_cannot_be_reported_is_one_line(shell, tmp_path):
    target = str(tmp_path / "report.html")
    for arguments, code, says in (
        (("-o", target), 1, "there is nothing to report: no run is recorded, and the store is empty"),
        (("--run", "last", "-o", target), 1, "nothing to report"),
        (("--run", "abcd", "-o", target), 1, "no run begins with 'abcd'"),
        (("--compare", "last", "abcd", "-o", target), 1, "no run begins with"),
        (("--compare", "last", "last", "--run", "last"), 2, "exclude each other"),
        (("-o", "-", "--json"), 2, "exclude each other"),
        (("--since", "soon"), 2, "not a duration"),
    ):
        assert says in shell.say("report", *arguments, code=code), arguments
    shell.record_run(shell.put("jit_f"))
    failed = shell.run("report", "-o", str(tmp_path / "nowhere" / "report.html"))
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.count("\n") == 1


def test_without_the_extra_or_a_browser_it_says_so(shell, tmp_path, monkeypatch):
    shell.record_run(shell.put("jit_f"))
    monkeypatch.setitem(sys.modules, "jinja2", None)
    said = shell.say("report", code=1)
    assert "pip install 'jax-xcache[report]'" in said
    assert said.count("\n") == 1
    monkeypatch.undo()
    target = tmp_path / "report.html"
    done = shell.run("report", "-o", str(target), "--open", PATH="/nowhere", BROWSER="", DISPLAY="", WAYLAND_DISPLAY="")
    assert done.returncode == 1
    assert f"no browser can be opened here; the report is in {target}" in done.stderr
    assert target.exists()


def test_an_older_store_is_reported_without_what_it_lacks(shell, write):
    shell.put("jit_f")
    shell.say("stop")
    shell.change("PRAGMA user_version = 8")
    text = write()
    assert "No run is recorded" in text
    shell.change("PRAGMA user_version = 9")


def test_the_report_goes_to_a_pipe(shell):
    shell.record_run(shell.put("jit_f"))
    piped = shell.run("report", "-o", "-")
    assert (piped.returncode, piped.stderr) == (0, "")
    Page(piped.stdout)
