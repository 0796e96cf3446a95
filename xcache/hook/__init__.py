"""Replace jax's file cache by xcache, and restore it. Only this package knows jax's internals."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from xcache import logs
from xcache._version import __version__
from xcache.config import config
from xcache.errors import ConfigError, UnsupportedError, XcacheError
from xcache.hook import deferred
from xcache.signals import reraise_if_the_programs

if TYPE_CHECKING:
    from xcache.hook import call_records, skipping, stages
    from xcache.statistics import Statistics

logger = logging.getLogger("xcache")
_PACKAGE = str(Path(__file__).parent.parent)
_installed: Handle | None = None


class Handle:
    """An installed hook; ``uninstall()``, or leaving a ``with``, restores jax exactly.

    Only jaxlib's ``serialize()`` stays replaced while an executable from the cache lives, and three functions of jax's
    while a module lives that was not lowered: these need that.
    """

    def __init__(self, settings: config.Config, mode: str) -> None:
        # Imported here, because a program with the cache off should not pay for these.
        from xcache import cache, process_cache
        from xcache.hook import ahead, jax_versions, stages, wrapper
        from xcache.keys import cpu_clients, describe

        self.jax = jax_versions.probe()
        self.surroundings = surroundings = describe.Surroundings(
            self.jax.jaxlib_folder, self.jax.jaxlib_version, settings.own_dir, self.jax.cuda_folder
        )
        loader = ahead.JaxLoader(self.jax, surroundings, everywhere=settings.sources["prefetch"] != "default")
        self.cache = cache.Cache(settings, mode, __version__, loader)
        self._undo = contextlib.ExitStack()
        try:
            # Each undo is registered before its step: Ctrl-C in between must not leave half a hook.
            self._undo.callback(self._forget)
            # Undone after the cache is closed, so that the cache's last line is still logged at the chosen level.
            self._undo.enter_context(logs.shown(settings))
            self._undo.callback(process_cache.leave, self.cache)
            self._undo.enter_context(cpu_clients.watched())
            self._undo.enter_context(surroundings.watching_libtpu())
            compiler = self.jax.compiler
            self._original = compiler.compile_or_get_cached
            self.stages = noted = stages.Stages(lambda: self.cache.ledger)
            self._undo.enter_context(noted.listening())
            skipping = self._skipping(settings, mode, noted)
            self.calls = self._call_records(skipping, settings)
            self._wrapped = wrapper.wrap(self._original, self.jax, self.cache, surroundings, noted, skipping)
            self._undo.callback(self._restore)
            compiler.compile_or_get_cached = self._wrapped
            self._undo.enter_context(skipping.installed(self._is_in_place))
            if not skipping.notes_arguments:
                self._undo.enter_context(noted.noting_arguments())
            # jax leaves its own frames out of tracebacks; do the same with xcache's.
            self._undo.callback(self._show_frames)
            self.jax.excluded_paths.append(_PACKAGE)
            self._undo.callback(self.jax.exclude_from_locations(f"{_PACKAGE}/"))
            process_cache.use(self.cache)
            # An executable that was loaded ahead must not keep a client alive after jax clears its backends.
            self._watch = self.jax.watch_clearing(self.cache.drop_for_discarded_clients)
            self.cache.warm_up()
            self._become_the_installed()
        except BaseException:
            self._undo.close()
            raise

    def uninstall(self) -> None:
        """Restore jax and finish pending stores. Calling it again does nothing."""
        from xcache import process_cache

        with process_cache.switching:
            self._undo.close()

    def statistics(self) -> Statistics:
        """Return what was counted since the hook was installed."""
        return self.cache.statistics()

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.uninstall()

    def _become_the_installed(self) -> None:
        global _installed
        _installed = self

    def _forget(self) -> None:
        global _installed
        if _installed is self:
            _installed = None

    def _skipping(self, settings: config.Config, mode: str, noted: stages.Stages) -> skipping.Skipping | skipping.Never:
        """Return the replacement of jax's lowering, as far as it is wanted and this jax is known."""
        from xcache.hook import skipping, wrapper

        if settings.lowering == "off" or mode == "refresh":
            return skipping.NEVER
        try:
            return skipping.Skipping(
                self.cache.aliases,
                self.cache.count_lowering,
                noted,
                settings.own_dir,
                settings.lowering,
                functools.partial(wrapper.reason_to_leave_all_to_jax, self.jax),
            )
        except UnsupportedError as error:
            logger.debug("%s", error)
            return skipping.NEVER

    def _call_records(self, skipping: Any, settings: config.Config) -> call_records.CallRecords | None:
        """Return the records of calls, if they are wanted; they need lowering to be skipped."""
        from xcache.hook import call_records
        from xcache.hook.skipping import NEVER

        if skipping is NEVER or settings.lowering not in ("auto", "skip") or settings.jit == "off":
            return None
        try:
            return call_records.CallRecords(skipping, self.cache, check=settings.jit == "check")
        except UnsupportedError as error:
            logger.debug("%s", error)
            return None

    def _is_in_place(self) -> bool:
        return self.jax.compiler.compile_or_get_cached is self._wrapped

    def _restore(self) -> None:
        if self.jax.compiler.compile_or_get_cached is self._wrapped:
            self.jax.compiler.compile_or_get_cached = self._original
        elif self.jax.compiler.compile_or_get_cached is not self._original:
            logger.warning("another library has replaced jax's compile function; xcache could not remove its own")

    def _show_frames(self) -> None:
        with contextlib.suppress(ValueError):
            self.jax.excluded_paths.remove(_PACKAGE)


