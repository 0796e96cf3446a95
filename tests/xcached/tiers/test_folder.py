"""Only folders do this."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from xcached.tiers import folder as folders
from xcached.tiers import tier as tiers
from xcached.tiers.engines import open_tier
from xcached.tiers.tier import Tier, TierError

Run = Callable[[Any], Any]
MOST = 2**20


def using(folder: Path, use: Callable[[Tier], Any], timeout: float = 5.0) -> Any:
    async def main() -> Any:
        tier = open_tier(folder.as_uri(), timeout)
        try:
            return await use(tier)
        finally:
            await tier.close()

    return main()


async def kind_of(attempt: Any) -> str:
    with pytest.raises(TierError) as caught:
        await attempt
    return str(caught.value.kind)


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o2775])
def test_files_have_the_permissions_of_the_folder(tmp_path: Path, run: Run, mode: int) -> None:
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(mode)
    before = os.umask(0o077)
    try:
        run(using(root, lambda tier: tier.put("a/b/c", b"")))
    finally:
        os.umask(before)
    assert (root / "a" / "b").stat().st_mode & 0o7777 == mode
    assert (root / "a" / "b" / "c").stat().st_mode & 0o7777 == mode & 0o666


def test_other_files_are_no_objects(tmp_path: Path, run: Run) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "d").mkdir()
    (tmp_path / "Other").write_text("x")
    (tmp_path / "link").symlink_to("/etc")

    async def use(tier: Tier) -> None:
        for name in ("pipe", "d", "link"):
            assert await tier.get(name, MOST) is None
            assert not await tier.contains(name)
        await tier.put("a", b"")
        assert [each.name async for each in tier.listed("")] == ["a"]

    run(using(tmp_path, use))


def test_leftovers_are_not_listed_and_go_after_a_day(tmp_path: Path, run: Run) -> None:
    old, new = tmp_path / "d" / "#0", tmp_path / "d" / "#1"
    old.parent.mkdir()
    old.write_text("x")
    new.write_text("x")
    os.utime(old, (0, time.time() - 2 * 86400))

    async def use(tier: Tier) -> None:
        await tier.put("d/a", b"")
        assert [each.name async for each in tier.listed("")] == ["d/a"]

    run(using(tmp_path, use))
    assert not old.exists()
    assert new.exists()


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, tiers.FULL),
        (errno.EDQUOT, tiers.FULL),
        (errno.EROFS, tiers.READ_ONLY),
        (errno.ESTALE, tiers.UNREACHABLE),
        (errno.ETIMEDOUT, tiers.UNREACHABLE),
        (errno.EMFILE, tiers.FAILED),
    ],
)
def test_what_a_file_system_says(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, number: int, kind: str
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(folders, "_opened_new", fail)
    assert run(using(tmp_path, lambda tier: kind_of(tier.put("a", b"")))) == kind


def test_a_mount_that_hangs(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []
    until = time.monotonic() + 1.5

    def hang(*_: object) -> int:
        begun.append(1)
        time.sleep(max(0.0, until - time.monotonic()))
        raise OSError(errno.EIO, "")

    monkeypatch.setattr(folders, "_opened_new", hang)

    async def use(tier: Tier) -> None:
        start = time.monotonic()
        tries = [kind_of(tier.put("a", b"")) for _ in range(100)]
        assert set(await asyncio.gather(*tries)) == {tiers.UNREACHABLE}
        assert time.monotonic() - start < 1.2
        # Its threads hang, and no others begin.
        assert len(begun) == 16
        await asyncio.sleep(max(0.0, until - time.monotonic()) + 0.2)
        monkeypatch.undo()
        await tier.put("a", b"x")

    run(using(tmp_path, use, 0.3))


def test_a_failed_write_leaves_nothing(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "")

    monkeypatch.setattr(os, "link", fail)
    assert run(using(tmp_path, lambda tier: kind_of(tier.create("a", b"x")))) == tiers.FAILED
    assert list(tmp_path.iterdir()) == []
