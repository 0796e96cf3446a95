"""Compile varied programs without a cache, and print for each xcache's key and a digest of the code.

The target is the processor, or a TPU or CUDA device that need not exist.

It reads one question a line and answers each in a process of its own, forked before XLA has read anything. With
``--once`` it answers by itself, where the environment must be set from the beginning.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
from jax import lax
from jax.experimental import topologies

from support import cgroups, keys_jax, keys_placing
from support.places import REPOSITORY
from xcache.errors import UncacheableError
from xcache.executables import serialize
from xcache.hook import jax_versions, stages, wrapper
from xcache.keys import cpu_clients, describe
from xcache.keys.protobuf import fields, varint
from xcache.recording import Ledger
from xcache.request import Outcome

LONGEST_SECONDS = 120
# XLA takes minutes to compile these.
TOO_LONG = {"tpu": {"sort", "fft", "reduce_window"}, "cuda": {"sort"}}
# The compilers must find no device anywhere.
NO_DEVICE = {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def _programs() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    line = jax.ShapeDtypeStruct((50_000,), jnp.float32)
    square = jax.ShapeDtypeStruct((160, 160), jnp.float32)
    image = jax.ShapeDtypeStruct((2, 24, 24, 8), jnp.float32)
    kernel = jax.ShapeDtypeStruct((3, 3, 8, 16), jnp.float32)
    whole = jax.ShapeDtypeStruct((4_000,), jnp.int32)
    # How long a key is, and whether it has a type of its own, depends on jax's options.
    key = jax.eval_shape(lambda: jax.random.PRNGKey(0))
    return {
        "cumsum": (lambda x: jnp.cumsum(x * 2), (line,)),
        "cumprod": (lambda x: jnp.cumprod(x + 1), (line,)),
        "reduce_window": (lambda x: lax.reduce_window(x, 0.0, lax.add, (8,), (2,), "SAME"), (line,)),
        "normal": (lambda k: jax.random.normal(k, (30_000,)), (key,)),
        "dot": (lambda x, y: jnp.tanh(x @ y) + x, (square, square)),
        "conv": (
            lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
            (image, kernel),
        ),
        "sort": (lambda x: jnp.sort(x), (line,)),
        "top_k": (lambda x: lax.top_k(x, 5), (whole,)),
        "scan": (lambda x: lax.scan(lambda c, y: (jnp.sin(c) + y, c * y), 0.0, x)[1], (line,)),
        "while": (lambda x: lax.while_loop(lambda v: v.sum() < 9.0, lambda v: v * 1.5 + 1, x), (square,)),
        "fft": (lambda x: jnp.abs(jnp.fft.fft(x)), (line,)),
        "lapack": (lambda x: jnp.linalg.cholesky(x @ x.T), (square,)),
        "scatter": (lambda x, i: x.at[i].add(1.0)[i[::-1]], (line, whole)),
        "softmax": (lambda x: jax.nn.softmax(x, axis=-1).sum(0) / jnp.exp(x).mean(), (square,)),
    }


class _Recording:
    """Stands in for the cache: compiles everything, and notes the key and the code."""

    def __init__(self, platform: str) -> None:
        self.last: dict[str, Any] = {}
        self.ledger = Ledger("on", lambda _: None)
        self._platform = platform

    def check_guard(self) -> None:
        """Do nothing: nothing is forbidden."""

    def count_uncacheable(self, reason: str) -> None:
        self.last = {"no key": reason}

    def get_or_compile(
        self,
        compile_now: Callable[[], Any],
        make_request: Callable[[], Any],
        as_without: Callable[[], Any],
        *,
        has_another: bool,
    ) -> Outcome:
        try:
            key = make_request().key
            self.last = {"key": key.digest, "components": dict(key.components)}
        except Exception as error:  # noqa: BLE001 - whatever the product would not cache
            self.last = {"no key": str(error) if isinstance(error, UncacheableError) else repr(error)}
        executable = compile_now()
        self.last |= _code(executable, self._platform)
        return Outcome(executable, "miss", 0.0)


def _code(executable: Any, platform: str) -> dict[str, str]:
    """Return a digest of the optimized HLO, and one that adds object code, thunks and memory layout."""
    text = "\n".join(module.to_string() for module in executable.hlo_modules())
    # The source's lines, in each operation and in tables of their own.
    text = re.sub(r", metadata=\{[^{}]*\}|^(File|Function|Stack)\w+\n(?:.+\n)+", "", text, flags=re.MULTILINE)
    found = hashlib.sha256(text.encode())
    hlo = found.hexdigest()[:24]
    raw = serialize(getattr(executable, "client", None), executable)
    length, after = varint(raw, 0)
    if platform != "cpu":
        code = _tpu_code(raw[after + length :]) if platform == "tpu" else _cuda_code(raw[after + length :])
        return {"hlo": hlo, "code": hashlib.sha256(code).hexdigest()[:24]}
    for content in (raw[after + length :], raw):
        try:
            outer: dict[int, Any] = dict(fields(content))
            parts = list(fields(outer[1]))
        except (IndexError, ValueError, KeyError, TypeError):
            continue
        # Object files and symbols are made on several threads, in any order. The rest are buffers and thunks.
        for part in sorted(repr((number, _anonymous(value))) for number, value in parts if number != 1):
            found.update(part.encode())
        return {"hlo": hlo, "code": found.hexdigest()[:24]}
    raise ValueError("a serialized executable of another form")


def _tpu_code(content: bytes) -> bytes:
    """Return the code for a TPU without the HLO behind it, which has module numbers."""
    length, after = varint(content, 0)
    return content[after : after + length]


def _cuda_code(content: bytes) -> bytes:
    """Return everything but the HLO, which has source lines and all options; one Riegeli chunk, Snappy-compressed."""
    file: Any = dict(fields(content))[1]
    header, chunk = file[64:104], file[104:]
    # Another header begins each 64 KiB.
    if header[24:25] != b"r" or chunk[:1] != b"s" or len(file) >= 2**16:
        raise ValueError("a serialized executable of another form")
    length, after = varint(chunk, 1)
    sizes, records = _unsnapped(chunk[after : after + length]), _unsnapped(chunk[after + length :])
    found, at, start = [], 0, 0
    while at < len(sizes):
        length, at = varint(sizes, at)
        found.append(_without_hlo(records[start : start + length]))
        start += length
    return repr(found).encode()


def _unsnapped(data: bytes) -> bytes:
    """Decompress the content that follows its size."""
    import cramjam

    _, after = varint(data, 0)
    return bytes(cramjam.snappy.decompress_raw(data[after:]))


def _without_hlo(record: bytes) -> Any:
    """Return a record's fields but the first, or a long text that is a record of its own."""
    try:
        return [(number, value) for number, value in fields(record) if number != 1]
    except (IndexError, ValueError):
        return record


