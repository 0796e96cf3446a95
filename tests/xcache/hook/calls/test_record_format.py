"""Records of computations: what is read is what was written, or nothing is written."""

from __future__ import annotations

import contextlib
import tracemalloc
import zlib

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from xcache.hook.calls import record_format
from xcache.hook.structure.encoding import CannotSkipError

mesh = Mesh(np.array(jax.devices()[:1]), ("a",))
rows = NamedSharding(mesh, P("a"))


def lowered(function, *arguments, **options):
    traced = jax.jit(function, **options).trace(*arguments)
    return traced.lower()._lowering, traced.out_tree


CASES = {
    "scalar": lambda: lowered(lambda x: x + 1, 1.0),
    "kept": lambda: lowered(lambda x, y: x, np.ones(3), np.ones(2), keep_unused=True),
    "dropped": lambda: lowered(lambda x, y: x, np.ones(3), np.ones(2)),
    "donated": lambda: lowered(lambda x: x + 1, np.ones(3, np.float32), donate_argnums=0),
    "key": lambda: lowered(lambda key: jax.random.split(key), jax.random.key(0)),
    "small float": lambda: lowered(lambda x: x.astype(jnp.bfloat16), np.ones(3)),
    "sharded": lambda: lowered(lambda x: x * 2, np.ones((2, 2)), in_shardings=rows, out_shardings=rows),
    "placed": lambda: lowered(lambda x: x * 2, jax.device_put(jnp.ones(2), jax.devices()[0])),
    "options": lambda: lowered(lambda x: x, 1.0, compiler_options={"xla_cpu_enable_fast_math": True}),
}


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_a_computation_comes_back(make):
    computation, tree = make()
    # Only messages of ahead-of-time calls need it.
    computation.compile_args["all_args_info"] = None
    written = record_format.encode(computation, tree, [])
    record = record_format.decode(written)
    assert record.tree([]) == tree
    again = record_format.make_computation(record, computation._hlo)
    assert record_format.encode(again, tree, []) == written
    for name in ("global_in_avals", "global_out_avals", "in_shardings", "out_shardings", "kept_var_idx", "backend"):
        assert again.compile_args[name] == computation.compile_args[name]
    assert again._donated_invars == computation._donated_invars
    assert again.compile().unsafe_call


def test_what_has_an_effect_or_an_unknown_type_is_not_written():
    computation, tree = lowered(lambda x: jax.debug.print("{}", x), 1.0)
    with pytest.raises(CannotSkipError):
        record_format.encode(computation, tree, [])
    computation, tree = CASES["scalar"]()
    computation.compile_args["more"] = object()
    with pytest.raises(CannotSkipError, match="unknown type"):
        record_format.encode(computation, tree, [])


def test_a_record_of_another_format_or_of_devices_that_are_not_here_is_not_read():
    computation, tree = CASES["placed"]()
    version, *others = msgpack.unpackb(zlib.decompress(record_format.encode(computation, tree, [])))
    with pytest.raises(ValueError, match="format"):
        record_format.decode(zlib.compress(msgpack.packb([version + 1, *others])))
    elsewhere = msgpack.packb([version, *others]).replace(
        msgpack.packb(["device", "cpu", 0]), msgpack.packb(["device", "cpu", 99])
    )
    with pytest.raises(ValueError, match="no device 99"):
        record_format.decode(zlib.compress(elsewhere))


MAPS = b"\xdd\x00\x00\xea\x60" + b"\x81\xa0\xc0" * 60_000


@pytest.mark.parametrize("content", [bytes(256 * 1024**2), b"\x9f" + MAPS * 15, MAPS], ids=["zeros", "maps", "few"])
def test_a_small_record_takes_little_memory(content):
    record = zlib.compress(content, 9)
    tracemalloc.start()
    try:
        with contextlib.suppress(ValueError):
            record_format.decode(record)
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024**2
    finally:
        tracemalloc.stop()
