"""The picture of ``xcache monitor``: everything fits, and the times are never cut off."""

from __future__ import annotations

import json
import os

import pytest

from xcache.cli.monitor_view import View
from xcache.wire import commands

ME = os.getuid()
FACTS = {
    "pid": 77,
    "version": "1",
    "uptime_seconds": 3723.0,
    "entries": 120,
    "bytes": 3 * 2**30,
    "max_size": 20 * 2**30,
    "max_entries": 0,
    "seconds": 0.5,
    "hits": 4,
    "misses": 1,
    "left_out": 0,
    "connected": 2,
    "compiling": 1,
    "waiting": 0,
    "other_connected": 0,
    "other_compiling": 0,
    "other_waiting": 0,
}


def program(pid: int, name: str = "train.py", uid: int = ME, **changes: object) -> dict[str, object]:
    return {
        "pid": pid,
        "uid": uid,
        "program": name,
        "seconds": 9.0,
        "connections": 1,
        "hits": 12,
        "misses": 3,
        **changes,
    }


def activity(pid: int, kind: str = "compiling", name: str = "jit_step", **changes: object) -> dict[str, object]:
    more = {"compiling": {"waiting": 0}, "waiting": {"of_pid": 4711}, "loading": {"ahead": False}}[kind]
    row = {"pid": pid, "uid": ME, "program": "train.py", "kind": kind, "key": "ab" * 32, "module_name": name}
    return row | {"seconds": 12.3, **more, **changes}


def miss(position: int, **changes: object) -> dict[str, object]:
    spans = json.dumps([["compile", 1.0, 2.5, "MainThread"]])
    return {
        "pid": 4711,
        "uid": ME,
        "program": "train.py",
        "run": "r",
        "position": position,
        "module_name": f"jit_{position}",
        "site": "/home/someone/project/train.py:12 in main",
        "shapes": "f32[8]",
        "key": "ab" * 32,
        "outcome": "miss",
        "cause": "other flags",
        "stored": "",
        "nearest": "",
        "spans": spans,
        **changes,
    }


def drawn(*told: commands.Seen | str, width: int = 80, height: int = 24, ascii_only: bool = False) -> list[str]:
    view = View(ascii_only=ascii_only)
    for each in told:
        view.take(each)
    lines = view.lines(width, height)
    assert len(lines) <= height
    assert all(line.cell_len <= width for line in lines), [line.plain for line in lines]
    return [line.plain.rstrip() for line in lines]


def seen(programs=(), doing=(), missed=(), **facts: object) -> commands.Seen:
    return commands.Seen(FACTS | facts, list(programs), list(doing), list(missed))


BUSY = seen(
    [program(4711), program(4712, "serve.py"), program(4713)],
    [
        activity(4711, waiting=2),
        activity(4712, "waiting"),
        activity(4713, "loading"),
        activity(4713, "loading", "jit_g", ahead=True),
    ],
    [miss(0), miss(1, outcome="uncacheable", cause="callback")],
)


def test_a_wide_picture():
    lines = drawn(BUSY)
    assert lines[0].startswith("xcache monitor  daemon 77, up 1h 02m") and lines[0].endswith("q leaves")
    assert lines[1].startswith("120 entries, 3 GiB of 20 GiB (15%)  █")
    assert lines[2].startswith("8.0 hits/s, 2.0 misses/s; since ")
    assert lines[3] == "2 programs: 1 compiling, 0 waiting"
    assert lines[5:10] == [
        " pid  program   hits misses  doing",
        "4711  train.py    12      3  compiling jit_step for 12.3 s, 2 wait",
        "4712  serve.py    12      3  waiting for jit_step of 4711, 12.3 s",
        "4713  train.py    12      3  loading jit_step for 12.3 s",
        "                             loading ahead jit_g for 12.3 s",
    ]
    assert lines[11] == "missed     pid  function  compile  cause"
    assert lines[12][8:] == "  4711  jit_1       2.5 s  not cacheable: callback  train.py:12"
    assert lines[13][8:] == "  4711  jit_0       2.5 s  other flags  train.py:12"


