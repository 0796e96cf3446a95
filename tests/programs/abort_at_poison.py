"""Compile one function; an entry that reads ``poison`` ends the program."""

import dataclasses
import json
import os

import jax

import xcache
from xcache import executables

# XLA itself dies of some damaged entries; here it takes a certain word, so that it always does.
load = executables.deserialize


def deserialize(client, raw, *arguments):
    if raw == b"poison":
        os.abort()
    return load(client, raw, *arguments)


executables.deserialize = deserialize
import xcache.hook.wrapper

xcache.hook.wrapper.deserialize = deserialize
result = float(jax.jit(lambda v: v * 3 + 1)(2.0))
print(json.dumps([result, dataclasses.asdict(xcache.stats())]))
