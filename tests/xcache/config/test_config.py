"""Settings: where each comes from, which wins, and what is said of one that cannot be used."""

from __future__ import annotations

import contextlib
import math
import os
import pwd
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcache.config import config, parsing
from xcache.config.table import MAX_SOCKET_PATH, SETTINGS
from xcache.errors import ConfigError


@pytest.fixture
def surroundings(tmp_path, monkeypatch):
    """A home, a user's file, a named file and a system's file, all empty."""
    for name in ("user/xcache", "system"):
        (tmp_path / name).mkdir(parents=True)
    files = {
        "named": tmp_path / "named.toml",
        "user": tmp_path / "user" / "xcache" / "config.toml",
        "system": tmp_path / "system" / "config.toml",
    }
    for path in files.values():
        path.write_text("")
    monkeypatch.setattr(config, "SYSTEM_FILE", files["system"])
    env = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "user"), "XCACHE_CONFIG": str(files["named"])}
    return env, files


def test_the_nearest_place_wins(surroundings):
    """One setting is taken away from the nearest place after the other."""
    env, files = surroundings
    for size, path in enumerate(files.values(), start=20_000):
        path.write_text(f"max_size = {size}")
    env["XCACHE_MAX_SIZE"] = "1G"
    loaded = config.load(env, max_size=0)
    assert (loaded.max_size, loaded.sources["max_size"]) == (0, "code")
    assert config.load(env).sources["max_size"] == "environment"
    del env["XCACHE_MAX_SIZE"]
    for size, path in enumerate(files.values(), start=20_000):
        loaded = config.load(env)
        assert (loaded.max_size, loaded.sources["max_size"]) == (size, str(path))
        path.write_text("")
    assert (config.load(env).max_size, config.load(env).sources["max_size"]) == (20 * 1024**3, "default")


def test_one_file_does_not_hide_what_another_says_of_other_settings(surroundings):
    env, files = surroundings
    files["named"].write_text('log = "debug"')
    files["user"].write_text("timeout = 2.5\nautostart = false")
    files["system"].write_text('idle_exit = "2h"\nlog = "error"')
    loaded = config.load(env)
    assert (loaded.log, loaded.timeout, loaded.autostart, loaded.idle_exit) == ("debug", 2.5, False, 7200.0)


BAD = {
    "dir": [""],
    "socket": ["  "],
    "max_size": ["big", "10", "-1", "10 XB", "1e", "", "9" * 400],
    "log": ["loud", ""],
    "autostart": ["maybe", "2", ""],
    "timeout": ["0", "-1s", "soon", "0ms", ""],
    "idle_exit": ["never", "-5", "5 years", "1ms", "0.5"],
    "on_miss": ["forbid", ""],
    "signing_key": ["relative/path", "env:", "env:A B", "command:", "command: 'unfinished", "kms:arn"],
    "trusted_keys": [""],
}
ALLOWED = {setting.name: setting.allowed for setting in SETTINGS}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BAD.items() for text in texts])
def test_a_bad_value_names_the_setting_its_source_and_what_is_allowed(surroundings, name, text):
    env, files = surroundings
    with pytest.raises(ConfigError) as caught:
        config.load(env | {f"XCACHE_{name.upper()}": text})
    for part in (f"XCACHE_{name.upper()}", repr(text), "environment", ALLOWED[name]):
        assert part in str(caught.value)
    files["user"].write_text(f'{name} = "{text}"')
    with pytest.raises(ConfigError) as caught:
        config.load(env)
    for part in (name, repr(text), str(files["user"]), ALLOWED[name]):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("colour = 3", "'colour' is not a setting; there are dir, socket"),
        ("XCACHE_MAX_SIZ = 3", "'XCACHE_MAX_SIZ' is not a setting; did you mean max_size"),
        ("[xcache]\nmax_size = 3", "'xcache' is not a setting"),
        (
            'mode = "readonly"',
            "only the environment says whether a program uses the cache: XCACHE=1, on, 0, off, readonly",
        ),
        ("max_size = [1, 2]", ALLOWED["max_size"]),
        ("max_size = inf", ALLOWED["max_size"]),
        ("timeout = nan", ALLOWED["timeout"]),
        ("dir = 5", ALLOWED["dir"]),
        ("max_size = = 3", "line 1"),
        ("\udcff", "utf-8"),
    ],
)
def test_a_bad_file_is_named(surroundings, content, part):
    env, files = surroundings
    files["user"].write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        config.load(env)
    assert str(files["user"]) in str(caught.value)
    assert part in str(caught.value)


