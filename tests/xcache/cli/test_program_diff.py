"""Programs that differ in one way are told apart in that way, with advice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xcache.cli import program_diff
from xcache.keys import program, stablehlo

ONES = jnp.ones((4, 4))


def bytecode_of(function, *arguments, **options):
    module = jax.jit(function, **options).lower(*arguments).compiler_ir("stablehlo")
    return program.canonical(
        module, keep_locations=False, ignore_partitioning_pointer=False, callbacks_hold_pointers=False
    )


def found(one: bytes, other: bytes) -> list[program_diff.Difference]:
    return program_diff.differences(program_diff.read(one), program_diff.read(other))


def scaled(factor):
    return bytecode_of(lambda x: x * factor, ONES)


def at_precision(precision):
    with jax.default_matmul_precision(precision):
        return bytecode_of(lambda x: x @ x, ONES)


def of_type(dtype):
    return bytecode_of(jnp.sin, ONES.astype(dtype))


def of_shape(*shape):
    return bytecode_of(jnp.sin, jnp.ones(shape))


def returning(function):
    return bytecode_of(function, ONES)


def split_into(count):
    # As jax does where a program asks outside of jit: all of it makes random numbers.
    text = """
module @jit__threefry_split {
  func.func public @main() {
    %%0 = stablehlo.iota dim = 0 : tensor<%dxui32> loc("jit(_threefry_split)/iota")
    return loc("jit(_threefry_split)/return")
  }
}"""
    return stablehlo.bytecode(stablehlo.parse(text % count))


def on_mesh(count):
    text = """
