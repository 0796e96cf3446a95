"""Keys as text, what a signature covers, and where the private key comes from."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import time

import pytest
from support.places import REPOSITORY
from support.signing import OURS, STRANGER

from xcache.errors import ConfigError, SigningKeyError, XcacheError
from xcache.wire import signatures, signing_key
from xcache.wire.signatures import PRIVATE, PUBLIC, parse_private, parse_public, sign, verify


def test_a_signature_is_of_one_content_one_purpose_and_one_key():
    made = sign(OURS, b"parcel", b"content")
    assert len(made) == signatures.SIGNATURE_BYTES
    assert verify(OURS.public, b"parcel", b"content", made)
    assert not verify(OURS.public, b"parcel", b"contenT", made)
    assert not verify(OURS.public, b"bundle", b"content", made)
    # The same bytes, cut elsewhere.
    assert not verify(OURS.public, b"parcelc", b"ontent", made)
    assert not verify(STRANGER.public, b"parcel", b"content", made)
    for wrong in (b"", made[:-1], made + b"\0", bytes(64), b"\xff" * 64):
        assert not verify(OURS.public, b"parcel", b"content", wrong)


def test_every_bit_of_a_signature_counts():
    made = sign(OURS, b"parcel", b"content")
    for bit in range(8 * len(made)):
        altered = bytearray(made)
        altered[bit // 8] ^= 1 << bit % 8
        assert not verify(OURS.public, b"parcel", b"content", bytes(altered))


def test_keys_as_text_come_back():
    name, text = str(OURS.public).split()
    assert parse_public(name, text) == OURS.public
    assert parse_private(OURS.line()).public == OURS.public
    assert parse_private(OURS.line().split()[1]).public == OURS.public._replace(name="unnamed")
    assert len(OURS.public.id) == 16
    assert OURS.public.id != STRANGER.public.id
    new = signatures.new_key("ci@host-1.example")
    assert parse_private(new.line()).public == new.public != signatures.new_key("ci@host-1.example").public


def test_a_private_key_shows_itself_nowhere():
    secret = OURS.line().split(":")[1].strip()
    for shown in (repr(OURS), str(OURS), f"{OURS}", str(OURS.public), repr(vars(OURS).get("public"))):
        assert secret not in shown


@pytest.mark.parametrize("name", ["", "a b", "-x", "#x", "ü", "x" * 101, "a\nb", "a:b"])
def test_a_name_that_a_list_could_not_have(name):
    with pytest.raises(ConfigError, match="cannot be the name of a key"):
        signatures.new_key(name)
    assert parse_public(name, OURS.public.text) is None


def spellings() -> dict[str, str]:
    good = OURS.public.text.removeprefix(PUBLIC)
    # The last digit before '=' has two spare bits.
    other = good[:-2] + chr(ord(good[-2]) + 1) + "="
    assert base64.b64decode(other) == OURS.public.raw
    return {
        "spare bits": PUBLIC + other,
        "no end": PUBLIC + good[:-1],
        "too long": PUBLIC + base64.b64encode(OURS.public.raw + b"\0").decode(),
        "too short": PUBLIC + base64.b64encode(OURS.public.raw[:-1]).decode(),
        "blank": f"{PUBLIC} {good}",
        "other kind": "ssh-ed25519:" + good,
        "upper case": PUBLIC.upper() + good,
        "url": PUBLIC + "-" + good[1:],
        "not ASCII": PUBLIC + "é" + good[1:],
        "nothing": PUBLIC,
        "empty": "",
        "private": OURS.line().split()[1],
    }


@pytest.mark.parametrize("case", spellings())
def test_there_is_one_spelling_of_each_key(case):
    assert parse_public("ours", spellings()[case]) is None


@pytest.mark.parametrize(
    "text", ["", "\n", "x", PRIVATE, f"{PRIVATE}AAAA", f"a b {OURS.line()}", f"-x {OURS.line()[5:]}", str(OURS.public)]
)
def test_what_is_no_private_key_is_refused_and_not_repeated(text):
    with pytest.raises(SigningKeyError) as caught:
        parse_private(text)
    assert not text.strip() or text.strip() not in str(caught.value) or text in ("x", PRIVATE)


# Where it comes from.


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "signing-key"
    path.write_text(OURS.line())
    path.chmod(0o600)
    return path


def test_a_file_a_variable_and_a_command(key_file):
    assert signing_key.load(str(key_file)).public == OURS.public
    assert signing_key.load("env:MINE", environ={"MINE": OURS.line()}).public == OURS.public
    assert signing_key.load(f"command:cat '{key_file}'").public == OURS.public
    key_file.chmod(0o400)
    assert signing_key.load(str(key_file)).public == OURS.public


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o644, 0o666])
def test_a_file_that_others_may_open_is_refused(key_file, mode):
    key_file.chmod(mode)
    with pytest.raises(SigningKeyError, match=rf"{key_file}: others may open it .its mode is {mode:04o}.: chmod 600"):
        signing_key.load(str(key_file))


def test_a_file_of_another_user_is_refused(key_file):
    with pytest.raises(SigningKeyError, match="belongs to another user"):
        signing_key.load(str(key_file), trusted=(54321,))


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, reason in (("pipe", "not a file"), ("", "not a file|Is a directory"), ("none", "No such file")):
        with pytest.raises(SigningKeyError, match=reason):
            signing_key.load(str(tmp_path / name))
    (tmp_path / "long").write_text("x" * 10_000)
    (tmp_path / "long").chmod(0o600)
    with pytest.raises(SigningKeyError, match="too long"):
        signing_key.load(str(tmp_path / "long"))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("env:MINE", "the variable MINE: it is not set"),
        ("command:/no/such/program", "the command /no/such/program: No such file"),
        ("command:false", "the command false: it ended with status 1"),
        ("command:echo hello", "the command echo: it is no private key"),
        ("command:yes", "the command yes: it is too long"),
    ],
)
def test_what_gives_no_key_says_so(monkeypatch, source, reason):
    monkeypatch.setattr(signing_key, "_COMMAND_SECONDS", 2.0)
    with pytest.raises(SigningKeyError, match=reason):
        signing_key.load(source, environ={})


@pytest.mark.parametrize("program", ["sleep 60", "sh -c 'sleep 60 & echo x; wait'", "sh -c 'exec >&-; sleep 60'"])
def test_a_command_that_does_not_end_is_ended_with_all_that_it_started(monkeypatch, program):
    monkeypatch.setattr(signing_key, "_COMMAND_SECONDS", 0.3)
    start = time.monotonic()
    with pytest.raises(SigningKeyError, match="did not end within"):
        signing_key.load(f"command:{program}")
    assert time.monotonic() - start < 10


def test_without_the_library_it_is_named(monkeypatch):
    # An import of None raises ImportError.
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    for ask in (lambda: signatures.new_key("x"), lambda: verify(OURS.public, b"", b"", bytes(64))):
        with pytest.raises(XcacheError, match=r"pip install 'jax-xcache\[remote\]'"):
            ask()


def test_a_program_that_uses_the_cache_imports_neither_cryptography_nor_messages_of_the_command_line():
    check = "import sys, xcache.plugin, xcache.hook.skipping, xcache.hook.wrapper, xcache.cache\n"
    check += "import xcache.wire.trusted_keys, xcache.wire.signing_key\n"
    check += "print([each for each in sys.modules if each.startswith(('cryptography', 'xcache.wire.commands'))])"
    said = subprocess.run(
        [sys.executable, "-c", check], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True
    )
    assert said.stdout == "[]\n"