def test_unknown_names_and_a_named_file_that_is_not_there(surroundings):
    env, _ = surroundings
    with pytest.raises(ConfigError, match="'sizes' is not a setting; did you mean max_size"):
        config.load(env, sizes=3)
    with pytest.raises(ConfigError, match=r"XCACHE_CONFIG='/none' .environment. is not a file"):
        config.load(env | {"XCACHE_CONFIG": "/none"})


@pytest.fixture
def without_rights(place):
    """Run something as a user without any rights; what is imported has to be before."""
    if os.getuid() != 0:
        pytest.skip("needs root to give up")
    place.root.chmod(0o755)

    def run(program: str, **environment: str) -> str:
        said = place.run(
            "import os, pwd; from xcache.config import config\n"
            f"os.setgroups([]); os.setgid(54321); os.setuid(54321)\n{program}",
            **environment,
        )
        assert said.returncode == 0, said.stderr
        return said.stdout.strip()

    return run


def test_a_user_file_that_may_not_be_looked_for_is_no_file(place, without_rights):
    """A program that gave up root's rights still has root's HOME, into which it may not look."""
    home = place.root / "home"
    home.mkdir(mode=0o700)
    assert without_rights("print(config.load().log)", HOME=str(home), XDG_CONFIG_HOME="") == "warning"


def test_a_user_without_a_home_can_still_name_everything(place, without_rights):
    """Containers run as a number that no password file knows, and not always with a HOME."""
    assert without_rights("del os.environ['HOME']\nprint(config.load().dir)") == str(place.dir)


def test_directories_are_absolute_whatever_home_is():
    """The daemon is started in another working directory."""
    assert config.load({"HOME": "here"}).dir.is_absolute()
    assert config.load({"HOME": "/h", "XCACHE_DIR": "there"}).dir == Path.cwd() / "there"
    assert config.load({"HOME": "/h", "XDG_CACHE_HOME": "relative"}).dir == Path("/h/.cache/xcache")
    assert config.load({"HOME": "/h", "XDG_CACHE_HOME": "/c"}).dir == Path("/c/xcache")
    assert config.load({"XCACHE_DIR": "~/x"}).dir == Path.home() / "x"
    with pytest.raises(ConfigError):
        config.load({"HOME": "/h", "XCACHE_DIR": "~nobody-of-that-name/x"})


def test_a_relative_path_in_a_file_starts_from_the_file_s_folder(tmp_path, monkeypatch):
    """Every program and the daemon mean the same store, wherever each of them runs."""
    folder = tmp_path / "settings"
    folder.mkdir()
    (folder / "config.toml").write_text('dir = "cache"\nsocket = "../run/s"\n')
    for place, named in ((tmp_path, "settings/config.toml"), (folder, "config.toml")):
        monkeypatch.chdir(place)
        found = config.load({"HOME": "/h", "XCACHE_CONFIG": named})
        assert (found.dir, found.socket) == (folder / "cache", folder / ".." / "run" / "s")
    (folder / "config.toml").write_text('dir = "~/x"\n')
    assert config.load({"XCACHE_CONFIG": "config.toml"}).dir == Path.home() / "x"
    (folder / "config.toml").write_text('dir = " "\n')
    with pytest.raises(ConfigError, match="must be a directory"):
        config.load({"XCACHE_CONFIG": "config.toml"})


def test_variables_that_are_nearly_settings_are_misspelt_and_others_are_not():
    known = dict.fromkeys(setting.variable for setting in SETTINGS)
    others = dict.fromkeys(
        ("XCACHE", "XCACHE_CONFIG", "XCACHE_FILE", "XCACHE_ADMINS", "XCACHE_ROOT", "XCACH_DIR", "_XCACHE_COMPLETE")
    )
    assert config.misspelt(known | others) == {}
    wrong = {
        "XCACHE_MAXSIZE": "XCACHE_MAX_SIZE",
        "XCACHE_MAX_SIZ": "XCACHE_MAX_SIZE",
        "XCACHE_TIME_OUT": "XCACHE_TIMEOUT",
        "XCACHE_SOKET": "XCACHE_SOCKET",
        "XCACHE_CONFG": "XCACHE_CONFIG",
        "XCACHE_PREFETCH_": "XCACHE_PREFETCH",
    }
    assert config.misspelt(known | dict.fromkeys(wrong)) == wrong


