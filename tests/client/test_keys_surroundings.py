"""Toolchain and platform: another compiler or another kind of device is another key."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import jaxlib
import pytest

from xcache import keys
from xcache.errors import UncacheableError
from xcache.keys import platform, toolchain

Client = namedtuple("Client", "platform platform_version")
Device = namedtuple("Device", "device_kind process_index id")


@pytest.fixture
def jaxlib_folder(tmp_path):
    """A jaxlib as far as its native libraries go, last changed long ago."""
    folder = tmp_path / "site-packages" / "jaxlib"
    folder.mkdir(parents=True)
    for name in ("libjax_common.so", "_jax.so"):
        (folder / name).write_bytes(name.encode() * 1000)
        os.utime(folder / name, (1e9, 1e9))
    return folder


def describe(folder: Path, memo: Path | None = None, version: str = "1.0") -> bytes:
    return toolchain.describe("cpu", folder, version, memo).content


def test_other_bytes_of_the_same_version_count(jaxlib_folder, tmp_path):
    before = describe(jaxlib_folder, tmp_path)
    library = jaxlib_folder / "libjax_common.so"
    content = bytearray(library.read_bytes())
    content[500] ^= 1
    library.write_bytes(content)
    os.utime(library, (1e9, 1e9))
    assert describe(jaxlib_folder, tmp_path) != before


def test_the_version_counts_and_the_place_does_not(jaxlib_folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(jaxlib_folder, elsewhere)
    assert describe(elsewhere) == describe(jaxlib_folder)
    assert describe(jaxlib_folder, version="1.1") != describe(jaxlib_folder)


def test_digests_are_remembered_for_files_that_have_settled(jaxlib_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: (jaxlib_folder / "_jax.so").stat().st_ctime + 60)
    first = describe(jaxlib_folder, tmp_path / "memo")
    known = json.loads((tmp_path / "memo" / toolchain.MEMO).read_text())
    assert set(known) == {str(path) for path in jaxlib_folder.iterdir()}

    def never(*_):
        raise AssertionError("hashed again")

    monkeypatch.setattr(toolchain.hashlib, "file_digest", never)
    assert describe(jaxlib_folder, tmp_path / "memo") == first


def test_a_file_that_has_just_changed_is_not_remembered(jaxlib_folder, tmp_path):
    describe(jaxlib_folder, tmp_path / "memo")
    assert not (tmp_path / "memo" / toolchain.MEMO).exists()


@pytest.mark.parametrize("content", [b"", b"[1, 2", b"[]", b'{"x": 3}', b"\xff\xfe"])
def test_a_damaged_memo_is_as_good_as_none(jaxlib_folder, tmp_path, content):
    memo = tmp_path / toolchain.MEMO
    memo.write_bytes(content)
    memo.chmod(0o600)
    assert describe(jaxlib_folder, tmp_path) == describe(jaxlib_folder)


def test_a_memo_that_others_can_write_is_not_believed(jaxlib_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: (jaxlib_folder / "_jax.so").stat().st_ctime + 60)
    true = describe(jaxlib_folder, tmp_path)
    memo = tmp_path / toolchain.MEMO
    memo.write_text(json.dumps({path: [*mark[:-1], "0" * 64] for path, mark in json.loads(memo.read_text()).items()}))
    memo.chmod(0o600)
    assert describe(jaxlib_folder, tmp_path) != true
    memo.chmod(0o666)
    assert describe(jaxlib_folder, tmp_path) == true


def test_a_memo_that_cannot_be_written_is_no_trouble(jaxlib_folder, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: (jaxlib_folder / "_jax.so").stat().st_ctime + 60)
    assert describe(jaxlib_folder, Path("/proc/nowhere")) == describe(jaxlib_folder)


def test_a_memo_that_cannot_be_written_leaves_nothing_behind(jaxlib_folder, tmp_path, monkeypatch):
    """On a full disk every process would leave a file."""
    monkeypatch.setattr(time, "time", lambda: (jaxlib_folder / "_jax.so").stat().st_ctime + 60)
    memo = tmp_path / "memo"
    (memo / toolchain.MEMO).mkdir(parents=True)
    describe(jaxlib_folder, memo)
    assert [path.name for path in memo.iterdir()] == [toolchain.MEMO]


def test_without_a_native_library_nothing_is_cached(tmp_path):
    with pytest.raises(UncacheableError):
        describe(tmp_path)


def test_a_platform_whose_library_is_not_known_is_not_cached():
    with pytest.raises(UncacheableError, match="strange"):
        toolchain.describe("strange", Path(jaxlib.__file__).parent, "1.0", None)


_REPLACED = """
import shutil, sys
from pathlib import Path
import jaxlib
from jaxlib import xla_client
from xcache.errors import UncacheableError
from xcache.keys import toolchain
folder = Path(jaxlib.__file__).parent
mapped = toolchain._mapped_files()
library = next(path for path in mapped if path.parent == folder)
before = toolchain.describe("cpu", folder, "1.0", None)
# What pip does: the old file goes, a new one takes its name; this process still has the old one mapped.
library.rename(str(library) + ".old")
shutil.copyfile(str(library) + ".old", library)
try:
    toolchain.describe("cpu", folder, "1.0", None)
