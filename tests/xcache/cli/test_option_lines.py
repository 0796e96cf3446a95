"""Lines of compile options are shown with the names that XLA gives its options."""

from __future__ import annotations

import struct

import pytest
from jaxlib import xla_client

from xcache.cli.option_lines import named
from xcache.keys import options


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("3.3.99=0", "xla_cpu_enable_fast_math = false"),
        ("3.1=18446744073709551615", "device_ordinal = -1"),
        ("3.3.109=2f746d70", "xla_dump_to = '/tmp'"),
        ("3.3.422=040503", "xla_cpu_experimental_ynn_fusion_type = [LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,"),
        ("3.9.1=2", "device_assignment.replica_count = 2"),
        (f"3.20={struct.pack('<f', 0.5).hex()}", "exec_time_optimization_effort = 0.5"),
        ("3.3.357=0a067274745f757312022d31", "{key: 'rtt_us', value: '-1'}"),
        ("3.3.99999=7", "option 99999 = 7"),
        ("3.9.3=0@0/0 1@0/0", "device_assignment.computation_devices = 0@0/0 1@0/0"),
        ("content of x=abc", "content of x=abc"),
        ("3.3.109=zz", "xla_dump_to = zz"),
    ],
)
def test_a_line_is_named(line, shown):
    assert shown in named(line)


def test_every_line_of_real_options_has_a_name():
    lines = options.canonical(xla_client.CompileOptions().SerializeAsString()).decode().split("\n")
    assert len(lines) > 100
    assert not [line for line in lines if "option " in named(line)]
