"""Loading an executable before jax asks for it, with the options and devices that it was loaded with last time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from time import sleep
from typing import Any

from xcache.clock import monotonic
from xcache.errors import UncacheableError
from xcache.executables import deserialize
from xcache.hook.jax_versions import Jax
from xcache.keys.describe import Surroundings
from xcache.prefetch import Item

# The backend is being made at the moment, and a large machine takes its time for that; another may be there already.
_LONGEST_WAIT, _LONGEST_WAIT_BESIDE = 120.0, 2.0
_LOOK_EVERY = 0.002


class Loader:
    """Loads onto a backend as soon as jax has one."""

    def __init__(self, jax: Jax, surroundings: Surroundings) -> None:
        self._jax = jax
        self._surroundings = surroundings
        # By platform and devices.
        self._around: dict[tuple[str, tuple[int, ...]], tuple[str, str, str]] = {}

    def prepare(self, items: Sequence[Item]) -> None:
        """Find out what the toolchain is: of the libraries of others than the CPU, only when they are at work."""
        if any(item.platform == "cpu" for item in items):
            with contextlib.suppress(UncacheableError):
                self._surroundings.toolchain_files("cpu")

    def is_foreign(self, item: Item) -> bool:
        """Whether it is known that it was made with something else than this process has."""
        return self._around.get((item.platform, item.devices), item.around) != item.around

    def check(self, item: Item, is_over: Callable[[], bool]) -> None:
        """UncacheableError unless it was made with exactly what this process has: XLA may crash on anything else."""
        where = item.platform, item.devices
        if where not in self._around:
            backend = self._backend(item.platform, is_over)
            self._around[where] = self._surroundings.around(
                backend, self._devices(backend, item), self._jax.custom_key(), tuple(self._jax.flag_prefixes())
            )
        if self.is_foreign(item):
            raise UncacheableError("it was made with something else")

    def __call__(self, item: Item, raw: bytes) -> Any:
        """The executable; whatever jaxlib raises when it cannot be loaded."""
        from jaxlib import xla_client

        backend = self._backend(item.platform, lambda: False)
        placed = xla_client.DeviceList(self._devices(backend, item))
        return deserialize(backend, raw, placed, xla_client.CompileOptions.ParseFromString(item.options))

    def _devices(self, backend: Any, item: Item) -> tuple[Any, ...]:
        devices = {device.id: device for device in backend.devices()}
        return tuple(devices[number] for number in item.devices)

    def _backend(self, platform: str, is_over: Callable[[], bool]) -> Any:
        deadline = monotonic() + _LONGEST_WAIT
        while monotonic() < deadline and not is_over():
            # Looked at and never asked for: to make one is the program's decision.
            backends = list(self._jax.backends().values())
            for backend in backends:
                if backend.platform == platform:
                    return backend
            if backends:
                deadline = min(deadline, monotonic() + _LONGEST_WAIT_BESIDE)
            sleep(_LOOK_EVERY)
        raise UncacheableError(f"there is no backend for {platform}")
