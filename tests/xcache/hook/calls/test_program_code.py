"""What a code object does and reads, told from its bytecode."""

from __future__ import annotations

import pytest
from support.describing import of_text

from xcache.hook.calls.program_code import Import, code_of
from xcache.hook.structure.encoding import CannotSkipError

# So many constants that Python writes the numbers of later ones in two steps.
MANY = "".join(f"    x = x + {number}.5\n" for number in range(300))


def read_by(text, before=""):
    return set(code_of(of_text(f"def function(x):\n{before}    {text}\n").__code__).reads)


@pytest.mark.parametrize("before", ["", MANY])
def test_an_import_is_found_with_its_level_and_names(before):
    for text, reads in {
        "import a.b": {(Import(0, "a.b"),), (Import(0, "a"),)},
        "import a.b as c": {(Import(0, "a.b"),)},
        "from c import d": {(Import(0, "c"), "d")},
        "from . import e": {(Import(1, ""), "e")},
        "from ..f import g, h": {(Import(2, "f"), "g"), (Import(2, "f"), "h")},
    }.items():
        assert read_by(text, before) == reads


@pytest.mark.parametrize("before", ["", MANY])
def test_a_global_is_found_with_the_attributes_that_are_read_from_it(before):
    for text, reads in {
        "return a.b.c + x.d": {("a", "b", "c")},
        "return a.b(x).c": {("a", "b")},
        "return [a.b for y in x]": {("a", "b")},
        "return lambda: (lambda: a)": {("a",)},
        "a.b = x": {("a",)},
        "class C(a.b): c = d.e": {("a", "b"), ("d", "e"), ("__name__",)},
    }.items():
        assert read_by(text, before) == reads


def test_a_set_that_is_only_searched_has_no_order():
    searched = (
        code_of(of_text(f"def function(x, mode): return mode in {each}").__code__) for each in ("{1, 'a'}", "{'a', 1}")
    )
    assert len({(each.digest, each.makes_sets) for each in searched}) == 1
    for text in ("{*x}", "[0 for x in {'a', 'b'}]", "mode in {1, 2}"):
        code = code_of(of_text(f"def function(x, mode): return {text}").__code__)
        assert code.makes_sets == ("mode" not in text)


@pytest.mark.parametrize("text", ["x.__globals__", "x.f_back", "object.__subclasses__()", "getattr(x, '__globals__')"])
def test_code_that_may_read_anything_is_refused(text):
    with pytest.raises(CannotSkipError, match="outside the program"):
        read_by(f"return {text}")