def _anonymous(message: Any) -> Any:
    """Remove module numbers from a message: XLA counts the modules that a process has compiled."""
    try:
        found = list(fields(message)) if isinstance(message, bytes) else []
    except (IndexError, ValueError):
        found = []
    if not found or any(number == 0 for number, _ in found):
        return message
    values: dict[int, Any] = dict(found)
    # A thunk's name, its module's, and the module's number unless that is 0.
    if {1, 2} <= {*values} <= {1, 2, 3} and isinstance(values[2], bytes) and values[2].startswith(b"jit_"):
        return values[1], values[2]
    return [(number, _anonymous(value)) for number, value in found]


def _devices(platform: str, topology: str) -> Any:
    if platform == "cpu":
        with cpu_clients.watched():
            return jax.devices()
    if platform == "tpu":
        return topologies.get_topology_desc("v5e:2x2", "tpu").devices
    target = (REPOSITORY / "scripts" / "h100.textproto").read_text()
    return topologies.get_topology_desc("h100", "cuda", topology=topology, target_config=target).devices


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Compile as asked, each program once for each set of compiler options."""
    platform = question.get("platform", "cpu")
    os.environ.update(question.get("environ", {}))
    if question.get("affinity"):
        os.sched_setaffinity(0, question["affinity"])
    if question.get("cgroup"):
        cgroups.enter(question["cgroup"])
    for name, value in question.get("config", {}).items():
        keys_jax.update(name, value)
    recording = _Recording(platform)
    # xcache caches nothing for a device that is not there, but its keys are to be those for one that is.
    found = jax_versions.probe()._replace(only_compiles=lambda _: False)
    surroundings = describe.Surroundings(
        Path(jaxlib.__file__).parent, jaxlib.__version__, Path(question["memo"]), found.cuda_folder
    )
    compiler = found.compiler
    compiler.compile_or_get_cached = wrapper.wrap(
        compiler.compile_or_get_cached, found, recording, surroundings, stages.Stages(lambda: recording.ledger)
    )
    with surroundings.watching_libtpu():
        os.environ.update(question.get("environ_meanwhile", {}))
        devices = _devices(platform, question.get("topology", "1x1x1"))
    os.environ.update(question.get("environ_after", {}))
    if question.get("affinity_after"):
        os.sched_setaffinity(0, question["affinity_after"])
    programs = _programs()
    names = [name for name in question.get("programs") or programs if name not in TOO_LONG.get(platform, ())]
    if question.get("reversed"):
        names = names[::-1]
    for name in question.get("run_before", ()):
        function, shapes = programs[name]
        jax.block_until_ready(jax.jit(function)(*(jnp.zeros(shape.shape, shape.dtype) for shape in shapes)))
    lowered: dict[str, Any] = {}
    for name in names:
        try:
            lowered[name] = keys_placing.lowered(*programs[name], devices, question)
        except Exception as error:  # noqa: BLE001 - what jax refuses makes no code
            lowered[name] = error
    answers = []
    for options in question.get("options", [{}]):
        results = {}
        for name, program in lowered.items():
            recording.last = {}
            try:
                if isinstance(program, Exception):
                    raise program
                program.compile(compiler_options=options or None)
            except Exception as error:  # noqa: BLE001 - a combination that XLA refuses makes no code
                recording.last = {"refused": f"{type(error).__name__}: {error}"[:200]}
            results[name] = recording.last
        answers.append(results)
    return {"answers": answers}


def _serve() -> None:
    for line in sys.stdin:
        with tempfile.TemporaryFile() as result:
            child = os.fork()
            if not child:
                signal.alarm(LONGEST_SECONDS)
                os.dup2(os.open(os.devnull, os.O_RDWR), 1)
                os.dup2(1, 2)
                try:
                    said = answer(json.loads(line))
                except Exception as error:  # noqa: BLE001 - settings that jax or XLA refuse
                    said = {"refused": f"{type(error).__name__}: {error}"[:200]}
                result.write(json.dumps(said).encode())
                result.flush()
                os._exit(0)
            _, status = os.waitpid(child, 0)
            result.seek(0)
            text = result.read().decode() or json.dumps({"refused": f"ended with {status}"})
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1:] == ["--once"]:
        sys.stdout.write(json.dumps(answer(json.loads(sys.stdin.readline()))) + "\n")
    else:
        _serve()