def test_the_default_socket_belongs_to_the_store(tmp_path):
    home = pwd.getpwuid(os.getuid()).pw_dir
    usual = {"HOME": home, "XDG_RUNTIME_DIR": str(tmp_path)}
    assert config.load(usual).socket == tmp_path / "xcache" / "xcached.sock"
    elsewhere = [config.load(usual | {"XCACHE_DIR": name}).socket for name in ("/a", "/b", "/a")]
    assert elsewhere[0] == elsewhere[2]
    assert len({*elsewhere, config.load(usual).socket}) == 3
    assert all(path.parent == tmp_path / "xcache" for path in elsewhere)
    assert config.load({"HOME": home, "XDG_RUNTIME_DIR": "relative"}).socket.parent.name == f"xcache-{os.getuid()}"


@pytest.mark.parametrize("length", [107, 108])
def test_a_socket_path_has_107_bytes_at_most(length):
    path = "/" + "ü" * 20 + "s" * (length - 41)
    environment = {"HOME": "/h", "XCACHE_SOCKET": path}
    if length <= MAX_SOCKET_PATH:
        assert config.load(environment).socket == Path(path)
        return
    with pytest.raises(ConfigError, match=r"environment.*at most 107 bytes"):
        config.load(environment)
    with pytest.raises(ConfigError, match=r"default.*too long for a Unix socket.*XCACHE_SOCKET"):
        config.load({"HOME": "/h", "XDG_RUNTIME_DIR": path})


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", "on"), (" ON ", "on"), ("0", "off"), ("", "off"), ("Readonly", "readonly"), ("refresh", "refresh")],
)
def test_mode(text, expected):
    assert config.mode({"XCACHE": text}) == expected


def test_mode_is_off_unless_asked_for_and_says_what_it_could_be():
    assert config.mode({}) == "off"
    with pytest.raises(ConfigError, match=r"XCACHE='yes' .environment.*1, on, 0, off, readonly or refresh"):
        config.mode({"XCACHE": "yes"})


UNITS = {"": 1, "b": 1, "k": 2**10, "KiB": 2**10, "KB": 10**3, "M": 2**20, "MB": 10**6, "G": 2**30, "TiB": 2**40}


