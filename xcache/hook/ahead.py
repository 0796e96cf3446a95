"""Load an executable before jax asks for it, with the options and devices that it was loaded with last time."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from xcache.clock import monotonic, pause
from xcache.errors import UncacheableError
from xcache.executables import deserialize
from xcache.hook.jax_versions import Jax
from xcache.keys.describe import Surroundings
from xcache.prefetch.prefetcher import Item
from xcache.request import LoadTarget

# A large machine takes long to make a backend. If jax has another backend already, this one is unlikely to appear.
_LONGEST_WAIT_SECONDS, _LONGEST_WAIT_BESIDE_SECONDS = 120.0, 2.0
_POLL_SECONDS = 0.002


class JaxLoader:
    """Loads onto a backend as soon as jax has one."""

    def __init__(self, jax: Jax, surroundings: Surroundings, *, everywhere: bool) -> None:
        """``everywhere``: the user has switched loading ahead on for GPU and TPU, too."""
        self._jax = jax
        self._surroundings = surroundings
        self._everywhere = everywhere
        # Digests of flags, platform and toolchain, by client and devices; weak, so that they keep no client alive.
        self._made_with: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], tuple[str, str, str]]]
        self._made_with = weakref.WeakKeyDictionary()
        # Platforms whose backend did not appear in time.
        self._missing: set[str] = set()

    def prepare(self, items: Sequence[Item]) -> None:
        """Digest the CPU's toolchain beforehand; other platforms' libraries only once their backend exists."""
        if any(item.platform == "cpu" for item in items):
            with contextlib.suppress(UncacheableError):
                self._surroundings.toolchain_files("cpu")

    def must_not_load(self, item: Item) -> bool:
        """Return whether it is known that this process must not load the item.

        A process of a job of several loads nothing ahead: all of them must use their devices in the same order. On a
        GPU or TPU loading ahead takes device memory, and has not been shown to do no harm.
        """
        if self._jax.distributed.client is not None or not (item.platform == "cpu" or self._everywhere):
            return True
        backend = self._backend(item.platform)
        made_with = None if backend is None else self._made_with.get(backend, {}).get(item.devices)
        return item.platform in self._missing or made_with not in (None, item.made_with)

    def target(self, item: Item, is_over: Callable[[], bool]) -> LoadTarget:
        """Wait for a backend, and return the client and devices to load the item onto.

        Raise UncacheableError unless flags, platform and toolchain are this process's: XLA may crash on others.
        """
        backend = self._wait_for_backend(item.platform, is_over)
        devices = self._devices(backend, item)
        known = self._made_with.setdefault(backend, {})
        if item.devices not in known:
            known[item.devices] = self._surroundings.made_with(
                backend, devices, self._jax.custom_key(), tuple(self._jax.flag_prefixes()), item.options
            )
        if self.must_not_load(item):
            raise UncacheableError("it was made with other flags, platform or toolchain")
        return LoadTarget(item.options, backend, devices)

    def is_current(self, client: Any) -> bool:
        """Return whether jax still uses this client: after ``clear_backends()`` it makes another."""
        return any(backend is client for backend in list(self._jax.backends().values()))

    def __call__(self, target: LoadTarget, raw: bytes) -> Any:
        """Load and return the executable; jaxlib raises various exceptions if it cannot."""
        from jaxlib import xla_client

        placed = xla_client.DeviceList(target.devices)
        return deserialize(target.client, raw, placed, xla_client.CompileOptions.ParseFromString(target.options))

    def _devices(self, backend: Any, item: Item) -> tuple[Any, ...]:
        devices = {device.id: device for device in backend.devices()}
        if not devices.keys() >= set(item.devices):
            raise UncacheableError("its devices are not here")
        return tuple(devices[number] for number in item.devices)

    def _backend(self, platform: str) -> Any:
        # Never ask jax for a backend: making one is the program's decision.
        return next((backend for backend in list(self._jax.backends().values()) if backend.platform == platform), None)

    def _wait_for_backend(self, platform: str, is_over: Callable[[], bool]) -> Any:
        deadline = monotonic() + _LONGEST_WAIT_SECONDS
        while not is_over():
            backend = self._backend(platform)
            if backend is not None:
                return backend
            if self._jax.backends():
                deadline = min(deadline, monotonic() + _LONGEST_WAIT_BESIDE_SECONDS)
            if monotonic() >= deadline:
                self._missing.add(platform)
                break
            pause(_POLL_SECONDS)
        raise UncacheableError(f"there is no backend for {platform}")
