"""Settings that change while the daemon runs: by SIGHUP or a written file, but not by a wrong one."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal

import pytest
from support.conversation import key_of, talking
from support.places import PATIENCE, Place, put_message, until

from xcache.errors import ConfigError
from xcache.wire import commands, protocol
from xcached.host import reload
from xcached.host.reload import Following, LiveSettings

KEY = key_of("a")


@pytest.fixture
def file(place):
    place.env["XCACHE_CONFIG"] = str(place.root / "settings.toml")
    write(place, "")
    return place.root / "settings.toml"


def write(place: Place, text: str) -> None:
    new = place.root / "settings.new"
    new.write_text(text)
    new.replace(place.root / "settings.toml")


def facts(place: Place) -> dict[str, protocol.Scalar]:
    with talking(place) as talk:
        return talk.status()


def log(place: Place) -> str:
    return (place.dir / "daemon.log").read_text()


def test_a_file_that_is_written_takes_effect_at_once(place, file):
    child = place.start_daemon()
    write(place, 'max_size = "3G"')
    assert until(lambda: facts(place)["max_size"] == 3 * 2**30)
    assert child.poll() is None
    assert f"setting changed: max_size: 21474836480 -> 3221225472 ({file})" in log(place)
    # Written in place, and not replaced.
    with file.open("w") as writing:
        writing.write('max_size = "2G"')
    assert until(lambda: facts(place)["max_size"] == 2 * 2**30)
    file.unlink()
    assert until(lambda: "XCACHE_CONFIG" in str(facts(place)["configuration_problem"]))
    assert facts(place)["max_size"] == 2 * 2**30


def test_a_file_is_watched_and_not_only_looked_at_again_and_again(tmp_path, monkeypatch):
    file = tmp_path / "settings.toml"
    file.touch()
    monkeypatch.setenv("XCACHE_CONFIG", str(file))

    async def follow() -> None:
        settings, changed = LiveSettings(), asyncio.Event()
        following = Following(settings, changed.set)
        try:
            file.write_text("max_entries = 77")
            await asyncio.wait_for(changed.wait(), PATIENCE)
        finally:
            following.close()
        assert settings.now.max_entries == 77

    asyncio.run(follow())


def test_a_file_that_comes_into_being_is_noticed_wherever_it_may_be(place):
    place.start_daemon()
    user = place.root / "config" / "xcache"
    user.mkdir(parents=True)
    (user / "config.toml").write_text('max_size = "3G"')
    assert until(lambda: facts(place)["max_size"] == 3 * 2**30)
    (user / "config.toml").unlink()
    assert until(lambda: facts(place)["max_size"] == 20 * 2**30)


def test_a_file_behind_links_is_noticed_as_kubernetes_changes_it(place, file):
    """Kubernetes replaces, in one step, the folder that a link leads to."""
    for number in (1, 2):
        (place.root / f"data{number}").mkdir()
        (place.root / f"data{number}" / "settings.toml").write_text(f'max_size = "{number}G"')
    (place.root / "..data").symlink_to("data1")
    file.unlink()
    file.symlink_to("..data/settings.toml")
    place.start_daemon()
    assert facts(place)["max_size"] == 2**30
    (place.root / "..new").symlink_to("data2")
    (place.root / "..new").replace(place.root / "..data")
    assert until(lambda: facts(place)["max_size"] == 2 * 2**30)


def test_a_file_that_is_being_written_is_not_read_half_done(tmp_path, monkeypatch):
    """An emptied file would mean the defaults for a moment, and most of a large store would be evicted."""
    # However long the machine takes for the next step.
    monkeypatch.setattr(reload, "_EMPTIED_SECONDS", 1e6)
    file = tmp_path / "settings.toml"
    file.write_text("max_entries = 5")
    monkeypatch.setenv("XCACHE_CONFIG", str(file))
    taken: list[int] = []

    async def follow() -> None:
        settings, changed = LiveSettings(), asyncio.Event()
        following = Following(settings, lambda: (taken.append(settings.now.max_entries), changed.set()))
        try:
            for number, emptied in enumerate((lambda: file.write_text(""), file.unlink)):
                emptied()
                await asyncio.sleep(0.4)
                file.write_text(f"max_entries = {number + 77}")
                await asyncio.wait_for(changed.wait(), PATIENCE)
                changed.clear()
        finally:
            following.close()

    asyncio.run(follow())
    assert taken == [77, 78]


def test_a_file_that_may_be_read_again_is_read_again(place, file):
    """chmod changes the file's ctime, not its mtime."""
    if os.getuid() == 0 and not shutil.which("setpriv"):
        pytest.skip("needs setpriv to take from root that it may read everything")
    place.start_daemon(*(("setpriv", "--inh-caps=-all", "--bounding-set=-all") if os.getuid() == 0 else ()))
    write(place, 'max_size = "3G"')
    file.chmod(0)
    assert until(lambda: "Permission denied" in str(facts(place)["configuration_problem"]))
    file.chmod(0o644)
    assert until(lambda: facts(place)["max_size"] == 3 * 2**30)


