"""The verdict on what scripts/soundness recorded."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import soundness_judge as judge

SCRIPT = Path(judge.__file__)


@pytest.fixture
def recorded(tmp_path):
    """Return a function that writes records, each a structure, a program and what else is unusual."""
    folder = tmp_path / "1.2.3"
    (folder / "records").mkdir(parents=True)

    def write(*given):
        usual = {"version": "1.2.3", "seed": "0", "test": "t", "name": "n"}
        usual |= {"stable": True, "reason": None, "changed": None}
        lines = [
            json.dumps({**usual, "structure": structure, "program": program, **other})
            for structure, program, other in given
        ]
        (folder / "records" / "one").write_text("\n".join(lines) + '\n{"half a')
        return judge.judge(folder)

    return write


def test_one_structure_of_two_programs_is_a_contradiction(recorded):
    judged = recorded(("s", "p", {}), ("s", "p", {}), ("s", "q", {}), ("t", "q", {}))
    assert [pair[1]["program"] for pair in judged.contradictions.values()] == ["q"]


def test_what_is_lowered_anyway_contradicts_nothing(recorded):
    judged = recorded(("s", "p", {}), ("s", "q", {"reason": "callbacks"}))
    assert not judged.contradictions
    assert (judged.lowerings, judged.eligible, judged.reasons["callbacks"]) == (2, 1, 1)


def test_a_structure_that_changes_is_unstable(recorded):
    assert len(recorded(("s", "p", {}), ("t", "q", {"stable": False})).unstable) == 1


def test_state_that_changes_is_listed(recorded):
    changed = {"changed": ["jax._src.a.b"]}
    judged = recorded(("s", "p", {}), ("t", "q", {"changed": []}), ("u", "r", changed))
    assert (judged.compared, judged.changed) == (2, {"jax._src.a.b": 1})
    assert "| `jax._src.a.b` | 1 |" in judge.table([judged])


def test_a_known_program_under_a_new_structure_is_a_lost_skip(recorded):
    assert recorded(("s", "p", {}), ("t", "p", {}), ("t", "p", {}), ("u", "q", {})).lost == 1


def test_the_second_run_finds_what_the_first_has_lowered(recorded):
    second = {"seed": "1"}
    judged = recorded(("s", "p", {}), ("s", "p", second), ("new", "q", second), ("other", "p", second))
    assert (judged.repeated, judged.found, judged.missing.total()) == (2, 1, 1)


def test_a_difference_is_found_inside_a_token(tmp_path):
    for digest, content in (("one", b"s4:size(i1;"), ("two", b"s4:size(i2;")):
        token = digest.encode() * 6 + b"xx"
        held = {"encoding": (b"s4:aval@" + token).hex(), "tokens": {token.hex(): content.hex()}}
        path = tmp_path / "structures" / digest[:2] / digest
        path.parent.mkdir(parents=True)
        path.write_bytes(zlib.compress(json.dumps(held).encode()))
    assert judge.difference(tmp_path, "one", "two").startswith("aval > size: (i1; / (i2;")


@pytest.mark.parametrize("structure", ["s", "t"])
def test_the_page_is_written_and_a_contradiction_fails(recorded, tmp_path, structure):
    recorded(("s", "p", {}), (structure, "q", {}))
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n{judge.BEGIN}\nold\n{judge.END}\nend\n")
    command = [sys.executable, SCRIPT, tmp_path, "--page", page]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == (structure == "s"), ran.stderr
    assert page.read_text().startswith(f"# Title\n{judge.BEGIN}\n\n| jax |")
    assert page.read_text().endswith(f"{judge.END}\nend\n")
    assert "old" not in page.read_text()
