"""Flags, settings of jax, and all that a helper may read of its surroundings."""

from __future__ import annotations

from collections.abc import Iterator

from pairing.pair import Pair, program

# The setting, its value as A and as B, and a use.
CONFIGS = (
    ("jax_enable_x64", False, True, "jit(lambda v: v.astype(float) / 3)(np.arange(4))"),
    ("jax_default_prng_impl", "threefry2x32", "rbg", "jit(lambda v: v + jax.random.uniform(jax.random.key(0)))(x)"),
    ("jax_threefry_partitionable", True, False, "jit(lambda v: v + jax.random.uniform(jax.random.key(0), (8,)))(x)"),
    ("jax_random_seed_offset", 0, 1, "jit(lambda v: v + jax.random.uniform(jax.random.key(0), (8,)))(x)"),
    ("jax_numpy_rank_promotion", "allow", "raise", "jit(lambda v: v + jnp.ones((2, 8)))(x)"),
    ("jax_numpy_dtype_promotion", "standard", "strict", "jit(lambda v: v + jnp.ones(8, jnp.int32))(x)"),
    ("jax_debug_nans", False, True, "jit(lambda v: jnp.log(v - 1))(x)"),
    ("jax_debug_infs", False, True, "jit(lambda v: 1 / (v * 0))(x)"),
    ("jax_default_dtype_bits", "64", "32", "jit(lambda v: jnp.arange(3) + 0.5)(x)"),
    ("jax_default_matmul_precision", None, "BF16_BF16_F32", "jit(lambda v: jnp.outer(v, v) @ jnp.outer(v, v / 3))(x)"),
    ("jax_enable_custom_prng", False, True, "jit(lambda v: jax.random.PRNGKey(0))(x)"),
    ("jax_disable_jit", False, True, "jit(lambda v: v * (2 if isinstance(v, jax.core.Tracer) else 3))(x)"),
    ("jax_legacy_prng_key", "allow", "error", "jit(lambda v: v + jax.random.uniform(jax.random.PRNGKey(0)))(x)"),
    ("jax_check_tracer_leaks", False, True, "(kept := []) + [jit(lambda v: kept.append(v) or v * 2)(x)]"),
    ("jax_transfer_guard", "allow", "disallow", "jit(lambda v: v * 2)(x)"),
    ("jax_default_device", None, "second", "jit(lambda v: v * len(str(jax.config.jax_default_device)))(x)"),
)  # fmt: skip
_UPDATE = "jax.config.update({name!r}, pick({a!r}, {b!r}))\n"
_WAYS = {
    "set first": "{update}out = {use}\n",
    "set after a compile": "before = jax.jit(lambda v: v - 1)(x)\n{update}out = {use}\n",
    "set after the same compile": "def used():\n    return {use}\nbefore = used()\n{update}out = before, used()\n",
}
# The flags as A and as B, and a use that shows them.
_BF16 = "jit(lambda v: ((v.astype(jnp.bfloat16) * 1.7 + 0.3) * 2.3 - 0.7).astype(jnp.float32))(x)"
FLAGS = (
    ("excess precision", "", "--xla_allow_excess_precision=false", _BF16),
    ("fast min and max", "--xla_cpu_enable_fast_min_max=false", "--xla_cpu_enable_fast_min_max=true",
     "jit(lambda v, w: jnp.minimum(v, w))(x, np.where(x > 1, np.float32('nan'), x))"),
    ("devices", "", "--xla_force_host_platform_device_count=3", "jit(lambda v: v * jax.device_count())(x)"),
    ("devices, eagerly", "", "--xla_force_host_platform_device_count=3", "jnp.ones(jax.device_count()) * 2"),
    ("fast math", "--xla_cpu_enable_fast_math=false",
     "--xla_cpu_enable_fast_math=true --xla_cpu_fast_math_honor_nans=false --xla_cpu_fast_math_honor_infs=false",
     "jit(lambda v, w: jnp.isnan(w) | (v / w != v / w))(x, np.where(x > 1, np.float32('nan'), x))"),
    ("order of two flags", "--xla_allow_excess_precision=false --xla_allow_excess_precision=true",
     "--xla_allow_excess_precision=true --xla_allow_excess_precision=false", _BF16),
)  # fmt: skip
# What a helper reads: the environment as A and B, a definition, and the helper.
READ = (
    ("os.environ", "def act(v): return v * float(os.environ['PAIRS_K'])"),
    ("os.getenv", "def act(v): return v * float(os.getenv('PAIRS_K'))"),
    ("os.environ.get", "def act(v): return v * float(os.environ.get('PAIRS_K', 1))"),
    ("a name for os.environ.get", "get = os.environ.get\ndef act(v): return v * float(get('PAIRS_K', 1))"),
    ("a module's name for it", "from os import environ\ndef act(v): return v * float(environ['PAIRS_K'])"),
    ("os.environb", "def act(v): return v * float(os.environb[b'PAIRS_K'])"),
    ("dict(os.environ)", "def act(v): return v * float(dict(os.environ)['PAIRS_K'])"),
    ("/proc/self/environ", "def act(v):\n    with open('/proc/self/environ') as f:\n"
     "        return v * float(f.read().split('PAIRS_K=')[1][0]) if 'PAIRS_K' in open('/proc/self/environ').read()"
     " else v * float(os.environ['PAIRS_K'])"),
    ("sys.argv", "def act(v): return v * (2 if sys.argv[1] == 'A' else 3)"),
    ("a file", "import tempfile\np = os.path.join(tempfile.gettempdir(), f'pairs-{os.getpid()}')\n"
     "open(p, 'w').write(os.environ['PAIRS_K'])\ndef act(v):\n    with open(p) as f: return v * float(f.read())"),
    ("an open file", "import tempfile\nf = tempfile.TemporaryFile('w+')\nf.write(os.environ['PAIRS_K'])\n"
     "def act(v):\n    f.seek(0)\n    return v * float(f.read())"),
    ("a pathlib.Path", "import pathlib, tempfile\np = pathlib.Path(tempfile.gettempdir(), 'pairs-x')\n"
     "p.write_text(os.environ['PAIRS_K'])\ndef act(v): return v * float(p.read_text())"),
    ("numpy.load", "import tempfile\np = os.path.join(tempfile.gettempdir(), 'pairs-y.npy')\n"
     "np.save(p, float(os.environ['PAIRS_K']))\ndef act(v): return v * np.load(p)"),
    ("the working directory", "import tempfile\nos.makedirs(d := tempfile.gettempdir() + '/' + 'x' * int(os.environ['PAIRS_K']), exist_ok=True)\nos.chdir(d)\n"
     "def act(v): return v * len(os.getcwd())"),
    ("a child's output", "import subprocess\ndef act(v): return v * float(subprocess.check_output(['printenv', 'PAIRS_K']))"),
    ("a global that a function sets", "k = 1\ndef configure():\n    global k\n    k = float(os.environ['PAIRS_K'])\nconfigure()\n"
     "def act(v): return v * k"),
    ("a setting of jax", "jax.config.update('jax_default_matmul_precision', pick('float32', 'bfloat16'))\n"
     "def act(v): return v * len(jax.config.jax_default_matmul_precision)"),
    ("the recursion limit", "sys.setrecursionlimit(pick(2000, 3000))\ndef act(v): return v * sys.getrecursionlimit()"),
    ("a locale's or module's state", "import decimal\ndecimal.getcontext().prec = pick(2, 3)\n"
     "def act(v): return v * float(decimal.Decimal(1) / decimal.Decimal(3))"),
    ("np.errstate", "np.seterr(divide=pick('ignore', 'warn'))\ndef act(v): return v * len(np.geterr()['divide'])"),
    ("the devices", "jax.config.update('jax_num_cpu_devices', pick(1, 2))\ndef act(v): return v * len(jax.devices())"),
)  # fmt: skip


