"""Wrappers of the functions through which jax lowers and compiles, which edit the module or what is asked of XLA."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import Any

from pairing.pair import Pair, program

EDITS = '''\
from jaxlib.mlir import ir
from jax._src.interpreters import mlir as mlir_of_jax
n = pick(1.5, 2.5)
def module_of(held):
    """Return the module in what a function of jax got or returned, and how deep it is."""
    for each in (held if isinstance(held, (tuple, list)) else [held]):
        each = getattr(each, "module", each)
        if hasattr(each, "operation"):
            return each
    return None
def edit(module):
    """Multiply the constants of 3.5 in a module, in place."""
    def visit(op):
        if op.name == "stablehlo.constant":
            value = op.attributes["value"]
            if "3.5" in str(value):
                element = ir.RankedTensorType(value.type).element_type
                op.attributes["value"] = ir.DenseElementsAttr.get_splat(value.type, ir.FloatAttr.get(element, 3.5 * n))
        for region in op.regions:
            for block in region:
                for each in block:
                    visit(each.operation)
    with module.context, ir.Location.unknown(module.context):
        visit(module.operation)
def edited(module):
    """Return another module, with other constants."""
    with module.context, ir.Location.unknown(module.context):
        return ir.Module.parse(str(module).replace("3.500000e+00", f"{3.5 * n:e}"))
'''
# The functions on the path, as far as a jax has them; and what of them is edited.
FUNCTIONS = {
    "jax._src.interpreters.mlir": ("lower_jaxpr_to_module", "lower_jaxpr_to_fun", "jaxpr_subcomp", "module_to_bytecode"),
    "jax._src.interpreters.pxla": ("_cached_lowering_to_hlo", "_cached_compilation", "lower_sharding_computation",
                                   "create_compile_options", "MeshComputation.compile", "MeshComputation.stablehlo",
                                   "UnloadedMeshExecutable.from_hlo", "MeshExecutable.from_hlo"),
    "jax._src.compiler": ("backend_compile_and_load", "backend_compile", "compile_or_get_cached", "get_compile_options",
                          "_compile_and_write_cache", "use_detailed_logging"),
    "jax._src.pjit": ("_pjit_lower", "_resolve_and_lower", "_pjit_call_impl", "jit_lower"),
    "jax._src.dispatch": ("apply_primitive",),
    "jax._src.stages": ("Lowered.compile",),
}  # fmt: skip
WRAPPERS = {
    "edits what it gets": """
    for each in (*args, *options.values()):
        if (module := module_of(each)) is not None: edit(module)
    return old(*args, **options)""",
    "edits what it returns": """
    done = old(*args, **options)
    if (module := module_of(done)) is not None: edit(module)
    return done""",
    "passes another module on": """
    def other(each): return edited(each) if type(each) is ir.Module else each
    return old(*map(other, args), **{key: other(each) for key, each in options.items()})""",
    "looks at it": """
    done = old(*args, **options)
    for each in (*args, *options.values(), done):
        if (module := module_of(each)) is not None: seen.append("3.5" in str(module.operation))
    return done""",
    "asks for other options": """
    done = old(*args, **options)
    if hasattr(done, "executable_build_options"):
        done.executable_build_options.debug_options.xla_cpu_enable_fast_min_max = n == 1.5
    return done""",
    "changes its result": """
    done = old(*args, **options)
    if isinstance(done, (list, tuple)) and done and isinstance(done[0], jax.Array): done = type(done)(each * n for each in done)
    return done""",
}
MADE = {
    "wraps": "@functools.wraps(old)\ndef new(*args, **options):{body}\n",
    "plain": "def new(*args, **options):{body}\n",
}
TIMES = {
    "before the first compile": "{wrap}out = {use}\n",
    "after the first compile": "before = jax.jit(lambda v: v - 1)(x)\n{wrap}out = {use}\n",
    "and the same before": "before = {use}\njax.clear_caches()\n{wrap}out = before, {use}\n",
}
# A module that a wrapper edits and one that none does.
KINDS = {"two edits": "True", "wrapped or not": "not A"}
_USE = "jax.jit(lambda v: (v * 3.5, jnp.minimum(v, jnp.nan)))(x)"
_ANOTHER = (("two edits", "after the first compile"), ("wrapped or not", "and the same before"))
# Which wrappers do something to which function.
_RETURNING = ("lower_jaxpr_to_module", "_cached_lowering_to_hlo")
_TAKING = ("_cached_compilation", "backend_compile_and_load", "backend_compile", "compile_or_get_cached",
           "_compile_and_write_cache", "UnloadedMeshExecutable.from_hlo", "MeshExecutable.from_hlo")  # fmt: skip
# They get the module, and hand it to nothing.
_READING = ("use_detailed_logging",)


def _wrappers(function: str) -> tuple[str, ...]:
    if function in _RETURNING:
        return ("edits what it returns", "looks at it")
    if function in _TAKING:
        return ("edits what it gets", "passes another module on", "looks at it")
    return ("edits what it gets", "looks at it") if function in _READING else ("looks at it",)


def _wrap(module: str, function: str, made: str, wrapper: str, condition: str) -> str:
    *owner, name = function.split(".")
    body = MADE[made].format(body=WRAPPERS[wrapper])
    place = ".".join(["M", *owner])
    text = f"old = getattr({place}, {name!r})\n{body}setattr({place}, {name!r}, new)\n"
    within = "".join(f"    {line}\n" for line in text.splitlines())
    return (
        f"import importlib\nM = importlib.import_module({module!r})\nseen = []\n"
        f"if ({condition}) and hasattr({place}, {name!r}):\n{within}"
    )


def _exists(module: str, function: str) -> bool:
    """Return whether the jax of this environment has this function."""
    held: Any = importlib.import_module(module)
    for part in function.split("."):
        held = getattr(held, part, None)
    return held is not None


def pairs() -> Iterator[Pair]:
    """Yield all pairs of this family."""
    for module, functions in FUNCTIONS.items():
        for function in filter(functools.partial(_exists, module), functions):
            for wrapper in _wrappers(function):
                for when, body in TIMES.items():
                    for kind, condition in KINDS.items():
                        if wrapper == "passes another module on" and (kind, when) not in _ANOTHER:
                            continue
                        made = "plain" if when == "before the first compile" and kind == "two edits" else "wraps"
                        text = body.format(wrap=_wrap(module, function, made, wrapper, condition), use=_USE)
                        if wrapper == "looks at it":
                            if kind == "two edits":
                                continue
                            # That somebody looks changes nothing but what they see.
                            text += "out = out, True if A else all(seen) or not seen\n"
                        yield Pair("path", f"{module.rpartition('.')[2]}.{function}, {wrapper}, {when}, {kind}",
                                   program(EDITS + text, "jax.jit"), is_alone=True, is_same=wrapper == "looks at it")  # fmt: skip
