"""The questions of the keys campaign: everything that could change what XLA makes of a program."""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import random
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jaxlib import xla_client

from support import keys_jax, keys_sources
from support.keys_child import NO_DEVICE
from xcache.keys.flags import _counts
from xcache.keys.protobuf import field_at

# These are enough where the key is known to differ.
FEW = ["cumsum", "dot", "while"]
# Compiler options, and variables, that are tried together; of variables in no more groups than this.
TOGETHER, MANY, GROUPS = 10, 300, 25
# The package each platform's compiler comes in.
COMPILERS = {"cpu": "jaxlib", "tpu": "libtpu", "cuda": "jax_plugins.xla_cuda12"}
# Arrays with more dimensions than one, and programs that differ when they are cut.
LAID_OUT = ["dot", "conv", "while", "lapack", "softmax"]
SPREAD = ["cumsum", "normal", "dot", "sort", "while", "scatter", "softmax"]
# Programs with loops, random numbers, precision, indices and promotion, which jax's options can change.
TRACED = ["cumsum", "normal", "dot", "while", "scatter", "softmax"]
# Numbers of one order of n dimensions among all; the first is the usual one.
ORDERS = (None, 0, 1, 7, 23, "auto")
# The variable that limits a run to some kinds of questions.
ONLY = "KEYS_CAMPAIGN_ONLY"


def anywhere() -> dict[str, dict[str, Any]]:
    """Surroundings of a program beside flags and settings, for every platform."""
    return {
        "again": {},
        "in a fresh process": {"fresh": True},
        "one processor": {"affinity": sorted(os.sched_getaffinity(0))[:1]},
        "7 threads": {"environ": {"PJRT_NPROC": "7"}},
        "OMP_NUM_THREADS": {"environ": {"OMP_NUM_THREADS": "1"}, "fresh": True},
        "in the other order": {"reversed": True},
        "donated": {"jit": {"donate_argnums": 0}},
        "arguments kept": {"jit": {"keep_unused": True}},
        "other language and time": {"environ": {"LANG": "tr_TR.UTF-8", "TZ": "Asia/Tokyo"}, "fresh": True},
        "another hash seed": {"environ": {"PYTHONHASHSEED": "7"}, "fresh": True},
    }


