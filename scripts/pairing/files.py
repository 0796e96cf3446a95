"""Programs whose files differ, and files of jax that are edited: before the program, or while it runs."""

from __future__ import annotations

from collections.abc import Iterator

from pairing.jax_files import EDITS
from pairing.pair import Pair, program

_USE = "jax.jit(lambda v: v < 1)(x)"
_FILE, _TEXT, _INSTEAD = EDITS["NE"]
# A program that edits its jax while it runs, in the ways in which files come to be changed.
_EDIT = f"""\
def edit(keeps_times=False, replaces=False):
    path = os.path.join(os.environ["PAIRS_OVERLAY"], "jax", {_FILE!r})
    status = os.stat(path)
    text = open(path).read().replace({_TEXT!r}, {_INSTEAD!r})
    other = path + ".new" if replaces else path
    with open(other, "w") as file:
        file.write(text)
    if keeps_times:
        os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    if replaces:
        os.rename(other, path)
def swap():
    current = os.environ["PAIRS_OVERLAY"]
    os.symlink("NE", current + ".swap")
    os.rename(current + ".swap", current)
"""
# Each row: the program's work as A, and the state of jax when it starts as A and as B.
_WHILE_IT_RUNS = {
    "between the import and the first compile": ("edit()", "in place"),
    "between the import and the first compile, with its times": ("edit(keeps_times=True)", "in place"),
    "between the import and the first compile, by a rename": ("edit(replaces=True)", "in place"),
    "between two compiles": ("jax.jit(lambda v: v - 1)(x)\n    edit()", "in place"),
    "between two compiles, with its times": ("jax.jit(lambda v: v - 1)(x)\n    edit(True)", "in place"),
    "between the import and a fork": ("edit()\n    forked = True", "in place"),
    "by a link that another folder gets": ("swap()", ""),
}
_IN_A_FORK = """
if "forked" in globals():
    import warnings
    warnings.simplefilter("ignore")
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            out = {use}
            import atexit
            atexit._run_exitfuncs()
            os.write(writing, np.asarray(out).tobytes())
        finally:
            os._exit(0)
    os.close(writing)
    out = jnp.asarray(np.frombuffer(os.read(reading, 100), bool))
else:
    out = {use}
"""
# How the files are when a program starts.
_BEFORE = {
    "another folder behind a link": ("pristine", "NE"),
    "two edits behind a link": ("EQ", "NE"),
    "edited in place": ("pristine, in place", "NE, in place"),
    "two edits in place": ("EQ, in place", "NE, in place"),
    "two edits in place with one time": ("EQ, with its times", "NE, with its times"),
    "compiled from another source": ("pristine", "NE, compiled"),
    "compiled from two other sources": ("EQ, compiled", "NE, compiled"),
}
# A hook of the import that compiles another text than the file's, as tools for types and coverage do.
_HOOK = f"""\
import importlib.machinery, sys
class Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        path = self.get_filename(fullname)
        return compile(self.get_data(path).decode().replace({_TEXT!r}, CHANGED), path, "exec", dont_inherit=True)
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "jax._src.interpreters.mlir": return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec
direction = dict(A=FIRST, B="NE")[sys.argv[1]]
CHANGED = f"hlo.ComparisonDirectionAttr.get(dict(LT={{direction!r}}).get(direction, direction))"
sys.meta_path.insert(0, Finder)
"""
# Programs that differ in a file: the text as A and B, of the program or of a module that it imports.
_TEXTS = {
    "constant": ("def act(v): return v * 2\n", "def act(v): return v * 3\n"),
    "kind of a constant": ("def act(v): return v.astype(int) * 2\n", "def act(v): return v.astype(int) * 2.0\n"),
    "operator": ("def act(v): return v * 2\n", "def act(v): return v + 2\n"),
    "order": ("def act(v): return v - v[::-1]\n", "def act(v): return v[::-1] - v\n"),
    "name": ("def act(v): return jnp.sin(v)\n", "def act(v): return jnp.cos(v)\n"),
    "default": ("def act(v, k=2): return v * k\n", "def act(v, k=3): return v * k\n"),
    "branch": ("def act(v): return v if v.ndim else v * 2\n", "def act(v): return v if not v.ndim else v * 2\n"),
    "comment": ("def act(v): return v * 2  # a\n", "def act(v): return v * 2  # b\n"),
}


def pairs() -> Iterator[Pair]:
    """Yield all pairs of this family."""
    for name, states in _BEFORE.items():
        for jit in ("jax.jit", "xcache.jit"):
            body = f"out = {_USE.replace('jax.jit', 'jit')}\n"
            yield Pair("file of jax", name, program(body, jit), jit, is_alone=True, jax_files=states)
    for name, (change, manner) in _WHILE_IT_RUNS.items():
        body = f"{_EDIT}if A:\n    {change}\n{_IN_A_FORK.format(use=_USE)}"
        states = ("pristine, in place", f"NE, {manner}") if manner else ("pristine", "NE")
        yield Pair("file of jax", name, program(body, "jax.jit"), is_alone=True, jax_files=states)
    for name, first in (("hook of the import", "LT"), ("two hooks of the import", "EQ")):
        text = _HOOK.replace("FIRST", repr(first)) + program(f"out = {_USE}\n", "jax.jit")
        yield Pair("file of jax", name, text, is_alone=True, is_fresh=True)
    for name, (a, b) in _TEXTS.items():
        use = "@jit\ndef step(v): return act(v) + 1\nout = step(x)\n"
        for jit in ("jax.jit", "xcache.jit"):
            whole = [program(text + use, jit) for text in (a, b)]
            yield Pair(
                "text", f"{name}, another checkout", whole[0], jit, source_as_b=whole[1], is_same=name == "comment"
            )
            module = "helper_" + name.replace(" ", "_") + jit[0]
            yield Pair(
                "text", f"{name} in a module, another checkout", program(f"from {module} import act\n{use}", jit), jit,
                modules={f"{module}.py": (f"import jax.numpy as jnp\n{a}", f"import jax.numpy as jnp\n{b}")},
                is_same=name == "comment",
            )  # fmt: skip
        yield Pair("text", f"{name}, edited", whole[0], jit, is_alone=True, is_fresh=True, is_edited=True,
                   source_as_b=whole[1], is_same=name == "comment")  # fmt: skip
