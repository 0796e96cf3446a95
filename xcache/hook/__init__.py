"""Takes the place of jax's file cache, and gives it back: the only package that knows jax's internals."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from xcache import config
from xcache._version import __version__
from xcache.errors import UnsupportedError, XcacheError

if TYPE_CHECKING:
    from xcache.statistics import Statistics

logger = logging.getLogger("xcache")
_PACKAGE = str(Path(__file__).parent.parent)
_lock = threading.RLock()
_installed: Handle | None = None


class Handle:
    """An installed hook; ``uninstall()``, or leaving a ``with``, restores jax exactly."""

    def __init__(self, settings: config.Config, mode: str) -> None:
        # Imported here: what costs time is paid by those who use it.
        from xcache import cache
        from xcache.hook import ahead, jax_versions, wrapper
        from xcache.keys import describe

        self._jax = jax_versions.probe()
        surroundings = describe.Surroundings(
            self._jax.jaxlib_folder, self._jax.jaxlib_version, settings.own_dir, self._jax.cuda_folder
        )
        self._cache = cache.Cache(settings, mode, __version__, ahead.Loader(self._jax, surroundings))
        self._undo = contextlib.ExitStack()
        try:
            # How to undo a step comes before it: Ctrl-C in between must not leave half a hook.
            self._undo.callback(self._forget)
            self._undo.callback(cache.leave, self._cache)
            self._undo.enter_context(_logging(settings))
            compiler = self._jax.compiler
            self._original = compiler.compile_or_get_cached
            self._wrapped = wrapper.wrap(self._original, self._jax, self._cache, surroundings)
            self._undo.callback(self._restore)
            compiler.compile_or_get_cached = self._wrapped
            # jax leaves its own frames out of tracebacks; xcache's are to be seen as little.
            self._undo.callback(self._show_frames)
            self._jax.excluded_paths.append(_PACKAGE)
            cache.use(self._cache)
            self._cache.warm_up()
            self._become_the_installed()
        except BaseException:
            self._undo.close()
            raise

    def uninstall(self) -> None:
        """Restore jax and finish what is still to be stored. Calling it again does nothing."""
        self._undo.close()

    def statistics(self) -> Statistics:
        """What was counted since the hook was installed."""
        return self._cache.statistics()

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.uninstall()

    def _become_the_installed(self) -> None:
        global _installed
        with _lock:
            _installed = self

    def _forget(self) -> None:
        global _installed
        with _lock:
            if _installed is self:
                _installed = None

    def _restore(self) -> None:
        if self._jax.compiler.compile_or_get_cached is self._wrapped:
            self._jax.compiler.compile_or_get_cached = self._original
        elif self._jax.compiler.compile_or_get_cached is not self._original:
            logger.warning("jax's compile function was replaced by somebody else; xcache could not take itself out")

    def _show_frames(self) -> None:
        with contextlib.suppress(ValueError):
            self._jax.excluded_paths.remove(_PACKAGE)


def install(mode: str = "on", **settings: Any) -> Handle:
    """Switch the cache on in this process, with these settings over all others."""
    if sys.platform == "win32":
        raise UnsupportedError("xcache does not run on Windows; it stays off")
    loaded = config.load(**settings)
    disable()
    return Handle(loaded, mode)


def disable() -> None:
    """Switch the cache off, if it is on."""
    if _installed is not None:
        _installed.uninstall()


def stats() -> Statistics:
    """What this process counted; all zero while the cache is off."""
    from xcache.cache import current
    from xcache.statistics import Statistics

    cache = current()
    return Statistics() if cache is None else cache.statistics()


def install_from_environment() -> None:
    """What the plugin does: install as ``XCACHE`` says, or say in one line why not."""
    if _installed is not None:
        return
    try:
        mode = config.mode()
        if mode != "off":
            install(mode)
    except (XcacheError, OSError) as error:
        logger.warning("%s; xcache is off", error)


@contextlib.contextmanager
def _logging(settings: config.Config) -> Any:
    """Apply the level that was asked for; without any asking, logging is the program's own business."""
    if settings.sources["log"] == "default":
        yield
        return
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter("xcache: %(message)s"))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(settings.log.upper())
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to stderr, unless the program has a handler of its own that will."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)