def limits(folders: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Cgroups with limits, where they could be made."""
    return {f"in a cgroup with a limit of {kind}": {"cgroup": folder} for kind, folder in folders.items()}


def elsewhere(platform: str) -> dict[str, dict[str, Any]]:
    """The same for a device that need not be there."""
    found = anywhere()
    if platform == "tpu":
        found["the second device"] = {"device": 1}
        name = "xla_tpu_scoped_vmem_limit_kib"
        flags, none = ({"LIBTPU_INIT_ARGS": text} for text in (f"--{name}=1024", ""))
        # XLA cannot compile all of them for a device with so little memory.
        for_them = {"programs": ["dot", "while"]}
        found["libtpu's flags"] = for_them | {"environ": flags}
        found["libtpu's flags afterwards"] = for_them | {"environ_after": flags}
        found["libtpu's flags taken back"] = for_them | {"environ": flags, "environ_after": none}
        meanwhile = {"environ_meanwhile": flags, "environ_after": none}
        found["libtpu's flags while it starts"] = for_them | meanwhile
        from_variable = {"LIBTPU_INIT_ARGS": f"--tryfromenv={name}"}
        found["libtpu's flags from a variable"] = for_them | {"environ": from_variable | {f"FLAGS_{name}": "1024"}}
        found["libtpu's flags from a variable that is not set"] = for_them | {"environ": from_variable}
        # libtpu splits at spaces only, takes off two dashes at most, and gives a flag without a value the next word.
        for way, text in {
            "after a space": f"--undefok=a --{name}=1024",
            "after a tab": f"--undefok=a\t--{name}=1024",
            "with two dashes": f"--undefok=-{name} --{name}=1024",
            "with three dashes": f"--undefok=-{name} ---{name}=1024",
            "from a file": "--flagfile=/dev/null",
            "as the value of another": f"--xla_jf_dump_to --{name}=1024",
        }.items():
            found[f"libtpu's flags {way}"] = for_them | {"environ": {"LIBTPU_INIT_ARGS": text}}
    else:
        found["no tools on the PATH"] = {"environ": {"PATH": "/nonexistent"}}
    return found


def surroundings() -> dict[str, dict[str, Any]]:
    """The same for the processor."""
    usable = sorted(os.sched_getaffinity(0))
    devices = {count: {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"} for count in (2, 3, 8)}
    threads = (1, 2, 3, 16, 255, 256, 300, 600)
    found = anywhere()
    found |= {f"{count} devices": {"environ": environ} for count, environ in devices.items()}
    found |= {f"{number} threads": {"environ": {"PJRT_NPROC": str(number)}} for number in threads}
    found |= {
        "jax_num_cpu_devices": {"config": {"jax_num_cpu_devices": 8}},
        "the second device": {"environ": devices[2], "device": 1},
        "one processor afterwards": {"affinity_after": usable[:1]},
        "PJRT_NPROC afterwards": {"environ_after": {"PJRT_NPROC": "7"}},
        "NPROC": {"environ": {"NPROC": "5"}},
        "after others": {"run_before": ["dot", "sort", "lapack"]},
        "flags taken back": {
            "environ": {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"},
            "environ_after": {"XLA_FLAGS": ""},
        },
        "flags afterwards": {"environ_after": {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}},
    }
    return found


def of_debug_options() -> dict[str, dict[str, Any]]:
    """Each field of DebugOptions, through XLA_FLAGS and through compiler_options."""
    serialized = xla_client.CompileOptions().SerializeAsString()
    options = keys_sources.debug_options(Path(jaxlib.__file__).parent, field_at(serialized, (3, 3)))
    found: dict[str, dict[str, Any]] = {}
    pairs = [(option.name, value) for option in options for value in option.values]
    for name, value in pairs:
        text = str(value).lower() if isinstance(value, bool) else str(value)
        question: dict[str, Any] = {"environ": {"XLA_FLAGS": f"--{name}={text}"}}
        # Where it counts, the key differs whatever the code.
        found[f"flag {name}={text}"] = question | ({"programs": FEW} if _counts(name) else {})
    for at in range(0, len(pairs), TOGETHER):
        some = pairs[at : at + TOGETHER]
        # And at the end none: LLVM's options are global, and nothing of them may stay behind.
        options = [{name: value} for name, value in some]
        found[f"compiler_options {some[0][0]} to {some[-1][0]}"] = {"options": [*options, {}]}
    return found


def of_layouts() -> dict[str, dict[str, Any]]:
    """Other orders of the dimensions, of arguments and results; chosen by XLA, too."""
    found: dict[str, dict[str, Any]] = {}
    for given, wanted in itertools.product(ORDERS, ORDERS):
        if (given, wanted) != (None, None):
            found[f"layouts {given} to {wanted}"] = {"layouts": [given, wanted], "programs": LAID_OUT}
    found["layouts, donated"] = {"layouts": [1, 1], "programs": LAID_OUT, "jit": {"donate_argnums": 0}}
    return found


def of_memory() -> dict[str, dict[str, Any]]:
    """Arguments in other kinds of memory."""
    kinds = sorted({memory.kind for memory in jax.devices("cpu")[0].addressable_memories()})
    return {f"memory {kind}": {"memory": kind, "programs": LAID_OUT} for kind in kinds}


def of_meshes(platform: str, seed: int) -> dict[str, dict[str, Any]]:
    """Meshes of other sizes and shapes, with their devices in other orders; what is in them, spread in other ways."""
    number = 8 if platform == "cpu" else 4
    devices = {"cpu": {"environ": {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}}}
    base = devices.get(platform, {"topology": f"1x1x{number}"}) | {"programs": SPREAD if platform == "cpu" else FEW}
    shapes = [shape for shape in ([1], [2], [4], [8], [2, 2], [2, 4], [4, 2], [1, 8], [2, 2, 2]) if fits(shape, number)]
    found: dict[str, dict[str, Any]] = {}
    for shape in shapes:
        for name, order in _orders(math.prod(shape), number, seed).items():
            text = "x".join(map(str, shape))
            found[f"mesh {text} {name}"] = base | {"mesh": {"shape": shape, "order": order}}
    for shape in ([number], [2, number // 2]):
        mesh = {"shape": shape, "order": list(range(number))}
        text = "x".join(map(str, shape))
        for way in ("last", "joined", "none"):
            found[f"mesh {text}, spread {way}"] = base | {"mesh": mesh, "spread": way}
        for way in ("first", "last", "joined", "none"):
            found[f"mesh {text}, results {way}"] = base | {"mesh": mesh, "results_spread": way}
        found[f"mesh {text}, explicit"] = base | {"mesh": mesh | {"explicit": True}}
        found[f"mesh {text}, donated"] = base | {"mesh": mesh, "jit": {"donate_argnums": 0}}
        gspmd = {"config": {"jax_use_shardy_partitioner": not jax.config.jax_use_shardy_partitioner}}
        found[f"mesh {text}, other partitioner"] = base | {"mesh": mesh} | gspmd
    if platform == "cpu":
        fewer = {"environ": {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}}
        found["mesh 4 of 4"] = base | fewer | {"mesh": {"shape": [4], "order": [0, 1, 2, 3]}}
    return found


def fits(shape: list[int], number: int) -> bool:
    """Return whether a mesh of this shape can be made of so many devices."""
    return math.prod(shape) <= number


def _orders(size: int, number: int, seed: int) -> dict[str, list[int]]:
    """Return orders of so many devices."""
    usual = list(range(size))
    found = {
        "as numbered": usual,
        "reversed": usual[::-1],
        "rotated": [*usual[1:], *usual[:1]],
        "the last": list(range(number - size, number)),
        "by chance": random.Random(f"{seed} {size}").sample(range(number), size),
    }
    return {name: order for at, (name, order) in enumerate(found.items()) if order not in list(found.values())[:at]}


def of_jax() -> dict[str, dict[str, Any]]:
    """Each option of jax's configuration, with each value that it can have."""
    return {
        f"jax {name}={value}": {"config": {name: value}, "programs": TRACED}
        for name, values in keys_jax.options().items()
        for value in values
    }


def of_environment(platform: str) -> dict[str, dict[str, Any]]:
    """Variables by the hundred, since hardly any of them is ever read."""
    compiler = Path(importlib.util.find_spec(COMPILERS[platform]).submodule_search_locations[0])
    names = keys_sources.environment_names(Path(jaxlib.__file__).parent, compiler)
    not_here = {"XLA_FLAGS", "PJRT_NPROC", *NO_DEVICE}
    names = [name for name in names if not name.lower().startswith("jax_") and name not in not_here]
    found = {}
    step = max(MANY, len(names) // GROUPS)
    for at in range(0, len(names), step):
        some = names[at : at + step]
        for value in ("1", "0"):
            question = {"environ": dict.fromkeys(some, value), "fresh": True}
            found[f"variables {some[0]} to {some[-1]} = {value}"] = question
    return found


def candidates(platform: str, seed: int) -> dict[str, dict[str, dict[str, Any]]]:
    """All questions but the surroundings, by their kind."""
    flags = of_debug_options()
    counted = {name for name, question in flags.items() if "programs" in question or "options" in question}
    found = {
        "uncounted": {name: question for name, question in flags.items() if name not in counted},
        "variables": of_environment(platform),
        "layouts": of_layouts(),
        "memory": of_memory() if platform == "cpu" else {},
        "meshes": of_meshes(platform, seed),
        "jax": of_jax(),
        "flags": {name: question for name, question in flags.items() if name in counted},
    }
    only = os.environ.get(ONLY, ",".join(found)).split(",")
    return {kind: questions for kind, questions in found.items() if kind in only}


def in_turn(kinds: dict[str, dict[str, Any]], seed: int) -> list[str]:
    """Return the names in an order by chance, of each kind one in turn; at the end the flags that are in the key.

    Only in what is not in the key can equal keys hide other code.
    """
    chance = random.Random(seed)
    mixed = {kind: chance.sample(sorted(names), len(names)) for kind, names in kinds.items()}
    last = mixed.pop("flags", [])
    turns = itertools.chain.from_iterable(itertools.zip_longest(*mixed.values()))
    return [*(name for name in turns if name is not None), *last]
