"""Compare two entries by the components of their keys, in the words of XLA's options and of people."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from xcache.cli import option_lines
from xcache.cli.operation_diff import Difference
from xcache.cli.output import counted, shortened

# More differences of one component than these help nobody.
_MOST_SHOWN = 8
_LONGEST_VALUE = 80
_NONE = "not set"

_FLAGS = "Give all runs the same XLA_FLAGS (and LIBTPU_INIT_ARGS)."
_OPTIONS = (
    "The compiler_options of jax.jit and compile(), XLA_FLAGS and settings of jax make them; give all runs the same."
)
# Facts of a platform, and what sets them.
_PLATFORM = {
    "platform": ("the platform is", "JAX_PLATFORMS chooses it."),
    "version": ("the version of the platform is", "A driver or plugin was upgraded, or the runs use different ones."),
    "kinds": ("the devices are", "Each kind and number of devices needs executables of its own."),
    "processes": ("the number of processes is", "Each number of processes needs executables of its own."),
    "threads": (
        "the number of threads for which XLA compiles is",
        "It is the number of processors that the process may use (taskset, cgroups, a batch system), or NPROC; give all"
        " runs the same.",
    ),
    "devices": (
        "the number of devices of the CPU client is",
        "--xla_force_host_platform_device_count in XLA_FLAGS or jax_num_cpu_devices sets it; give all runs the same.",
    ),
    "host": ("the processor", "The runs were on machines with other processors, or with other features switched on."),
    "topology": ("the topology of the devices is", "Each topology needs executables of its own."),
    "target": ("the GPU is", "Each kind of GPU needs executables of its own."),
    "memory": (
        "the memory limit of the GPU allocator is",
        "XLA_PYTHON_CLIENT_MEM_FRACTION or XLA_CLIENT_MEM_FRACTION sets it; give all runs the same.",
    ),
}
_OVERRIDE = re.compile(r"\{key: '(\w+)', value: \{\w+: (.*)\}\}")
# Facts that follow from a change of the program.
_OF_PROGRAM = re.compile(
    r"(num_partitions|num_replicas|device_assignment.*|allow_spmd_sharding_propagation_to_.*|use_\w*partition\w*|kinds)"
)
_DEVICES = "device_assignment.computation_devices"
_PLACED = (
    "Each choice and order of devices needs an executable of its own: put the arguments on the same devices in all runs"
    " (jax.device_put, the order of the devices in a mesh)."
)
_UPGRADE = "This is usual after an upgrade; what is compiled now serves the next runs."
_REBUILT = "A library was rebuilt or patched without a new version, or comes from another source."


def differences(components: Mapping[str, Mapping[str, list[str]]], *, same_program: bool = True) -> list[Difference]:
    """Return in what two entries differ; ``components`` has the lines that only one of them has, as ``lines`` gives."""
    found: list[Difference] = []
    facts = {name: [_facts(sides["here"]), _facts(sides["there"])] for name, sides in components.items()}
    # XLA's flags set options, too.
    known = {name.partition(" ")[2] for side in facts.get("flags", ()) for name in side}
    facts = {
        component: [
            {name: value for name, value in side.items()
             if name not in known and (same_program or not _OF_PROGRAM.fullmatch(name))}
            for side in sides
        ]
        for component, sides in facts.items()
    }  # fmt: skip
    is_upgrade = any("jaxlib" in side for side in facts.get("toolchain", ()))
    if is_upgrade:
        # Each jaxlib describes the processor in its own way.
        for side in facts.get("platform", ()):
            side.pop("host", None)
    for name, compare in _COMPARE.items():
        if name not in facts:
            continue
        differing = list(compare(*facts[name]))
        if name == "options" and is_upgrade and differing:
            text = f"{counted(len(differing), 'compile option')} differ, as the defaults of other versions of jaxlib do"
            differing = [Difference(text)]
        found += differing[:_MOST_SHOWN]
    return found


def lines(name: str, here: str, there: str) -> dict[str, list[str]]:
    """Return the lines that only one of two descriptions of a component has; options with XLA's names for them."""
    both = {"here": here.split("\n"), "there": there.split("\n")}
    only = {side: [line for line in both[side] if line and line not in set(both[other])]
            for side, other in (("here", "there"), ("there", "here"))}  # fmt: skip
    if name == "options":
        only = {side: [option_lines.named(line) for line in those] for side, those in only.items()}
        # The order of the devices counts, so they are told whole.
        devices = {side: [each for line in rows if (each := option_lines.named(line)).startswith(_DEVICES)]
                   for side, rows in both.items()}  # fmt: skip
        if devices["here"] != devices["there"]:
            only = {side: [each for each in those if not each.startswith(_DEVICES)] + devices[side]
                    for side, those in only.items()}  # fmt: skip
    return only


