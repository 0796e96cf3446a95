"""Leases of machines where requests come at an unlucky moment; the tier is a folder."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from support.conversation import key_of
from support.signing import NOON, OURS, SECOND, STRANGER, in_memory

from xcache.config.remotes import Remote
from xcache.wire.signatures import PrivateKey
from xcache.wire.trusted_keys import TrustedKeys
from xcached.tiers.claims import ALONE, ARRIVED, FAILED, RELEASED, STORED, TAKEN, Claims, Compile, Periods
from xcached.tiers.folder import Folder
from xcached.tiers.guarded import GuardedTier
from xcached.tiers.lease_object import Held, decoded
from xcached.tiers.tier import FAILED as NOT_DONE
from xcached.tiers.tier import UNREACHABLE, TierError

KEY = key_of("wanted")
LEASE, ENTRY = f"leases/{KEY}", f"entries/{KEY}"
PERIODS = Periods(beat=0.05, dead=0.5, first_look=0.02, longest_look=0.05, settling=0.2, farewell=0.3)

NOBODY = in_memory()


class Machine:
    """A daemon's part in leases."""

    def __init__(
        self, folder: Folder, longest: float = 5.0, signer: PrivateKey | None = None, trusts: TrustedKeys | None = None
    ) -> None:
        self.tier = GuardedTier(Remote("file:///tier"), folder, 5.0)
        self.folder = folder
        self.decided: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.sends = True
        self.hangs = False
        self.claims = Claims(
            self.tier,
            lambda key: f"leases/{key}",
            lambda key: f"entries/{key}",
            fetch=self._fetch,
            send=self._send,
            signer=lambda: signer,
            read=lambda content, name: decoded(content, name, trusts or NOBODY, NOON, trust_unsigned=trusts is None),
            longest=lambda: longest,
            periods=PERIODS,
        )

    async def asks(self) -> str:
        """Return what is decided."""
        self.begin()
        return await self.decided

    def begin(self) -> None:
        self.claims.begin(Compile(KEY, "", 1, "train.py", 0.0, lambda held: None, self.decided.set_result))

    async def _fetch(self, key: str, unusable: str) -> bool:
        if self.hangs:
            await asyncio.sleep(60.0)
        return await self.folder.get(f"entries/{key}", 100) == b"good"

    async def _send(self, key: str) -> bool:
        if self.sends:
            await self.folder.put(f"entries/{key}", b"good")
        return self.sends


