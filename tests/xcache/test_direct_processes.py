"""Jobs of several processes, and devices other than the CPU: whether xcache keeps out of it, without such devices."""

from __future__ import annotations

import types

import pytest

from xcache import direct
from xcache.hook import ahead, jax_versions, stages, wrapper
from xcache.keys import describe
from xcache.prefetch.prefetcher import Item
from xcache.recording import Ledger


def client_of(platform: str, *processes: int) -> types.SimpleNamespace:
    made = types.SimpleNamespace(platform=platform, platform_version="1")
    made.all_devices = [
        types.SimpleNamespace(id=number, process_index=process, client=made, device_kind="a kind")
        for number, process in enumerate(processes)
    ]
    made.devices = lambda: made.all_devices
    made.compile_and_load = lambda *arguments: "compiled"
    return made


class Counts:
    """Stands in for a cache, and counts the requests and reports to it."""

    def __init__(self) -> None:
        self.uncacheable: list[str] = []
        self.requests: list[object] = []

        self.ledger = Ledger("on", lambda message: None)

    def check_guard(self) -> None:
        pass

    def count_uncacheable(self, reason: str) -> None:
        self.uncacheable.append(reason)

    def get_or_compile(self, compile_now, request, as_without=None, *, has_another=False):
        self.requests.append(request)
        return types.SimpleNamespace(executable="from the cache", kind="uncacheable")


JOBS = [
    ("gpu", (0, 1), "original"),
    ("cuda", (0, 0, 1, 1), "original"),
    ("rocm", (0, 1), "original"),
    ("gpu", (0, 0), "from the cache"),
    ("gpu", (1,), "from the cache"),
    ("tpu", (0, 1), "from the cache"),
    ("cpu", (0, 1), "from the cache"),
]


@pytest.mark.parametrize(("platform", "processes", "expected"), JOBS)
def test_a_gpu_program_of_several_processes_goes_jaxs_own_way(platform, processes, expected):
    """One that compiles would wait for up to a day for the autotuning of one that hits."""
    import numpy as np
    from jaxlib import xla_client

    cache, jax, client = Counts(), jax_versions.probe(), client_of(platform, *processes)
    hook = wrapper.wrap(lambda *arguments: "original", jax, cache, None, stages.Stages(lambda: cache.ledger))
    devices = np.array(client.all_devices, dtype=object)
    options = xla_client.CompileOptions()
    assert hook(client, jax_module(), devices, options, [], client.all_devices) == expected
    assert cache.uncacheable == (["GPU program of several processes"] if expected == "original" else [])
    assert len(cache.requests) == (expected != "original")


def jax_module() -> object:
    import jax

    return jax.jit(lambda v: v).lower(1.0).compiler_ir("stablehlo")


@pytest.mark.parametrize(("platform", "processes", "expected"), JOBS)
def test_so_it_does_where_jaxlib_is_called_directly(monkeypatch, platform, processes, expected):
    cache, client = Counts(), client_of(platform, *processes)
    monkeypatch.setattr(direct, "_cache", lambda: cache)
    monkeypatch.setattr("jaxlib.xla_client.DeviceList", tuple)
    program = "func.func public @main(%x: tensor<3xf32>) -> tensor<3xf32> { return %x : tensor<3xf32> }"
    from jaxlib import xla_client

    found = direct.compile(client, program, client.all_devices, xla_client.CompileOptions())
    assert found == ("compiled" if expected == "original" else expected)
    assert len(cache.requests) == (expected != "original")
    if cache.requests:
        parts = {"program": types.SimpleNamespace(content=b"")}
        surroundings = types.SimpleNamespace(components=lambda *arguments, **options: parts)
        cache.config = types.SimpleNamespace(own_dir=None)
        monkeypatch.setattr(direct, "_surroundings", lambda folder: surroundings)
        monkeypatch.setattr(direct.keys, "combine", lambda parts: None)
        assert cache.requests[0]().may_wait == (len(set(processes)) == 1)
        # A program for this process alone does not wait either, if others belong to the job.
        direct.compile(client, program, client.all_devices[:1], xla_client.CompileOptions())
        assert cache.requests[1]().may_wait == (len(set(processes)) == 1)


def loader(*clients: types.SimpleNamespace, everywhere: bool = False, job: object = None) -> ahead.JaxLoader:
    made = types.SimpleNamespace(
        backends=lambda: {str(number): client for number, client in enumerate(clients)},
        distributed=types.SimpleNamespace(client=job),
    )
    return ahead.JaxLoader(made, describe.Surroundings(None, "", None, None), everywhere=everywhere)


def item(platform: str) -> Item:
    return Item("key", b"options", (0,), platform, 0.1, ("f", "p", "t"))


@pytest.mark.parametrize(
    ("platform", "everywhere", "job", "expected"),
    [
        ("cpu", False, None, True),
        ("gpu", False, None, False),
        ("tpu", False, None, False),
        ("gpu", True, None, True),
        ("tpu", True, None, True),
        ("cpu", True, "a client of the job", False),
        ("gpu", True, "a client of the job", False),
    ],
)
def test_loading_ahead_is_for_one_process_on_its_cpu_unless_it_is_asked_for(platform, everywhere, job, expected):
    asked = loader(everywhere=everywhere, job=job)
    assert asked.must_not_load(item(platform)) != expected
