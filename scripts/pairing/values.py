"""Constants that are easily taken for one another: equal but of other kinds, or told apart only by their bits."""

from __future__ import annotations

from collections.abc import Iterator

from pairing.pair import Pair, program

# The name, and the constant as A and as B.
NUMBERS = (
    ("1 or 1.0", "1", "1.0"),
    ("1 or True", "1", "True"),
    ("1.0 or True", "1.0", "True"),
    ("0.0 or -0.0", "0.0", "-0.0"),
    ("0 or -0.0", "0", "-0.0"),
    ("1.0 or 1+0j", "1.0", "1+0j"),
    ("zeros of complex", "complex(0.0, 0.0)", "complex(-0.0, 0.0)"),
    ("imaginary parts", "complex(0.0, 2.0)", "complex(0.0, -2.0)"),
    ("inf or -inf", "float('inf')", "-float('inf')"),
    ("nan's payload", "np.uint32(0x7fc00001).view(np.float32)", "np.uint32(0x7fc00002).view(np.float32)"),
    ("nan's sign", "np.uint32(0x7fc00000).view(np.float32)", "np.uint32(0xffc00000).view(np.float32)"),
    ("nan in an array", "np.array([0x7fc00001], np.uint32).view(np.float32)",
     "np.array([0x7fc00002], np.uint32).view(np.float32)"),
    ("subnormal or 0", "np.float32(1e-45)", "np.float32(0)"),
    ("neighbours of float32", "np.float32(1.0)", "np.nextafter(np.float32(1), np.float32(2))"),
    ("2.0 or float32", "2.0", "np.float32(2)"),
    ("2.0 or float64", "2.0", "np.float64(2)"),
    ("float16 or float32", "np.float16(2)", "np.float32(2)"),
    ("float16 or bfloat16", "np.float16(2)", "jnp.bfloat16(2)"),
    ("float32 or complex64", "np.float32(2)", "np.complex64(2)"),
    ("2 or int32", "2", "np.int32(2)"),
    ("int8 or uint8", "np.int8(2)", "np.uint8(2)"),
    ("int8 or int32", "np.int8(2)", "np.int32(2)"),
    ("int16 or int32", "np.int16(2)", "np.int32(2)"),
    ("int32 or uint32", "np.int32(2)", "np.uint32(2)"),
    ("True or numpy's", "True", "np.int8(1)"),
    ("numpy's bool or uint8", "np.bool_(True)", "np.uint8(1)"),
    ("weak or strong", "jnp.asarray(2.0)", "jnp.float32(2.0)"),
    ("weak or strong int", "jnp.asarray(2)", "jnp.int32(2)"),
    ("Python's or weak int16", "jnp.int16(2)", "jnp.asarray(2)"),
    ("scalar or one element", "np.float32(2)", "np.array([2], np.float32)"),
    ("one element or a row", "np.array([2], np.float32)", "np.array([[2]], np.float32)"),
    ("row or column", "np.arange(8, dtype=np.float32).reshape(1, 8)", "np.arange(8, dtype=np.float32).reshape(8, 1)"),
    ("order in memory", "np.arange(64, dtype=np.float32).reshape(8, 8)",
     "np.asfortranarray(np.arange(64, dtype=np.float32).reshape(8, 8)).T"),
    ("forwards or backwards", "np.arange(8, dtype=np.float32)", "np.arange(8, dtype=np.float32)[::-1]"),
    ("broadcast or not", "np.broadcast_to(np.float32(2), (8,))", "np.broadcast_to(np.float32(3), (8,))"),
    ("last element of many", "np.arange(4096, dtype=np.float32)[-8:]", "np.append(np.arange(4095.), 0).astype('f4')[-8:]"),
    ("last bit of a large array", "np.zeros((64, 1024), np.float32).sum(0)[:8]",
     "np.append(np.zeros(7, np.float32), np.float32(1e-45))"),
    ("byte order", "np.array([1, 2] * 4, '<i4')", "np.array([1, 2] * 4, '<i4').byteswap()"),
    ("float8 kinds", "jnp.float8_e4m3fn(1.5)", "jnp.float8_e5m2(1.5)"),
    ("large integers", "2**24", "2**24 + 1"),
    ("unsigned by wrap", "np.uint8(255)", "np.int8(-1)"),
    ("subclass of float", "type('F', (float,), {})(2.0)", "type('F', (float,), {})(3.0)"),
    ("IntEnum or int", "enum.IntEnum('E', dict(a=2)).a", "3"),
)  # fmt: skip
# The constant is called c.
NUMBER_SHAPES = {
    "global": "@jit\ndef step(v): return v * c, c + jnp.int8(1)\nout = step(x)",
    "closure": "def build(k):\n    def step(v): return v * k, k + jnp.int8(1)\n    return step\nout = jit(build(c))(x)",
    "default": "def step(v, k=c): return v * k, k + jnp.int8(1)\nout = jit(step)(x)",
    "argument": "out = jit(lambda v, k: (v * k, k + jnp.int8(1)))(x, c)",
    "in a scan": "@jit\ndef step(v): return jax.lax.scan(lambda s, e: (s, e * c), 0.0, v)\nout = step(x)",
    "in a branch": "@jit\ndef step(v): return jax.lax.cond(v[0] > 0, lambda v: v * c, lambda v: v * c + 1, v)\nout = step(x)",
    "result": "@jit\ndef step(v): return jnp.asarray(c), jnp.full_like(v, 1) / c\nout = step(x)",
    "in a dataclass": "@dataclasses.dataclass\nclass D:\n    c: typing.Any\nd = D(c)\n"
    "@jit\ndef step(v): return v * d.c, d.c + jnp.int8(1)\nout = step(x)",
}
# Values that are static arguments, and a function that shows which it got. The function gets k and v.
STATIC = (
    ("1 or True", "1", "True", "v * k if type(k) is int else v * 5"),
    ("1 or 1.0", "1", "1.0", "v.astype(int) * k"),
    ("0.0 or -0.0", "0.0", "-0.0", "v * 0 + jnp.copysign(v, k)"),
    ("None or 0", "None", "0", "v if k is None else v * 2"),
    ("empty tuple or None", "()", "None", "v if k is None else v * 2"),
    ("text", "'ab'", "'ac'", "v * 2 if k == 'ab' else v * 3"),
    ("text or bytes", "'ab'", "b'ab'", "v * 2 if isinstance(k, str) else v * 3"),
    ("normal forms of a text", "'\\u00e9'", "'e\\u0301'", "v * len(k)"),
    ("surrogates", "'\\ud800'", "'\\ud801'", "v * ord(k)"),
    ("tuple of 1 or True", "(1, 2)", "(True, 2)", "v * 2 if k[0] is True else v * 3"),
    ("tuple or named tuple", "(1, 2)", "collections.namedtuple('P', 'a b')(1, 2)", "v * 2 if hasattr(k, 'a') else v * 3"),
    ("nested tuples", "((1,), 2)", "(1, (2,))", "v * 2 if isinstance(k[0], tuple) else v * 3"),
    ("frozenset", "frozenset((1, 2))", "frozenset((1, 3))", "v * sum(k)"),
    ("range", "range(2)", "range(0, 2, 1) and range(3)", "v * len(k)"),
    ("equal ranges", "range(0, 3, 2)", "range(0, 4, 2)", "v * k.stop"),
    ("slice of an array", "np.s_[1:3].start", "np.s_[2:3].start", "v[k:]"),
    ("dtype", "jnp.float32", "jnp.float16", "v.astype(k)"),
    ("dtype by name", "'float32'", "'bfloat16'", "v.astype(k)"),
    ("numpy dtype", "np.dtype('int8')", "np.dtype('uint8')", "v.astype(k)"),
    ("shape", "(2, 4)", "(4, 2)", "v.reshape(k)"),
    ("axis", "0", "-1", "jnp.stack([v, v + 1], axis=k)"),
    ("static shape of random numbers", "(3,)", "(4,)", "jax.random.normal(jax.random.key(0), k)"),
    ("enumeration", "enum.Enum('E', 'a b').a", "enum.Enum('E', 'a b').b", "v * k.value"),
    ("object with equal hash", "type('K', (), dict(__hash__=lambda s: 1, __eq__=lambda s, o: True, k=2))()",
     "type('K', (), dict(__hash__=lambda s: 1, __eq__=lambda s, o: True, k=3))()", "v * k.k"),
    ("frozen dataclass", "dataclasses.make_dataclass('D', ['k'], frozen=True)(2)",
     "dataclasses.make_dataclass('D', ['k'], frozen=True)(3)", "v * k.k"),
    ("class", "type('K', (), dict(k=2))", "type('K', (), dict(k=3))", "v * k.k"),
    ("numpy scalar or int", "np.int32(2)", "2", "jnp.int8(1) * k"),
    ("float64 or float", "np.float64(2)", "2.0", "v.astype(jnp.bfloat16) * k"),
    ("Ellipsis or None", "...", "None", "v[k] if k is ... else v[k] * 2"),
    ("module", "np", "jnp", "v * 2 if k is np else v * 3"),
    ("precision", "jax.lax.Precision.DEFAULT", "None", "v * 2 if k is None else v * 3"),
    ("big int", "2**70", "2**70 + 1", "v * (k % 1000)"),
    ("timedelta", "__import__('datetime').timedelta(1)", "__import__('datetime').timedelta(2)", "v * k.days"),
    ("uuid", "__import__('uuid').UUID(int=1)", "__import__('uuid').UUID(int=2)", "v * k.int"),
)  # fmt: skip
STATIC_SHAPES = {
    "static": "out = jit(lambda k, v: {f}, static_argnums=0)(k, x)",
    "static by name": "out = jit(lambda v, *, k: {f}, static_argnames='k')(x, k=k)",
    "global": "@jit\ndef step(v): return {f}\nout = step(x)",
    "global of a helper": "def helper(v): return {f}\n@jit\ndef step(v): return helper(v)\nout = step(x)",
    "node of a tree": "@jax.tree_util.register_pytree_node_class\nclass T:\n    def __init__(self, v, k): self.v, self.k = v, k\n"
    "    def tree_flatten(self): return (self.v,), self.k\n    @classmethod\n    def tree_unflatten(cls, k, vs): return cls(*vs, k)\n"
    "def use(v, k): return {f}\nout = jit(lambda t: use(t.v, t.k))(T(x, k))",
}
# Arguments of other types and trees.
ARGUMENTS = (
    ("dtype", "x", "x.astype(np.float16)"), ("int or float", "np.arange(8, dtype=np.int32)", "np.arange(8, dtype=np.float32)"),
    ("weak type", "jnp.asarray(2.0)", "jnp.float32(2.0)"), ("rank", "x", "x[None]"), ("shape", "x", "x[:4]"),
    ("transposed", "np.ones((2, 4), 'f4')", "np.ones((4, 2), 'f4')"), ("list or tuple", "[x, x]", "(x, x)"),
    ("key of a dictionary", "dict(a=x)", "dict(b=x)"), ("None in a tree", "(x, None)", "(x,)"),
    ("numpy's or Python's scalar", "np.float32(2)", "2.0"), ("bool or int", "True", "1"),
    ("int8 or uint8", "np.int8(3)", "np.uint8(3)"), ("key or its data", "jax.random.key(0)", "jax.random.key_data(jax.random.key(0))"),
    ("kind of a key", "jax.random.key(0, impl='rbg')", "jax.random.key(0)"),
    ("structure", "((x, x), x)", "(x, (x, x))"), ("complex", "x", "x.astype(np.complex64)"),
)  # fmt: skip


