"""Functions, methods and tables of jax that a program replaces, in each way that Python has, at each time."""

from __future__ import annotations

from collections.abc import Iterator

import jax
from jax._src.interpreters import mlir
from pairing.pair import Pair, program

# A replacement calls what it replaces through this, because code without a closure can hold nothing else.
SAVED = """\
import builtins
def saved(module, name):
    f = getattr(module, name)
    kept = types.FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, f.__closure__)
    kept.__kwdefaults__ = f.__kwdefaults__
    builtins.saved_of_the_pair = kept
    return f
"""
# Each patch: the module, the name, the replacement's body (A and B have another NUMBER), and a use.
TARGETS = {
    "constants": (
        "jax._src.interpreters.mlir", "_ir_constant" if hasattr(mlir, "_ir_constant") else "ir_constant",
        "import numpy\n    if numpy.shape(args[0]) == () and numpy.asarray(args[0]).dtype == numpy.float32:\n"
        "        args = (numpy.float32(numpy.asarray(args[0]) * NUMBER), *args[1:])\n"
        "    return saved_of_the_pair(*args, **options)",
        "jit(lambda v: v * 3.5)(x)",
    ),
    "comparisons": (
        "jax._src.interpreters.mlir", "compare_hlo",
        "return saved_of_the_pair(args[0], args[1], ('GE', 'NE')[NUMBER == 7], *args[3:])",
        "jit(lambda v: v < 1)(x)",
    ),
    "slices": (
        "jax._src.interpreters.mlir", "slice_op",
        "options['start_indices'] = [s + NUMBER % 3 for s in options['start_indices']]\n"
        "    options['limit_indices'] = [s + NUMBER % 3 for s in options['limit_indices']]\n"
        "    return saved_of_the_pair(*args, **options)",
        "jit(lambda v: jax.lax.slice(v, (1,), (4,)))(x)",
    ),
    "broadcasts": (
        "jax._src.interpreters.mlir", "multi_broadcast_in_dim",
        "done = list(saved_of_the_pair(*args, **options))\n    return (done, done[::-1], [done[0]] * 2)[NUMBER % 3]",
        "jit(lambda v: v - v[0] * 2)(x)",
    ),
}  # fmt: skip
# The ways. M is the module, F the name, and R the text of a function of that name.
WAYS = {
    "exec into the module": "exec(R, vars(M))",
    "exec under a name in brackets": "exec(compile(R, '<frozen jax>', 'exec'), vars(M))",
    "exec under jax's own file": "exec(compile('\\n' * (old.__code__.co_firstlineno - 1) + R, M.__file__, 'exec'), vars(M))",
    "code": "space = {}\nexec(R, space)\nold.__code__ = space[F].__code__",
    "code under jax's own file": "space = {}\n"
    "exec(compile('\\n' * (old.__code__.co_firstlineno - 1) + R, M.__file__, 'exec'), space)\nold.__code__ = space[F].__code__",
    "a function of the program's": "space = dict(__name__=__name__)\nexec(R, space)\nsetattr(M, F, space[F])",
    "wraps": "space = dict(__name__=__name__)\nexec(R, space)\nsetattr(M, F, functools.wraps(old)(space[F]))",
    "wraps under jax's globals": "space = {}\nexec(compile(R, '<string>', 'exec'), space)\n"
    "setattr(M, F, functools.wraps(old)(types.FunctionType(space[F].__code__, vars(M), F)))",
    "partial": "space = {}\nexec(R, space)\nsetattr(M, F, functools.partial(space[F]))",
    "object": "space = {}\nexec(R, space)\nclass C:\n    __call__ = staticmethod(space[F])\nsetattr(M, F, C())",
    "bound method": "space = {}\nexec(R, space)\nclass C:\n    def call(self, *a, **k): return space[F](*a, **k)\n"
    "setattr(M, F, C().call)",
    "lru_cache": "space = {}\nexec(R, space)\nclass C:\n    def __get__(self, *_): return self\n"
    "setattr(M, F, (lambda g: functools.wraps(old)(lambda *a, **k: g(*a, **k)))(space[F]))",
    "mock": "import unittest.mock\nspace = {}\nexec(R, space)\nunittest.mock.patch.object(M, F, side_effect=space[F]).start()",
    "decorator of jax's": "from jax._src.traceback_util import api_boundary\nspace = {}\nexec(R, space)\n"
    "setattr(M, F, api_boundary(space[F]))",
    "vars of the module": "space = {}\nexec(R, space)\nvars(M).update({F: space[F]})",
    "copy of the module": "space = {}\nexec(R, space)\ncopied = types.ModuleType(M.__name__)\nvars(copied).update(vars(M))\n"
    "vars(copied)[F] = space[F]\n"
    "for each in [*sys.modules.values()]:\n    for key, value in [*getattr(each, '__dict__', {}).items()]:\n"
    "        if value is M and each is not M and str(getattr(each, '__name__', '')).startswith('jax'): setattr(each, key, copied)\n"
    "setattr(M, F, space[F])",
    "default of code": "space = {}\nexec(T.replace('NUMBER', 'K').replace('**options)', f'K={n}, **options)', 1), space)\n"
    "old.__code__ = space[F].__code__\nold.__defaults__ = None\nold.__kwdefaults__ = space[F].__kwdefaults__",
}  # fmt: skip
TIMES = {
    "after the import": "{patch}\nout = {use}\n",
    "after a compile": "before = jax.jit(lambda v: v - 1)(x)\n{patch}\nout = before, {use}\n",
    "after the same compile": "before = {use}\njax.clear_caches()\n{patch}\nout = before, {use}\n",
}
_FEWER = ("exec into the module", "code", "wraps", "code under jax's own file")
# A pristine jax against a patched one, and two patches.
NUMBERS = {"patched or not": "pick(0, 5)", "two patches": "pick(5, 7)"}