except UncacheableError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_library_that_was_replaced_under_the_program_is_not_taken_for_the_one_it_runs(tmp_path):
    """The bytes on disk would say what the next process runs, and not this one."""
    site = Path(jaxlib.__file__).parent.parent
    copy = tmp_path / "site"
    shutil.copytree(site / "jaxlib", copy / "jaxlib")
    result = subprocess.run(
        [sys.executable, "-c", _REPLACED],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(copy), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "replaced" in result.stdout, result.stderr


CPU = Client("cpu", "cpu")


def devices(*kinds: str, process: int = 0) -> tuple[Device, ...]:
    return tuple(Device(kind, process, number) for number, kind in enumerate(kinds))


@pytest.fixture
def host(monkeypatch):
    def be(features: str) -> None:
        monkeypatch.setattr(platform, "_host_cpu", lambda: features)

    be("avx2")
    return be


def test_the_processor_counts_where_it_is_the_device(host):
    before = platform.describe(CPU, devices("cpu"))
    host("avx512")
    assert platform.describe(CPU, devices("cpu")) != before


def test_the_number_of_processors_counts_where_loops_are_cut_by_it(host, monkeypatch):
    before = platform.describe(CPU, devices("cpu"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(77)))
    other = platform.describe(CPU, devices("cpu"))
    monkeypatch.setenv("PJRT_NPROC", "5")
    assert len({before, other, platform.describe(CPU, devices("cpu"))}) == 3


def test_kinds_versions_and_how_many_devices_count(host, monkeypatch):
    monkeypatch.setattr(platform, "_fingerprint", lambda devices: f"{len(devices)} of them")
    descriptions = [
        platform.describe(Client("tpu", "1"), devices("v5e")),
        platform.describe(Client("tpu", "2"), devices("v5e")),
        platform.describe(Client("tpu", "1"), devices("v6e")),
        platform.describe(Client("tpu", "1"), devices("v5e", "v5e")),
        platform.describe(Client("tpu", "1"), (*devices("v5e"), *devices("v5e", process=1))),
        platform.describe(Client("gpu", "1"), devices("v5e")),
        platform.describe(CPU, devices("cpu")),
    ]
    assert len(set(descriptions)) == len(descriptions)


def test_a_key_needs_all_its_components_and_differs_with_each():
    parts = {name: keys.Component(name, name.encode()) for name in keys.COMPONENTS}
    whole = keys.combine(parts)
    others = [keys.combine(parts | {name: keys.Component(name, b"other")}).digest for name in keys.COMPONENTS]
    assert len({whole.digest, *others}) == 1 + len(parts)
    swapped = parts | {"program": parts["options"], "options": parts["program"]}
    assert keys.combine(swapped).digest != whole.digest
    with pytest.raises(ValueError, match="exactly"):
        keys.combine({name: parts[name] for name in keys.COMPONENTS[:-1]})


def test_no_fact_can_pass_for_two():
    assert keys.lines({"a": "1'\nb='2"}) != keys.lines({"a": "1", "b": "2"})
