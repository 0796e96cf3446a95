"""Compile options: some must not change the key, and all others must."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxlib import xla_client
from support.seeds import field

from xcache.errors import UncacheableError
from xcache.keys.named_files import READ_BY_XLA
from xcache.keys.options import LEFT_OUT, canonical, cuda_data_dirs

MAPS = (7, 357, 500)
# Eight GPUs, four in each of two processes.
PLACES = tuple((number, number // 4, None) for number in range(8))


def options(debug: bytes = b"", build: bytes = b"", top: bytes = b"") -> bytes:
    return field(3, field(3, debug) + build) + top


def of(serialized: bytes, *, gpu: bool = False) -> bytes:
    return canonical(serialized, places=PLACES if gpu else None)


values = st.one_of(st.integers(0, 2**63 - 1), st.binary(max_size=20))
counting_fields = st.dictionaries(
    st.integers(1, 600).filter(lambda n: n not in LEFT_OUT and n not in MAPS and n not in READ_BY_XLA), values
)
ignored_fields = st.lists(st.tuples(st.sampled_from(sorted(LEFT_OUT)), values))
map_entries = st.lists(st.binary(min_size=1, max_size=8), unique=True, max_size=5)


@given(counting_fields, ignored_fields, st.randoms(use_true_random=False))
def test_dump_and_log_fields_and_the_order_of_fields_do_not_count(counting, ignored, random):
    plain = b"".join(field(n, v) for n, v in counting.items())
    mixed = [field(n, v) for n, v in counting.items()] + [field(n, v) for n, v in ignored]
    random.shuffle(mixed)
    assert of(options(b"".join(mixed))) == of(options(plain))


@given(
    counting_fields,
    st.integers(1, 600).filter(lambda n: n not in LEFT_OUT and n not in MAPS and n not in READ_BY_XLA),
    values,
    values,
)
def test_every_other_field_counts(counting, number, before, after):
    counting.pop(number, None)
    rest = b"".join(field(n, v) for n, v in counting.items())
    assert of(options(rest + field(number, before))) != of(options(rest))
    if before != after and not _same_wire_text(before, after):
        assert of(options(rest + field(number, before))) != of(options(rest + field(number, after)))


def _same_wire_text(one: int | bytes, other: int | bytes) -> bool:
    """A number and bytes under the same field: which it is, is told by its type on the wire."""
    return type(one) is not type(other) and str(one) in {str(other), other.hex() if isinstance(other, bytes) else ""}


@given(map_entries, st.randoms(use_true_random=False), st.sampled_from([357, 500]))
def test_the_order_of_a_map_does_not_count(entries, random, number):
    shuffled = list(entries)
    random.shuffle(shuffled)
    one, other = (b"".join(field(number, entry) for entry in order) for order in (entries, shuffled))
    assert of(options(one)) == of(options(other))


@given(st.binary(max_size=60))
def test_no_bytes_get_past_as_anything_but_options_or_a_refusal(content):
    try:
        of(content)
    except UncacheableError as error:
        assert "cannot be read" in str(error)


def real() -> xla_client.CompileOptions:
    made = xla_client.CompileOptions()
    made.num_replicas, made.num_partitions = 1, 2
    made.device_assignment = xla_client.DeviceAssignment.create(np.array([[0, 1]]))
    return made


def changed(made: xla_client.CompileOptions, path: str, value: object) -> xla_client.CompileOptions:
    target = made
    *owners, name = path.split(".")
    for owner in owners:
        target = getattr(target, owner)
    setattr(target, name, value)
    return made


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("num_replicas", 2),
        ("num_partitions", 4),
        ("parameter_is_tupled_arguments", True),
        ("compile_portable_executable", True),
        ("env_option_overrides", [("xla_cpu_enable_fast_math", "true")]),
        ("executable_build_options.use_spmd_partitioning", True),
        ("executable_build_options.use_shardy_partitioner", True),
        ("executable_build_options.use_auto_spmd_partitioning", True),
        ("executable_build_options.allow_spmd_sharding_propagation_to_output", [True, False]),
        ("executable_build_options.debug_options.xla_cpu_enable_fast_math", True),
        ("executable_build_options.debug_options.xla_backend_optimization_level", 1),
        ("executable_build_options.debug_options.xla_llvm_disable_expensive_passes", True),
        ("executable_build_options.debug_options.xla_disable_hlo_passes", "fusion"),
        ("device_assignment", xla_client.DeviceAssignment.create(np.array([[1, 0]]))),
    ],
)
def test_each_real_option_counts(path, value):
    assert of(changed(real(), path, value).SerializeAsString()) != of(real().SerializeAsString())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("executable_build_options.debug_options.xla_dump_to", "/somewhere"),
        ("executable_build_options.debug_options.xla_dump_hlo_as_text", True),
        ("executable_build_options.debug_options.xla_detailed_logging", False),
        ("executable_build_options.debug_options.xla_gpu_per_fusion_autotune_cache_dir", "/somewhere"),
        ("executable_build_options.debug_options.xla_gpu_kernel_cache_file", "/somewhere"),
        ("executable_build_options.debug_options.xla_gpu_cuda_data_dir", "/somewhere"),
        ("env_option_overrides", [("xla_dump_to", "/somewhere")]),
    ],
)
def test_dumping_logging_and_cache_directories_do_not_count(path, value):
    assert of(changed(real(), path, value).SerializeAsString()) == of(real().SerializeAsString())


def test_on_gpu_the_numbers_of_devices_do_not_count_but_how_many_there_are_does():
    def placed(ids: list[list[int]]) -> bytes:
        made = real()
        made.device_assignment = xla_client.DeviceAssignment.create(np.array(ids))
        return made.SerializeAsString()

    assert of(placed([[0, 1]]), gpu=True) == of(placed([[4, 5]]), gpu=True) == of(placed([[1, 0]]), gpu=True)
    assert of(placed([[0, 1]]), gpu=True) != of(placed([[0], [1]]), gpu=True)
    assert of(placed([[0, 1]])) != of(placed([[4, 5]]))


def test_on_gpu_it_counts_which_devices_are_in_one_process():
    """XLA makes other code for neighbours than for what is across the network."""

    def placed(*ids: int) -> bytes:
        made = real()
        made.num_partitions = len(ids)
        made.device_assignment = xla_client.DeviceAssignment.create(np.array([ids]))
        return of(made.SerializeAsString(), gpu=True)

    assert placed(0, 1, 4, 5) == placed(4, 7, 3, 2)
    assert len({placed(0, 1, 4, 5), placed(0, 4, 1, 5), placed(0, 4, 5, 1), placed(0, 1, 2, 3)}) == 4


@pytest.mark.parametrize("name", ["xla_gpu_load_autotune_results_from", "xla_gpu_ptx_file", "xla_some_new_flag"])
def test_the_content_of_a_file_counts_that_an_override_names(tmp_path, name):
    file = tmp_path / "named"

    def now() -> bytes:
        return of(changed(real(), "env_option_overrides", [(name, str(file))]).SerializeAsString())

    contents = set()
    for text in ("one", "two"):
        file.write_text(text)
        assert now() == now()
        contents.add(now())
    assert len(contents) == 2
    file.unlink()
    if name in READ_BY_XLA.values():
        with pytest.raises(UncacheableError, match="cannot be read"):
            now()


@pytest.mark.parametrize("number", [*READ_BY_XLA, 599])
def test_the_content_of_a_file_counts_that_a_field_names(tmp_path, number):
    file = tmp_path / "named"
    contents = set()
    for text in ("one", "two"):
        file.write_text(text)
        contents.add(of(options(field(number, str(file).encode()))))
    assert len(contents) == 2


def test_the_cuda_folder_is_found_wherever_it_is_named():
    made = changed(real(), "executable_build_options.debug_options.xla_gpu_cuda_data_dir", "/of/the/options")
    made = changed(made, "env_option_overrides", [("xla_gpu_cuda_data_dir", "/of/the/override")])
    assert cuda_data_dirs(made.SerializeAsString())[-2:] == ("/of/the/options", "/of/the/override")


_PROGRAM = """
import json
from jaxlib import xla_client
from xcache.keys import flags, options
made = options.canonical(xla_client.CompileOptions().SerializeAsString())
print(json.dumps([made.decode(), flags.collect().decode()]))
"""


def in_a_process_with(xla_flags: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the options and flags as a fresh process sees them, and the given flags that this jaxlib knows."""
    known = dict(xla_flags)
    while True:
        result = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            env=os.environ | {"XLA_FLAGS": " ".join(f"--{n}={v}" for n, v in known.items())},
            capture_output=True,
            text=True,
            timeout=60,
        )
        if result.returncode == 0:
            return json.loads(result.stdout), known
        unknown = [name for name in re.findall(r"--(\w+)=", result.stderr.partition("XLA_FLAGS:")[2]) if name in known]
        assert unknown, result.stderr
        for name in unknown:
            del known[name]


@pytest.mark.slow
def test_the_field_numbers_are_those_of_this_jaxlib():
    """Every flag that is left out is set, in a process of its own, to a value that is not its default."""
    true = dict.fromkeys(LEFT_OUT.values(), "true")
    numbers = {
        "xla_force_host_platform_device_count",
        "xla_dump_max_hlo_modules",
        "xla_debug_buffer_assignment_show_max",
    }
    flags = true | dict.fromkeys(numbers, "7")
    flags.pop("xla_gpu_experimental_autotune_cache_mode")
    plain, _ = in_a_process_with({})
    with_flags, known = in_a_process_with(flags)
    assert with_flags == plain
    # The others are those of newer versions, and those that only exist as fields.
    assert len(known) >= 30
