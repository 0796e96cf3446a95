"""The names, imports and sets that a function's code uses, read from its bytecode."""

from __future__ import annotations

import sys
import types

import pytest
from support.describing import of_text

from xcache.hook.calls.program_code import Import, iterated_sets, modules_of, names_in

# So many constants that Python writes the numbers of later ones in two steps.
MANY = "".join(f"    x = x + {number}.5\n" for number in range(300))


@pytest.mark.parametrize("before", ["", MANY])
def test_a_set_that_is_only_searched_has_no_order(before):
    searched = of_text(f"def function(x, mode):\n{before}    return x if mode in {{'a', 'b'}} else 0")
    iterated = of_text(f"def function(x):\n{before}    return [x for name in {{'a', 'b'}}]")
    assert not iterated_sets(searched.__code__)
    assert iterated_sets(iterated.__code__) in ({frozenset("ab")}, set())


@pytest.mark.parametrize("before", ["", MANY])
def test_an_import_is_found_with_its_level_and_names(before):
    lines = "import a.b", "from c import d", "from . import e", "from ..f import g, h"
    text = f"def function(x):\n{before}" + "".join(f"    {line}\n" for line in lines)
    assert names_in(of_text(text).__code__)[2] == {
        Import(0, "a.b", ()),
        Import(0, "c", ("d",)),
        Import(1, "", ("e",)),
        Import(2, "f", ("g", "h")),
    }


def test_an_import_leads_to_all_modules_that_the_function_can_name(monkeypatch):
    for name in ("a", "a.b", "top", "top.pack", "top.pack.e", "top.f", "top.f.g", "e"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    imports = Import(0, "a.b", ()), Import(1, "", ("e",)), Import(2, "f", ("g", "h"))
    assert modules_of(imports, "top.pack").keys() == {"a", "a.b", "top", "top.pack", "top.pack.e", "top.f", "top.f.g"}
