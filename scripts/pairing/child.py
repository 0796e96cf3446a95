"""Runs programs of pairs in this process and describes their results to the last bit; see zygote for its other use.

``python -m pairing.child REQUEST``: the file REQUEST has what ``run`` takes, as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

_ADDRESS = re.compile(r"0x[0-9a-f]+")


def run(request: dict[str, Any]) -> None:
    """Run the programs of a request, one after the other, and write what each gave."""
    warnings.simplefilter("ignore")
    sys.path[:0] = request["folders"]
    # A program that is edited within a second would get what was compiled before.
    sys.dont_write_bytecode = True
    told = {}
    for name in request["programs"]:
        sys.argv = [name, request["side"]]
        before = _counted()
        told[name] = {"result": _result(name)}
        told[name]["counts"] = {key: value - before.get(key, 0) for key, value in _counted().items()}
    written = Path(request["told"])
    written.with_suffix(".new").write_text(json.dumps(told))
    written.with_suffix(".new").rename(written)


def _result(name: str) -> Any:
    try:
        module = importlib.import_module(name)
        return _described(module.out)
    except Exception as error:  # noqa: BLE001 - what a program raises is its result
        if os.environ.get("PAIRS_TRACEBACK"):
            traceback.print_exc()
        text = _ADDRESS.sub("0x", str(error)).replace(os.environ.get("PAIRS_OVERLAY", "/?"), "overlay")
        return [f"raised {type(error).__name__}", text[:200]]


def _described(out: Any) -> Any:
    import jax

    leaves, tree = jax.tree.flatten(out)
    return [_ADDRESS.sub("0x", str(tree)), *map(_leaf, leaves)]


def _leaf(value: Any) -> Any:
    import jax
    import numpy as np

    if not isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return f"{type(value).__name__} {value!r}"
    about = f"{type(value).__name__} {value.dtype} {value.shape} {getattr(value, 'weak_type', '')}"
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return [about, np.asarray(value).tobytes().hex()[:2000]]


def _counted() -> dict[str, int]:
    """Return xcache's own counts, as far as it is on."""
    if "xcache.hook" not in sys.modules:
        return {}
    import xcache

    stats = xcache.stats()
    counted = {"hits": stats.hits, "misses": stats.misses, "errors": sum(stats.errors.values())}
    for kind in ("lowerings", "calls"):
        for reason, count in getattr(stats, kind).items():
            counted[f"{kind}: {reason}"] = count
    return counted


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()))