def pairs() -> Iterator[Pair]:
    """Yield all pairs of this family; some of them cannot differ where the type alone is another one."""
    for number, (name, a, b) in enumerate(NUMBERS):
        shapes = [*NUMBER_SHAPES]
        for shape in (shapes[0], shapes[1 + number % (len(shapes) - 1)], shapes[1 + (number + 3) % (len(shapes) - 1)]):
            for jit in ("jax.jit", "xcache.jit"):
                body = f"c = pick({a}, {b})\n{NUMBER_SHAPES[shape]}\n"
                yield Pair("constant", f"{name}, {shape}", program(body, jit), jit)
    for number, (name, a, b, use) in enumerate(STATIC):
        shapes = [*STATIC_SHAPES]
        for at, shape in enumerate((shapes[0], shapes[1 + number % (len(shapes) - 1)])):
            for jit in ("jax.jit", "xcache.jit") if at == 0 else ("xcache.jit",):
                body = f"k = pick({a}, {b})\n{STATIC_SHAPES[shape].format(f=use)}\n"
                yield Pair("static", f"{name}, {shape}", program(body, jit), jit)
    for name, a, b in ARGUMENTS:
        for jit in ("jax.jit", "xcache.jit"):
            body = f"given = pick({a}, {b})\nout = jit(lambda v: jax.tree.map(lambda w: w, v))(given)\n"
            yield Pair("argument", name, program(body, jit), jit)