@given(st.integers(0, 2**22), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_sizes(amount, unit, space):
    assert parsing.parse_size(f" {amount}{space}{unit} ") == amount * UNITS[unit]


@given(st.integers(0, 10**9), st.sampled_from([("ms", 0.001), ("", 1), ("s", 1), ("m", 60), ("h", 3600), ("d", 86400)]))
def test_durations(amount, unit):
    name, seconds = unit
    assert parsing.parse_duration(f"{amount}{name}") == pytest.approx(amount * seconds)
    assert parsing.parse_duration(f"{amount}{name.upper()}") == pytest.approx(amount * seconds)


@given(st.text())
def test_any_text_is_a_quantity_or_an_error_of_value(text):
    for parse in (parsing.parse_size, parsing.parse_duration):
        with contextlib.suppress(ValueError, OverflowError):
            assert parse(text) >= 0


@given(
    max_size=st.just(0) | st.integers(16384, 2**62),
    timeout=st.floats(1e-6, 1e9, allow_nan=False),
    idle_exit=st.just(0) | st.floats(1, 1e18, allow_nan=False),
    autostart=st.booleans(),
    log=st.sampled_from(["debug", "info", "warning", "error"]),
)
def test_a_daemon_is_given_the_very_settings_of_its_starter(**chosen):
    loaded = config.load({"HOME": "/h"}, **chosen)
    given = config.load({"HOME": "/elsewhere"} | loaded.as_environment())
    # These are in the home, which a daemon shares with its starter.
    homely = {"signing_key": loaded.signing_key, "trusted_keys": loaded.trusted_keys}
    assert given._replace(sources=loaded.sources, **homely) == loaded


@pytest.mark.parametrize("text", ["9" * 400, "99999999d", "1" + "0" * 17])
def test_a_timeout_that_no_socket_takes_is_refused(text):
    """socket.settimeout raises OverflowError above some centuries: in the middle of a compile."""
    try:
        seconds = config.load({"HOME": "/h", "XCACHE_TIMEOUT": text}).timeout
    except ConfigError:
        return
    assert math.isfinite(seconds)
    assert seconds < 2**63 / 1e9


@pytest.mark.parametrize(
    ("text", "expected"), [("5%", "5%"), (" 2.5 % ", "2.5%"), ("0", "0"), ("0%", "0"), ("10G", str(10 * 2**30))]
)
def test_room_to_leave(text, expected):
    assert parsing.parse_room(text) == expected


@pytest.mark.parametrize("text", ["", "%", "-5%", "91%", "5 percent", "5%%", "x", "9" * 30])
def test_room_that_cannot_be_left(text):
    with pytest.raises(ValueError):
        parsing.parse_room(text)


def test_the_limits_of_room_reach_the_daemon_as_they_are(surroundings):
    env, _ = surroundings
    given = {"MAX_ENTRIES": "1000", "MAX_AGE": "90d", "MIN_FREE": "5000000"}
    first = config.load(env | {f"XCACHE_{name}": value for name, value in given.items()})
    again = config.load(first.as_environment())
    assert (again.max_entries, again.max_age, again.min_free) == (1000, 90 * 86400.0, "5000000") == (
        first.max_entries, first.max_age, first.min_free
    )  # fmt: skip


def test_root_leaves_nothing_in_the_home_of_another_user(tmp_path):
    """sudo may keep HOME, and the user cannot change files that root makes there."""
    if os.getuid() != 0:
        pytest.skip("needs root")
    own = Path(pwd.getpwuid(0).pw_dir) / ".cache" / "xcache"
    os.chown(tmp_path, 54321, 54321)
    assert config.load({"HOME": str(tmp_path)}).dir == own
    assert config.load({"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "new" / "cache")}).dir == own
    assert config.files({"HOME": str(tmp_path)})[0].parent.parent.parent == Path(pwd.getpwuid(0).pw_dir)
    named = {"HOME": str(tmp_path), "XCACHE_DIR": str(tmp_path / "store")}
    assert config.load(named).dir == tmp_path / "store"
    os.chown(tmp_path, 0, 0)
    assert config.load({"HOME": str(tmp_path)}).dir == tmp_path / ".cache" / "xcache"


@pytest.mark.parametrize("taken", ["by a stranger", "by a file", "by a link", "there is none", "read-only"])
def test_where_the_usual_place_of_the_socket_is_not_ours_it_is_beside_the_store(place, monkeypatch, taken):
    root = place.root
    if os.getuid() != 0:
        pytest.skip("needs root to give a folder away")
    root.chmod(0o1777)
    usual = root / f"xcache-{os.getuid()}"
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    settings = {"HOME": "/h", "XCACHE_DIR": "/d"}
    assert config.load(settings).socket.parent == usual
    if taken == "by a stranger":
        usual.mkdir()
        os.chown(usual, 54321, 54321)
    elif taken == "by a file":
        usual.touch()
    elif taken == "by a link":
        usual.symlink_to("/nowhere/at/all")
    elif taken == "there is none":
        monkeypatch.setattr(tempfile, "tempdir", str(root / "none"))
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    else:
        monkeypatch.setattr(os, "access", lambda path, mode: path != root)
    assert config.load(settings).socket == Path("/d/xcached.sock")
    # A store whose path is too long for a socket keeps the usual place.
    long = "/" + "d" * 100
    assert config.load(settings | {"XCACHE_DIR": long}).socket.parent.name == usual.name


def test_a_runtime_directory_of_another_user_is_not_used(place, monkeypatch):
    root = place.root
    if os.getuid() != 0:
        pytest.skip("needs root to give a folder away")
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    theirs = root / "user"
    theirs.mkdir()
    os.chown(theirs, 54321, 54321)
    settings = {"HOME": "/h", "XDG_RUNTIME_DIR": str(theirs)}
    assert config.load(settings).socket.parent == root / f"xcache-{os.getuid()}"
    os.chown(theirs, 0, 0)
    assert config.load(settings).socket.parent == theirs / "xcache"
    # The folder there belongs to another account.
    (theirs / "xcache").mkdir()
    os.chown(theirs / "xcache", 54321, 54321)
    assert config.load(settings).socket.parent == root / f"xcache-{os.getuid()}"


@pytest.mark.parametrize(
    ("said", "meant"),
    [(" ON ", "on"), ("1", "on"), (1, "on"), (True, "on"), ("0", "off"), (False, "off"), ("Readonly", "readonly")],
)
def test_a_program_says_the_mode_as_the_variable_does(said, meant):
    assert config.mode_from_code(said) == meant


@pytest.mark.parametrize("said", ["foo", "/scratch/x", 2, None, 0.0])
def test_a_mode_that_there_is_not_is_an_error_from_code(said):
    with pytest.raises(ConfigError, match="use 1, on, 0, off, readonly or refresh; settings are given by name"):
        config.mode_from_code(said)


def test_an_account_that_there_is_not_is_named_with_its_setting_and_its_file(surroundings):
    env, files = surroundings
    files["system"].write_text('daemon_user = "nobody-of-this-name"\nmax_entries = 7')
    told = f"daemon_user='nobody-of-this-name' ({files['system']}) cannot be used: there is no account"
    # The command that makes the account reads the settings before that.
    loaded = config.load(env)
    with pytest.raises(ConfigError, match=re.escape(told)):
        loaded.daemon_uid()
    settings, problems = config.load_usable(env)
    assert [problem.startswith(told) for problem in problems] == [True]
    assert (settings.daemon_user, settings.sources["daemon_user"], settings.max_entries) == ("", "default", 7)
    assert settings.dir == Path(env["HOME"]) / ".cache" / "xcache"


def test_keys_are_beside_the_settings(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "SYSTEM_FILE", tmp_path / "system" / "config.toml")
    own = config.load({"HOME": "/h"})
    assert own.signing_key == "/h/.config/xcache/signing-key"
    assert own.trusted_keys == Path("/h/.config/xcache/trusted-keys")
    machine = config.load({"HOME": "/h"}, daemon_user=str(os.getuid()))
    assert machine.signing_key == str(tmp_path / "system" / "signing-key")
    assert machine.trusted_keys == tmp_path / "system" / "trusted-keys"
    assert config.load({"HOME": "/h", "XCACHE_SIGNING_KEY": ""}).signing_key == ""


@pytest.mark.parametrize(
    ("text", "variable"),
    [("/etc/key", ""), ("env:MY_KEY", "MY_KEY"), ("command:kms 'a b'", ""), ("", "")],
)
def test_where_a_signing_key_comes_from_reaches_the_daemon(text, variable):
    loaded = config.load({"HOME": "/h", "XCACHE_SIGNING_KEY": text})
    assert (loaded.signing_key, loaded.key_variable) == (text, variable)
    assert config.load(loaded.as_environment()).signing_key == text


@pytest.mark.parametrize(("text", "seconds"), [(None, None), ("", None), ("0", 0), ("0s", 0), ("10m", 600)])
def test_the_time_after_which_compiles_are_forbidden_may_be_none_or_zero(surroundings, text, seconds):
    env, _ = surroundings
    given = {} if text is None else {"XCACHE_ON_MISS_AFTER": text}
    settings = config.load(env | given)
    assert settings.on_miss_after == seconds
    assert config.load(env | settings.as_environment()).on_miss_after == seconds


@pytest.mark.parametrize(
    ("variables", "guards"),
    [
        ({}, False),
        ({"XCACHE_ON_MISS": "warn", "XCACHE_MAX_SIZE": "big"}, False),
        ({"XCACHE_ON_MISS": "fail", "XCACHE_MAX_SIZE": "big"}, True),
        ({"XCACHE_ON_MISS": "forbid"}, True),
        ({"XCACHE_ON_MISS_AFTER": "soon"}, True),
    ],
)
def test_a_guard_is_asked_for_also_where_it_cannot_be_understood(surroundings, variables, guards):
    env, files = surroundings
    assert config.guards(env | variables) == guards
    settings = {name.removeprefix("XCACHE_").lower(): value for name, value in variables.items()}
    files["user"].write_text("".join(f'{name} = "{value}"\n' for name, value in settings.items()))
    assert config.guards(env) == guards