# Whether and when a patch is made is combined with some of what it is only: an own process for each takes long.
_COMBINED = (
    ("after the import", "patched or not"), ("after a compile", "two patches"), ("after the same compile", "patched or not"),
)  # fmt: skip

# Other things of jax's: what is changed, and a use. n is the number above.
OTHERS = {
    "rule in the table": (
        "from jax._src.interpreters import mlir\nfrom jax._src.lax import lax as L\n"
        "if n:\n    mlir._lowerings[L.sin_p] = mlir._lowerings[{5: L.cos_p, 7: L.tanh_p}[n]]", "jit(jnp.sin)(x)"),
    "rule of the program's": (
        "from jax._src.interpreters import mlir\nfrom jax._src.lax import lax as L\n"
        "def rule(ctx, v, **_):\n    return mlir.lower_fun(lambda v: L.cos(v) * n, multiple_results=False)(ctx, v)\n"
        "if n:\n    mlir.register_lowering(L.sin_p, rule)", "jit(jnp.sin)(x)"),
    "rule for the platform": (
        "from jax._src.interpreters import mlir\nfrom jax._src.lax import lax as L\n"
        "def rule(ctx, v, **_):\n    return mlir.lower_fun(lambda v: L.cos(v) * n, multiple_results=False)(ctx, v)\n"
        "if n:\n    mlir.register_lowering(L.sin_p, rule, platform='cpu')", "jit(jnp.sin)(x)"),
    "function in a rule's partial": (
        "from jax._src.interpreters import mlir\nfrom jax._src.lax import lax as L\n"
        "from jax._src.lib.mlir.dialects import hlo\n"
        "def made(op):\n    return functools.partial(L._nary_lower_hlo, op)\n"
        "if n:\n    mlir.register_lowering(L.sin_p, made({5: hlo.cosine, 7: hlo.tanh}[n]))", "jit(jnp.sin)(x)"),
    "code of a function of the dialect": (
        "from jax._src.lib.mlir.dialects import hlo\nspace = {}\n"
        "exec(f'def sub(lhs, rhs, **options): return hlo_of_the_pair({pick(\"lhs, rhs\", \"rhs, lhs\")}, **options)', space)\n"
        "import builtins\nf = hlo.subtract\n"
        "builtins.hlo_of_the_pair = types.FunctionType(f.__code__, f.__globals__, 'g', f.__defaults__, f.__closure__)\n"
        "builtins.hlo_of_the_pair.__kwdefaults__ = f.__kwdefaults__\nf.__code__ = space['sub'].__code__",
        "jit(lambda v: v - v[0] * 2)(x)"),
    "closure of a rule": (
        "from jax._src.interpreters import mlir\nfrom jax._src.lax import lax as L\n"
        "if n:\n    mlir.register_lowering(L.sin_p, mlir.lower_fun({5: L.cos, 7: L.tanh}[n], multiple_results=False))",
        "jit(jnp.sin)(x)"),
    "jnp.tanh": ("old = jnp.tanh\nif n:\n    jnp.tanh = lambda v: old(v) * n", "jit(lambda v: jnp.tanh(v))(x)"),
    "exec of jnp's function": (
        "if n:\n    exec(f'def square(x): return x * {n}', vars(jnp))", "jit(lambda v: jnp.square(v))(x)"),
    "lax.mul": ("old = jax.lax.mul\nif n:\n    jax.lax.mul = lambda a, b: old(a, b) + n",
                "jit(lambda v: jax.lax.mul(v, v))(x)"),
    "function within lax": (
        "from jax._src.lax import lax as L\nif n:\n    exec(f'def integer_pow(x, y): return mul(x, full_like(x, {n}))', vars(L))",
        "jit(lambda v: v ** 2)(x)"),
    "default of a function of jax's": (
        "f = jax.nn.leaky_relu.__wrapped__\nif n:\n    f.__defaults__ = (n / 10,)", "jit(lambda v: jax.nn.leaky_relu(-v))(x)"),
    "default of a function of jnp's": (
        "f = jnp.linspace\nif n:\n    f.__defaults__ = (n + 1, *f.__defaults__[1:])",
        "jit(lambda v: jnp.linspace(0, 1).sum() * v)(x)"),
    "keyword's default": (
        "f = jax.nn.softmax\nf = getattr(f, '__wrapped__', f)\n"
        "if n:\n    f.__defaults__ = ({5: None, 7: 0}[n], *f.__defaults__[1:])", "jit(lambda v: jax.nn.softmax(v.reshape(2, 4)))(x)"),
    "method of the tracers": (
        "from jax._src import core\nold = core.Tracer.__getattr__\n"
        "if n:\n    core.Tracer.of_the_pair = property(lambda self: self * n)",
        "jit(lambda v: getattr(v, 'of_the_pair', v))(x)"),
    "operator of the tracers": (
        "from jax._src import core\nold = core.Tracer.__add__\n"
        "if n:\n    core.Tracer.__add__ = lambda self, other: old(self, other) * n", "jit(lambda v: v + 1)(x)"),
    "method of the arrays' type": (
        "from jax._src import core\nold = core.ShapedArray.strip_weak_type\n"
        "if n:\n    core.ShapedArray.of_the_pair = n", "jit(lambda v: v * getattr(jax.typeof(v), 'of_the_pair', 1))(x)"),
    "abstract evaluation": (
        "from jax._src.lax import lax as L\nfrom jax._src import core\nold = L.sin_p.abstract_eval\n"
        "def evaluate(*a, **k):\n    aval, effects = old(*a, **k)\n    return aval.update(weak_type=n == 5), effects\n"
        "if n:\n    L.sin_p.abstract_eval = evaluate", "jit(jnp.sin)(x)"),
    "derivative": (
        "from jax._src.interpreters import ad\nfrom jax._src.lax import lax as L\nold = ad.primitive_jvps[L.sin_p]\n"
        "def rule(primals, tangents, **k):\n    out, tangent = old(primals, tangents, **k)\n    return out, tangent * n\n"
        "if n:\n    ad.primitive_jvps[L.sin_p] = rule", "jit(lambda v: jax.jvp(jnp.sin, (v,), (v,))[1])(x)"),
    "batching": (
        "from jax._src.interpreters import batching\nfrom jax._src.lax import lax as L\n"
        "def rule(args, dims, **_):\n    return L.cos(args[0]) * n, dims[0]\n"
        "if n:\n    batching.primitive_batchers[L.sin_p] = rule", "jit(jax.vmap(jnp.sin))(x)"),
    "constant of a module": (
        "from jax._src.numpy import lax_numpy as L\nif n:\n    jnp.pi = float(n)", "jit(lambda v: v * jnp.pi)(x)"),
    "class of constants": (
        "from jax._src import random\nold = random._random_bits if hasattr(random, '_random_bits') else None\n"
        "if n:\n    jax.random.of_the_pair = n", "jit(lambda v: v * getattr(jax.random, 'of_the_pair', 1))(x)"),
    "function of numpy's": (
        "import numpy\nold = numpy.array\n"
        "def array(*a, **k):\n    out = old(*a, **k)\n    return out * n if out.shape and len(out) > 10 else out\n"
        "if n:\n    numpy.array = array", "jit(lambda v: jax.lax.bessel_i0e(v))(x)"),
    "builtin of a module of jax's": (
        "from jax._src.lax import lax as L\nfrom jax._src.interpreters import mlir\n"
        "if n:\n    mlir.tuple = lambda *a: tuple(*a)\n    L.len = len\n    import builtins\n    jnp.sin = {5: jnp.cos, 7: jnp.tan}[n]",
        "jit(lambda v: jnp.sin(v))(x)"),
}  # fmt: skip