class _Off(Handle):
    """The handle of a cache that is off."""

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()

    def statistics(self) -> Statistics:
        """Return zeros."""
        from xcache.statistics import Statistics

        return Statistics()


def enable(mode: str | int = "on", **settings: Any) -> Handle:
    """Switch the cache on in this process, before or after its first compile, in place of ``XCACHE``.

    ``mode`` is one of

        "on"        look up, and store what was compiled (also "1" or 1)
        "readonly"  look up, never store
        "refresh"   compile anew and overwrite
        "off"       switch the cache off, like disable() (also "0" or 0)

    ``settings`` are those that ``xcache config`` lists, in lower case and without the prefix. They win over the
    environment and all files: ``enable(dir="/scratch/me/xcache", max_size="10G")``. Leaving a ``with`` block, the
    handle's ``uninstall()``, or ``disable()`` switches the cache off, even if XCACHE or an outer block switched it on.
    Raise ConfigError for a mode or setting that is not understood.
    """
    mode = config.mode_from_code(mode)
    if mode == "off":
        disable()
        return _Off()
    if sys.platform == "win32":
        raise UnsupportedError("xcache does not run on Windows; it stays off")
    loaded = config.load(**settings)
    from xcache import process_cache

    with process_cache.switching:
        _uninstall()
        handle = Handle(loaded, mode)
        process_cache.only_when_asked()
        return handle


def disable() -> None:
    """Switch the cache off, and keep it off whatever XCACHE says."""
    from xcache import process_cache

    with process_cache.switching:
        _uninstall()
        process_cache.only_when_asked()


def _uninstall() -> None:
    """Uninstall the hook, if any, and close a cache that ``xcache.compile`` may have made."""
    from xcache import process_cache

    deferred.allow_compiles()
    if _installed is not None:
        _installed.uninstall()
    process_cache.use_none()


def stats() -> Statistics:
    """Return what this process has counted; all zero while the cache is off."""
    from xcache.process_cache import current
    from xcache.statistics import Statistics

    cache = current()
    return Statistics() if cache is None else cache.statistics()


def ledger() -> dict[str, Any]:
    """Return what this process has asked for so far, in the shape of ``xcache run --json``; empty without a cache."""
    from xcache.process_cache import current

    cache = current()
    return {} if cache is None else cache.ledger.as_data()


@contextlib.contextmanager
def no_compiles() -> Iterator[None]:
    """Have every compile within raise CompileInGuardError, on any thread of the process; a hit is no compile.

    While the cache is off, nothing is seen and nothing is raised, and a warning says so once.
    """
    from xcache.guard import guard

    if _is_off():
        _warn_of_guard()
    with guard.forbidding():
        yield


def _is_off() -> bool:
    """Return whether the cache is off and will not come with jax's backends."""
    from xcache import process_cache

    try:
        is_wanted = process_cache.may_be_made() and config.mode() != "off"
    except XcacheError:
        # This was said where the cache could not be switched on.
        is_wanted = True
    return process_cache.current() is None and not is_wanted


@functools.cache
def _warn_of_guard() -> None:
    logs.complain("xcache is off, so that no_compiles() sees none of jax's compiles; XCACHE=1 switches it on")


def warmed_up() -> None:
    """Note that the program has compiled all it needs: from now on ``XCACHE_ON_MISS`` holds."""
    from xcache.guard import guard

    guard.warm()


def current_calls() -> call_records.CallRecords | None:
    """Return the records of calls, if the cache is on and jax compiles through it."""
    handle = current_handle()
    return None if handle is None else handle.calls


def current_handle() -> Handle | None:
    """Return the hook, if the cache is on and jax compiles through it."""
    handle = _installed
    return handle if handle is not None and handle._is_in_place() else None


def current_stages() -> stages.Stages | None:
    """Return what notes the stages of programs, if the cache is on."""
    return None if _installed is None else _installed.stages


def install_from_environment() -> None:
    """Switch the cache on as ``XCACHE`` says, or log in one line why not; compiles that are to fail do so then."""
    try:
        mode = config.mode()
        if mode != "off":
            if unclear := config.misspelt_guard(os.environ):
                raise ConfigError(unclear)
            from xcache import process_cache

            if process_cache.may_be_made():
                enable(mode)
    except (XcacheError, OSError) as error:
        # A signal handler of the program's may raise TimeoutError, which is an OSError.
        reraise_if_the_programs(error)
        if config.guards():
            # Without the cache nothing would hold the program back.
            deferred.forbid_compiles(str(error))
        logs.complain("%s; xcache is off", error)
