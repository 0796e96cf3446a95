"""Compiling through jaxlib: the example of the documentation, and every form a program may have."""

from __future__ import annotations

import json
import textwrap

from xcache import direct

FORMS = """
import io, json, jax, numpy as np, xcache
from jax import export
x = np.arange(4.0, dtype=np.float32)
lowered = jax.jit(lambda v: v * 2 + 1).lower(x)
module = lowered.compiler_ir("stablehlo")
bytecode = io.BytesIO(); module.operation.write_bytecode(file=bytecode)
portable = export.export(jax.jit(lambda v: v * 2 + 1))(x).mlir_module_serialized
device = jax.devices()[0]
for program in (module, str(module), bytecode.getvalue(), portable):
    executable = xcache.compile(device.client, program, [device])
    (result,) = executable.execute_sharded([jax.device_put(x)]).disassemble_into_single_device_arrays()
    assert np.asarray(result[0]).tolist() == [1, 3, 5, 7]
    xcache.stats()
print(json.dumps([xcache.stats().hits, xcache.stats().misses, xcache.stats().errors]))
"""


def example() -> str:
    text = direct.__doc__ or ""
    return textwrap.dedent(text[text.index("    import jax") : text.index("(jax is there")])


def test_the_example_runs_and_hits_the_second_time(place):
    for hits in (0, 1):
        result = place.run(example() + "\nprint(xcache.stats().hits)")
        assert result.stdout.splitlines() == ["[0. 2. 4.]", str(hits)], result.stderr


def test_every_form_of_a_program(place):
    place.run(FORMS)
    hits, misses, errors = json.loads(place.run(FORMS).stdout)
    assert (hits, misses, errors) == (4, 0, {})


def test_off_means_off(place):
    result = place.run(example() + "\nprint(xcache.stats().requests)", XCACHE="0")
    assert result.stdout.splitlines() == ["[0. 2. 4.]", "0"]
    assert not place.dir.exists()


def test_the_jaxlib_way_and_the_jax_way_share_statistics_and_daemon(place):
    source = example() + "\njax.jit(lambda v: v - 1)(jax.numpy.ones(3))\nprint(xcache.stats().requests)"
    result = place.run(source, XCACHE="1")
    assert int(result.stdout.splitlines()[1]) >= 3, result.stderr


def test_a_program_that_cannot_be_compiled_raises_what_jaxlib_raises(place):
    source = example().replace("stablehlo.add", "stablehlo.no_such_operation")
    result = place.run(source)
    assert result.returncode == 1
    assert "MLIRError" in result.stderr