module @jit_f attributes {mhlo.num_partitions = %d : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["x"=%d]>
  func.func public @main(%%x: tensor<4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> tensor<4xf32> {
    return %%x : tensor<4xf32>
  }
}"""
    return stablehlo.bytecode(stablehlo.parse(text % (count, count)))


@pytest.mark.parametrize(
    ("here", "there", "text", "advice"),
    [
        (
            lambda: of_shape(4, 2),
            lambda: of_shape(8, 2),
            "argument 0 is f32[4,2] here, f32[8,2] in the stored program",
            "needs an executable of its own",
        ),
        (
            lambda: bytecode_of(jnp.sin, jnp.ones(4, "complex64")),
            lambda: bytecode_of(jnp.sin, jnp.ones(8, "complex64")),
            "argument 0 is c64[4] here, c64[8] in the stored program",
            "needs an executable of its own",
        ),
        (
            lambda: of_type("bfloat16"),
            lambda: of_type("float32"),
            "argument 0 is bf16[4,4] here, f32[4,4] in the stored program",
            "needs an executable of its own",
        ),
        (
            lambda: scaled(2.5),
            lambda: scaled(3.5),
            "a constant of type f32[] is 2.5 here, 3.5 in the stored program",
            "Nothing else differs. A number",
        ),
        (lambda: at_precision("highest"), lambda: at_precision("default"), "dot_general", "matmul_precision"),
        (
            lambda: bytecode_of(jnp.sin, ONES, donate_argnums=0),
            lambda: bytecode_of(jnp.sin, ONES),
            "argument 0 is donated here, but not in the stored program",
            "donate_argnums",
        ),
        (
            lambda: bytecode_of(lambda x, y: x + y, ONES, ONES),
            lambda: bytecode_of(lambda x: x + x, ONES),
            "it has 2 arguments here, 1 in the stored program",
            "structure of the arguments",
        ),
        (
            lambda: bytecode_of(jnp.sin, ONES),
            lambda: bytecode_of(jnp.cos, ONES),
            "sine : f32[4,4] here",
            "the function itself does something else",
        ),
        (lambda: on_mesh(2), lambda: on_mesh(1), "2 devices here", "Each mesh and number of devices"),
        (
            lambda: returning(lambda x: {"sine": x}),
            lambda: returning(lambda x: {"sine": x, "argument": x}),
            "it has 1 result here, 2 in the stored program (only there: result['argument'])",
            "another structure",
        ),
        (lambda: split_into(3), lambda: split_into(2), "gives ui32[3] here, ui32[2]", "such as a shape"),
    ],
    ids=[
        *("shape", "complex", "dtype", "number", "precision", "donation", "arguments", "operation", "mesh"),
        *("results", "size of random numbers"),
    ],
)
def test_the_difference_is_named(here, there, text, advice):
    first, *_ = found(here(), there())
    assert text in first.text
    assert advice in first.advice


def divided(count, of_mesh):
    partitions, replicas = (count, 1) if of_mesh else (1, count)
    kind = f"tensor<{8 // count}xf32>"
    text = f"""
module @jit_f attributes {{mhlo.num_partitions = {partitions} : i32, mhlo.num_replicas = {replicas} : i32}} {{
  func.func public @main(%x: {kind}) -> {kind} {{ return %x : {kind} }}
}}"""
    return stablehlo.bytecode(stablehlo.parse(text))


@pytest.mark.parametrize("of_mesh", [True, False])
def test_shapes_that_follow_from_the_number_of_devices_get_no_advice(of_mesh):
    devices, shapes = found(divided(2, of_mesh), divided(4, of_mesh))
    assert "it runs on 2 devices here, on 4 devices" in devices.text
    assert "f32[4] here, f32[2]" in shapes.text
    assert (bool(devices.advice), shapes.advice) == (True, "")


def test_a_mesh_without_axes_is_none():
    """The type of a random key brings one into the program."""
    text = """
module @jit_f {
  %s
  func.func public @main(%%x: tensor<4xf32>) -> tensor<4xf32> {
    return %%x : tensor<4xf32>
  }
}"""
    mesh, without = (stablehlo.bytecode(stablehlo.parse(text % each)) for each in ("sdy.mesh @empty = <[]>", ""))
    assert not any("mesh" in each.text for each in found(mesh, without))


def test_the_number_is_named_that_ends_a_loop():
    def repeated(length):
        return bytecode_of(lambda x: jax.lax.scan(lambda carry, _: (jnp.sin(carry), None), x, None, length)[0], ONES)

    (difference,) = found(repeated(5), repeated(7))
    assert "ends a loop" in difference.advice


def drawn(*shape, implementation="threefry2x32"):
    key = jax.random.key(0, impl=implementation)
    return bytecode_of(lambda key: jax.random.normal(key, shape), key)


def sampled(seed):
    return bytecode_of(lambda x: x + jax.random.normal(jax.random.key(seed), (4, 4)), ONES)


def looped(number):
    """Return a loop that uses a number, and does not end by it."""
    return bytecode_of(lambda x: jax.lax.fori_loop(0, 3, lambda _, y: jnp.sin(y) * number, x), ONES)


def multiplied(shape, precision):
    return bytecode_of(lambda x: jnp.dot(x, jnp.ones(shape), precision=precision), ONES)


def ordered(*names):
    def function(x):
        for name in names:
            x = getattr(jnp, name)(x)
        return x

    return bytecode_of(function, ONES)


# Programs that differ in a way which looks like another one, and the words that must not be said of them.
NEAR_MISSES = {
    "size of random numbers": (lambda: drawn(40, 45), lambda: drawn(79, 80), ("prng", "threefry_p", "bucket", "Pad")),
    "odd size of random numbers": (lambda: drawn(7), lambda: drawn(8), ("prng", "threefry_p", "bucket", "Pad")),
    "implementation in the code": (
        lambda: bytecode_of(lambda x: x + jax.random.normal(jax.random.key(0, impl="rbg"), x.shape), ONES),
        lambda: sampled(0),
        ("prng", "threefry_p"),
    ),
    "dropout that is new": (lambda: sampled(0), lambda: scaled(2.0), ("prng", "threefry_p", "number")),
    "rank": (lambda: of_shape(4), lambda: of_shape(4, 1), ("dtype", "Convert", "Pad", "dimension")),
    "size that is reduced": (
        lambda: bytecode_of(jnp.mean, jnp.ones(48)),
        lambda: bytecode_of(jnp.mean, jnp.ones(32)),
        ("Pad", "bucket", "batch"),
    ),
    "large number": (lambda: scaled(2147483647), lambda: scaled(2147483520), ("seed",)),
    "number near the time": (lambda: scaled(1790000000.0), lambda: scaled(1780000000.0), ("time",)),
    "number and operation": (
        lambda: bytecode_of(lambda x: jnp.sin(x) * 2.0, ONES),
        lambda: bytecode_of(lambda x: jnp.cos(x) * 3.0, ONES),
        ("Nothing else", "inject_hyperparams"),
    ),
    "number and operands": (
        lambda: bytecode_of(lambda x, y: (x - y) * 2.0, ONES, ONES),
        lambda: bytecode_of(lambda x, y: (y - x) * 3.0, ONES, ONES),
        ("Nothing else", "inject_hyperparams"),
    ),
    "number and name of a result": (
        lambda: bytecode_of(lambda x: {"loss": x * 2.0}, ONES),
        lambda: bytecode_of(lambda x: {"error": x * 3.0}, ONES),
        ("Nothing else", "inject_hyperparams"),
    ),
    "number in a loop": (lambda: looped(2.0), lambda: looped(3.0), ("scan", "ends a loop")),
    "precision and size": (
        lambda: multiplied((4, 5), "highest"),
        lambda: multiplied((4, 6), "default"),
        ("Nothing else", "jax_default_matmul_precision"),
    ),
    "64 bits in the code": (
        lambda: bytecode_of(lambda x: x.astype(jnp.bfloat16).sum(), ONES),
        lambda: bytecode_of(lambda x: x.astype(jnp.float16).sum(), ONES),
        ("x64", "JAX_ENABLE"),
    ),
    "64 bits of the input": (lambda: of_64_bits(), lambda: of_type("float32"), ("x64", "JAX_ENABLE", "Convert")),
    "other code of the same operations": (
        lambda: ordered("sin", "cos", "tanh"),
        lambda: ordered("cos", "sin", "tanh"),
        ("The order comes from",),
    ),
}


def of_64_bits():
    with jax.enable_x64(True):
        return of_type("float64")


@pytest.mark.parametrize("way", NEAR_MISSES)
def test_what_only_looks_like_a_cause_is_not_named(way):
    here, there, never = NEAR_MISSES[way]
    said = " ".join(f"{each.text} {each.advice}" for each in found(here(), there()))
    assert said
    assert [word for word in never if word in said] == []


def test_a_size_within_the_function_is_told_by_what_it_returns():
    first, *_ = found(drawn(40, 45), drawn(79, 80))
    assert first.text == "result 0 is f32[40,45] here, f32[79,80] in the stored program"
    assert "a static argument (such as a shape)" in first.advice


def test_a_program_that_only_has_another_name_is_told_from_another_program():
    def before(x):
        return jnp.sin(x)

    def after(x):
        return jnp.sin(x)

    programs = [program_diff.read(bytecode_of(each, ONES)) for each in (before, after, jnp.cos, before)]
    assert program_diff.is_renamed(programs[0], programs[1])
    assert not program_diff.is_renamed(programs[0], programs[2])
    assert not program_diff.is_renamed(programs[0], programs[3])


@pytest.mark.parametrize(
    ("here", "there", "text"),
    [(2j, 3j, "(0,2) here, (0,3)"), (np.nan, -np.inf, "nan here, -inf"), (1e9 + 0.25, 1e9 + 0.5, "1000000000.25 here")],
    ids=["complex", "not finite", "long"],
)
def test_unusual_numbers_are_named(here, there, text):
    def added(number):
        with jax.enable_x64(True):
            return bytecode_of(lambda x: x + number, jnp.ones(4, "complex64" if isinstance(number, complex) else None))

    (difference,) = found(added(here), added(there))
    assert text in difference.text
    assert "A number that is built into the program" in difference.advice


def test_the_operations_of_other_shapes_are_not_listed():
    assert not any("sine" in each.text for each in found(of_shape(4, 2), of_shape(8, 2)))


def calling(*names):
    """Return a program that calls functions of these names."""
    functions = [
        f"  func.func private @{name}(%x: tensor<4xf32>) -> tensor<4xf32> {{ return %x : tensor<4xf32> }}"
        for name in names
    ]
    calls = [
        f"    %{number + 1} = func.call @{name}(%{number}) : (tensor<4xf32>) -> tensor<4xf32>"
        for number, name in enumerate(names)
    ]
    main = "  func.func public @main(%0: tensor<4xf32>) -> tensor<4xf32> {"
    end = f"    return %{len(names)} : tensor<4xf32>\n  }}"
    return stablehlo.bytecode(stablehlo.parse("\n".join(["module @jit_f {", main, *calls, end, *functions, "}"])))


def test_symbols_that_were_only_renumbered_should_not_have_missed():
    (difference,) = found(calling("relu", "relu_0"), calling("relu_1", "relu_3"))
    assert "only the numbers in the names of inner functions differ" in difference.text
    assert "should not have missed" in difference.advice


def test_inner_functions_that_were_renamed_are_named():
    (difference,) = found(calling("relu", "gelu"), calling("relu", "silu"))
    assert "gelu here, silu before" in difference.text
    assert "costs one compile" in difference.advice


def test_a_part_that_is_not_compared_is_admitted():
    (difference,) = found(scaled(2.5), scaled(2.5))
    assert difference.text == "no part of the two programs differs"


def test_many_arguments_that_changed_alike_are_one_difference():
    def summed(size):
        return bytecode_of(lambda *values: sum(value.sum() for value in values), *[jnp.ones((size, 3))] * 5)

    (difference,) = found(summed(4), summed(8))
    assert difference.text == "5 arguments (0, 1, 2 and 2 more) differ in a dimension: 4 here, 8 in the stored program"
    assert difference.arguments == ()


def test_the_arguments_that_differ_are_known_by_number_and_name():
    programs = (
        bytecode_of(lambda scale, tokens, mask: (tokens * scale + mask).sum(), 2.0, jnp.ones((4, size)), jnp.ones(size))
        for size in (8, 9)
    )
    here, there = (program_diff.read(each) for each in programs)
    named = [each._replace(name=name) for each, name in zip(here.arguments, ("scale", "tokens", "mask"), strict=True)]
    (difference,) = program_diff.of_arguments(named, there.arguments)
    assert difference.arguments == ((1, "tokens"), (2, "mask"))


def test_long_programs_are_compared_from_where_they_differ():
    def chain(count, factor):
        def function(x):
            for _ in range(count):
                x = jnp.sin(x)
            return x * factor

        return bytecode_of(function, ONES)

    (difference,) = found(chain(2000, 2.0), chain(2000, 3.0))
    assert difference.text == "a constant of type f32[] is 2 here, 3 in the stored program"
    *_, last = found(chain(3000, 2.0), bytecode_of(lambda x: x - 1, ONES))
    assert "only the first operations that differ were compared" in last.text


@pytest.mark.parametrize(
    ("dtype", "here", "there"),
    [
        ("float32", "[0.5, 1.5, 2.5, 3.5, ...]", "[0.5, 1.5, -7, 3.5, ...]"),
        ("int32", "[0, 1, 2, 3, ...]", "[0, 1, -7, 3, ...]"),
        ("uint8", "[0, 1, 2, 3, ...]", "[0, 1, 249, 3, ...]"),
    ],
)
def test_a_large_array_is_shown_by_its_first_values(dtype, here, there):
    values = (np.arange(400.0) + (0.5 if dtype == "float32" else 0)).astype(dtype)
    others = values.copy()
    others[2] = 249 if dtype == "uint8" else -7
    (difference,) = found(*(bytecode_of(lambda x, each=each: x[0, 0] + each, ONES) for each in (values, others)))
    assert f"{here} here, {there} in the stored program" in difference.text
    assert "An array that is built into the program" in difference.advice


def test_large_arrays_that_begin_alike_are_said_to_differ_elsewhere():
    values = np.arange(400, dtype=np.float32)
    others = values.copy()
    others[399] = 7
    (difference,) = found(*(bytecode_of(lambda x, each=each: x[0, 0] + each, ONES) for each in (values, others)))
    assert "has other values here" in difference.text
