"""A mixed load from several processes for as long as stdin is open. Run as a script.

Contents follow from their keys, so that each can be checked.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import select
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from support.conversation import Conversation, key_of
from support.places import Place, digest, get_message
from xcache.wire import commands, framing, protocol

_SMALL, _LARGE, _UNCACHEABLE, _TOOLCHAINS = 600, 60, 50, 20
_PROGRAM = b"program"


def content_of(name: str) -> bytes:
    """Return the content stored under a name, small enough for a row or large enough for a file."""
    least, most = (100, 20_000) if name.startswith("small") else (40_000, 300_000)
    return random.Random(name).randbytes(16) * (random.Random(name).randrange(least, most) // 16)


class Loader:
    """One process of the load, with a lasting connection and short ones."""

    def __init__(self, place: Place, number: int, seed: str) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._place = place
        self._choose = random.Random(f"{seed} {number}")
        self._prefix = f"{seed} {number}"
        self._asked_for = 0
        self._talk = self._connected()
        self._ways: dict[Callable[[], None], int] = {
            self._misses: 30,
            self._hits: 30,
            self._read_a_file: 6,
            self._put_small: 10,
            self._put_large: 3,
            self._remove: 3,
            self._take_and_release: 5,
            self._take_and_leave: 3,
            self._wait_and_inherit: 3,
            self._come_and_go: 3,
            self._load: 4,
            self._report: 4,
            self._announce: 1,
            self._complain: 1,
            self._mark: 1,
            self._be_killed: 1,
        }

    def work(self, over: int) -> None:
        """Work until the descriptor ``over`` can be read."""
        ways, weights = list(self._ways), list(self._ways.values())
        while not select.select([over], [], [], 0)[0]:
            for way in self._choose.choices(ways, weights, k=20):
                way()
        self._talk.close()

    def _misses(self) -> None:
        requests = [self._talk.say(get_message(self._fresh())) for _ in range(30)]
        answers = self._talk.answers(requests)
        self._expect(all(answer.lease == 0 for answer in answers.values()), "a miss", answers)
        self.counts["misses"] += len(requests)

    def _hits(self) -> None:
        asked = {}
        for _ in range(15):
            name = self._small()
            asked[self._talk.say(get_message(key_of(name)))] = name
        for request, answer in self._talk.answers(list(asked)).items():
            if isinstance(answer, protocol.Found):
                self._expect(answer.payload == content_of(asked[request]), asked[request], answer.digest)
                self.counts["hits"] += 1
            else:
                self._expect(answer.lease == 0, asked[request], answer)
                self.counts["misses"] += 1

    def _read_a_file(self) -> None:
        name = self._large()
        content = self._talk.get(key_of(name))
        self._expect(content in (None, content_of(name)), name, content and digest(content))
        self.counts["misses" if content is None else "files read"] += 1

    def _put_small(self) -> None:
        requests = []
        for _ in range(5):
            name, overwrite = self._small(), self._choose.random() < 0.5
            requests.append(self._talk.begin_put(key_of(name), content_of(name), _PROGRAM, overwrite=overwrite))
        answers = self._talk.answers(requests)
        self._expect(all(isinstance(a, protocol.Stored) for a in answers.values()), "puts", answers)
        self.counts["puts"] += len(requests)

    def _put_large(self) -> None:
        name = self._large()
        answer = self._talk.put(key_of(name), content_of(name), _PROGRAM, overwrite=self._choose.random() < 0.5)
        self._expect(isinstance(answer, protocol.Stored), name, answer)
        self.counts["puts by descriptor"] += 1

    def _remove(self) -> None:
        keys = [key_of(self._small()) for _ in range(3)] + [key_of(self._large())]
        self._expect(isinstance(self._talk.ask(commands.Remove(keys)), commands.Removed), "a removal", keys)
        self.counts["removes"] += 1

    def _take_and_release(self) -> None:
        for key in [self._fresh() for _ in range(5)]:
            self._talk.say(protocol.Release(key, self._take(self._talk, key)))

    def _take_and_leave(self) -> None:
        talk = self._connected()
        for _ in range(3):
            self._take(talk, self._fresh())
        if self._choose.random() < 0.5:
            # Half a message.
            talk.raw(framing.encode(100, get_message(self._fresh()))[:20])
        talk.close()

    def _wait_and_inherit(self) -> None:
        """Wait for a holder that leaves, and get its lease."""
        key, other = self._fresh(), self._connected()
        self._take(other, key)
        request = self._talk.say(get_message(key, 60.0))
        _, word = self._talk.hear()
        self._expect(isinstance(word, protocol.Wait), "who waits", word)
        other.close()
        while isinstance(answer := self._talk.answer(request), protocol.Wait):
            pass
        self._expect(isinstance(answer, protocol.Missing) and answer.lease, "who waited", answer)
        self._talk.say(protocol.Release(key, answer.lease))
        self.counts["waits"] += 1

    def _come_and_go(self) -> None:
        for _ in range(3):
            self._connected().close()

    def _load(self) -> None:
        key = key_of(self._small())
        self._talk.say(protocol.Loading(key, digest(b"loaded"), False))
        self._talk.say(protocol.Loaded())
        self.counts["loads"] += 1

    def _report(self) -> None:
        requests = [self._talk.say(protocol.Report({"requests": 1, "hits": 1})) for _ in range(5)]
        self._expect(set(self._talk.answers(requests).values()) == {protocol.Done()}, "reports", requests)
        self.counts["reports"] += len(requests)

    def _announce(self) -> None:
        """Announce a toolchain that the daemon cannot see."""
        which = self._choose.randrange(_TOOLCHAINS)
        file = {"path": f"/nowhere/{which}/lib/a.so", "size": 1, "mtime_ns": 1, "inode": 1, "digest": digest(b"a")}
        answer = self._talk.ask(protocol.Announce(key_of(f"toolchain {which}"), "cpu", "0.0", "a toolchain", [file]))
        self._expect(answer == protocol.Done(), "a toolchain", answer)
        self.counts["announcements"] += 1

    def _complain(self) -> None:
        name = self._small()
        answer = self._talk.ask(protocol.Complain(key_of(name), digest(content_of(name)), "it is only a test", False))
        self._expect(answer == protocol.Done(), name, answer)
        self.counts["complaints"] += 1

    def _mark(self) -> None:
        key = key_of(f"uncacheable {self._choose.randrange(_UNCACHEABLE)}")
        answer = self._talk.ask(protocol.MarkNotCacheable(key, "jit_f", "not serializable"))
        self._expect(answer == protocol.Done(), "a mark", answer)
        self._expect(self._talk.ask(get_message(key)) == protocol.NotCacheable("not serializable"), "a mark", key)
        self.counts["marks"] += 2

    def _be_killed(self) -> None:
        """Die with a lease, with answers pending, and in the middle of a put."""
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                talk = self._connected()
                self._take(talk, self._fresh())
                for _ in range(10):
                    talk.say(get_message(key_of(self._large())))
                talk.begin_put(key_of("small killed"), content_of("small killed"))
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        self.counts["killed clients"] += 1

    def _take(self, talk: Conversation, key: str) -> int:
        answer = talk.ask(get_message(key, 60.0))
        self._expect(isinstance(answer, protocol.Missing) and answer.lease, "a lease", answer)
        self.counts["leases"] += 1
        return answer.lease

    def _connected(self) -> Conversation:
        talk = Conversation(self._place)
        talk.greet()
        self.counts["connections"] += 1
        return talk

    def _fresh(self) -> str:
        self._asked_for += 1
        return key_of(f"{self._prefix} {os.getpid()} {self._asked_for}")

    def _small(self) -> str:
        return f"small {self._choose.randrange(_SMALL)}"

    def _large(self) -> str:
        return f"large {self._choose.randrange(_LARGE)}"

    def _expect(self, right: object, what: str, found: object) -> None:
        assert right, f"{what}: {str(found)[:500]}"


def main() -> int:
    """Fork the processes and wait for them; return how many failed."""
    place, processes, seed = Place(Path(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
    children = []
    for number in range(processes):
        child = os.fork()
        if not child:
            try:
                loader = Loader(place, number, seed)
                loader.work(over=0)
                (place.root / f"counts-{number}.json").write_text(json.dumps(loader.counts))
            except BaseException:  # noqa: BLE001 - the parent's code must not go on in here
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


if __name__ == "__main__":
    sys.exit(main())
