"""The function that replaces jax's leaves to jax whatever xcache never has a key for."""

from __future__ import annotations

import types

import jax
import numpy as np
import pytest
from jax._src import array, compiler

from xcache.hook import compile_path, jax_versions, stages, wrapper
from xcache.keys import stablehlo


@pytest.mark.parametrize(
    ("platform", "version", "reason"), [("neuron", "1", "platform neuron"), ("rocm", "60300", "ROCm")]
)
def test_a_platform_without_keys_is_left_to_jax_and_its_own_cache(caches, platform, version, reason):
    cache = caches()
    seen = []
    wrapped = wrapper.wrap(
        lambda *given: seen.append(given), jax_versions.probe(), cache, None, stages.Stages(lambda: cache.ledger)
    )
    backend = types.SimpleNamespace(platform=platform, platform_version=version)
    devices = np.array([types.SimpleNamespace(process_index=0)])
    options = types.SimpleNamespace(
        executable_build_options=types.SimpleNamespace(fdo_profile=b""), profile_version=0
    )  # fmt: skip
    module = stablehlo.parse("module @jit_f {}")
    given = (backend, module, devices, options, [], list(devices), None)
    wrapped(*given)
    assert seen == [given]
    assert cache.statistics().uncacheable == {reason: 1}


def test_a_method_that_a_tool_adds_to_arrays_takes_no_part_in_a_compile(monkeypatch):
    client = type(jax.devices()[0].client)
    monkeypatch.setattr(array.ArrayImpl, "shown", lambda _: "x", raising=False)
    assert compile_path.replaced(client) is None
    monkeypatch.setattr(compiler, "get_compile_options", lambda *_: None)
    assert compile_path.replaced(client).startswith("function of jax replaced: jax._src.compiler.get_compile_options")