def pairs() -> Iterator[Pair]:
    """Yield all pairs of this family."""
    for name, a, b, use in CONFIGS:
        update = _UPDATE.format(name=name, a=a, b=b)
        if b == "second":
            update = "jax.config.update('jax_default_device', pick(None, jax.devices()[0]))\n"
        for way, body in _WAYS.items():
            for jit in ("jax.jit", "xcache.jit"):
                text = body.replace("{update}", update).replace("{use}", use)
                yield Pair("setting", f"{name}, {way}", program(text, jit), jit, is_alone=True)
        if isinstance(a, (bool, str)) and b != "second":
            environments = {name.upper(): str(a)}, {name.upper(): str(b)}
            text = program(f"out = {use}\n", "jax.jit")
            yield Pair(
                "setting", f"{name}, by its variable", text, is_alone=True, is_fresh=True, environments=environments
            )
    for name, a, b, use in FLAGS:
        for jit in ("jax.jit", "xcache.jit"):
            text = program(f"out = {use}\n", jit)
            yield Pair("flag", name, text, jit, is_alone=True, environments=({"XLA_FLAGS": a}, {"XLA_FLAGS": b}))
    for name, definition in READ:
        for shape, use in {
            "called directly": "@jit\ndef step(v): return act(v) + 1\nout = step(x)\n",
            "behind a helper": "def helper(v): return act(v)\n@jit\ndef step(v): return helper(v) + 1\nout = step(x)\n",
        }.items():
            text = program(f"{definition}\n{use}", "xcache.jit")
            environments = {"PAIRS_K": "2"}, {"PAIRS_K": "3"}
            is_alone = "jax." in name or "devices" in name or "jax.config" in definition
            yield Pair(
                "surroundings", f"{name}, {shape}", text, "xcache.jit", is_alone=is_alone, environments=environments
            )
