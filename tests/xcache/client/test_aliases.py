"""The client asks for aliases, has them kept and dropped, and believes none of which a bit has changed."""

from __future__ import annotations

import time

import pytest
from support.peers import Talk, answering, fake_daemon
from support.places import digest, put_message

from xcache.client.client import Client
from xcache.errors import DamagedAliasError, NobodyThereError, NotAskedError, ProtocolError, RefusedError
from xcache.prefetch import history
from xcache.prefetch.history import History
from xcache.wire import protocol
from xcache.wire.seals import sealed

PROGRAM = digest(b"raw p")
S, T = (sealed(digest(name), PROGRAM, b"facts of " + name) for name in (b"s", b"t"))
KEY = digest(b"a")


@pytest.fixture
def client(place):
    place.start_daemon()
    made = Client(place.config(timeout=20), "test")
    assert made.put(put_message(KEY, b"a", b"p", payload=None, program=None), b"a", b"p")
    yield made
    made.close()


@pytest.fixture
def alone(place):
    """Without a daemon, unless the test makes one."""
    made = Client(place.config(timeout=5), "test")
    yield made
    made.close()


def test_an_alias_is_found_until_it_is_dropped(client):
    assert client.alias(S.structure) is None
    client.remember_aliases([S, T])
    assert client.alias(S.structure) == S
    client.drop_alias(S.structure, digest(b"no entry"))
    assert client.alias(S.structure) is None
    assert client.alias(T.structure) == T


def test_any_number_of_aliases_is_sent_in_parts(client, place):
    client.remember_aliases([])
    many = [sealed(digest(b"%d" % n), PROGRAM, b"f" * protocol.MAX_FACTS) for n in range(2 * protocol.MAX_ALIASES + 1)]
    client.remember_aliases(many)
    assert place.query("SELECT structure FROM aliases ORDER BY rowid") == [(one.structure,) for one in many[-16:]]
    # Records of calls are larger, and many functions may have one program.
    records = [sealed(digest(b"r%d" % n), PROGRAM, b"f" * protocol.MAX_RECORD) for n in range(20)]
    client.remember_aliases(records)
    assert place.query("SELECT structure FROM aliases ORDER BY rowid") == [
        (one.structure,) for one in (*many[-16:], *records)
    ]


def test_facts_that_are_too_long_are_refused(client):
    with pytest.raises(RefusedError):
        client.remember_aliases([sealed(S.structure, PROGRAM, b"f" * (protocol.MAX_RECORD + 1))])


def predict(client: Client, monkeypatch: pytest.MonkeyPatch) -> History:
    monkeypatch.setattr(history, "_name", lambda: ("train.py", ""))
    item = {"key": KEY, "options": digest(b"o"), "devices": "0", "platform": "cpu", "seconds": 0.1}
    client.remember(protocol.Remember("train.py", "", [item], {digest(b"o"): b"o"}))
    made = History(client)
    assert [one.key for one in made.predict()] == [KEY]
    return made


@pytest.mark.parametrize("column", ["facts", "seal", "structure", "program"])
def test_a_changed_alias_is_damaged_and_costs_nothing_else(client, place, monkeypatch, column):
    other = digest(b"raw other")
    client.put(put_message(digest(b"b"), b"b", b"other", payload=None, program=None), b"b", b"other")
    client.remember_aliases([S, T])
    changed, asked = {
        "facts": ((b"Facts of s", S.structure), S.structure),
        "seal": (("0" * 64, S.structure), S.structure),
        "structure": ((digest(b"u"), S.structure), digest(b"u")),
        "program": ((other, S.structure), S.structure),
    }[column]
    place.execute(f"UPDATE aliases SET {column} = ? WHERE structure = ?", *changed)  # noqa: S608 - names of our own
    with pytest.raises(DamagedAliasError) as damaged:
        client.alias(asked)
    assert damaged.value.kind == "damaged alias"
    assert client.alias(T.structure) == T
    assert predict(client, monkeypatch).aliases == {T.structure: T}
    # Written again, it is as before.
    client.remember_aliases([S])
    assert client.alias(S.structure) == S


def test_a_prediction_brings_aliases(client, monkeypatch):
    client.remember_aliases([S, T])
    assert predict(client, monkeypatch).aliases == {S.structure: S, T.structure: T}


def test_an_alias_of_another_structure_is_damaged(place, alone):
    with fake_daemon(place.socket, answering(S)), pytest.raises(DamagedAliasError):
        alone.alias(T.structure)


def test_another_answer_breaks_the_protocol(place, alone):
    with fake_daemon(place.socket, answering(protocol.Done())), pytest.raises(ProtocolError, match="instead of Alias"):
        alone.alias(S.structure)


def test_the_wait_is_charged_to_the_allowance(place, alone, monkeypatch):
    ahead = 0.0
    for module in ("xcache.client.breaker.monotonic", "xcache.client.client.own_time"):
        monkeypatch.setattr(module, lambda: time.monotonic() + ahead)

    def behave(talk: Talk) -> None:
        nonlocal ahead
        talk.welcome()
        while True:
            talk.read()
            ahead += 1.0
            talk.say(S)

    with fake_daemon(place.socket, behave):
        assert alone.alias(S.structure) == S
    assert 1.0 <= alone.lost_seconds < 2.0


def test_a_daemon_that_failed_is_not_asked(alone):
    with pytest.raises(NobodyThereError):
        alone.alias(S.structure)
    with pytest.raises(NotAskedError):
        alone.alias(S.structure)