def test_sighup_has_them_read_again(place, file):
    child = place.start_daemon()
    child.send_signal(signal.SIGHUP)
    assert until(lambda: "the settings were read again; nothing changed" in log(place))
    assert child.poll() is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('max_size = "lots"', "max_size='lots'"),
        ("max_size = ", "Invalid value"),
        ("unknown = 1", "'unknown' is not a setting"),
        (f"max_entries = {'9' * 5000}", "Exceeds the limit"),
        # Too deep, in whichever words Python says so.
        (f"max_entries = {'[' * 50_000}", "{file}: "),
        ('dir = "/elsewhere"\nmax_size = "3G"', "dir cannot change from '{dir}' to '/elsewhere' ({file})"),
        ('socket = "/elsewhere"', "socket cannot change from '{socket}' to '/elsewhere' ({file})"),
        ("daemon_user = 'no-such-one'", "cannot be used: there is no account 'no-such-one'"),
        (f"daemon_user = {os.getuid()}", f"daemon_user cannot change from '' to '{os.getuid()}'"),
    ],
)
def test_a_wrong_file_is_refused_whole_and_reported(place, file, text, problem):
    fixed = f'dir = "{place.dir}"\nsocket = "{place.socket}"\n'
    write(place, fixed)
    for name in ("XCACHE_DIR", "XCACHE_SOCKET"):
        del place.env[name]
    place.start_daemon()
    write(place, text if "dir" in text or "socket" in text else fixed + text)
    # A file that says nothing of the one is wrong about the other as well.
    if "dir" in text:
        write(place, f'socket = "{place.socket}"\n{text}')
    if "socket" in text:
        write(place, f'dir = "{place.dir}"\n{text}')
    expected = problem.format(dir=place.dir, socket=place.socket, file=file)
    assert until(lambda: expected in str(facts(place)["configuration_problem"])), facts(place)["configuration_problem"]
    assert "the settings were not changed: " in log(place)
    assert facts(place)["max_size"] == 20 * 2**30
    write(place, fixed + 'max_size = "5G"')
    assert until(lambda: facts(place)["max_size"] == 5 * 2**30)
    assert facts(place)["configuration_problem"] == ""
    place.env |= {"XCACHE_DIR": str(place.dir), "XCACHE_SOCKET": str(place.socket)}


def test_the_environment_goes_on_winning(place, file):
    child = place.start_daemon(XCACHE_MAX_SIZE="1G")
    write(place, 'max_size = "3G"\nlog = "debug"')
    assert until(lambda: "setting changed: log: warning -> debug" in log(place))
    child.send_signal(signal.SIGHUP)
    assert until(lambda: "settings were read again; nothing changed" in log(place))
    assert facts(place)["max_size"] == 2**30


def test_a_smaller_store_is_emptied_without_waiting_for_a_restart(place, file):
    place.start_daemon()
    with talking(place) as talk:
        for number in range(20):
            talk.put(key_of(str(number)), os.urandom(10_000))
        assert talk.status()["entries"] == 20
    write(place, "max_size = 50000")
    assert until(lambda: facts(place)["max_size"] == 50_000)
    # The writer looks every few seconds, and whenever it has something to do.
    with talking(place) as talk:
        talk.ask(commands.Sync())
    assert until(lambda: facts(place)["bytes"] <= 50_000)
    assert facts(place)["entries"] > 0


def test_limits_and_times_are_those_of_now(place, file):
    del place.env["XCACHE_IDLE_EXIT"]
    place.start_daemon()
    write(place, 'max_payload = "1M"\nsilence = "300ms"\nmax_connections = 3')
    assert until(lambda: "max_connections: 1024 -> 3" in log(place))
    with talking(place) as talk:
        refused = talk.ask(put_message(KEY, b"", b"p", payload=None, stored_size=2**20 + 1))
        assert (type(refused), refused.kind) == (protocol.Refused, "protocol error")
        with place.connect() as silent, place.connect() as another, place.connect() as third:
            assert third.recv(1000)
            silent.settimeout(20)
            assert silent.recv(1000) == b""
            another.close()
    write(place, 'idle_exit = "1s"')
    assert until(lambda: not place.answers()), log(place)


def test_a_daemon_that_a_program_starts_follows_the_files_as_well(place, file):
    """It is given what the program's environment says, and reads the rest itself."""
    write(place, 'max_size = "2G"')
    started = place.run("from xcache.cli import main; main(['start'])", XCACHE_LOG="info")
    assert started.returncode == 0, started.stderr
    assert facts(place)["max_size"] == 2 * 2**30
    write(place, 'max_size = "3G"\nlog = "error"')
    assert until(lambda: facts(place)["max_size"] == 3 * 2**30)
    assert "setting changed: log" not in log(place)


def test_a_change_that_somebody_refuses_reaches_nobody(monkeypatch, tmp_path):
    monkeypatch.setenv("XCACHE_CONFIG", str(tmp_path / "settings.toml"))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "settings.toml").write_text("")
    settings = LiveSettings()
    taken = []

    def refuse(new):
        if new.max_size == 50_000:
            raise ConfigError("not this")

    settings.when_changed(refuse)
    settings.when_changed(lambda new: taken.append(new.max_size))
    assert settings.change() is None
    (tmp_path / "settings.toml").write_text("max_size = 50000")
    assert not settings.change().emptied
    settings.reload()
    assert settings.change() is None
    assert (settings.problem, taken, settings.now.max_size) == ("not this", [], 20 * 2**30)
    (tmp_path / "settings.toml").write_text("max_size = 60000")
    settings.reload()
    assert (settings.problem, taken, settings.now.max_size) == ("", [60_000], 60_000)
