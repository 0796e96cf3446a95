"""Objects and classes that differ only in what their attributes and methods are at run time."""

from __future__ import annotations

from collections.abc import Iterator

from pairing.pair import Pair, program

# The name, the definition, and the expression that a step calls with an array.
CLASSES = (
    ("attribute read by a method", "class M:\n    def __init__(self, k): self.k = k\n    def apply(self, v): return v * self.k\n"
     "model = M(pick(2, 3))", "model.apply"),
    ("bound method", "class M:\n    def __init__(self, k): self.k = k\n    def apply(self, v): return v * self.k\n"
     "apply = M(pick(2, 3)).apply", "apply"),
    ("called object", "class M:\n    def __init__(self, k): self.k = k\n    def __call__(self, v): return v * self.k\n"
     "model = M(pick(2, 3))", "model"),
    ("attribute of an attribute", "class M:\n    def __init__(self, k): self.k = k\n    def __call__(self, v): return v * self.k\n"
     "class N:\n    def __init__(self, m): self.m = m\n    def __call__(self, v): return self.m(v)\nmodel = N(N(M(pick(2, 3))))",
     "model"),
    ("function in an attribute", "class M:\n    def __call__(self, v): return self.f(v)\nmodel = M()\n"
     "model.f = pick(lambda v: v * 2, lambda v: v * 3)", "model"),
    ("slot", "class M:\n    __slots__ = ('k',)\n    def __call__(self, v): return v * self.k\nmodel = M()\nmodel.k = pick(2, 3)",
     "model"),
    ("attribute of the class", "class M:\n    k = pick(2, 3)\n    def apply(self, v): return v * self.k\nmodel = M()", "model.apply"),
    ("method in an if", "class M:\n    if A:\n        def apply(self, v): return v * 2\n    else:\n"
     "        def apply(self, v): return v * 3\nmodel = M()", "model.apply"),
    ("class in an if", "if A:\n    class M:\n        def apply(self, v): return v * 2\nelse:\n    class M:\n"
     "        def apply(self, v): return v * 3\nmodel = M()", "model.apply"),
    ("method set later", "class M:\n    def apply(self, v): return v * 2\nif not A:\n    M.apply = lambda self, v: v * 3\nmodel = M()",
     "model.apply"),
    ("method set on the object", "class M:\n    def apply(self, v): return v * 2\nmodel = M()\n"
     "if not A:\n    model.apply = lambda v: v * 3", "model.apply"),
    ("class from a factory", "def make(k):\n    class M:\n        def apply(self, v): return v * k\n    return M\n"
     "model = make(pick(2, 3))()", "model.apply"),
    ("named class from a factory", "def make(k):\n    class M:\n        def apply(self, v): return v * k\n"
     "    M.__qualname__ = 'M'\n    return M\nM = make(pick(2, 3))\nmodel = M()", "model.apply"),
    ("static method", "class M:\n    apply = staticmethod(pick(lambda v: v * 2, lambda v: v * 3))", "M.apply"),
    ("class method", "class M:\n    k = pick(2, 3)\n    @classmethod\n    def apply(cls, v): return v * cls.k", "M.apply"),
    ("static method of a closure", "def make(k):\n    return staticmethod(lambda v: v * k)\nclass M:\n    apply = make(pick(2, 3))",
     "M.apply"),
    ("inherited method", "class P:\n    def apply(self, v): return v * 2\nclass Q:\n    def apply(self, v): return v * 3\n"
     "class M(pick(P, Q)): pass\nmodel = M()", "model.apply"),
    ("order of bases", "class P:\n    def apply(self, v): return v * 2\nclass Q:\n    def apply(self, v): return v * 3\n"
     "class M(*pick((P, Q), (Q, P))): pass\nmodel = M()", "model.apply"),
    ("super", "class P:\n    def apply(self, v): return v * 2\nclass Q:\n    def apply(self, v): return v * 3\n"
     "class M(pick(P, Q)):\n    def apply(self, v): return super().apply(v) + 1\nmodel = M()", "model.apply"),
    ("attribute of a base", "class P:\n    k = pick(2, 3)\nclass M(P):\n    def apply(self, v): return v * self.k\nmodel = M()",
     "model.apply"),
    ("type()", "M = type('M', (), dict(apply=pick(lambda self, v: v * 2, lambda self, v: v * 3)))\nmodel = M()", "model.apply"),
    ("class of an object", "class P:\n    def apply(self, v): return v * 2\nclass Q:\n    def apply(self, v): return v * 3\n"
     "model = P()\nmodel.__class__ = pick(P, Q)", "model.apply"),
    ("one of two classes", "class P:\n    def apply(self, v): return v * 2\nclass Q:\n    def apply(self, v): return v * 3\n"
     "model = pick(P, Q)()", "model.apply"),
    ("property", "class M:\n    k = property(pick(lambda self: 2, lambda self: 3))\n    def apply(self, v): return v * self.k\n"
     "model = M()", "model.apply"),
    ("property of an attribute", "class M:\n    def __init__(self, n): self.n = n\n    @property\n    def k(self): return self.n + 1\n"
     "model = M(pick(1, 2))\ndef act(v): return v * model.k", "act"),
    ("property of a global", "n = pick(1, 2)\nclass M:\n    @property\n    def k(self): return n + 1\nmodel = M()\n"
     "def act(v): return v * model.k", "act"),
    ("cached property", "class M:\n    @functools.cached_property\n    def k(self): return n\nn = pick(2, 3)\nmodel = M()\n"
     "def act(v): return v * model.k", "act"),
    ("__getattr__", "class M:\n    def __init__(self, n): self.n = n\n    def __getattr__(self, name): return self.__dict__['n']\n"
     "model = M(pick(2, 3))\ndef act(v): return v * model.k", "act"),
    ("__getattr__ of a global", "n = pick(2, 3)\nclass M:\n    def __getattr__(self, name): return n\nmodel = M()\n"
     "def act(v): return v * model.k", "act"),
    ("__getattribute__", "n = pick(2, 3)\nclass M:\n    k = 2\n    def __getattribute__(self, name): return n\nmodel = M()\n"
     "def act(v): return v * model.k", "act"),
    ("descriptor", "class D:\n    def __init__(self, n): self.n = n\n    def __get__(self, *_): return self.n\n"
     "class M:\n    k = D(pick(2, 3))\nmodel = M()\ndef act(v): return v * model.k", "act"),
    ("metaclass", "class Meta(type):\n    @property\n    def k(cls): return n\nn = pick(2, 3)\nclass M(metaclass=Meta): pass\n"
     "def act(v): return v * M.k", "act"),
    ("metaclass's call", "class Meta(type):\n    def __call__(cls, v): return v * n\nn = pick(2, 3)\nclass M(metaclass=Meta): pass",
     "M"),
    ("__new__", "n = pick(2, 3)\nclass M:\n    def __new__(cls, v): return v * n", "M"),
    ("__getitem__", "class M:\n    def __init__(self, n): self.n = n\n    def __getitem__(self, key): return self.n\n"
     "model = M(pick(2, 3))\ndef act(v): return v * model['k']", "act"),
    ("operator", "class M:\n    def __init__(self, n): self.n = n\n    def __rmul__(self, v): return v * self.n\n"
     "    __array_priority__ = 1000\n    def __add__(self, v): return v * self.n\n"
     "model = M(pick(2, 3))\ndef act(v): return model + v", "act"),
    ("__call__ of a global", "n = pick(2, 3)\nclass M:\n    def __call__(self, v): return v * n\nmodel = M()", "model"),
    ("__iter__", "class M:\n    def __init__(self, n): self.n = n\n    def __iter__(self): return iter([self.n])\n"
     "model = M(pick(2, 3))\ndef act(v): return v * sum(model)", "act"),
    ("__len__ and __bool__", "class M:\n    def __init__(self, n): self.n = n\n    def __len__(self): return self.n\n"
     "model = M(pick(0, 1))\ndef act(v): return v * 2 if model else v * 3", "act"),
    ("__float__", "class M:\n    def __init__(self, n): self.n = n\n    def __float__(self): return float(self.n)\n"
     "model = M(pick(2, 3))\ndef act(v): return v * float(model)", "act"),
    ("__jax_array__", "class M:\n    def __init__(self, n): self.n = n\n    def __jax_array__(self): return jnp.float32(self.n)\n"
     "model = M(pick(2, 3))\ndef act(v): return v * jnp.asarray(model.__jax_array__())", "act"),
    ("__array__", "class M:\n    def __init__(self, n): self.n = n\n    def __array__(self, *_, **__): return np.float32([self.n])\n"
     "model = M(pick(2, 3))\ndef act(v): return v * np.asarray(model)", "act"),
    ("__enter__", "class M:\n    def __init__(self, n): self.n = n\n    def __enter__(self): return self.n\n"
     "    def __exit__(self, *_): pass\nmodel = M(pick(2, 3))\ndef act(v):\n    with model as k: return v * k", "act"),
    ("__eq__ and __hash__", "class M:\n    def __init__(self, n): self.n = n\n    def __hash__(self): return 1\n"
     "    def __eq__(self, other): return True\n    def __call__(self, v): return v * self.n\nmodel = M(pick(2, 3))", "model"),
    ("dataclass", "@dataclasses.dataclass(frozen=True)\nclass M:\n    k: int\n    def __call__(self, v): return v * self.k\n"
     "model = M(pick(2, 3))", "model"),
    ("default of a dataclass", "@dataclasses.dataclass(frozen=True)\nclass M:\n    k: int = pick(2, 3)\n"
     "    def __call__(self, v): return v * self.k\nmodel = M()", "model"),
    ("field that is not compared", "@dataclasses.dataclass(frozen=True)\nclass M:\n"
     "    k: int = dataclasses.field(compare=False, repr=False, default=2)\n    def __call__(self, v): return v * self.k\n"
     "model = M(pick(2, 3))", "model"),
    ("member of an enumeration", "class E(enum.Enum):\n    A = 2\n    B = 3\nmember = pick(E.A, E.B)\ndef act(v): return v * member.value",
     "act"),
    ("value of a member", "E = enum.Enum('E', dict(A=pick(2, 3)))\ndef act(v): return v * E.A.value", "act"),
    ("method of a member", "class E(enum.Enum):\n    A = 1\n    def act(self, v): return v * n\nn = pick(2, 3)", "E.A.act"),
    ("subclass of float", "class F(float):\n    def __float__(self): return 3.0\n    __mul__ = __rmul__ = lambda self, v: v * n\n"
     "n = pick(2, 3)\nf = F(2.0)\ndef act(v): return f * v", "act"),
    ("subclass of dict", "class D(dict):\n    def __missing__(self, key): return n\nn = pick(2, 3)\nd = D()\n"
     "def act(v): return v * d['k']", "act"),
    ("subclass of list", "class L(list):\n    def __getitem__(self, key): return n\nn = pick(2, 3)\nheld = L([1])\n"
     "def act(v): return v * held[0]", "act"),
    ("registered node", "@jax.tree_util.register_pytree_node_class\nclass T:\n    def __init__(self, v, k): self.v, self.k = v, k\n"
     "    def tree_flatten(self): return (self.v,), self.k\n    @classmethod\n    def tree_unflatten(cls, k, vs): return cls(*vs, k)\n"
     "k = pick(2, 3)\ndef act(v):\n    t = jax.tree.map(lambda w: w, T(v, k))\n    return t.v * t.k", "act"),
    ("flattening of a node", "class T:\n    def __init__(self, v, k): self.v, self.k = v, k\nn = pick(2, 3)\n"
     "jax.tree_util.register_pytree_node(T, lambda t: ((t.v,), t.k), lambda k, vs: T(*vs, n))\n"
     "def act(v):\n    t = jax.tree.map(lambda w: w, T(v, 1))\n    return t.v * t.k", "act"),
    ("abstract method", "import abc\nclass P(abc.ABC):\n    @abc.abstractmethod\n    def k(self): ...\n    def __call__(self, v): return v * self.k()\n"
     "class M(P):\n    k = pick(lambda self: 2, lambda self: 3)\nmodel = M()", "model"),
    ("counter of instances", "class M:\n    made = 0\n    def __init__(self): type(self).made += 1\n"
     "    def __call__(self, v): return v * self.made\nmodels = [M() for _ in range(pick(2, 3))]\nmodel = models[0]", "model"),
    ("__init_subclass__", "class P:\n    def __init_subclass__(cls, k): cls.k = k\nclass M(P, k=pick(2, 3)):\n"
     "    def __call__(self, v): return v * self.k\nmodel = M()", "model"),
    ("mutable default of a class", "class M:\n    ks = []\n    def __call__(self, v): return v * self.ks[0]\nM.ks.append(pick(2, 3))\n"
     "model = M()", "model"),
)  # fmt: skip

