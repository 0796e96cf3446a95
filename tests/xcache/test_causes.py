"""The components in which a missed key differs from an entry of the same program, as causes."""

from __future__ import annotations

import pytest

from xcache.causes import differences
from xcache.keys import Key

STORED = ["k" * 64, "options", "flags", "platform", "toolchain"]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (("flags",), ["flags"]),
        # XLA puts flags into the options.
        (("options", "flags"), ["flags"]),
        (("options", "flags", "platform"), ["flags", "platform"]),
        (("options",), ["options"]),
        (("options", "platform"), ["options", "platform"]),
        # Another jaxlib has other defaults, too.
        (("options", "flags", "platform", "toolchain"), ["toolchain"]),
        ((), []),
    ],
)
def test_what_follows_from_another_component_is_no_cause(changed, named):
    components = {name: "another" if name in changed else name for name in STORED[1:]}
    assert differences(Key("", {"program": "", **components}), STORED) == named
