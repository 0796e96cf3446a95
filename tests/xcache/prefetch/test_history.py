"""A prediction brings stored entries with it, and one bad item spoils no other."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from support.peers import Talk, fake_daemon
from support.places import digest, put_message

from xcache.client.client import Client
from xcache.prefetch.history import History
from xcache.wire import protocol

LARGE, SMALL, OTHER = b"l" * (protocol.INLINE_LIMIT + 1), b"small", b"o" * (protocol.INLINE_LIMIT + 2)
CONTENTS = {digest(content): content for content in (LARGE, SMALL, OTHER)}
ASKED = protocol.Predict("train.py", "")


def wanted(key: str) -> dict[str, protocol.Scalar]:
    return {"key": key, "options": digest(b"o"), "devices": "0", "platform": "cpu", "seconds": 0.1}


@pytest.fixture
def client(place):
    place.start_daemon()
    made = Client(place.config(timeout=20), "test")
    for key, content in CONTENTS.items():
        made.put(put_message(key, content, b"p", payload=None, program=None), content, b"p")
    items = [wanted(key) for key in (*CONTENTS, digest(b"nowhere"))]
    made.remember(protocol.Remember("train.py", "", items, {digest(b"o"): b"o"}))
    yield made
    made.close()


def test_the_first_entries_come_along_whatever_their_size(client):
    before = len(list(Path("/proc/self/fd").iterdir()))
    found, entries = client.predict(ASKED)
    assert [item["key"] for item in found.items] == list(CONTENTS)
    assert {key: entry.sealed for key, entry in entries.items()} == CONTENTS
    assert {(entry.digest, entry.compile_seconds) for entry in entries.values()} == {(key, 1.0) for key in CONTENTS}
    # Also while the entries are held.
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_file_that_is_not_what_it_was_is_left_out(client, place):
    path = next((place.dir / "blobs").rglob(digest(LARGE)))
    os.truncate(path, 5)
    _, entries = client.predict(ASKED)
    assert {key: entry.sealed for key, entry in entries.items()} == {digest(c): c for c in (SMALL, OTHER)}


@pytest.mark.parametrize("files", [[], [b"another"]], ids=["no descriptor", "of another key"])
def test_an_announced_entry_that_does_not_come_is_done_without(place, files):
    """The kernel hands over no more descriptors than a program may have, so some may not come."""
    told = {"digest": "d", "compile_seconds": 1.0, "stored_size": 5, "made_with": 0}
    items = [wanted(digest(name)) | told for name in (b"a", b"b")]
    keys = [digest(name) for name in files or [b"b"]]
    prediction = protocol.Prediction(items, {digest(b"o"): b"o"}, {digest(b"a"): b"small"}, keys, ["f p t"], [], None)

    def behave(talk: Talk) -> None:
        talk.welcome()
        while True:
            talk.read()
            talk.say(prediction, (file.fileno(),) * len(files))

    # Open throughout: the daemon is a thread of this process, whose descriptors are counted.
    with open(os.devnull, "rb") as file, fake_daemon(place.socket, behave):
        client = Client(place.config(timeout=5.0), "test")
        found, entries = client.predict(ASKED)
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(5):
            client.predict(ASKED)
        assert len(list(Path("/proc/self/fd").iterdir())) == before
        client.close()
    assert len(found.items) == 2
    assert {key: entry.sealed for key, entry in entries.items()} == {digest(b"a"): b"small"}


def test_a_structure_without_an_alias_is_not_asked_for():
    history = History(None)
    assert history.may_have_alias(digest(b"a"))
    known = protocol.beginning(digest(b"a"))
    told = protocol.Prediction([], {}, {}, [], [], [], known)
    history = History(Answering(told))
    history.predict()
    assert history.may_have_alias(digest(b"a"))
    assert not history.may_have_alias(digest(b"b"))
    history = History(Answering(told._replace(structures=None)))
    history.predict()
    assert history.may_have_alias(digest(b"b"))


class Answering:
    """Answers as a daemon does that gives this prediction."""

    def __init__(self, prediction):
        self._prediction = prediction

    def predict(self, _):
        return self._prediction, {}


def test_a_program_waits_for_a_prediction_that_is_on_its_way_and_no_longer_than_it_wants(client):
    history = History(client)
    history.wait(60)
    assert client.lost_seconds == 0
    history._is_asked = True
    history.wait(0.01)
    assert history._is_asked
    assert client.lost_seconds >= 0.01
    comes = threading.Timer(0.01, lambda: setattr(history, "_is_asked", False))
    comes.start()
    history.wait(4)
    assert not history._is_asked
    comes.join(60)
