"""Call functions of xcache.jit that read what the program binds when it runs, by its argument; print what they return.

Each case is a module of its own, as a program is.
"""

import json
import sys
import types

import jax
import numpy as np

import xcache

HEAD = """
import abc, collections, contextlib, contextvars, dataclasses, enum, functools, itertools, operator, os, pathlib, random
import sys, threading, types, weakref
import jax, jax.numpy as jnp, numpy as np, xcache
K = float(sys.argv[1]); I = int(K)
jit = functools.partial(xcache.jit, version="1")
"""
CASES = {
    "acts lambdas": """
ACTS = {1: lambda x: x + 1, 2: lambda x: x * 5}
act = ACTS[I]
@jit
def f(x): return act(x)
call = lambda: f(3.0)
""",
    "def in if": """
if I == 1:
    def act(x): return x + 1
else:
    def act(x): return x * 5
@jit
def f(x): return act(x)
call = lambda: f(3.0)
""",
    "behind jit": """
ACTS = {1: lambda x: x + 1, 2: lambda x: x * 5}
act = jax.jit(ACTS[I])
@jit
def f(x): return act(x)
call = lambda: f(3.0)
""",
    "behind partial": """
ACTS = {1: lambda x: x + 1, 2: lambda x: x * 5}
act = functools.partial(ACTS[I])
@jit
def f(x): return act(x)
call = lambda: f(3.0)
""",
    "behind checkpoint": """
ACTS = {1: lambda x: x + 1, 2: lambda x: x * 5}
act = jax.checkpoint(ACTS[I])
@jit
def f(x): return act(x)
call = lambda: f(3.0)
""",
    "behind list": """
ACTS = {1: lambda x: x + 1, 2: lambda x: x * 5}
chosen = ACTS[I]
act = [chosen]
@jit
def f(x): return act[0](x)
call = lambda: f(3.0)
""",
    "behind namespace": """
ACTS = {1: lambda x: x + 1, 2: lambda x: x * 5}
chosen = ACTS[I]
act = types.SimpleNamespace(a=chosen)
@jit
def f(x): return act.a(x)
call = lambda: f(3.0)
""",
    "behind dict": """
ACTS = {1: lambda x: x + 1, 2: lambda x: x * 5}
chosen = ACTS[I]
act = {'a': chosen}
@jit
def f(x): return act['a'](x)
call = lambda: f(3.0)
""",
    "behind defaultdict": """
ACTS = {1: lambda x: x + 1, 2: lambda x: x * 5}
chosen = ACTS[I]
act = collections.defaultdict(lambda: chosen)
@jit
def f(x): return act['b'](x)
call = lambda: f(3.0)
""",
    "Model(k).apply": """
class Model:
    def __init__(self, k): self.k = k
    def apply(self, x): return x * self.k
apply = Model(K).apply
@jit
def f(x): return apply(x)
call = lambda: f(3.0)
""",
    "class from factory": """
def make(k):
    class Model:
        def apply(self, x): return x * k
    return Model
Model = make(K)
@jit
def f(x): return Model().apply(x)
call = lambda: f(3.0)
""",
    "model(x)": """
class Model:
    def __init__(self, k): self.k = k
    def __call__(self, x): return x * self.k
model = Model(K)
@jit
def f(x): return model(x)
call = lambda: f(3.0)
""",
    "global statement": """
RATE = 0.
def configure(k):
    global RATE
    RATE = k
def inner(x): return x * RATE
@jit
def f(x): return inner(x)
configure(K)
call = lambda: f(3.0)
""",
    "functools.wraps": """
def deco(k):
    def d(fn):
        @functools.wraps(fn)
        def w(x): return fn(x) * k
        return w
    return d
@deco(K)
def act(x): return x + 1
@jit
def f(x): return act(x)
call = lambda: f(3.0)
""",
    "lru_cache": """
R = K
@functools.lru_cache
def rate(): return R
@jit
def f(x): return x * rate()
call = lambda: f(3.0)
""",
    "classmethod": """
class M:
    rate = 0.
    @classmethod
    def act(cls, x): return x * cls.rate
M.rate = K
@jit
def f(x): return M.act(x)
call = lambda: f(3.0)
""",
    "staticmethod": """
class M:
    act = staticmethod((lambda x: x + 1) if I == 1 else (lambda x: x * 7))
@jit
def f(x): return M.act(x)
call = lambda: f(3.0)
""",
    "property reading a global": """
R = K
class M:
    @property
    def k(self): return R
m = M()
@jit
def f(x): return x * m.k
call = lambda: f(3.0)
""",
    "__getattr__": """
R = K
class M:
    def __getattr__(self, name): return R
m = M()
@jit
def f(x): return x * m.anything
call = lambda: f(3.0)
""",
    "dataclass default_factory": """
@dataclasses.dataclass
class Cfg:
    k: list = dataclasses.field(default_factory=lambda: [K])
@jit
def f(x): return x * Cfg().k[0]
call = lambda: f(3.0)
""",
    "enum method": """
class E(enum.Enum):
    A = 1
    def of(self, x): return x * K
@jit
def f(x): return E.A.of(x)
call = lambda: f(3.0)
""",
    "numpy array in place": """
a = np.zeros(3)
a[1] = K
def inner(): return float(a.sum())
@jit
def f(x): return x * inner()
call = lambda: f(3.0)
""",
    "generator function": """
def gen():
    yield K
@jit
def f(x): return x * next(gen())
call = lambda: f(3.0)
""",
    "descriptor": """
class D:
    def __get__(self, obj, kind=None): return K
class M:
    k = D()
@jit
def f(x): return x * M().k
call = lambda: f(3.0)
""",
    "metaclass": """
class Meta(type):
    @property
    def k(cls): return K
class M(metaclass=Meta): pass
@jit
def f(x): return x * M.k
call = lambda: f(3.0)
""",
    "inherited method": """
def base(k):
    class B:
        def act(self, x): return x * k
    return B
class M(base(K)): pass
m = M()
@jit
def f(x): return m.act(x)
call = lambda: f(3.0)
""",
    "nested functions": """
R = K
def outer(x):
    def mid(y):
        return (lambda z: z * R)(y)
    return mid(x)
@jit
def f(x): return outer(x)
call = lambda: f(3.0)
""",
    "default mutable": """
def act(x, table=[0.0]): return x * table[0]
act.__defaults__[0][0] = K
@jit
def f(x): return act(x)
call = lambda: f(3.0)
""",
    "operator.methodcaller": """
class M:
    def a(self, x): return x + 1
    def b(self, x): return x * 7
m = M()
caller = operator.methodcaller("a" if I == 1 else "b", 3.0)
@jit
def f(x): return x * caller(m)
call = lambda: f(3.0)
""",
    "os.environ": """
os.environ["RATE_OF_TEST"] = str(K)
def rate(): return float(os.environ["RATE_OF_TEST"])
@jit
def f(x): return x * rate()
call = lambda: f(3.0)
""",
    "sys.argv": """
@jit
def f(x): return x * float(sys.argv[1])
call = lambda: f(3.0)
""",
    "random instance": """
rng = random.Random(I)
def draw(): return random.Random(rng.getstate()[1][3]).random()
@jit
def f(x): return x * draw()
call = lambda: f(3.0)
""",
    "file Path": """
P = pathlib.Path("path.txt")
P.write_text(str(K))
@jit
def f(x): return x * float(P.read_text())
call = lambda: f(3.0)
""",
    "np.load": """
np.save("saved.npy", np.array(K))
@jit
def f(x): return x * float(np.load("saved.npy"))
call = lambda: f(3.0)
""",
    "open file object": """
open("opened.txt", "w").write(str(K))
h = open("opened.txt")
def read():
    h.seek(0); return float(h.read())
@jit
def f(x): return x * read()
call = lambda: f(3.0)
""",
    "contextvar default": """
v = contextvars.ContextVar("v", default=K)
def read(): return v.get()
@jit
def f(x): return x * read()
call = lambda: f(3.0)
""",
    "threading.local": """
v = threading.local()
v.k = K
def read(): return v.k
@jit
def f(x): return x * read()
call = lambda: f(3.0)
""",
    "weakref": """
class M: pass
m = M(); m.k = K
r = weakref.ref(m)
@jit
def f(x): return x * r().k
call = lambda: f(3.0)
""",
    "globals()": """
HIDDEN_K = K
@jit
def f(x): return x * globals()["HIDDEN" + "_K"]
call = lambda: f(3.0)
""",
    "assigned __code__": """
def act(x): return x + 1
def other(x): return x * 7
if I == 2: act.__code__ = other.__code__
@jit
def f(x): return act(x)
call = lambda: f(3.0)
""",
    "function attribute": """
def act(x): return x * act.k
act.k = K
@jit
def f(x): return act(x)
call = lambda: f(3.0)
""",
    "constant 0.0 -0.0": """
exec("def act(x): return x * %s" % ("0.0" if I == 1 else "-0.0"))
@jit
def f(x): return act(x)
call = lambda: f(3.0)
""",
    "custom_vjp": """
@jax.custom_vjp
def act(x): return x
act.defvjp(lambda x: (x, None), lambda _, g: (g * K,))
@jit
def f(x): return jax.grad(act)(x)
call = lambda: f(3.0)
""",
    "superclass swapped": """
class B1:
    def act(self, x): return x + 1
class B2:
    def act(self, x): return x * 7
class M(B1 if I == 1 else B2):
    def act(self, x): return super().act(x)
@jit
def f(x): return M().act(x)
call = lambda: f(3.0)
""",
    "isinstance abc register": """
class A(abc.ABC): pass
class M: pass
if I == 1: A.register(M)
m = M()
@jit
def f(x): return x * (2.0 if isinstance(m, A) else 3.0)
call = lambda: f(3.0)
""",
    "annotations read": """
def act(x: K): return x
def read(): return act.__annotations__["x"]
@jit
def f(x): return x * read()
call = lambda: f(3.0)
""",
    "singledispatch": """
@functools.singledispatch
def act(x): return x
act.register(object, lambda x: x * K)
@jit
def f(x): return act(x)
call = lambda: f(3.0)
""",
    "contextmanager helper": """
@contextlib.contextmanager
def scaled():
    yield K
@jit
def f(x):
    with scaled() as k: return x * k
call = lambda: f(3.0)
""",
    "np printoptions err state": """
np.set_printoptions(precision=I)
def read(): return float(np.array2string(np.array([1.23456]))[1:-1])
@jit
def f(x): return x * read()
call = lambda: f(3.0)
""",
    "itertools state": """
c = itertools.count(I)
def read():
    return c.__reduce__()[1][0]
@jit
def f(x): return x * read()
call = lambda: f(3.0)
""",
    "eval": """
HIDDEN_K2 = K
@jit
def f(x): return x * eval("HIDDEN_K" + "2")
call = lambda: f(3.0)
""",
    "lru_cache stale": """
R = 7.0 if I == 1 else 2.0
@functools.lru_cache
def rate(): return R
if I == 1: rate()
R = 2.0
@jit
def f(x): return x * rate()
call = lambda: f(3.0)
""",
}
results = {}
for name, text in CASES.items():
    # The classes of a case say what module they are of.
    module = types.ModuleType(f"case_{len(results)}")
    sys.modules[module.__name__] = module
    exec(HEAD + text, vars(module))  # noqa: S102 - the texts are those above
    results[name] = np.asarray(vars(module)["call"]()).tolist()
print(json.dumps({"results": results, "version": jax.__version__, "calls": dict(xcache.stats().calls)}))
