"""Bundles: what was written is read in place; what is damaged is refused as a whole."""

from __future__ import annotations

import contextlib
import io
import os
import random

import pytest

from xcache.errors import DamagedError
from xcache.wire import bundles

OBJECTS = {"v1/all/entries/aa/a": b"one" * 1000, "v1/all/entries/bb/b": b"", "v1/all/runs/cc/c": b"three"}


def written(objects: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    writer = bundles.BundleWriter(file)
    for name, content in sorted(objects.items()):
        writer.add(name, content)
    writer.finish()
    return file.getvalue()


@pytest.fixture
def read(tmp_path):
    """A function that opens a bundle of these bytes."""
    with contextlib.ExitStack() as stack:

        def read(content: bytes) -> bundles.Bundle:
            (tmp_path / "b").write_bytes(content)
            bundle = bundles.Bundle(tmp_path / "b")
            stack.callback(bundle.close)
            return bundle

        yield read


def test_what_was_written_is_read(read):
    bundle = read(written(OBJECTS))
    assert {name: bundle.get(name) for name in OBJECTS} == OBJECTS
    assert (bundle.get("nothing"), bundle.size("nothing")) == (None, None)
    assert dict(bundle.names("v1/all/entries/")) == {"v1/all/entries/aa/a": 3000, "v1/all/entries/bb/b": 0}


def test_the_same_objects_make_the_same_bytes():
    backwards = dict(reversed(OBJECTS.items()))
    assert written(backwards) == written(OBJECTS)


@pytest.mark.parametrize("content", [b"", b"xcbundle", b"something else entirely"], ids=["nothing", "begun", "other"])
def test_what_is_no_bundle_is_refused(read, content):
    with pytest.raises(DamagedError, match="no bundle"):
        read(content)


def test_a_bundle_of_another_length_is_refused(read):
    whole = written(OBJECTS)
    for length in range(len(whole)):
        with pytest.raises(DamagedError):
            read(whole[:length])
    with pytest.raises(DamagedError):
        read(whole + b"x")


def test_a_bundle_that_was_not_written_to_its_end_is_refused(read):
    file = io.BytesIO()
    bundles.BundleWriter(file).add("v1/all/entries/aa/a", b"one")
    with pytest.raises(DamagedError):
        read(file.getvalue())


def test_objects_are_added_in_the_order_of_their_names():
    writer = bundles.BundleWriter(io.BytesIO())
    writer.add("b", b"")
    for name in ("a", "b"):
        with pytest.raises(ValueError, match="comes after"):
            writer.add(name, b"")


def test_no_byte_of_the_frame_leads_astray(read):
    whole, choose = written(OBJECTS), random.Random("bundles")
    begin = whole.index(b"one")
    end = begin + sum(map(len, OBJECTS.values()))
    for at in (*range(begin), *range(end, len(whole))):
        spoiled = bytearray(whole)
        spoiled[at] ^= 1 << choose.randrange(8)
        try:
            bundle = read(bytes(spoiled))
        except DamagedError:
            continue
        # An object is signed; only its place could be another.
        assert all(len(bundle.get(name)) == size for name, size in bundle.names())


def test_a_file_that_is_cut_while_it_is_read_is_damaged_and_kills_nobody(read, tmp_path):
    bundle = read(written(OBJECTS))
    assert bundle.is_still_there()
    os.truncate(tmp_path / "b", 100)
    assert not bundle.is_still_there()
    with pytest.raises(DamagedError, match="shorter"):
        bundle.get("v1/all/entries/aa/a")


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises((DamagedError, OSError)):
            bundles.Bundle(path)