def _facts(rows: list[str]) -> dict[str, str]:
    """Return the values in lines ``name=value`` by name; those of a flag that comes twice are joined."""
    facts: dict[str, str] = {}
    for row in rows:
        name, _, value = (part.strip() for part in row.partition("="))
        if override := _OVERRIDE.fullmatch(value):
            name, value = f"{override[1]} (in compiler_options)", override[2]
        facts[name] = f"{facts[name]}, {_plain(value)}" if name in facts else _plain(value)
    return facts


def _plain(value: str) -> str:
    try:
        return str(ast.literal_eval(value))
    except (ValueError, SyntaxError):
        return value


def _pairs(here: Mapping[str, str], there: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for name in {**here, **there}:
        yield name, shortened(here.get(name, _NONE), _LONGEST_VALUE), shortened(there.get(name, _NONE), _LONGEST_VALUE)


def _of_options(here: Mapping[str, str], there: Mapping[str, str]) -> Iterator[Difference]:
    for name, mine, theirs in _pairs(here, there):
        if name == _DEVICES:
            mine, theirs = (
                shortened(", ".join(re.findall(r"\d+", side.get(name, ""))), _LONGEST_VALUE) or _NONE
                for side in (here, there)
            )
            yield Difference(f"it runs on device {mine} here, {theirs} in the stored entry", _PLACED)
            continue
        yield Difference(f"the compile option {name} is {mine} here, {theirs} in the stored entry", _OPTIONS)


def _of_flags(here: Mapping[str, str], there: Mapping[str, str]) -> Iterator[Difference]:
    for name, mine, theirs in _pairs(here, there):
        source, _, flag = name.partition(" ")
        flag = f"the flag --{flag} of {source}" if flag else f"a flag of {source}"
        yield Difference(f"{flag} is {mine} here, {theirs} in the stored entry", _FLAGS)


def _of_platform(here: Mapping[str, str], there: Mapping[str, str]) -> Iterator[Difference]:
    for name, mine, theirs in _pairs(here, there):
        if name == "threads" and "devices" in {**here, **there}:
            # XLA has a thread for each device of the CPU client.
            continue
        what, advice = _PLATFORM.get(name, (f"{name} is", ""))
        if name == "host":
            # Only digests of it are known.
            yield Difference(f"{what} is another one than that of the stored entry", advice)
        else:
            mine, theirs = (_readable(name, value) for value in (mine, theirs))
            yield Difference(f"{what} {mine} here, {theirs} in the stored entry", advice)


def _readable(name: str, value: str) -> str:
    """Return a fact of a platform as one would say it."""
    try:
        found = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value
    if name == "devices" and isinstance(found, tuple) and len(set(found)) == 1:
        return str(found[0])
    if name == "kinds" and isinstance(found, tuple):
        return ", ".join(f"{count} x {kind}" for kind, count in Counter(found).items())
    return value


def _of_toolchain(here: Mapping[str, str], there: Mapping[str, str]) -> Iterator[Difference]:
    if here.get("jaxlib") != there.get("jaxlib"):
        yield Difference(f"jaxlib is {here.get('jaxlib')} here, {there.get('jaxlib')} in the stored entry", _UPGRADE)
        return
    for name, mine, theirs in _pairs(here, there):
        digests = [len(value) == 64 for value in (mine, theirs)]
        if any(digests):
            yield Difference(f"{name} has other bytes here than in the stored entry, under the same jaxlib", _REBUILT)
        else:
            yield Difference(f"{name} is {mine} here, {theirs} in the stored entry", _UPGRADE)


_COMPARE: dict[str, Callable[[Mapping[str, str], Mapping[str, str]], Iterator[Difference]]] = {
    "toolchain": _of_toolchain,
    "flags": _of_flags,
    "options": _of_options,
    "platform": _of_platform,
}