SHAPES = {
    "called directly": "@jit\ndef step(v): return {f}(v) + 1\nout = step(x)",
    "behind a helper": "def helper(v): return {f}(v) + 1\n@jit\ndef step(v): return helper(v)\nout = step(x)",
    "in a closure": "def build(g):\n    def step(v): return g(v) + 1\n    return step\nout = jit(build({f}))(x)",
    "in a list": "fs = [{f}]\n@jit\ndef step(v):\n    for f in fs: v = f(v)\n    return v\nout = step(x)",
    "in a partial": "def apply(g, v): return g(v) + 1\nout = jit(functools.partial(apply, {f}))(x)",
    "static": "step = jit(lambda g, v: g(v) + 1, static_argnums=0)\nout = step({f}, x)",
    "behind checkpoint": "inner = jax.checkpoint(lambda v: {f}(v))\n@jit\ndef step(v): return inner(v).sum()\nout = step(x)",
}
_ALWAYS = ("called directly", "behind a helper")


def pairs() -> Iterator[Pair]:
    """Yield all pairs of this family."""
    others = [name for name in SHAPES if name not in _ALWAYS]
    for number, (name, definition, expression) in enumerate(CLASSES):
        for shape in (*_ALWAYS, others[number % len(others)]):
            body = f"{definition}\n{SHAPES[shape].format(f=expression)}\n"
            yield Pair("class", f"{name}, {shape}", program(body, "xcache.jit"), "xcache.jit")
