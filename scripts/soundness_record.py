"""Records what xcache's digest says of each program that jax lowers, and which program jax makes of it.

It is a plugin of pytest (``-p soundness_record``), and runs other programs: ``soundness_record.py PROGRAM [ARGUMENT]``.
The folder SOUNDNESS_RECORDS gets a file of records for each process, and each program and structure once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import runpy
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import soundness_state
from jax._src.interpreters import mlir

from xcache.errors import UncacheableError
from xcache.hook import effects, jax_versions, skipping
from xcache.hook.structure import ambient, digest
from xcache.hook.structure.encoding import CannotSkipError, Encoding
from xcache.keys import program

FOLDER = "SOUNDNESS_RECORDS"


class _Kept(Encoding):
    """An encoding that keeps what it wrote, and what its tokens stand for."""

    made = threading.local()
    written = b""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: dict[str, str] = {}
        _Kept.made.last = self

    def apart(self, value: Any, handler: Callable[[Encoding, Any], None]) -> bytes:
        content = super().apart(value, handler)
        self.tokens[hashlib.blake2b(content, digest_size=20).hexdigest()] = content.hex()
        return content

    def digest(self) -> str:
        self.written = b"".join(self._parts)
        return super().digest()


class Recorder:
    """Writes a record for each lowering."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for each in ("records", "programs", "structures"):
            (folder / each).mkdir(parents=True, exist_ok=True)
        self._file = (folder / "records" / f"{os.getpid()}.{os.urandom(4).hex()}").open("a", buffering=1)
        self._lock = threading.Lock()
        self._canonical = _canonical()
        # Primitives of the lowerings during which jax's state was compared.
        self._compared: set[str] = set()
        self.test = "?"

    def record(self, lower: Callable[..., Any], name: str, jaxpr: Any, options: dict[str, Any]) -> Any:
        """Lower a program, and record its structure before and after."""
        record = {
            "version": jax.__version__,
            "seed": os.environ.get("PYTHONHASHSEED", "random"),
            "test": os.environ.get("PYTEST_CURRENT_TEST", self.test).removesuffix(" (call)"),
            "name": name,
        }
        modules = len(sys.modules)
        structure, reason, where = _structure(name, jaxpr, options)
        kept = _Kept.made.last if structure else None
        result, record["changed"] = self._compare(lambda: lower(name, jaxpr, **options), jaxpr)
        if kept is not None:
            reason = effects.reason_to_lower(result, effects.custom_calls(result.module))
            record["structure"] = structure
            again = _structure(name, jaxpr, options)[0]
            # None: a test has replaced a function of jax's in between. Lowering may import modules, whose settings and
            # rules count from then on.
            record["stable"] = again in (structure, None) or modules != len(sys.modules)
        else:
            record["where"] = where
        try:
            content = self._canonical(result.module)
            record["program"] = hashlib.sha256(content).hexdigest()
        except UncacheableError as error:
            reason = reason or f"not cached: {error}"
        record["reason"] = reason
        with self._lock:
            if kept is not None:
                self._keep("structures", structure, lambda: _shown(kept))
            if "program" in record:
                self._keep("programs", record["program"], lambda: content)
            self._file.write(json.dumps(record) + "\n")
        return result

    def _compare(self, lower: Callable[[], Any], jaxpr: Any) -> tuple[Any, list[str] | None]:
        """Lower, and return what that changed in jax's modules; None if that is known, or cannot be told."""
        found = {*soundness_state.primitives(jaxpr)}
        if found <= self._compared:
            return lower(), None
        modules, before = len(sys.modules), soundness_state.state()
        result = lower()
        if len(sys.modules) != modules:
            # Modules register rules and the like when they are imported, whoever imports them. The next lowering is
            # compared instead.
            return result, None
        self._compared |= found
        return result, soundness_state.changes(before, soundness_state.state())

    def _keep(self, kind: str, name: str, content: Callable[[], bytes]) -> None:
        path = self._folder / kind / name[:2] / name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}")
            part.write_bytes(zlib.compress(content(), 1))
            part.rename(path)


def _canonical() -> Callable[[Any], bytes]:
    known = jax_versions.probe()
    return functools.partial(
        program.canonical,
        keep_locations=False,
        ignore_partitioning_pointer=False,
        callbacks_hold_pointers=known.callbacks_hold_pointers,
        strip_kernels=known.strip_kernels,
    )


def _structure(name: str, jaxpr: Any, options: dict[str, Any]) -> tuple[str | None, str | None, str | None]:
    """Return the digest, or the reason why there is none and where it lies."""
    try:
        return digest.structure(name, jaxpr, options).digest, None, None
    except CannotSkipError as reason:
        return None, str(reason), reason.where
    except Exception as error:  # noqa: BLE001 - a bug in the encoder is a finding, not the end
        return None, f"error: {type(error).__name__}: {error}"[:300], None


def _shown(kept: _Kept) -> bytes:
    memos = {made.hex(): repr(values).encode().hex() for values, made in (ambient.context.made, ambient.settings.made)}
    tokens = {**kept.tokens, **memos}
    return json.dumps({"encoding": kept.written.hex(), "tokens": tokens}).encode()


@contextlib.contextmanager
def recording(folder: Path) -> Iterator[Recorder]:
    """Record every lowering as long as this is open."""
    recorder, original, encoding = Recorder(folder), mlir.lower_jaxpr_to_module, digest.Encoding

    def lower(name: str, jaxpr: Any, **options: Any) -> Any:
        return recorder.record(original, name, jaxpr, options)

    # xcache does not count its own Replacement as a changed jax.
    mlir.lower_jaxpr_to_module = skipping.Replacement(original, lower)
    digest.Encoding = _Kept  # type: ignore[misc] # mypy takes a class in a module for a constant
    try:
        yield recorder
    finally:
        mlir.lower_jaxpr_to_module = original
        digest.Encoding = encoding  # type: ignore[misc] # as above


_until_the_end = contextlib.ExitStack()


def pytest_configure() -> None:
    """Record, in pytest's process, until it ends."""
    _until_the_end.enter_context(recording(Path(os.environ[FOLDER])))


def main(program: str) -> None:
    """Run a program with the arguments in sys.argv."""
    with recording(Path(os.environ[FOLDER])) as recorder:
        recorder.test = " ".join((Path(program).name, *sys.argv[1:]))
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    del sys.argv[0]
    main(sys.argv[0])
