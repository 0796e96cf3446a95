"""Collect all components of a program's key."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from xcache.errors import UncacheableError
from xcache.keys import COMPONENTS, Component, custom_calls, flags, options, platform, program, toolchain
from xcache.wire.protocol import LONGEST_DESCRIPTION, InstalledFile

# Stands between two texts of LIBTPU_INIT_ARGS, in the form of a flag.
_CHANGED = "--changed-to"


class Surroundings:
    """Everything a key needs besides the program. Facts that cannot change within a process are found once."""

    def __init__(self, jaxlib_folder: Path, jaxlib_version: str, memo: Path | None, cuda: Path | None = None) -> None:
        self._jaxlib = jaxlib_folder
        self._version = jaxlib_version
        self._memo = memo
        self._cuda = () if cuda is None else (str(cuda),)
        self._toolchains: dict[object, toolchain.Toolchain | UncacheableError] = {}
        # libtpu reads its flags once, before the first client is made; the program may change them before and after.
        self._libtpu_texts: tuple[str, ...] = (os.environ.get("LIBTPU_INIT_ARGS", ""),)
        self._libtpu_flags: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

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
        known_program: str = "",
    ) -> dict[str, Component]:
        """Return the components of ``module``'s key. The cheap ones come first: they may find it uncacheable.

        With ``known_program``, the digest of a program without foreign custom calls, no module is read.
        """
        places = platform.places(client) if client.platform in platform.GPU else None
        parts = {
            "options": options.canonical(serialized_options, places=places),
            "flags": self._flags(client, extra_flags, flag_prefixes),
            "platform": platform.describe(client, devices),
            "program": b""
            if known_program
            else program.canonical(
                module,
                keep_locations=keep_locations,
                ignore_partitioning_pointer=ignore_partitioning_pointer,
                callbacks_hold_pointers=callbacks_hold_pointers,
                strip_kernels=strip_kernels,
            ),
        }
        # The registration of a foreign call decides how XLA partitions it, and whether a GPU's command buffer holds it.
        on_gpu, is_partitioned = client.platform in platform.GPU, options.partitions(serialized_options) > 1
        if (on_gpu or is_partitioned) and not known_program and custom_calls.foreign(module, parts["program"]):
            raise UncacheableError(f"foreign custom call {'on a GPU' if on_gpu else 'in several partitions'}")
        parts["toolchain"] = self._toolchain(client.platform, serialized_options).content
        known = {"program": known_program}
        return {name: Component(name, parts[name], known.get(name, "")) for name in COMPONENTS}

    def made_with(
        self,
        client: Any,
        devices: Sequence[Any],
        extra_flags: str = "",
        flag_prefixes: tuple[str, ...] = (),
        serialized_options: bytes = b"",
    ) -> tuple[str, str, str]:
        """Return the digests of flags, platform and toolchain, which the keys of all programs share."""
        return (
            Component("flags", self._flags(client, extra_flags, flag_prefixes)).digest,
            Component("platform", platform.describe(client, devices)).digest,
            Component("toolchain", self._toolchain(client.platform, serialized_options).content).digest,
        )

    def toolchain_files(self, platform_name: str, serialized_options: bytes = b"") -> tuple[InstalledFile, ...]:
        """Return the compiler's files for a platform, as they were when first asked for."""
        return self._toolchain(platform_name, serialized_options).files

    @contextlib.contextmanager
    def watching_libtpu(self) -> Iterator[None]:
        """Note libtpu's flags when it reads them: the program may take them back before its first compile."""
        from jaxlib import xla_client

        owner, name = getattr(xla_client, "_xla", None), "initialize_pjrt_plugin"
        original = getattr(owner, name, None)
        if original is None:
            yield
            return

        @functools.wraps(original)
        def initialize_pjrt_plugin(*arguments: Any, **options: Any) -> Any:
            self._note_libtpu()
            return original(*arguments, **options)

        setattr(owner, name, initialize_pjrt_plugin)
        try:
            yield
        finally:
            if getattr(owner, name) is initialize_pjrt_plugin:
                setattr(owner, name, original)

    def _flags(self, client: Any, extra: str, prefixes: tuple[str, ...]) -> bytes:
        environ = {"XLA_FLAGS": os.environ.get("XLA_FLAGS", ""), "LIBTPU_INIT_ARGS": self._libtpu(client)}
        if client.platform not in ("cpu", *platform.GPU):
            flags.refuse_unseen(environ["LIBTPU_INIT_ARGS"])
        return flags.collect(environ, extra=extra, prefixes=prefixes)

    def _libtpu(self, client: Any) -> str:
        """Return every value that LIBTPU_INIT_ARGS had until the client was first seen, in order."""
        if client not in self._libtpu_flags:
            # libtpu has read one of them. xcache cannot tell which, so all count, in their order.
            self._libtpu_flags[client] = f" {_CHANGED} ".join(self._note_libtpu())
        return self._libtpu_flags[client]

    def _note_libtpu(self) -> tuple[str, ...]:
        """Note the present value of LIBTPU_INIT_ARGS; return all values that it had until now."""
        texts, now = self._libtpu_texts, os.environ.get("LIBTPU_INIT_ARGS", "")
        if now != texts[-1]:
            # Replaced, because two threads that see the client at once must not both append to it.
            self._libtpu_texts = texts = (*texts, now)
        return texts

    def _toolchain(self, platform_name: str, serialized_options: bytes) -> toolchain.Toolchain:
        folders: tuple[str, ...] = ()
        where: object = platform_name
        if platform_name in platform.GPU:
            folders = (*options.cuda_data_dirs(serialized_options), *self._cuda)
            # XLA searches these for tools at each compile.
            where = platform_name, folders, os.environ.get("PATH"), _current_folder()
        known = self._toolchains.get(where)
        if known is None or (isinstance(known, toolchain.Toolchain) and not known.is_in_place()):
            try:
                known = toolchain.describe(platform_name, self._jaxlib, self._version, self._memo, folders)
            except UncacheableError as error:
                known = error
            self._toolchains[where] = known
        if isinstance(known, UncacheableError):
            raise UncacheableError(str(known))
        return known


def span_processes(devices: Iterable[Any]) -> bool:
    """Return whether devices belong to more than one process of a job."""
    return len({device.process_index for device in devices}) > 1


def _current_folder() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        return ""


def texts(parts: Mapping[str, Component]) -> dict[str, str]:
    """Return the readable text of each component but the program, which the store keeps whole.

    A part of a text proves nothing, so that one which is too long is left out.
    """
    return {
        name: part.content.decode("utf-8", "replace")
        for name, part in parts.items()
        if name != "program" and len(part.content) <= LONGEST_DESCRIPTION
    }
