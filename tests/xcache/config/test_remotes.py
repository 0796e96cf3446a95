"""The addresses of remote stores and bundles: one that cannot be used is named, without its credentials."""

from __future__ import annotations

import pytest

from xcache.config import config
from xcache.config.remotes import masked
from xcache.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "culprit"),
    [
        ("file:///a https://c/x?header=Secret:1&readonly=2", "the option readonly=2 is not understood"),
        ("file:///a ftp://me:Secret@b", "ftp://***@b is not understood"),
        ("file:///a file:///a", "file:///a comes twice"),
        ("file:///a?readonly=1&writeonly=1", "file:///a is both readonly and writeonly"),
        ("file:///a?rate=1", "the option rate=1 is not understood"),
    ],
)
def test_the_wrong_one_of_several_is_named_without_secrets(tmp_path, text, culprit):
    with pytest.raises(ConfigError) as raised:
        config.load({"HOME": str(tmp_path), "XCACHE_REMOTE": text})
    assert f"cannot be used: {culprit}; it must be" in str(raised.value)
    assert "Secret" not in str(raised.value)


def test_the_wrong_one_of_several_bundles_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be used: b\.xcb is not understood"):
        config.load({"HOME": str(tmp_path), "XCACHE_BUNDLES": "/a.xcb b.xcb"})


def test_names_passwords_and_headers_are_masked():
    told = masked("https://me:word@cache/x?header=Authorization:Bearer&readonly=1&header=b:c redis://:pw@host/0")
    assert told == "https://***@cache/x?header=***&readonly=1&header=*** redis://***@host/0"
