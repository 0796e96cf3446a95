"""``version_of`` says what it covers, and changes with all of it."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
import zipfile

import pytest

import xcache


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Yield a folder on the path; forget what was imported from it."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_package_counts_with_all_its_files_and_imports(modules):
    package = modules / "trains" / "deep"
    package.mkdir(parents=True)
    (modules / "trains" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("def f():\n    from helps import h  # later\n")
    (modules / "helps.py").write_text("import numpy as np, json\nimport not_there\n")
    first = xcache.version_of("trains")
    assert first.covered[0] == "helps (1 file)"
    assert first.covered[1].startswith("numpy ")
    assert first.covered[2:] == ("trains (2 files)",)
    assert xcache.version_of("trains") == xcache.version_of("trains.deep") == first
    versions = {first}
    for file, text in (
        (package / "__init__.py", "def f():\n    from helps import h  # sooner\n"),
        (package / "new.py", ""),
        (modules / "helps.py", "import json\n"),
    ):
        file.write_text(text)
        versions.add(xcache.version_of("trains"))
    (package / "new.py").rename(package / "newer.py")
    versions.add(xcache.version_of("trains"))
    assert len(versions) == 5
    (package / "__pycache__").mkdir(exist_ok=True)
    (package / "__pycache__" / "x.py").write_text("")
    assert xcache.version_of("trains") in versions


def test_an_installed_distribution_counts_by_its_name_and_version():
    assert any(covered.startswith("msgpack ") for covered in xcache.version_of("msgpack").covered)
    # The package's name is not the distribution's.
    assert any(covered.lower().startswith("pyyaml ") for covered in xcache.version_of("yaml").covered)


def install(folder, name, file, *, requires="", editable=False):
    """Write a distribution as pip does."""
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text("")
    made = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    made.mkdir(exist_ok=True)
    header = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    (made / "METADATA").write_text(f"{header}{requires and f'Requires-Dist: {requires}'}\n\nRequires-Dist: nothing\n")
    (made / "RECORD").write_text(f"{file},sha256=x,0\n" if not editable else "")
    if editable:
        (made / "direct_url.json").write_text('{"dir_info": {"editable": true}, "url": "file:///"}')


@pytest.fixture
def installed(modules, monkeypatch):
    """Return a folder of installed distributions that is on the path."""
    folder = modules / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


def test_the_distributions_that_a_distribution_requires_count(modules, installed):
    (modules / "uses.py").write_text("import near\n")
    install(installed, "near", "near/__init__.py", requires='Far.Away>=1; extra == "all"')
    install(installed, "far-away", "far/__init__.py", requires="being-edited")
    install(installed, "being-edited", "nothing", editable=True)
    (modules / "being_edited.py").write_text("")
    first = xcache.version_of("uses")
    assert {*first.covered} == {
        "being-edited 1.0", "being_edited (1 file)", "far-away 1.0", "near 1.0", "uses (1 file)",
    }  # fmt: skip
    (modules / "being_edited.py").write_text("changed = True")
    second = xcache.version_of("uses")
    record = installed / "far_away-1.0.dist-info" / "RECORD"
    record.write_text(record.read_text().replace("sha256=x", "sha256=y"))
    assert len({first, second, xcache.version_of("uses")}) == 3


def test_each_part_of_a_namespace_package_counts(modules, installed):
    install(installed, "shared-one", "shared/one.py")
    install(installed, "shared-two", "shared/two.py")
    (modules / "shared").mkdir()
    (modules / "shared" / "own.py").write_text("")
    first = xcache.version_of("shared")
    assert {*first.covered} == {"shared-one 1.0", "shared-two 1.0", "shared (1 file)"}
    (modules / "shared" / "own.py").write_text("changed = True")
    assert xcache.version_of("shared") != first


@dataclasses.dataclass
class Config:
    rate: float = 1e-3
    sizes: tuple[int, ...] = (1, 2)


def test_a_config_counts_by_its_content():
    configs = [
        None, {"a": 1}, {"a": 1.0}, {"a": [1]}, Config(), Config(2e-3), Config(sizes=(1,)), argparse.Namespace(a=1),
    ]  # fmt: skip
    versions = [xcache.version_of("msgpack", config=config) for config in configs]
    assert len(set(versions)) == len(configs)
    assert xcache.version_of("msgpack", config=Config()) == xcache.version_of("msgpack", config=Config())
    assert "the config (Config)" in xcache.version_of("msgpack", config=Config()).covered


@pytest.mark.parametrize(
    "source",
    [
        "import os; import helper",
        "import helper; print(helper)",
        "import os, \\\n    helper",
        "try: import helper\nexcept ImportError: pass",
        "if True: from helper import N",
        "x = 1; from helper import N",
        "from \\\n helper import N",
        "from\thelper import N",
        "import os, helper as h  # and more",
        "import helper\tas h",
        "\ufeffimport helper",
        "N = 1\rimport helper",
        "import importlib; N = importlib.import_module('helper').N",
        '__import__( "helper" )',
        "from importlib import import_module as get; import importlib; importlib.import_module (\n    name='helper')",
    ],
)
def test_an_import_is_found_wherever_it_stands(modules, source):
    (modules / "program_of_test.py").write_text(source + "\n")
    (modules / "helper.py").write_text("N = 1")
    before = xcache.version_of("program_of_test")
    (modules / "helper.py").write_text("N = 2")
    assert xcache.version_of("program_of_test") != before


def test_a_file_counts_however_python_finds_it(modules):
    (modules / "real").mkdir()
    (modules / "linked").mkdir()
    (modules / "linked" / "__init__.py").write_text("")
    (modules / "linked" / "inner").symlink_to(modules / "real")
    # A link that leads back up is followed once.
    (modules / "real" / "up").symlink_to(modules / "linked")
    (modules / "program_of_test.py").write_text("import linked.inner.part, profile, packed\n")
    sys.path.insert(0, str(modules / "packed.zip"))
    versions = set()
    try:
        for number in range(4):
            # One of them changes at a time; the name of the second is one of Python's own.
            (modules / "real" / "part.py").write_text(f"N = {min(number, 1)}")
            (modules / "profile.py").write_text(f"N = {min(number, 2)}")
            with zipfile.ZipFile(modules / "packed.zip", "w") as archive:
                archive.writestr("packed.py", f"N = {min(number, 3)}")
            importlib.invalidate_caches()
            sys.modules.pop("profile", None)
            versions.add(xcache.version_of("program_of_test"))
    finally:
        sys.path.remove(str(modules / "packed.zip"))
    assert len(versions) == 4


def test_what_cannot_be_told_is_refused():
    with pytest.raises(TypeError, match="needs a module"):
        xcache.version_of()
    with pytest.raises(TypeError, match="config"):
        xcache.version_of("msgpack", config=iter(()))
    with pytest.raises(ValueError, match="not_there"):
        xcache.version_of("not_there")
    with pytest.raises(TypeError, match="version must be a str"):
        xcache.jit(len, version=3)
