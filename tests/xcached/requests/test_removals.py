"""Removing and clearing say how much went, and take the marks along."""

from __future__ import annotations

from support.conversation import key_of
from support.places import get_message

from xcache.wire import commands, protocol


def test_remove_and_clear_say_what_went(talk):
    for name in "abcd":
        talk.put(key_of(name), name.encode() * 100, b"program of " + name.encode())
    assert talk.ask(commands.Remove([key_of("a"), key_of("none"), "no key", key_of("a")])) == commands.Removed(1, 112)
    assert talk.ask(commands.Remove([])) == commands.Removed(0, 0)
    assert talk.ask(commands.Clear()) == commands.Removed(3, 336)
    assert talk.ask(commands.Clear()) == commands.Removed(0, 0)
    assert (talk.status()["entries"], talk.status()["bytes"]) == (0, 0)


def test_a_removed_mark_is_asked_for_anew(talk):
    """Removing a key also removes its mark."""
    talk.ask(protocol.MarkNotCacheable(key_of("a"), "jit_f", "a pointer"))
    talk.ask(commands.Remove([key_of("a")]))
    assert talk.ask(get_message(key_of("a"))).lease == 0
