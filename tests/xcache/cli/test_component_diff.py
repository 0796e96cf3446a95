"""Components of two keys are told apart in words, with advice."""

from __future__ import annotations

import numpy as np
import pytest
from jaxlib import xla_client

from xcache.cli import component_diff
from xcache.keys import options


def on(*devices):
    wanted = xla_client.CompileOptions()
    wanted.device_assignment = xla_client.DeviceAssignment.create(np.array(devices, "int32")[:, None])
    return options.lines_of(wanted.SerializeAsString()).decode()


@pytest.mark.parametrize(
    ("here", "there", "text"),
    [
        ((2,), (0,), "it runs on device 2 here, 0 in the stored entry"),
        ((3, 2, 1, 0), (0, 1, 2, 3), "it runs on device 3, 2, 1, 0 here, 0, 1, 2, 3 in the stored entry"),
    ],
    ids=["another", "another order"],
)
def test_devices_are_named(here, there, text):
    lines = component_diff.lines("options", on(*here), on(*there))
    (difference,) = component_diff.differences({"options": lines})
    assert difference.text == text
    assert "same devices" in difference.advice


def test_an_option_that_a_flag_sets_is_told_as_the_flag_and_another_one_is_told_too():
    flags = {"here": ["XLA_FLAGS xla_x='true'"], "there": []}
    options = {"here": ["xla_x = true", "num_replicas = 2"], "there": ["xla_x = false", "num_replicas = 1"]}
    of_flag = {side: rows[:1] for side, rows in options.items()}
    (difference,) = component_diff.differences({"options": of_flag, "flags": flags})
    assert "the flag --xla_x of XLA_FLAGS is true here" in difference.text
    texts = [each.text for each in component_diff.differences({"options": options, "flags": flags})]
    assert [text.partition(" is ")[0] for text in texts] == [
        "the flag --xla_x of XLA_FLAGS", "the compile option num_replicas"
    ]  # fmt: skip
    (difference,) = component_diff.differences({"options": of_flag})
    assert "the compile option xla_x" in difference.text


def test_a_number_of_devices_is_not_told_as_one_of_threads_too():
    sides = {"here": ["devices=4", "threads=4"], "there": ["devices=1", "threads=2"]}
    (difference,) = component_diff.differences({"platform": sides})
    assert "the number of devices of the CPU client is 4 here" in difference.text
