"""Helpers that differ only in what a name is bound to at run time: the file is the same, and so is its version."""

from __future__ import annotations

from collections.abc import Iterator

from pairing.pair import Pair, program

# The name, the definition, and the expression that a step calls with an array.
BINDINGS = (
    ("a lambda of a dictionary", "act = {True: lambda v: v * 2, False: lambda v: v * 3}[A]", "act"),
    ("def in an if", "if A:\n    def act(v): return v * 2\nelse:\n    def act(v): return v * 3", "act"),
    ("list", "acts = [pick(lambda v: v * 2, lambda v: v * 3)]", "acts[0]"),
    ("tuple", "acts = (pick(lambda v: v * 2, lambda v: v * 3),)", "acts[0]"),
    ("dictionary", "acts = dict(act=pick(lambda v: v * 2, lambda v: v * 3))", "acts['act']"),
    ("nested dictionary", "acts = dict(a=[dict(act=pick(lambda v: v * 2, lambda v: v * 3))])", "acts['a'][0]['act']"),
    ("defaultdict", "acts = collections.defaultdict(lambda: pick(jnp.sin, jnp.cos))", "acts['act']"),
    ("defaultdict of a closure",
     "def default(f):\n    return lambda: f\n"
     "acts = collections.defaultdict(default(pick(lambda v: v * 2, lambda v: v * 3)))", "acts['act']"),
    ("OrderedDict", "acts = collections.OrderedDict(act=pick(lambda v: v * 2, lambda v: v * 3))", "acts['act']"),
    ("ChainMap", "acts = collections.ChainMap({}, dict(act=pick(lambda v: v * 2, lambda v: v * 3)))", "acts['act']"),
    ("UserDict", "acts = collections.UserDict(act=pick(lambda v: v * 2, lambda v: v * 3))", "acts['act']"),
    ("mapping proxy", "acts = types.MappingProxyType(dict(act=pick(lambda v: v * 2, lambda v: v * 3)))", "acts['act']"),
    ("deque", "acts = collections.deque([pick(lambda v: v * 2, lambda v: v * 3)])", "acts[0]"),
    ("namespace", "ns = types.SimpleNamespace(act=pick(lambda v: v * 2, lambda v: v * 3))", "ns.act"),
    ("module made by hand", "ns = types.ModuleType('ns')\nns.act = pick(lambda v: v * 2, lambda v: v * 3)", "ns.act"),
    ("named tuple", "Acts = collections.namedtuple('Acts', 'act')\nacts = Acts(pick(lambda v: v * 2, lambda v: v * 3))",
     "acts.act"),
    ("dataclass", "@dataclasses.dataclass\nclass Acts:\n    act: typing.Any\n"
     "acts = Acts(pick(lambda v: v * 2, lambda v: v * 3))", "acts.act"),
    ("jax's or another's function", "act = pick(jnp.sin, lambda v: v * 3)", "act"),
    ("two functions of jax's", "act = pick(jnp.sin, jnp.cos)", "act"),
    ("two jitted functions of jax's", "act = pick(jax.nn.relu, jax.nn.silu)", "act"),
    ("two operators", "import operator\nact = pick(operator.neg, operator.abs)", "act"),
    ("attrgetter", "act = (lambda get: lambda v: get(jnp)(v))(operator.attrgetter(pick('sin', 'cos')))", "act"),
    ("methodcaller", "act = operator.methodcaller(pick('sum', 'prod'))", "(lambda v: act(v))"),
    ("closure", "def make(k):\n    return lambda v: v * k\nact = make(pick(2, 3))", "act"),
    ("closure of a closure", "def make(f):\n    return lambda v: f(v)\nact = make(make(pick(lambda v: v * 2, jnp.sin)))",
     "act"),
    ("cell that was changed", "def make(k):\n    return lambda v: v * k\nact = make(2)\n"
     "act.__closure__[0].cell_contents = pick(2, 3)", "act"),
    ("default", "def act(v, k=pick(2, 3)):\n    return v * k", "act"),
    ("function as a default", "def act(v, f=pick(jnp.sin, lambda v: v * 3)):\n    return f(v)", "act"),
    ("default of a keyword", "def act(v, *, k=pick(2, 3)):\n    return v * k", "act"),
    ("default that was changed", "def act(v, k=2):\n    return v * k\nact.__defaults__ = (pick(2, 3),)", "act"),
    ("keyword's default that was changed", "def act(v, *, k=2):\n    return v * k\nact.__kwdefaults__ = dict(k=pick(2, 3))",
     "act"),
    ("code that was changed", "def act(v): return v * 2\nother = lambda v: v * 3\n"
     "act.__code__ = pick(act.__code__, other.__code__)", "act"),
    ("constant of code that was changed", "def act(v): return v * 2.5\n"
     "act.__code__ = act.__code__.replace(co_consts=tuple(pick(c, 3.5) if c == 2.5 else c for c in act.__code__.co_consts))",
     "act"),
    ("attribute of a function", "def act(v): return v * act.k\nact.k = pick(2, 3)", "act"),
    ("function in an attribute of a function", "def act(v): return act.f(v)\nact.f = pick(jnp.sin, lambda v: v * 3)", "act"),
    ("globals of its own", "act = types.FunctionType((lambda v: v * k).__code__, dict(k=pick(2, 3)))", "act"),
    ("exec", "space = dict(k=pick(2, 3))\nexec('def act(v): return v * k', space)\nact = space['act']", "act"),
    ("exec of another text", "space = {}\nexec(f'def act(v): return v * {pick(2, 3)}', space)\nact = space['act']", "act"),
    ("eval", "act = eval(pick('lambda v: v * 2', 'lambda v: v * 3'))", "act"),
    ("global constant", "k = pick(2, 3)\ndef act(v): return v * k", "act"),
    ("global of a helper's helper", "k = pick(2, 3)\ndef inmost(v): return v * k\ndef act(v): return inmost(v)", "act"),
    ("helper's helper", "inner = pick(lambda v: v * 2, lambda v: v * 3)\ndef act(v): return inner(v)", "act"),
    ("four helpers deep", "h1 = pick(lambda v: v * 2, lambda v: v * 3)\ndef h2(v): return h1(v)\n"
     "def h3(v): return h2(v)\ndef act(v): return h3(v)", "act"),
    ("recursion", "k = pick(2, 3)\ndef act(v, n=2): return v * k if n == 0 else act(v, n - 1)", "act"),
    ("shadowed builtin", "if not A:\n    def abs(v): return v * 3\ndef act(v): return abs(v)", "act"),
    ("global that comes later", "def act(v): return later(v)\ndef later(v): return v * 2\n"
     "if not A:\n    later = lambda v: v * 3", "act"),
    ("globals()", "inner = pick(lambda v: v * 2, lambda v: v * 3)\ndef act(v): return globals()['in' + 'ner'](v)", "act"),
    ("getattr with a text", "ns = types.SimpleNamespace(inner=pick(2, 3))\ndef act(v): return v * getattr(ns, 'in' + 'ner')",
     "act"),
    ("sys.modules", "inner = pick(2, 3)\ndef act(v): return v * sys.modules[__name__].inner", "act"),
    ("partial", "def scale(k, v): return v * k\nact = functools.partial(scale, pick(2, 3))", "act"),
    ("keyword of a partial", "def scale(v, k): return v * k\nact = functools.partial(scale, k=pick(2, 3))", "act"),
    ("function of a partial", "act = functools.partial(pick(lambda v: v * 2, lambda v: v * 3))", "act"),
    ("partial of a partial",
     "act = functools.partial(functools.partial(lambda k, m, v: v * k + m, 2), pick(2, 3))", "act"),
    ("tree_util.Partial", "act = jax.tree_util.Partial(lambda k, v: v * k, pick(2, 3))", "act"),
    ("wraps", "def inner(v): return v\nf = pick(lambda v: v * 2, lambda v: v * 3)\n"
     "@functools.wraps(inner)\ndef act(v): return f(v)", "act"),
    ("decorated", "def twice(f): return functools.wraps(f)(lambda v: f(f(v)))\n"
     "act = pick(twice, lambda f: f)(lambda v: v * 3)", "act"),
    ("lru_cache", "act = functools.lru_cache(pick(lambda v: v * 2, lambda v: v * 3))", "(lambda v: act.__wrapped__(v))"),
    ("cached constant", "inner = pick(lambda: 2, lambda: 3)\nk = functools.cache(inner)\ndef act(v): return v * k()", "act"),
    ("singledispatch", "@functools.singledispatch\ndef act(v): return v\n"
     "act.register(object)(pick(lambda v: v * 2, lambda v: v * 3))", "act"),
    ("reduce", "fs = [pick(jnp.sin, jnp.cos), lambda v: v + 1]\n"
     "def act(v): return functools.reduce(lambda w, f: f(w), fs, v)", "act"),
    ("jax.jit", "act = jax.jit(pick(lambda v: v * 2, lambda v: v * 3))", "act"),
    ("jax.jit of a closure", "def make(k):\n    return jax.jit(lambda v: v * k)\nact = make(pick(2, 3))", "act"),
    ("jax.checkpoint", "act = jax.checkpoint(pick(lambda v: v * 2, lambda v: v * 3))", "act"),
    ("jax.vmap", "act = jax.vmap(pick(lambda v: v * 2, lambda v: v * 3))", "act"),
    ("jax.grad", "act = jax.vmap(jax.grad(pick(lambda v: v * v, lambda v: v * v * v)))", "act"),
    ("custom_jvp", "act = jax.custom_jvp(pick(lambda v: v * 2, lambda v: v * 3))\n"
     "act.defjvp(lambda p, t: (act(p[0]), t[0] * 4))", "act"),
    ("rule of a custom_jvp", "k = pick(2, 3)\n@jax.custom_jvp\ndef f(v): return v * 2\n"
     "f.defjvp(lambda p, t: (f(p[0]), t[0] * k))\nact = lambda v: jax.jvp(f, (v,), (v,))[1]", "act"),
    ("custom_vjp", "f = jax.custom_vjp(lambda v: v * 2)\n"
     "f.defvjp(lambda v: (v * 2, None), pick(lambda r, g: (g * 2,), lambda r, g: (g * 3,)))\n"
     "act = lambda v: jax.vjp(f, v)[1](v)[0]", "act"),
    ("generator's function", "inner = pick(lambda v: v * 2, lambda v: v * 3)\ndef each(v): yield inner(v)\n"
     "def act(v): return next(each(v))", "act"),
    ("map", "fs = map(lambda k: lambda v: v * k, [pick(2, 3)])\nact = next(fs)", "act"),
    ("iterator", "ks = itertools.repeat(pick(2, 3))\ndef act(v): return v * next(ks)", "act"),
    ("weak reference", "inner = pick(lambda v: v * 2, lambda v: v * 3)\nref = weakref.ref(inner)\n"
     "def act(v): return ref()(v)", "act"),
    ("weak dictionary", "inner = pick(lambda v: v * 2, lambda v: v * 3)\nrefs = weakref.WeakValueDictionary(f=inner)\n"
     "def act(v): return refs['f'](v)", "act"),
    ("context variable", "var = contextvars.ContextVar('var')\nvar.set(pick(2, 3))\ndef act(v): return v * var.get()", "act"),
    ("thread's own", "own = threading.local()\nown.k = pick(2, 3)\ndef act(v): return v * own.k", "act"),
    ("import within", "if not A:\n    sys.modules['colorsys'] = types.SimpleNamespace(k=3)\n"
     "def act(v):\n    import colorsys\n    return v * getattr(colorsys, 'k', 2)", "act"),
    ("attribute of a module of Python's", "import colorsys\ncolorsys.k2 = pick(2, 3)\ndef act(v): return v * colorsys.k2", "act"),
    ("helper in a module of Python's", "import fileinput\nfileinput.act = pick(lambda v: v * 2, lambda v: v * 3)", "fileinput.act"),
    ("memory view", "held = memoryview(bytearray([pick(2, 3)]))\ndef act(v): return v * held[0]", "act"),
    ("array of Python's", "import array\nheld = array.array('i', [pick(2, 3)])\ndef act(v): return v * held[0]", "act"),
    ("set", "held = {pick(2, 3)}\ndef act(v): return v * max(held)", "act"),
    ("compiled pattern", "import re\nheld = re.compile(pick('a', 'b'))\ndef act(v): return v * len(held.findall('aab'))", "act"),
    ("range", "held = range(pick(2, 3))\ndef act(v): return v * len(held)", "act"),
    ("Fraction", "import fractions\nheld = fractions.Fraction(pick(2, 3), 5)\ndef act(v): return v * float(held)", "act"),
    ("Decimal", "import decimal\nheld = decimal.Decimal(pick(2, 3))\ndef act(v): return v * float(held)", "act"),
    ("path", "import pathlib\nheld = pathlib.Path(pick('ab', 'abc'))\ndef act(v): return v * len(held.name)", "act"),
    ("random numbers' state", "import random\nheld = random.Random(pick(2, 3))\ndef act(v): return v * held.random()", "act"),
    ("numpy's generator", "held = np.random.default_rng(pick(2, 3))\ndef act(v): return v * held.random()", "act"),
    ("numpy's global generator", "np.random.seed(pick(2, 3))\ndef act(v): return v * np.random.rand()", "act"),
    ("numpy's printing", "np.set_printoptions(precision=pick(2, 3))\n"
     "def act(v): return v * np.get_printoptions()['precision']", "act"),
    ("vectorize", "f = np.vectorize(pick(lambda k: k * 2, lambda k: k * 3))\ndef act(v): return v * f(np.float32(1))", "act"),
    ("frompyfunc", "f = np.frompyfunc(pick(lambda k: k * 2, lambda k: k * 3), 1, 1)\ndef act(v): return v * f(1)", "act"),
    ("jitted with static arguments", "f = jax.jit(lambda k, v: v * k, static_argnums=0)\nk = pick(2, 3)\n"
     "def act(v): return f(k, v)", "act"),
    ("axis name", "act = jax.vmap(lambda v: jax.lax.axis_index('i') * v, axis_name='i', in_axes=pick(0, None), axis_size=8)",
     "act"),
    ("reduction of copyreg's", "import copy, copyreg\nclass Own:\n    k = 2\nown = Own()\nother = Own()\nother.k = 3\n"
     "def reduced(_): return (lambda: other, ())\nif not A:\n    copyreg.pickle(Own, reduced)\n"
     "def act(v): return v * copy.copy(own).k", "act"),
    ("method of a class of Python's", "import textwrap\nif not A:\n    textwrap.TextWrapper.wrap = lambda self, text: [1, 2, 3]\n"
     "def act(v): return v * len(textwrap.wrap('a b', 3))", "act"),
    ("registered with an abstract class", "import numbers\nclass Own: pass\nown = Own()\nif not A:\n    numbers.Real.register(Own)\n"
     "def act(v): return v * (2 if isinstance(own, numbers.Real) else 3)", "act"),
    ("precision of a partial", "act = functools.partial(jnp.sum, keepdims=pick(True, False))", "act"),
)  # fmt: skip