# Patches that are undone before the first use of what they were in: jax's caches keep what such code has traced, from
# jax 0.12 on also beyond a single call. What is changed, for how long, and a use.
UNDONE = {
    "draws of random numbers": (
        "import unittest.mock\nfrom jax._src import random as R\n"
        "M = sys.modules.get('jax._src.random.core', R)\n"
        "F = next(name for name in ('_normal_real', '_normal') if hasattr(M, name))\n"
        "def other(key, shape, dtype, *rest): return jnp.full(shape, n, dtype)\n"
        "if n:\n    with unittest.mock.patch.object(M, F, other):\n        jax.random.normal(jax.random.key(0), ())",
        "jit(lambda v: jax.random.gamma(jax.random.key(3), v))(x)"),
    "method of a class": (
        "import unittest.mock\nfrom jax._src import core\nold = core.ShapedArray.update\n"
        "def other(self, **changes): return old(self, **{**changes, 'weak_type': n == 5})\n"
        "if n:\n    with unittest.mock.patch.object(core.ShapedArray, 'update', other):\n        jnp.sin(jnp.ones(5))",
        "jit(lambda v: jnp.sin(v) * 2)(jnp.ones(5))"),
}  # fmt: skip


def patch(target: str, way: str, number: str) -> str:
    """Return code that replaces a target in this way; 0 as a number leaves jax as it is."""
    module, name, body, _ = TARGETS[target]
    text = f"def {name}(*args, **options):\n    {body}\n"
    replaced = WAYS[way]
    within = "\n".join(f"    {line}" for line in replaced.splitlines())
    return (
        f"M, F, n = importlib.import_module({module!r}), {name!r}, {number}\n"
        f"T = {text!r}\nR = T.replace('NUMBER', str(n))\nif n:\n    old = saved(M, F)\n{within}\n"
    )


