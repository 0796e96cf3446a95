"""Skip lowering: a program whose structure is known needs no module, because an alias names its StableHLO program."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from xcache import keys
from xcache.aliases import Aliases
from xcache.errors import UnsupportedError
from xcache.hook import effects, warned
from xcache.hook.stages import Stages
from xcache.keys import Component, stablehlo
from xcache.request import Alias
from xcache.wire.hashing import digest

logger = logging.getLogger("xcache")

# Counted for each lowering that was skipped.
SKIPPED = "skipped"


class Lowered(NamedTuple):
    """The facts of a module that was lowered, and the alias by which lowering could have been skipped, if any."""

    structure: str
    detailed_logging: bool
    lapack: bool
    worth: float
    expected: Alias | None
    # The digest of the module as it was lowered: a program may change it until it is compiled.
    content: str = ""


class Never:
    """Skips nothing: the feature is off, or this version of jax is not known well enough."""

    notes_arguments = False

    def late(self, computation: Any) -> None:
        """Return None: no lowering is skipped."""

    def take_lowered(self, computation: Any) -> None:
        """Return None: no lowering is skipped."""

    def checked_alias(self, lowered: Lowered, module: Any, parts: Mapping[str, Component], name: str) -> None:
        """Do nothing: no lowering is skipped."""

    def missed(self, _: Any) -> tuple[None, None]:
        """Return nothing: no lowering is skipped."""
        return None, None

    def is_watched(self) -> bool:
        """Return False."""
        return False

    def installed(self, _: Callable[[], bool]) -> contextlib.AbstractContextManager[None]:
        """Change nothing."""
        return contextlib.nullcontext()


NEVER = Never()


class Skipping:
    """Replaces jax's lowering as long as it is ``installed``."""

    notes_arguments = True

    def __init__(
        self,
        aliases: Aliases,
        count: Callable[..., None],
        stages: Stages,
        memo_folder: Path,
        wanted: str,
        reason_to_leave_all: Callable[[Any], str | None],
    ) -> None:
        """``count`` gets the reason for each lowering, or SKIPPED, and with ``instead_of`` one that it takes back.

        ``memo_folder`` is where the digest of jax's files is remembered. ``wanted`` is the setting: with "check" each
        alias is compared, not used; with "auto" lowering is skipped where the program gains by it.
        ``reason_to_leave_all`` tells why nothing of a client is compiled by xcache, if that is so.
        """
        try:
            from jax._src import compiler, util
            from jax._src.interpreters import mlir, pxla

            self._compiler, self._mlir, self._pxla, self._util = compiler, mlir, pxla, util
            self._lower = _without_left(pxla._cached_lowering_to_hlo)
            self._compile = _without_left(pxla._cached_compilation)
            self._to_module, self._use_detailed_logging = mlir.lower_jaxpr_to_module, compiler.use_detailed_logging
            self._stablehlo = _without_left(pxla.MeshComputation.stablehlo)
            config = compiler.config
            watching = ("jax_log_compiles", "jax_dump_ir_to", "jax_compilation_cache_include_metadata_in_key")
            self._watching = [config.config._value_holders[name] for name in watching]
            # Raises where this jax has a setting without a value.
            self.is_watched()
            from xcache.hook import describing, late_module
            from xcache.hook.structure.encoding import CannotSkipError

            self._late_module, self._must_lower = late_module, CannotSkipError
        except (ImportError, LookupError, AttributeError) as error:
            raise UnsupportedError(f"xcache cannot skip lowering with this version of jax: {error}") from None
        self._aliases, self._count, self._stages, self._check = aliases, count, stages, wanted == "check"
        self._reason_to_leave_all = reason_to_leave_all
        self._describing = describing.Describing(
            aliases.expected_worth, aliases.drop_expected, memo_folder, always=wanted != "auto"
        )
        self._state = _State()
        # How many modules there were when those that warn were last looked for, and what undoes the changes to them.
        self._modules, self._undo = 0, contextlib.ExitStack()
        self._is_ours: Callable[[], bool] = bool
        # By id: the facts of modules that were lowered here and not compiled yet, and the aliases of those that were.
        self._lowered: dict[int, tuple[weakref.ref[Any], Lowered]] = {}
        self._compiled: dict[int, tuple[weakref.ref[Any], Alias]] = {}

    def late(self, computation: Any) -> Any:
        """Return the module that was not lowered, with its jaxpr; None if the computation is a real module."""
        held = self._state.held
        return held if held is not None and held.late.stand_in is computation else None

    def take_lowered(self, computation: Any) -> Lowered | None:
        """Return the facts of a module that was lowered here, and forget them."""
        noted = self._lowered.pop(id(computation), None)
        return noted[1] if noted is not None and noted[0]() is computation else None

    def missed(self, late: Any) -> tuple[Lowered, Any]:
        """Lower a module whose alias led to no entry; return its facts, and the module."""
        alias = late.alias
        self._aliases.forget(alias.structure)
        module = late.lowered()
        self._count("no entry", instead_of="asked for")
        return Lowered(alias.structure, alias.detailed_logging, alias.lapack, alias.worth, alias), module

    def checked_alias(self, lowered: Lowered, module: Any, parts: Mapping[str, Component], name: str) -> Alias | None:
        """Return the alias of a module that was lowered; None if it contradicts an earlier one.

        ``parts`` are those of the program's key.
        """
        program, expected = parts["program"], lowered.expected
        if lowered.content and lowered.content != digest(stablehlo.bytecode(module)):
            logger.debug("no alias: %s was changed after it was lowered", name)
            return None
        facts = name, lowered.detailed_logging, lowered.lapack
        alias = Alias(lowered.structure, program.digest, *facts, worth=lowered.worth)
        if expected is None or expected.program == program.digest:
            _note(self._compiled, module, alias)
            return alias
        self._count("contradiction")
        wrong = keys.combine({**parts, "program": program._replace(content=b"", known=expected.program)}).digest
        self._aliases.drop(lowered.structure, wrong)
        logger.error(
            "%s was lowered to another program than its alias says; please report it with the output of `xcache show %s"
            " --program`, and of `xcache show %s --program` if that entry still exists"
            " (XCACHE_LOWERING=off switches aliases off)",
            name,
            keys.combine(parts).digest,
            wrong,
        )
        return None

    def program_of(self, computation: Any) -> Alias | None:
        """Return the alias of one of jax's computations that was compiled, or loaded by its alias."""
        module = computation._hlo
        if type(module) is self._late_module.BoundLateModule:
            if not module.late.is_lowered:
                return module.alias
            module = module.lowered()
        noted = self._compiled.get(id(module))
        return noted[1] if noted is not None and noted[0]() is module else None

    def late_module(self, alias: Alias, lower: Callable[[Any], Any]) -> Any:
        """Return what jax gets in place of the module of a program that was not even traced."""
        self._repeat_side_effects(alias)
        return self._late_module.BoundLateModule(self._late_module.LateModule(alias, lower, []), None)

    @contextlib.contextmanager
    def installed(self, is_ours: Callable[[], bool]) -> Iterator[None]:
        """Skip lowering wherever possible, as long as ``is_ours``: jax compiles with xcache's function.

        The functions that may get a late module from jax's caches or objects stay replaced until there is none.
        """
        self._is_ours = is_ours
        for_late_modules: tuple[tuple[Any, str, Any], ...] = (
            (self._pxla, "_cached_lowering_to_hlo", Replacement(self._lower, self._lower_nested)),
            (self._pxla, "_cached_compilation", Replacement(self._compile, self._compile_late)),
            (self._pxla.MeshComputation, "stablehlo", self._wrapped_stablehlo()),
        )
        others: tuple[tuple[Any, str, Any], ...] = (
            (self._mlir, "lower_jaxpr_to_module", Replacement(self._to_module, self._lower_or_skip)),
            (self._compiler, "use_detailed_logging", self._wrapped_detailed_logging()),
        )
        with contextlib.ExitStack() as undo:
            for owner, name, made in for_late_modules:
                made.is_for_late_modules = True
                put_back = functools.partial(_put_back, owner, name, made, made.__wrapped__)
                undo.callback(self._late_module.living.when_none_is_left, put_back)
                setattr(owner, name, made)
            undo.callback(self._describing.end)
            # Undone first: from here on no lowering is skipped.
            undo.callback(setattr, self, "_is_ours", bool)
            for owner, name, made in others:
                undo.callback(_put_back, owner, name, made, getattr(owner, name))
                setattr(owner, name, made)
            self._undo, self._modules = undo, 0
            self._count_warnings()
            yield

    def _count_warnings(self) -> None:
        """Count the warnings of jax's modules, also of those that were imported since this was last called."""
        modules = len(sys.modules)
        if modules == self._modules:
            return
        counting = warned.CountingWarnings(self._count_warning)
        for module in warned.modules_that_warn():
            self._undo.callback(_put_back, module, "warnings", counting, warnings)
            vars(module)["warnings"] = counting
        self._describing.watch()
        self._modules = modules

    def _lower_nested(self, jaxpr: Any, *arguments: Any, **options: Any) -> Any:
        outer = self._state.depth
        try:
            self._state.depth = outer + 1
            result = self._lower(jaxpr, *arguments, **options)
        finally:
            self._state.depth = outer
        if type(result[0]) is self._late_module.LateModule:
            late = self._late_module.BoundLateModule(result[0], jaxpr)
            return (late if self._is_ours() else late.lowered(), *result[1:])
        return result

    def _compile_late(self, computation: Any, *arguments: Any, **options: Any) -> Any:
        if type(computation) is self._late_module.BoundLateModule:
            if not self._is_ours() or computation.late.is_lowered:
                # The program has asked for the module, and may have changed it.
                return self._compile(computation.lowered(), *arguments, **options)
            # jax's cache holds this argument weakly, for as long as its cache of lowerings holds it.
            outer = self._state.held
            try:
                self._state.held = computation
                return self._compile(computation.late.stand_in, *arguments, **options)
            except Exception:
                if self._is_ours():
                    raise
                # Another thread has switched the cache off meanwhile, and jax has got the stand-in.
            finally:
                # A listener or a signal handler of the program's may compile in the middle of another compile.
                self._state.held = outer
            return self._compile(computation.lowered(), *arguments, **options)
        return self._compile(computation, *arguments, **options)

    def _wrapped_stablehlo(self) -> Callable[[Any], Any]:
        original, held = self._stablehlo, self._late_module.BoundLateModule

        @functools.wraps(original)
        def stablehlo(computation: Any) -> Any:
            module = original(computation)
            return module.lowered() if type(module) is held else module

        return stablehlo

    def _wrapped_detailed_logging(self) -> Callable[[Any], bool]:
        original = self._use_detailed_logging

        @functools.wraps(original)
        def use_detailed_logging(module: Any) -> bool:
            late = self.late(module)
            return bool(original(module) if late is None else late.alias.detailed_logging)

        return use_detailed_logging

    def _lower_or_skip(self, module_name: str, jaxpr: Any, *arguments: Any, **options: Any) -> Any:
        if self._state.depth:
            self._stages.note_arguments(module_name, jaxpr.in_avals)
        lower = functools.partial(self._lower_timed, module_name, options)
        is_plain = self._state.depth and not arguments
        if not is_plain or not self._is_ours() or self.is_watched() or self._is_left(options.get("backend")):
            self._see(jaxpr)
            return self._to_module(module_name, jaxpr, *arguments, **options)
        try:
            structure = self._describing.structure(module_name, jaxpr, options)
            alias = self._aliases.find(structure.digest)
        except self._must_lower as reason:
            self._count(reason.kind)
            logger.debug("lowered: %s: %s (%s)", module_name, reason, reason.where or "the program")
            return lower(jaxpr)
        except Exception as error:  # noqa: BLE001 - a bug in here must not stop the program
            self._failed(f"describe {module_name}", error)
            return lower(jaxpr)
        if alias is None or self._check:
            return self._lower_and_note(lower, module_name, jaxpr, structure, alias)
        self._count(SKIPPED)
        self._util.test_event("lower_jaxpr_to_module")
        self._repeat_side_effects(alias)

        def lower_late(jaxpr: Any) -> Any:
            self._count("asked for", instead_of=SKIPPED)
            return lower(jaxpr).module

        late = self._late_module.LateModule(alias, lower_late, structure.constants)
        if not self._is_ours():
            # Another thread has switched the cache off meanwhile, and may have found no late module.
            return lower(jaxpr)
        shapes = self._mlir.ShapePolyLoweringState((), tuple(options["platforms"]))
        return self._mlir.LoweringResult(late, [], [], shapes)

    def _is_left(self, client: Any) -> bool:
        """Return whether the client's programs are left to jax, so that nothing is gained by an alias."""
        return client is not None and self._reason_to_leave_all(client) is not None

    def _see(self, jaxpr: Any) -> None:
        try:
            self._describing.see(jaxpr)
        except Exception as error:  # noqa: BLE001 - a bug in here must not stop the program
            self._failed("look at a program", error)

    def _lower_timed(self, module_name: str, options: Mapping[str, Any], jaxpr: Any) -> Any:
        # The time of the processor counts, because a busy machine says nothing of the next start.
        began = time.thread_time()
        result = self._to_module(module_name, jaxpr, **options)
        self._state.seconds = time.thread_time() - began
        self._describing.note_lowering(self._state.seconds)
        return result

    def _lower_and_note(
        self, lower: Callable[[Any], Any], module_name: str, jaxpr: Any, structure: Any, alias: Alias | None
    ) -> Any:
        try:
            if self._is_ours():
                self._count_warnings()
        except Exception as error:  # noqa: BLE001 - a bug in here must not stop the program
            self._failed(f"count warnings of {module_name}", error)
            return lower(jaxpr)
        before = self._state.warnings
        with warned.errors_of_numpy() as errors:
            result = lower(jaxpr)
        if errors:
            # Once more, for the warnings or exceptions that numpy gives under the program's settings; Python's own
            # warnings have been given.
            with warned.collected_warnings():
                result = lower(jaxpr)
        has_warned = bool(errors) or self._state.warnings != before
        try:
            if not self._describing.is_as_then(structure):
                self._count("code of jax changed while it was in use")
                return result
            self._note_lowered(module_name, result, structure, alias, has_warned=has_warned)
        except Exception as error:  # noqa: BLE001 - a bug in here must not stop the program
            self._failed(f"note {module_name}", error)
        return result

    def _note_lowered(
        self, module_name: str, result: Any, structure: Any, alias: Alias | None, *, has_warned: bool
    ) -> None:
        calls = effects.custom_calls(result.module)
        reason = "it warns" if has_warned else effects.reason_to_lower(result, calls)
        outcome = reason or ("no alias" if alias is None else "checked")
        self._count(outcome)
        logger.debug("lowered: %s: %s", module_name, outcome)
        if reason is None:
            lapack = any(name.startswith(effects.LAPACK) for name in calls)
            detailed_logging = bool(self._use_detailed_logging(result.module))
            content = digest(stablehlo.bytecode(result.module))
            worth = self._describing.worth(self._state.seconds - structure.seconds) if alias is None else alias.worth
            lowered = Lowered(structure.digest, detailed_logging, lapack, worth, alias, content)
            _note(self._lowered, result.module, lowered)

    def _failed(self, what: str, error: Exception) -> None:
        logger.debug("could not %s: %s: %s", what, type(error).__name__, error)
        self._count("error")

    def _count_warning(self) -> None:
        self._state.warnings += 1

    @staticmethod
    def _repeat_side_effects(alias: Alias) -> None:
        """Do what a program's lowering rules would have done beside lowering."""
        if alias.lapack:
            from jax._src.lib import lapack

            lapack._lapack.initialize()

    def begin(self) -> None:
        """Describe programs from now on: more than lowering is gained by it."""
        self._describing.begin()

    def is_watched(self) -> bool:
        """Return whether somebody wants to see each module."""
        return any(state.value for state in self._watching)


class _State(threading.local):
    """One thread's: how deep it is in jax's lowering, the warnings it has given there, and what it compiles."""

    depth = 0
    warnings = 0
    held: Any = None
    # How long its last lowering took.
    seconds = 0.0


class Replacement:
    """A function of jax's that is called through another one, and keeps its attributes, such as ``cache_clear``."""

    def __init__(self, original: Any, replacement: Callable[..., Any]) -> None:
        self._original, self._replacement = original, replacement
        functools.update_wrapper(self, original, updated=())

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the replacement."""
        return self._replacement(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _note(noted: dict[int, tuple[weakref.ref[Any], Any]], module: Any, facts: Any) -> None:
    """Note facts of a module, for as long as it lives."""
    key = id(module)
    noted[key] = weakref.ref(module, lambda _: noted.pop(key, None)), facts


def _without_left(function: Any) -> Any:
    """Return jax's own function, without the replacement that an earlier cache has left for its late modules."""
    return getattr(function, "__wrapped__", function) if getattr(function, "is_for_late_modules", False) else function


def _put_back(owner: Any, name: str, made: Any, original: Any) -> None:
    if getattr(owner, name) is made:
        setattr(owner, name, original)