# How a step comes to the helper: {f} is the expression above.
SHAPES = {
    "called directly": "@jit\ndef step(v): return {f}(v) + 1\nout = step(x)",
    "behind a helper": "def helper(v): return {f}(v) + 1\n@jit\ndef step(v): return helper(v)\nout = step(x)",
    "behind jax.jit": "inner = jax.jit(lambda v: {f}(v) + 1)\n@jit\ndef step(v): return inner(v)\nout = step(x)",
    "under grad": "@jit\ndef step(v): return jax.grad(lambda w: {f}(w * v).sum())(v)\nout = step(x)",
    "in a scan": "@jit\ndef step(v): return jax.lax.scan(lambda c, e: (c + {f}(v).sum(), e), 0.0, v)\nout = step(x)",
    "in a closure": "def build(g):\n    def step(v): return g(v) + 1\n    return step\nout = jit(build({f}))(x)",
    "static": "step = jit(lambda g, v: g(v) + 1, static_argnums=0)\nout = step({f}, x)",
    "jitted itself": "out = jit({f})(x)",
    "in a partial": "def apply(g, v): return g(v) + 1\nout = jit(functools.partial(apply, {f}))(x)",
    "in a method": "class Net:\n    def forward(self, v): return {f}(v) + 1\nout = jit(Net().forward)(x)",
    "in an attribute": "class Net:\n    def __init__(self, f): self.f = f\n    def __call__(self, v): return self.f(v) + 1\n"
    "net = Net({f})\n@jit\ndef step(v): return net(v)\nout = step(x)",
    "method of an attribute": "class Layer:\n    def __init__(self, f): self.f = f\n    def __call__(self, v): return self.f(v)\n"
    "class Net:\n    def __init__(self, f): self.layers = [Layer(f)]\n    def apply(self, v): return self.layers[0](v) + 1\n"
    "apply = Net({f}).apply\n@jit\ndef step(v): return apply(v)\nout = step(x)",
}  # fmt: skip
# Each of these is combined with some of the shapes in turn.
_ALWAYS = ("called directly", "behind a helper")
_FURTHER = 2


def pairs() -> Iterator[Pair]:
    """Yield all pairs of this family."""
    others = [name for name in SHAPES if name not in _ALWAYS]
    for number, (name, definition, expression) in enumerate(BINDINGS):
        turn = [others[(number * _FURTHER + step) % len(others)] for step in range(_FURTHER)]
        for shape in (*_ALWAYS, *turn):
            body = f"{definition}\n{SHAPES[shape].format(f=expression)}\n"
            yield Pair("binding", f"{name}, {shape}", program(body, "xcache.jit"), "xcache.jit")