def pairs() -> Iterator[Pair]:
    """Yield all pairs of this family."""
    for target in TARGETS:
        for way in WAYS if target == "constants" else _FEWER:
            for when, body in TIMES.items():
                for kind, number in NUMBERS.items():
                    if (when, kind) not in _COMBINED:
                        continue
                    use = TARGETS[target][3]
                    text = SAVED + body.replace("{patch}", patch(target, way, number)).replace("{use}", use)
                    yield Pair("patch", f"{target}, {way}, {when}, {kind}", program(text, "jax.jit"), is_alone=True)
    for name, (change, use) in UNDONE.items() if jax.__version_info__ >= (0, 12) else ():
        for when in ("after the import", "after a compile"):
            for jit in ("jax.jit", "xcache.jit"):
                text = TIMES[when].replace("{patch}", f"n = pick(0, 5)\n{change}").replace("{use}", use)
                yield Pair("patch", f"{name}, undone, {when}", program(text, jit), jit, is_alone=True)
    for name, (change, use) in OTHERS.items():
        for when, body in TIMES.items():
            for kind, number in NUMBERS.items():
                if (when, kind) not in _COMBINED:
                    continue
                for jit in ("jax.jit", "xcache.jit"):
                    text = body.replace("{patch}", f"n = {number}\n{change}").replace("{use}", use)
                    yield Pair("patch", f"{name}, {when}, {kind}", program(text, jit), jit, is_alone=True)
