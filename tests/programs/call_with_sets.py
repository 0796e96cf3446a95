"""Call functions that go through a set of texts, whose order differs from process to process, or search one."""

import json

import xcache

WEIGHTS = {"mass": 1.0, "energy": 2.0, "spin": 3.0, "charge": 4.0, "color": 5.0}
FIELDS = set(WEIGHTS)


@xcache.jit(version="1")
def weigh(x):
    return [x * WEIGHTS[name] for name in FIELDS]


@xcache.jit(version="1", static_argnums=1)
def search(x, mode):
    return x + (mode in {"mass", "energy", "spin", "charge", "color"})


weighed = dict(zip(FIELDS, map(float, weigh(1.0)), strict=True))
print(json.dumps({"weighed": weighed, "found": float(search(1.0, "spin")), "calls": dict(xcache.stats().calls)}))
