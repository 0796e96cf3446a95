"""All components of a program's key together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from xcache.errors import UncacheableError
from xcache.keys import Component, flags, options, platform, program, toolchain

_GPU = ("gpu", "cuda", "rocm")
_LONGEST_TEXT = 16_000


class Surroundings:
    """Everything a key needs beside the program; what cannot change while the process lives is found once."""

    def __init__(self, jaxlib_folder: Path, jaxlib_version: str, memo: Path | None, cuda: Path | None) -> None:
        self._jaxlib = jaxlib_folder
        self._version = jaxlib_version
        self._memo = memo
        self._cuda = cuda
        self._toolchains: dict[str, toolchain.Toolchain | UncacheableError] = {}

    def components(
        self,
        client: Any,
        module: Any,
        devices: Sequence[Any],
        serialized_options: bytes,
        *,
        keep_locations: bool = False,
        ignore_partitioning_pointer: bool = False,
        callbacks_hold_pointers: bool = True,
        strip_kernels: Callable[[Any], None] | None = None,
        extra_flags: str = "",
        flag_prefixes: tuple[str, ...] = (),
    ) -> dict[str, Component]:
        """The components of ``module``'s key; the cheap ones, which may find it uncacheable, first."""
        parts = {
            "options": options.canonical(serialized_options, ignore_device_numbers=client.platform in _GPU),
            "flags": flags.collect(extra=extra_flags, prefixes=flag_prefixes),
            "platform": platform.describe(client, devices),
            "program": program.canonical(
                module,
                keep_locations=keep_locations,
                ignore_partitioning_pointer=ignore_partitioning_pointer,
                callbacks_hold_pointers=callbacks_hold_pointers,
                strip_kernels=strip_kernels,
            ),
        }
        made = {name: Component(name, parts[name]) for name in ("program", "options", "flags", "platform")}
        return made | {"toolchain": Component("toolchain", self._toolchain(client.platform).content)}

    def around(
        self, client: Any, devices: Sequence[Any], extra_flags: str = "", flag_prefixes: tuple[str, ...] = ()
    ) -> tuple[str, str, str]:
        """Digests of flags, platform and toolchain: what keys have in common whatever the program."""
        return (
            Component("flags", flags.collect(extra=extra_flags, prefixes=flag_prefixes)).digest,
            Component("platform", platform.describe(client, devices)).digest,
            Component("toolchain", self._toolchain(client.platform).content).digest,
        )

    def toolchain_files(self, platform_name: str) -> tuple[toolchain.InstalledFile, ...]:
        """The files that compile for a platform, as they were found when that was first asked."""
        return self._toolchain(platform_name).files

    def _toolchain(self, platform_name: str) -> toolchain.Toolchain:
        known = self._toolchains.get(platform_name)
        if known is None:
            try:
                known = toolchain.describe(platform_name, self._jaxlib, self._version, self._memo, self._cuda)
            except UncacheableError as error:
                known = error
            self._toolchains[platform_name] = known
        if isinstance(known, UncacheableError):
            raise UncacheableError(str(known))
        return known


def texts(parts: Mapping[str, Component]) -> dict[str, str]:
    """What a person can read of each component; the program is kept as a whole elsewhere."""
    return {
        name: part.content.decode("utf-8", "replace")[:_LONGEST_TEXT]
        for name, part in parts.items()
        if name != "program"
    }