def test_an_idle_daemon_is_said_to_be_so_once():
    lines = drawn(seen(connected=0, bytes=1000))
    assert lines[1].startswith("120 entries, 1000 B of 20 GiB (0%)  ░")
    assert lines[3:6] == ["", "no program is connected", ""]


def test_a_narrow_picture():
    lines = drawn(BUSY, width=40)
    assert lines[0] == "xcache monitor                  q leaves"
    assert "4711 train.py, hits 12, misses 3" in lines
    assert "  compiling jit_step for 12.3 s, 2 wait" in lines
    assert "  waiting for jit_step of 4711, 12.3 s" in lines
    assert any(line[8:] == " jit_0: other flags" for line in lines)
    (line,) = (
        line for line in drawn(seen(missed=[miss(0, module_name="jit_" + "x" * 99)]), width=40) if "jit_" in line
    )
    assert line.endswith("…: other flags") and len(line) == 40


@pytest.mark.parametrize("width", [20, 40, 65, 66, 80, 200])
@pytest.mark.parametrize("height", [1, 5, 10, 24, 60])
def test_any_size_is_kept_to(width, height):
    names = ["jit_" + "long" * 40, "\x1b[31mred", "名" * 60]
    told = seen(
        [program(number, names[number % 3], 12345) for number in range(100)],
        [activity(number % 50, "waiting", names[number % 3]) for number in range(200)],
        [miss(number, module_name=names[number % 3], site=names[number % 3]) for number in range(50)],
        max_entries=1000,
    )
    lines = drawn(told, width=width, height=height)
    assert not any("\x1b" in line for line in lines)
    drawn("a problem " * 20, told, "a problem " * 20, width=width, height=height)


def test_the_name_is_cut_and_the_time_is_not():
    (line,) = (
        line for line in drawn(seen([program(1)], [activity(1, name="jit_" + "x" * 100)])) if "compiling j" in line
    )
    assert line.endswith("… for 12.3 s")
    (line,) = (
        line
        for line in drawn(seen([program(1)], [activity(1, name="jit_" + "x" * 100)]), ascii_only=True)
        if "compiling j" in line
    )
    assert line.endswith("... for 12.3 s")
    assert line.isascii()


def test_what_there_is_no_room_for_is_counted():
    told = seen([program(number) for number in range(100)], [activity(0, name=f"jit_{n}") for n in range(9)])
    lines = drawn(told)
    assert "and 5 more" in [line.strip() for line in lines]
    shown = sum("train.py" in line for line in lines)
    assert f"and {100 - shown} more programs" in lines
    many = seen([program(number) for number in range(100)], missed=[miss(number) for number in range(50)])
    assert sum("other flags" in line for line in drawn(many)) >= 4


def test_a_row_that_comes_again_stays_in_its_place_in_time():
    first = seen(missed=[miss(0, spans="[]"), miss(1, spans="damaged")])
    lines = drawn(first, seen(missed=[miss(0)]))
    assert [line[8:].split()[1] for line in lines if "other flags" in line] == ["jit_1", "jit_0"]
    assert sum(" 2.5 s " in line for line in lines) == 1


def test_other_users_are_counted_or_named():
    assert "2 programs: 1 compiling, 0 waiting; other users' 5: 3 compiling" in drawn(
        seen(other_connected=5, other_compiling=3)
    )
    assert any("train.py (root)" in line for line in drawn(seen([program(1, uid=0)]))) or ME == 0
    assert any("train.py (uid 987654)" in line for line in drawn(seen([program(1, uid=987_654)]), width=100))


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"max_size": 0}, "120 entries, 3 GiB"),
        ({"max_size": 0, "max_entries": 240}, "120 of 240 entries, 3 GiB (50%)"),
        ({"entries": None, "bytes": None}, "the store cannot be read"),
    ],
)
def test_how_full_the_store_is(facts, expected):
    assert drawn(seen(**facts))[1].partition("  ")[0] == expected


def test_before_anything_is_known_the_problem_is_all():
    lines = drawn("no daemon runs for /somewhere; waiting")
    assert lines[1] == "no daemon runs for /somewhere; waiting"
    assert not any(lines[2:])
