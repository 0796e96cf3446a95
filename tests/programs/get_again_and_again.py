"""Get entries again and again, and report memory and descriptors."""

import json
import os
import sys

from jaxlib import xla_client  # noqa: F401  # takes its memory before the first look
from support.crowd import Loadable, content_of, request_of
from support.places import until
from support.resources import descriptors_of, memory_of

from xcache.cache import Cache
from xcache.config import config

gets, names = int(sys.argv[1]), [f"small {n}" for n in range(200)] + [f"large {n}" for n in range(5)]
kinds, looks = {}, []


def look():
    looks.append([memory_of(os.getpid()), sum(descriptors_of(os.getpid()).values())])


look()
cache, reading = (Cache(config.load(), mode, "test") for mode in ("on", "readonly"))


def get(cache, name):
    outcome = cache.get_or_compile(lambda: Loadable(content_of(name)), lambda: request_of(name))
    assert outcome.executable.raw == content_of(name)
    kinds[outcome.kind] = kinds.get(outcome.kind, 0) + 1


for name in names:
    get(cache, name)
assert until(lambda: cache.statistics().stores == len(names), 60.0)
for number in range(gets):
    # One in ten is nowhere.
    get(*((reading, f"nowhere {number}") if number % 10 == 9 else (cache, names[number % len(names)])))
    if number % (gets // 10) == gets // 10 - 1:
        look()
cache.close()
reading.close()
look()
assert (cache.statistics().errors, reading.statistics().errors) == ({}, {})
print(json.dumps([kinds, looks]))
