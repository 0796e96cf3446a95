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


def test_a_package_counts_with_all_its_files(modules):
    package = modules / "trains" / "deep"
    package.mkdir(parents=True)
    (modules / "trains" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("def f():\n    from helps import h  # later\n")
    (modules / "helps.py").write_text("")
    first = xcache.version_of("trains")
    assert first.covered == ("trains (2 files)",)
    assert xcache.version_of("trains") == xcache.version_of("trains.deep") == first
    assert {*xcache.version_of("trains", "helps").covered} == {"helps (1 file)", "trains (2 files)"}
    versions = {first}
    for file, text in (
        (package / "__init__.py", "def f():\n    from helps import h  # sooner\n"),
        (package / "n.py", ""),
    ):
        file.write_text(text)
        versions.add(xcache.version_of("trains"))
    (package / "n.py").rename(package / "newer.py")
    versions.add(xcache.version_of("trains"))
    assert len(versions) == 4
    (package / "__pycache__").mkdir(exist_ok=True)
    (package / "__pycache__" / "x.py").write_text("")
    (modules / "helps.py").write_text("changed = True")
    assert xcache.version_of("trains") in versions


def test_an_installed_package_counts_by_its_files_too():
    assert [covered.partition(" (")[0] for covered in xcache.version_of("msgpack").covered] == ["msgpack"]


def test_each_part_of_a_namespace_package_counts(modules):
    versions = set()
    (modules / "site-packages").mkdir()
    sys.path.append(str(modules / "site-packages"))
    try:
        for place in (modules, modules / "site-packages"):
            (place / "shared").mkdir()
            for text in ("", "changed = True"):
                (place / "shared" / "own.py").write_text(text)
                importlib.invalidate_caches()
                versions.add(xcache.version_of("shared"))
    finally:
        sys.path.remove(str(modules / "site-packages"))
    assert len(versions) == 4


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


def test_a_file_counts_however_python_finds_it(modules):
    (modules / "real").mkdir()
    (modules / "linked").mkdir()
    (modules / "linked" / "__init__.py").write_text("")
    (modules / "linked" / "inner").symlink_to(modules / "real")
    # A link that leads back up is followed once.
    (modules / "real" / "up").symlink_to(modules / "linked")
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
            versions.add(xcache.version_of("linked", "profile", "packed"))
    finally:
        sys.path.remove(str(modules / "packed.zip"))
    assert len(versions) == 4


class Opened:
    """A class that reads a file; what a config's class does counts, too."""

    def read(self):
        return open("x").read()


def test_what_cannot_be_told_is_refused():
    with pytest.raises(TypeError, match="needs a module"):
        xcache.version_of()
    for config in (iter(()), Opened()):
        with pytest.raises(TypeError, match="config"):
            xcache.version_of("msgpack", config=config)
    with pytest.raises(ValueError, match="not_there"):
        xcache.version_of("not_there")
    with pytest.raises(TypeError, match="version must be a str"):
        xcache.jit(len, version=3)