class Unlucky(Folder):
    """A folder whose next creation goes wrong."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.before_create = lambda: None
        self.error: TierError | None = None
        self.denies = False

    async def create(self, name: str, content: bytes) -> bool:
        await (self.before_create() or asyncio.sleep(0))
        created = await super().create(name, content)
        error, self.error = self.error, None
        if error is not None:
            raise error
        return created and not self.denies


@pytest.fixture
def folder(tmp_path):
    made = Unlucky(tmp_path)
    yield made
    asyncio.run(made.close())


async def gone(folder: Folder, name: str = LEASE) -> None:
    """Wait until there is no such object."""
    async with asyncio.timeout(10.0):
        while await folder.contains(name):
            await asyncio.sleep(0.01)


def test_an_entry_that_came_just_before_the_lease_was_free_is_taken(folder, run):
    folder.before_create = lambda: folder.put(ENTRY, b"good")

    async def scenario() -> None:
        assert await Machine(folder).asks() == ARRIVED
        await gone(folder)

    run(scenario())


def test_an_entry_of_no_use_has_everybody_compile(folder, run):
    folder.before_create = lambda: folder.put(ENTRY, b"bad")

    async def scenario() -> None:
        assert await Machine(folder).asks() == ALONE
        await gone(folder)

    run(scenario())


def test_an_entry_that_takes_long_to_come_is_not_waited_for(folder, run):
    folder.before_create = lambda: folder.put(ENTRY, b"good")

    async def scenario() -> None:
        here = Machine(folder, longest=0.5)
        here.hangs = True
        assert await here.asks() == ALONE
        await gone(folder)

    run(scenario())


@pytest.mark.parametrize("trouble", ["denied", "lost", "other"])
def test_a_creation_that_seems_to_have_failed_is_ones_own_all_the_same(trouble, folder, run):
    folder.denies = trouble == "denied"
    folder.error = {
        "denied": None,
        "lost": TierError(UNREACHABLE, "the answer was lost"),
        "other": TierError(NOT_DONE, "this store does not do that"),
    }[trouble]

    async def scenario() -> None:
        here, there = Machine(folder), Machine(Folder(folder._root))
        assert await here.asks() == TAKEN
        there.begin()
        await asyncio.sleep(3 * PERIODS.dead)
        assert not there.decided.done()
        here.claims.end(KEY, STORED)
        assert await there.decided == ARRIVED
        await here.claims.close()
        await there.folder.close()

    run(scenario())


def test_of_many_that_find_a_lease_dead_one_takes_it(folder, run):
    async def scenario() -> None:
        await folder.put(LEASE, b"left by a machine that is gone")
        machines = [Machine(folder) for _ in range(6)]
        for machine in machines:
            machine.begin()
        await asyncio.wait([machine.decided for machine in machines], return_when=asyncio.FIRST_COMPLETED, timeout=10.0)
        await asyncio.sleep(2 * PERIODS.settling)
        (taken,) = (machine for machine in machines if machine.decided.done())
        assert taken.decided.result() == TAKEN
        taken.claims.end(KEY, STORED)
        for machine in machines:
            if machine is not taken:
                assert await machine.decided == ARRIVED
        await gone(folder)

    run(scenario())


@pytest.mark.parametrize(("how", "decided"), [(RELEASED, TAKEN), (FAILED, ALONE), (STORED, ALONE)])
def test_how_a_lease_ends_decides_for_the_others(how, decided, folder, run):
    async def scenario() -> None:
        here, there = Machine(folder), Machine(folder)
        here.sends = False
        assert await here.asks() == TAKEN
        there.begin()
        await asyncio.sleep(0.3)
        here.claims.end(KEY, how)
        assert await there.decided == decided
        there.claims.end(KEY, RELEASED)
        await gone(folder)

    run(scenario())


def test_who_does_not_want_it_any_more_leaves_nothing(folder, run):
    async def scenario() -> None:
        here = Machine(folder)
        here.begin()
        here.claims.end(KEY, RELEASED)
        assert await here.decided in (ALONE, TAKEN)
        await gone(folder)

        held, waits = Machine(folder), Machine(folder)
        assert await held.asks() == TAKEN
        waits.begin()
        await asyncio.sleep(0.1)
        waits.claims.end(KEY, RELEASED)
        assert await waits.decided == ALONE
        assert held.claims._reading(await folder.get(LEASE, 2048), LEASE).held.holder
        await held.claims.close()
        await gone(folder)

    run(scenario())


def test_a_store_that_cannot_do_it_is_asked_rarely_and_takes_uploads_all_the_same(folder, run):
    async def scenario() -> None:
        here = Machine(folder)
        folder.error = TierError(NOT_DONE, "this store does not do that")
        assert await here.asks() == TAKEN
        assert not here.tier.may_lease
        assert here.tier.may_write
        assert here.tier.may_read
        here.claims.end(KEY, RELEASED)
        await gone(folder)

    run(scenario())


# Who writes in the tier has no key that counts: it signs with one of its own, does not sign, or writes again and again
# what was signed before (the same beat, or all of them), or for another key.
FORGED = Held("f" * 16, 1, "host", 1, "x", 0.0, 1e9)


@pytest.mark.parametrize(
    "kind", ["signed by a stranger", "unsigned", "garbage", "replayed", "recorded", "ended", "of another key"]
)
def test_whoever_can_write_to_a_tier_makes_nobody_wait(kind, folder, run):
    signer = {"signed by a stranger": STRANGER, "unsigned": None}.get(kind, SECOND)
    name = LEASE + "x" if kind == "of another key" else LEASE

    def forged(number: int) -> bytes:
        if kind == "garbage":
            return b"%d" % number
        at = time.time() - (3600.0 if kind == "recorded" else 0.0)
        held = FORGED._replace(beats=1 if kind == "replayed" else number, ended=kind == "ended", at=at)
        return held.encoded(name, signer)

    async def scenario() -> None:
        over = asyncio.Event()

        async def write() -> None:
            number = 0
            while not over.is_set():
                number += 1
                await folder.put(LEASE, forged(number))
                await asyncio.sleep(0.01)

        here = Machine(Folder(folder._root), signer=OURS, trusts=in_memory(OURS.public, SECOND.public))
        writing = asyncio.create_task(write())
        await asyncio.sleep(0.05)
        async with asyncio.timeout(60.0):
            assert await here.asks() in (ALONE, TAKEN)
        over.set()
        await writing
        await here.claims.close()
        await here.folder.close()

    run(scenario())


def test_the_lease_of_a_trusted_machine_is_waited_for(folder, run):
    trusts = in_memory(OURS.public, SECOND.public)

    async def scenario() -> None:
        here, there = Machine(folder, signer=OURS, trusts=trusts), Machine(folder, signer=SECOND, trusts=trusts)
        assert await here.asks() == TAKEN
        there.begin()
        await asyncio.sleep(3 * PERIODS.dead)
        assert not there.decided.done()
        here.claims.end(KEY, STORED)
        assert await there.decided == ARRIVED
        await gone(folder)

    run(scenario())
