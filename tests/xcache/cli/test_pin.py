"""``xcache pin`` and ``unpin``, and how other commands show pins."""

from __future__ import annotations

from support.command_line import names


def test_a_pinned_entry_is_shown_and_stays(shell):
    shell.env["XCACHE_MAX_ENTRIES"] = "2"
    first, second = shell.put("jit_first"), shell.put("jit_second")
    assert "pinned" not in shell.say("ls")
    assert "pinned 1 entry; 1 entry with" in shell.say("pin", first[:10])
    shell.put("jit_third")
    listed = shell.json("ls", "--sort", "name")
    assert [(entry["module_name"], entry["pinned"]) for entry in listed["entries"]] == [
        ("jit_first", True),
        ("jit_third", False),
    ]
    assert "pinned" in shell.say("ls")
    assert shell.json("show", first)["pinned"] is True
    assert "stays whatever the limits say" in shell.say("show", first)
    assert "no entry begins with" in shell.say("pin", second, code=1)


def test_an_unpinned_entry_goes_as_all_others_do(shell):
    shell.env["XCACHE_MAX_ENTRIES"] = "1"
    key = shell.put("jit_first")
    assert shell.json("pin", key, key[:8]) == {
        "entries": 1, "already": 0, "all_entries": 1, "all_bytes": shell.json("show", key)["footprint"], "keys": [key]
    }  # fmt: skip
    assert "pinned 0 entries (1 already was pinned); 1 entry with" in shell.say("pin", key)
    nothing_pinned = {"all_entries": 0, "all_bytes": 0, "keys": [key]}
    assert shell.json("unpin", key[:12]) == nothing_pinned | {"entries": 1, "already": 0}
    assert shell.json("unpin", key[:12]) == nothing_pinned | {"entries": 0, "already": 1}
    assert "unpinned 0 entries (1 was not pinned); no entry is pinned" in shell.say("unpin", key)
    shell.put("jit_second")
    assert names(shell.json("ls")) == ["jit_second"]


def test_a_store_of_the_last_version_can_be_listed(shell):
    """Before a daemon has opened it, nothing is known of pins."""
    key = shell.put("jit_f")
    shell.say("stop")
    for sql in (
        "DROP INDEX entries_by_worth",
        "DROP INDEX entries_by_writer_uid",
        "DROP INDEX entries_by_used_order",
        "DROP INDEX entries_pinned",
        "DROP INDEX entries_by_toolchain",
        "ALTER TABLE entries DROP COLUMN pinned",
        "PRAGMA user_version = 2",
    ):
        shell.change(sql)
    assert shell.json("ls")["entries"][0]["pinned"] is False
    assert shell.json("show", key)["pinned"] is False
