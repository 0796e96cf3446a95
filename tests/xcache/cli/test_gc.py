"""``xcache gc``."""

from __future__ import annotations

from support.command_line import names


def test_gc_says_what_went_and_why(shell):
    assert shell.json("gc") == {"entries": 0, "bytes": 0, "files": 0, "reasons": {}, "given_back": 0}
    for number in range(6):
        shell.put(f"jit_{number}", raw=bytes([number]) * 100 + b"x" * 200_000, program=b"program" * 10)
        shell.put(f"jit_small_{number}", raw=bytes([number]) * 3000)
    shell.change("UPDATE entries SET last_used_at = last_used_at - 1e6 WHERE used_order <= 8")
    leftover = shell.directory / "blobs" / "ee" / ("e" * 64)
    leftover.parent.mkdir(exist_ok=True)
    leftover.write_bytes(b"nobody speaks of it")
    shell.say("stop")
    shell.env["XCACHE_MAX_AGE"] = "1d"
    shell.say("start")
    for number in range(5):
        shell.put(f"jit_late_{number}", raw=bytes([number]) * 3000)
        shell.change("UPDATE entries SET last_used_at = last_used_at - 1e6")
        freed = shell.json("gc")
        # The daemon may have looked at just that moment.
        if freed["entries"]:
            break
    assert set(freed["reasons"]) == {"age"}
    assert freed["entries"] == sum(freed["reasons"].values()) > 0
    assert freed["bytes"] > 0
    assert names(shell.json("ls")) == []
    assert "evicted 0 entries, 0 B\n" in shell.say("gc")


def test_gc_deletes_files_that_nothing_refers_to_and_shrinks_the_database(shell):
    for number in range(40):
        shell.put(f"jit_{number}", raw=bytes([number]) + b"x" * 20)
    leftover = shell.directory / "blobs" / "ee" / ("e" * 64)
    leftover.parent.mkdir(exist_ok=True)
    leftover.write_bytes(b"nobody speaks of it")
    (shell.directory / "blobs" / "unfinished" / "half").write_bytes(b"half")
    freed = shell.json("gc")
    assert freed["files"] == 2
    assert not leftover.exists()
    assert len(names(shell.json("ls"))) == 40
