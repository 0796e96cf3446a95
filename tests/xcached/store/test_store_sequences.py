"""After any sequence of operations a store holds what a dictionary would, and nothing else."""

from __future__ import annotations

import shutil

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.conversation import key_of
from support.places import digest
from support.stores import Shelf, quick_folder

from xcache.wire import protocol
from xcached.requests.removals import removed

# Some small, some large, and used as executables and as programs alike, so that they are shared in every way.
CONTENTS = {
    "nothing": b"",
    "small": b"small",
    "other": b"other",
    "large": b"x" * (protocol.INLINE_LIMIT + 1),
    "larger": b"y" * (protocol.INLINE_LIMIT + 2),
}
contents = st.sampled_from(sorted(CONTENTS))
names = st.sampled_from("abcd")


def surroundings(flags: str) -> dict[str, dict[str, str]]:
    """Components of a key, of which one differs, and what they were."""
    details = {name: name for name in protocol.DESCRIBED_COMPONENTS} | {"flags": flags}
    components = {name: digest(text.encode()) for name, text in {"program": "program", **details}.items()}
    return {"components": components, "details": details}


class Sequences(RuleBasedStateMachine):
    max_size = 0

    def __init__(self) -> None:
        super().__init__()
        self.directory = quick_folder()
        self.shelf = Shelf(self.directory, self.max_size)
        self.expected: dict[str, bytes] = {}

    def teardown(self) -> None:
        self.shelf.close()
        shutil.rmtree(self.directory)

    @rule(name=names, payload=contents, program=contents, overwrite=st.booleans(), flags=st.sampled_from("xy"))
    def put(self, name: str, payload: str, program: str, overwrite: bool, flags: str) -> None:
        keep = overwrite or name not in self.expected
        answer = self.shelf.put(
            key_of(name), CONTENTS[payload], CONTENTS[program], overwrite=overwrite, **surroundings(flags)
        )
        assert answer == protocol.Stored(keep)
        if keep:
            self.expected[name] = payload

    @rule(puts=st.lists(st.tuples(names, contents, contents), min_size=2, max_size=4))
    def put_some_together(self, puts: list[tuple[str, str, str]]) -> None:
        with self.shelf.busy():
            begun = [
                self.shelf.begin_put(key_of(name), CONTENTS[payload], CONTENTS[program])
                for name, payload, program in puts
            ]
        # The first put of a key to be written is kept; that need not be the first one sent, as large ones take longer.
        kept: dict[str, list[str]] = {name: [] for name, _, _ in puts}
        for (name, payload, _), done in zip(puts, begun, strict=True):
            answer = done.result(20)
            assert isinstance(answer, protocol.Stored)
            if answer.kept:
                kept[name].append(payload)
        for name, payloads in kept.items():
            assert len(payloads) == (name not in self.expected)
            if payloads:
                self.expected[name] = payloads[0]
        self.shelf.sync()

    @rule(name=names, payload=contents, program=contents)
    def put_what_is_refused(self, name: str, payload: str, program: str) -> None:
        if name not in self.expected:
            wrong = key_of("something else")
            answer = self.shelf.put(key_of(name), CONTENTS[payload], CONTENTS[program], digest=wrong)
            assert isinstance(answer, protocol.Refused)

    @rule(chosen=st.lists(names, max_size=3))
    def remove(self, chosen: list[str]) -> None:
        answer = self.shelf.remove(*map(key_of, chosen))
        assert answer.entries == len(self.expected.keys() & set(chosen))
        for name in chosen:
            self.expected.pop(name, None)

    @rule()
    def clear(self) -> None:
        answer = self.shelf.call(lambda store: removed(store, store.entries_of(None)))
        assert answer.entries == len(self.expected)
        self.expected.clear()

    @rule(folder=st.sampled_from(["00", "unfinished"]))
    def restart_after_a_crash(self, folder: str) -> None:
        self.shelf.close()
        (self.directory / "blobs" / folder).mkdir(exist_ok=True)
        (self.directory / "blobs" / folder / ("00" + "e" * 62)).write_bytes(b"left over")
        self.shelf = Shelf(self.directory, self.max_size)
        self.shelf.sync()

    @invariant()
    def it_holds_what_it_should(self) -> None:
        for name in "abcd":
            expected = CONTENTS[self.expected[name]] if name in self.expected else None
            assert self.shelf.get(key_of(name)) == expected, name
        self.shelf.check()


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=20, stateful_step_count=15, deadline=None)
