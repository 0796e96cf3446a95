"""Bundles: one file takes entries to other machines, which import it or read it in place."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command_line import Shell
from support.conversation import key_of, talking
from support.places import Place, digest, until
from support.sharing import host, remote_of, trust
from support.signing import OURS, SECOND, STRANGER

from xcache.wire import protocol
from xcache.wire.bundles import Bundle, BundleWriter
from xcache.wire.names import Names
from xcache.wire.ownership import signer_uid
from xcached.tiers import bundle as bundle_tier
from xcached.tiers.tier import TierError

SMALL, LARGE = key_of("small"), key_of("large")
CONTENTS = {SMALL: b"an executable", LARGE: bytes(range(256)) * 400}
PROGRAM = protocol.Predict("train.py", digest(b"arguments"))
ALIAS = protocol.Alias(digest(b"structure"), digest(b"raw program"), b"facts", digest(b"seal"))


def fill(place: Place) -> None:
    """Store two entries, an alias, and what a program wanted."""
    items = [{"key": key, "options": "o", "devices": "0", "platform": "cpu", "seconds": 0.1} for key in CONTENTS]
    with talking(place) as talk:
        for key, content in CONTENTS.items():
            assert talk.put(key, content) == protocol.Stored(True)
        assert talk.ask(protocol.RememberAliases([[*ALIAS]])) == protocol.Done()
        assert talk.ask(protocol.Remember(*PROGRAM, items, {"o": b"options"})) == protocol.Done()


@pytest.fixture
def bundle(tmp_path) -> Path:
    """A bundle that our key has signed."""
    path = tmp_path / "cache.xcb"
    with host() as here:
        fill(here)
        assert "wrote 2 entries and what 1 program wanted" in Shell(here).say("export", "-o", str(path))
    return path


@contextlib.contextmanager
def serving(bundle: Path, option: str = "", **settings: object) -> Iterator[Place]:
    """Give a place whose daemon reads a bundle in place."""
    with host(XCACHE_BUNDLES=f"{bundle}{option}", **settings) as place:
        yield place


def has_all(place: Place) -> bool:
    with talking(place) as talk:
        return {key: talk.get(key) for key in CONTENTS} == CONTENTS


def has_none(place: Place) -> bool:
    with talking(place) as talk:
        return not any(talk.get(key) for key in CONTENTS)


def predicts_all(place: Place) -> bool:
    with talking(place) as talk:
        found = talk.ask(PROGRAM)
        return [item["key"] for item in found.items] == [*CONTENTS] and [*ALIAS] in found.aliases


def files_in(place: Place) -> list[Path]:
    return [path for path in (place.dir / "blobs").rglob("*") if path.is_file()]


def test_the_same_entries_make_the_same_file(tmp_path):
    with host() as here:
        fill(here)
        shell = Shell(here)
        for name in ("one", "two"):
            shell.say("export", "-o", str(tmp_path / name))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    # The unfinished file was renamed.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_a_bundle_is_imported(bundle):
    with host() as there:
        shell = Shell(there)
        assert "stored 2 entries" in shell.say("import", "--all", str(bundle))
        assert has_all(there)
        assert predicts_all(there)
        assert len(files_in(there)) == 1
        assert {uid for (uid,) in there.query("SELECT writer_uid FROM entries")} == {signer_uid(OURS.public.id)}
        told = json.loads(shell.say("import", "--all", "--json", str(bundle)))
        assert told == {"file": str(bundle), "stored": 0, "there": 2, "programs": 1, "left_out": {}}


def test_what_is_in_place_is_imported_all_the_same(bundle, tmp_path):
    copy = tmp_path / "copy"
    shutil.copy(bundle, copy)
    with serving(bundle) as there:
        assert has_all(there)
        told = json.loads(Shell(there).say("import", "--all", "--json", str(copy)))
        assert (told["stored"], told["there"]) == (1, 1)
        bundle.unlink()
        assert has_all(there)


def test_an_entry_of_ones_own_is_not_imported_a_second_time(tmp_path):
    with host() as here:
        fill(here)
        shell = Shell(here)
        shell.say("export", "-o", str(tmp_path / "mine"))
        told = json.loads(shell.say("import", "--all", "--json", str(tmp_path / "mine")))
        assert (told["stored"], told["there"]) == (0, 2)


def test_an_executable_on_a_file_system_that_may_hang_is_copied(bundle, monkeypatch, tmp_path):
    mounts = tmp_path / "mounts"
    monkeypatch.setattr(bundle_tier, "_MOUNTS", mounts)
    disk = "22 1 8:1 / / rw - ext4 /dev/vda rw"
    for kind, is_far in (("nfs4", True), ("fuse.sshfs", True), ("tmpfs", False)):
        mounts.write_text(f"{disk}\n30 22 0:41 / {tmp_path} rw,relatime shared:1 - {kind} host:/x rw\n")
        place = bundle_tier.InPlace([bundle]).open(digest(CONTENTS[LARGE]))
        assert (place is None) == is_far
        if place is not None:
            os.close(place[0])
    mounts.write_text(f"{disk}\n30 22 0:41 / {tmp_path}/other rw - nfs4 host:/x rw\n")
    descriptor, offset = bundle_tier.InPlace([bundle]).open(digest(CONTENTS[LARGE]))
    with open(descriptor, "rb") as file:
        assert os.pread(file.fileno(), len(CONTENTS[LARGE]), offset) == CONTENTS[LARGE]
    bundle_tier.bundle_at.cache_clear()


def test_a_bundle_is_read_in_place(bundle):
    with serving(bundle) as there:
        assert has_all(there)
        assert predicts_all(there)
        # The small one is in its row.
        assert not files_in(there)
        there.stop()
        there.start_daemon()
        assert has_all(there)
        assert remote_of(there)["gets"] == 0


def test_what_a_program_wanted_comes_with_its_entries(bundle):
    with serving(bundle) as there:
        assert predicts_all(there)
        assert remote_of(there)["found"] == 3
        assert has_all(there)
        assert remote_of(there)["gets"] == 3


def test_what_is_read_in_place_is_exported(bundle, tmp_path):
    with serving(bundle) as there:
        assert predicts_all(there)
        Shell(there).say("export", "-o", str(tmp_path / "again"), "--name", "jit_f")
    with host() as third:
        assert "stored 2 entries" in Shell(third).say("import", "--all", str(tmp_path / "again"))
        assert has_all(third)


def origins(bundle: Path) -> list[str]:
    with host() as place:
        told = json.loads(Shell(place).say("bundle", "inspect", "--json", str(bundle)))
        return [entry["writer"] for entry in told["entries"]]


@pytest.mark.parametrize("options", [(), ("--unsigned",)], ids=["signed", "vouched for"])
def test_an_entry_that_goes_from_machine_to_machine_keeps_its_origin(bundle, tmp_path, options):
    before = origins(bundle)
    for turn in range(2):
        with host() as there:
            Shell(there).say("import", "--all", *options, str(bundle))
            bundle = tmp_path / f"{turn}"
            Shell(there).say("export", "-o", str(bundle))
    assert origins(bundle) == before


def test_a_bundle_that_goes_is_a_miss_and_one_that_comes_is_used(bundle):
    aside = bundle.with_name("aside")
    with serving(bundle) as there:
        assert has_all(there)
        bundle.rename(aside)
        with talking(there) as talk:
            assert talk.get(LARGE) is None
            assert talk.get(SMALL) == CONTENTS[SMALL]
        aside.rename(bundle)
        assert until(lambda: has_all(there))


def test_the_beginning_of_an_object_in_a_bundle_is_read(bundle):
    whole = bundle.read_bytes()

    async def main() -> None:
        tier = bundle_tier.BundleFile(bundle)
        name = Names("").entry(LARGE)
        content = await tier.get(name, 2**20)
        assert content is not None and len(content) > len(CONTENTS[LARGE])
        for most in (1, 100, len(content), len(content) + 1):
            assert await tier.begin(name, most) == content[:most]
        assert await tier.begin(Names("").entry(key_of("another")), 100) is None
        os.truncate(bundle, 1000)
        with pytest.raises(TierError):
            await tier.begin(name, 100)
        bundle.write_bytes(whole)
        await tier.close()

    asyncio.run(main())
    # The frames of the error may refer to the tier, and to each other; the last one is that of a thread.
    assert until(lambda: not any(thread.name == "xcached-tier" for thread in threading.enumerate()))
    gc.collect()
    with serving(bundle) as there:
        rows = Shell(there).json("remote", "ls", "--details")["objects"]
        told = {row["id"]: row["details"] for row in rows if row["kind"] == "entries"}
        assert {key: each["state"] for key, each in told.items()} == dict.fromkeys(CONTENTS, "ok")


def test_another_bundle_takes_the_place_of_one(bundle, tmp_path):
    other = tmp_path / "other"
    with host() as here:
        with talking(here) as talk:
            assert talk.put(key_of("another"), b"another" * 20_000) == protocol.Stored(True)
        Shell(here).say("export", "-o", str(other))
    with serving(bundle) as there:
        assert has_all(there)
        other.rename(bundle)
        with talking(there) as talk:
            assert talk.get(key_of("another")) == b"another" * 20_000
            assert talk.get(LARGE) is None


def test_a_bundle_that_is_cut_costs_entries_and_nothing_else(bundle):
    with serving(bundle) as there:
        assert has_all(there)
        os.truncate(bundle, 1000)
        with talking(there) as talk:
            assert talk.get(LARGE) is None
            assert talk.get(SMALL) == CONTENTS[SMALL]
            assert talk.put(LARGE, CONTENTS[LARGE]) == protocol.Stored(True)
        assert has_all(there)


def altered(bundle: Path, key: str) -> None:
    """Alter a byte of an executable in a bundle, and leave the file's time as it was."""
    content = bytearray(bundle.read_bytes())
    at = content.index(CONTENTS[key])
    content[at] ^= 1
    before = bundle.stat()
    with bundle.open("r+b") as file:
        file.write(content)
    os.utime(bundle, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_an_altered_executable_is_not_taken(bundle):
    altered(bundle, LARGE)
    with serving(bundle) as there:
        with talking(there) as talk:
            assert talk.get(SMALL) == CONTENTS[SMALL]
            assert talk.get(LARGE) is None
        assert remote_of(there)["rejected"] == 1
        assert "the digest of its executable differs" in Shell(there).say("bundle", "verify", str(bundle), code=1)
        failed = Shell(there).say("import", "--all", str(bundle), code=1)
        assert "nothing is taken over: 1 object of 3 cannot be used" in failed


def test_an_executable_that_is_altered_later_is_set_aside_when_a_program_finds_out(bundle):
    with serving(bundle) as there:
        assert has_all(there)
        altered(bundle, LARGE)
        with talking(there) as talk:
            assert talk.get(LARGE) != CONTENTS[LARGE]
            complaint = protocol.Complain(LARGE, digest(CONTENTS[LARGE]), "its digest differs", False)
            assert talk.ask(complaint) == protocol.Done()
            assert talk.get(LARGE) is None
            assert talk.get(SMALL) == CONTENTS[SMALL]


def test_a_revoked_key_counts_at_once(bundle):
    with serving(bundle) as there:
        assert has_all(there)
        trust(there, f"{OURS.public} revoked=2020-01-01")
        assert until(lambda: has_none(there))


@pytest.mark.parametrize(
    ("option", "is_found"), [("", False), ("?trust=tier", True)], ids=["keys are trusted", "the file is trusted"]
)
def test_an_unsigned_bundle_needs_trust_in_the_file(tmp_path, option, is_found):
    path = tmp_path / "cache.xcb"
    with host(signer=None) as here:
        fill(here)
        assert "--unsigned does without" in Shell(here).say("export", "-o", str(path), code=1)
        Shell(here).say("export", "--unsigned", "-o", str(path))
    with serving(path, option, signer=None) as there:
        assert (has_all if is_found else has_none)(there)


def test_a_key_that_cannot_sign_is_said_once_and_does_not_stop_an_unsigned_export(tmp_path):
    (tmp_path / "cryptography").mkdir()
    (tmp_path / "cryptography" / "__init__.py").write_text("raise ImportError")
    with host(PYTHONPATH=str(tmp_path)) as here:
        fill(here)
        shell = Shell(here)
        said = shell.say("export", "-o", str(tmp_path / "cache.xcb"), code=1)
        assert said.count("signatures need the library cryptography") == 1
        shell.say("export", "--unsigned", "-o", str(tmp_path / "cache.xcb"))


def test_nothing_of_a_bundle_is_imported_that_nobody_trusted_signed(bundle, tmp_path):
    unsigned = tmp_path / "unsigned"
    with host(signer=STRANGER) as stranger:
        fill(stranger)
        Shell(stranger).say("export", "-o", str(tmp_path / "strange"))
        Shell(stranger).say("export", "--unsigned", "-o", str(unsigned))
    mixed = tmp_path / "mixed"
    good, bad = Bundle(bundle), Bundle(tmp_path / "strange")
    with contextlib.closing(good), contextlib.closing(bad), mixed.open("wb") as file:
        writer = BundleWriter(file)
        for number, (name, _) in enumerate(sorted(good.names())):
            writer.add(name, (bad if number == 1 else good).get(name))
        writer.finish()
    with host() as there:
        shell = Shell(there)
        for path in (tmp_path / "strange", unsigned, mixed):
            assert "nothing is taken over" in shell.say("import", "--all", str(path), code=1)
            assert shell.run("bundle", "verify", str(path)).returncode == 1
        assert has_none(there)
        assert "stored 2 entries" in shell.say("import", "--all", "--unsigned", str(unsigned))
        assert has_all(there)
        # Whoever imports it vouches for it.
        assert {uid for (uid,) in there.query("SELECT writer_uid FROM entries")} == {os.getuid()}


def test_vouching_does_not_help_what_a_revoked_key_signed(bundle):
    with host(trusts=(f"{OURS.public} revoked=2020-01-01", SECOND.public)) as there:
        assert "was revoked" in Shell(there).say("import", "--all", "--unsigned", str(bundle), code=1)
        assert has_none(there)


def test_a_bundle_of_another_namespace_is_left(bundle):
    with serving(bundle, XCACHE_NAMESPACE="team") as there:
        assert "belongs to no namespace" in Shell(there).say("import", str(bundle), code=1)
        assert has_none(there)


def test_entries_of_compilers_that_are_not_here_are_left_out(bundle):
    with host() as there:
        ran = Shell(there).run("import", str(bundle))
        assert ran.returncode == 1
        assert "left out 2 entries: another compiler made it, jaxlib" in ran.stdout
        assert has_none(there)


def test_a_part_is_exported(tmp_path):
    path, lonely = tmp_path / "part", key_of("lonely")
    with host() as here:
        fill(here)
        with talking(here) as talk:
            assert talk.put(lonely, b"lonely", module_name="jit_lonely") == protocol.Stored(True)
        shell = Shell(here)
        shell.record_run(SMALL)

        def exported(*options: str) -> tuple[set[str], list[str]]:
            shell.say("export", "-o", str(path), *options)
            told = json.loads(shell.say("bundle", "inspect", "--json", str(path)))
            return {row["key"] for row in told["entries"]}, [each["program"] for each in told["programs"]]

        assert exported() == ({*CONTENTS, lonely}, ["train.py"])
        assert exported("--name", "lonely") == ({lonely}, [])
        assert exported("--program", "train") == ({*CONTENTS}, ["train.py"])
        # The program wants more than this run did.
        assert exported("--run", "last") == ({SMALL}, [])
        before = path.read_bytes()
        for options in (["--name", "nothing"], ["--program", "serve.py"], ["--run", "ffff"], ["--older-than", "1d"]):
            shell.say("export", "-o", str(path), *options, code=1)
        assert path.read_bytes() == before
        assert "is a folder" in shell.say("export", "-o", str(tmp_path), code=2)


def test_people_see_what_is_in_a_bundle(bundle):
    with host(signer=None) as there:
        told = Shell(there).say("bundle", "inspect", str(bundle))
        assert "signed by  ours" in told
        assert "train.py" in told
        assert SMALL[:12] in told
        verified = Shell(there).say("bundle", "verify", str(bundle))
        assert "3 objects: all are whole" in verified


def test_what_programs_want_goes_along_from_one_bundle_to_the_next(tmp_path):
    """As on CI runners: each run reads the last one's bundle in place, and exports what it used."""
    path = tmp_path / "0.xcb"
    with host(signer=None) as here:
        fill(here)
        exported = Shell(here).json("export", "--unsigned", "-o", str(path))
    for number in range(1, 4):
        with serving(path, "?trust=tier", signer=None) as there:
            assert has_all(there) and predicts_all(there)
            path = tmp_path / f"{number}.xcb"
            again = Shell(there).json("export", "--unsigned", "-o", str(path))
            assert (again["entries"], again["programs"]) == (exported["entries"], exported["programs"]), number


def test_a_machine_vouches_for_what_it_signed_itself(tmp_path):
    path = tmp_path / "cache.xcb"
    with host() as here:
        fill(here)
        shell = Shell(here)
        shell.say("export", "-o", str(path))
        trust(here)
        said = shell.say("bundle", "verify", str(path))
        assert "all are whole, and signed by this machine's own key" in said
        assert f"xcache key trust '{OURS.public}'" in said
        trust(here, f"{OURS.public} revoked=2020-01-01")
        assert "was revoked" in shell.say("bundle", "verify", str(path), code=1)
