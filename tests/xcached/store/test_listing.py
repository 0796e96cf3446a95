"""Users of a machine's daemon can list their own entries, some at a time."""

from __future__ import annotations

from support.conversation import key_of
from support.stores import WRITER, shelf

from xcache.wire import commands, framing, protocol
from xcached.store.listing import entries_by


def test_users_are_told_of_their_own_entries_page_by_page(tmp_path, monkeypatch):
    monkeypatch.setattr(protocol, "MAX_LISTED", 2)
    with shelf(tmp_path) as made:
        keys = sorted(key_of(str(number)) for number in range(5))
        for uid in (1, 2):
            for key in keys[uid - 1 :]:
                made.put(key, b"content", b"program", uid=uid)

        def listed(uid: int, prefix: str = "", after: str = "") -> list[str]:
            asked = commands.AskEntries(prefix, after, uid)
            return [entry["key"] for entry in made.call(lambda store: entries_by(store, uid, asked)).entries]

        assert listed(1) == keys[:2]
        assert listed(2) == keys[1:3]
        assert listed(2, after=keys[2]) == keys[3:]
        assert listed(2, after=keys[4]) == listed(3) == []
        assert listed(1, prefix=keys[3][:8]) == [keys[3]]


def test_the_longest_names_fit_into_a_message(tmp_path):
    with shelf(tmp_path) as made:
        long = "\N{GRINNING FACE}" * 500
        for number in range(protocol.MAX_LISTED):
            made.put(key_of(str(number)), b"content", b"program", module_name=long, platform=long, device_kind=long)
        answer = made.call(lambda store: entries_by(store, WRITER.uid, commands.AskEntries("", "", 0)))
        assert len(answer.entries) == protocol.MAX_LISTED
        framing.encode(1, answer)
