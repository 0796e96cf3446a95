"""Content files: whole and under their own digest, or not there at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from support.conversation import open_file
from support.places import digest

from xcache.errors import RefusedError
from xcached.store import blobs
from xcached.store.blobs import BlobFiles

CONTENT = b"content " * 5000


@pytest.fixture
def files(tmp_path):
    return BlobFiles(tmp_path / "blobs")


def shortage(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "blobs").rglob("*") if path.is_file())


def read(files: BlobFiles, name: str) -> bytes:
    with open(files.open(name).descriptor, "rb") as file:
        return file.read()


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1])
def test_a_blob_is_read_as_it_was_written(files, tmp_path, size):
    content = (CONTENT * 30)[:size]
    with open_file(content) as source:
        # Wherever the descriptor stands: it is another process's file position, too.
        os.lseek(source, size // 2, os.SEEK_SET)
        files.write(source, size, digest(content))
    assert read(files, digest(content)) == content
    assert shortage(tmp_path) == [name for folder in files.by_folder() for name in folder] == [digest(content)]
    assert stat.S_IMODE(files.path(digest(content)).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "blobs" / "unfinished").stat().st_mode) == 0o700


def test_a_descriptor_with_more_than_was_announced_is_read_no_further(files):
    with open_file(CONTENT) as source:
        files.write(source, 100, digest(CONTENT[:100]))
    assert read(files, digest(CONTENT[:100])) == CONTENT[:100]


@pytest.mark.parametrize(
    ("size", "name", "kind"),
    [
        (len(CONTENT), digest(b"other"), "wrong digest"),
        (len(CONTENT) - 1, digest(CONTENT), "wrong digest"),
        (len(CONTENT) + 1, digest(CONTENT), "wrong size"),
        (2**50, digest(CONTENT), "wrong size"),
        (0, digest(CONTENT), "wrong digest"),
    ],
)
def test_a_blob_other_than_announced_is_refused_and_leaves_nothing(files, tmp_path, size, name, kind):
    with open_file(CONTENT) as source, pytest.raises(RefusedError) as caught:
        files.write(source, size, name)
    assert caught.value.kind == kind
    assert shortage(tmp_path) == []


def test_a_descriptor_that_cannot_be_read_from_is_refused(files, tmp_path):
    reading, writing = os.pipe()
    for source in (reading, writing):
        with pytest.raises(RefusedError):
            files.write(source, 10, digest(b"x"))
        os.close(source)
    # It has no end: reading it would fill the disk.
    with open("/dev/zero", "rb") as endless, pytest.raises(RefusedError):
        files.write(endless.fileno(), 2**50, digest(b"x"))
    folder = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(RefusedError):
        files.write(folder, 10, digest(b"x"))
    os.close(folder)
    assert shortage(tmp_path) == []


def test_a_failed_write_leaves_what_was_there(files):
    with open_file(CONTENT) as source:
        files.write(source, len(CONTENT), digest(CONTENT))
    with open_file(b"x") as source, pytest.raises(RefusedError):
        files.write(source, len(CONTENT), digest(CONTENT))
    assert read(files, digest(CONTENT)) == CONTENT


def test_a_damaged_file_is_replaced(files):
    with open_file(CONTENT) as source:
        files.write(source, len(CONTENT), digest(CONTENT))
        files.path(digest(CONTENT)).write_bytes(b"damaged")
        with open(files.open(digest(CONTENT)).descriptor, "rb") as reader:
            files.write(source, len(CONTENT), digest(CONTENT))
            # A reader of the old file goes on reading it.
            assert reader.read() == b"damaged"
    assert read(files, digest(CONTENT)) == CONTENT


def test_a_link_is_not_written_through(files, tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "blobs" / "unfinished" / f"{digest(CONTENT)}-0").symlink_to(victim)
    with open_file(CONTENT) as source, pytest.raises(RefusedError):
        files.write(source, len(CONTENT), digest(CONTENT))
    assert victim.read_bytes() == b"precious"


def test_everything_is_on_disk_before_it_is_spoken_of(files, tmp_path, monkeypatch):
    """The daemon syncs the content, its name in the folder, and the name of a new folder."""
    steps = []
    fsync, rename = os.fsync, Path.rename

    def recording_fsync(descriptor: int) -> None:
        steps.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    def recording_rename(path: Path, target: Path) -> Path:
        steps.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(Path, "rename", recording_rename)
    with open_file(CONTENT) as source:
        files.write(source, len(CONTENT), digest(CONTENT))
    root, folder = tmp_path / "blobs", tmp_path / "blobs" / digest(CONTENT)[:2]
    at = steps.index("rename")
    assert str(root / "unfinished" / f"{digest(CONTENT)}-0") in steps[:at]
    assert str(folder) in steps[at:]
    assert str(root) in steps


def test_a_file_that_is_gone_is_none_and_one_that_cannot_be_opened_is_not_gone(files, monkeypatch):
    """The store drops an entry whose file is gone. A lack of descriptors or of rights is no reason to drop one."""
    with open_file(CONTENT) as source:
        files.write(source, len(CONTENT), digest(CONTENT))

    def refuse(*_):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(blobs.os, "open", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            files.open(digest(CONTENT))
    files.delete(digest(CONTENT))
    files.delete(digest(CONTENT))
    assert files.open(digest(CONTENT)) is None


def test_unfinished_files_of_a_killed_daemon_are_cleared(files, tmp_path):
    with open_file(CONTENT) as source:
        files.write(source, len(CONTENT), digest(CONTENT))
    unfinished = tmp_path / "blobs" / "unfinished"
    for name in ("a", "b", digest(b"half")):
        (unfinished / name).write_bytes(b"half")
    assert files.clear_unfinished() == 3
    assert list(unfinished.iterdir()) == []
    assert [name for folder in files.by_folder() for name in folder] == [digest(CONTENT)]


def test_foreign_files_are_not_in_the_way(files, tmp_path):
    with open_file(CONTENT) as source:
        files.write(source, len(CONTENT), digest(CONTENT))
    root = tmp_path / "blobs"
    (root / ".DS_Store").write_bytes(b"")
    (root / digest(CONTENT)[:2] / "notes.txt").write_bytes(b"")
    assert [name for folder in files.by_folder() for name in folder] == [digest(CONTENT)]
