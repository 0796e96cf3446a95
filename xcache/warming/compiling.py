"""Make the key of a program, and compile it, with the jax of this process and a client of its own.

Keys and executables are made by the functions of jax and of the hook that make them in a program. An entry made here
is therefore the one that a program with this jax asks for, or it is not made at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from xcache import keys
from xcache.announcing import announcement_of
from xcache.clock import monotonic
from xcache.config import config
from xcache.errors import UncacheableError
from xcache.executables import serialize
from xcache.hook import jax_versions
from xcache.hook.wrapper import components_of
from xcache.keys import cpu_clients, custom_calls, describe, options, platform, stablehlo
from xcache.keys.protobuf import varint_bytes
from xcache.request import Request
from xcache.storing import stored_form
from xcache.warming.place import facts

# Such a call holds a pointer into the process that lowered the program, which compiling would follow.
_PARTITIONING = b"CustomSPMDPartitioning"
_CALLBACKS = (b"python_cpu_callback", b"python_gpu_callback")
# Facts of a platform that belong to the toolchain, or to this machine: an entry made here is for programs here.
_OF_THE_MACHINE = frozenset(("version", "host", "topology", "target"))
# CompileOptionsProto > executable_build_options > debug_options: what XLA's flags say.
_DEBUG = "3.3."
# Among these, the ones that jax's own settings change: optimization level, passes left out, expensive passes, layouts.
_DEBUG_BY_JAX = {"3.3.30", "3.3.31", "3.3.73", "3.3.91"}
# Options that a program itself decides: whether its arguments are a tuple, how shardings spread to its results and
# arguments, and the options for it alone.
_IN_A_TUPLE, _TO_RESULTS, _TO_ARGUMENTS, _OVERRIDES = "2", "3.12", "3.18", "7"
_REPLICAS, _PARTITIONS, _DEVICES = "3.4", "3.5", "3.9.3"


class Refused(Exception):  # noqa: N818 - it is an answer and no error
    """Why a program has no entry that this process could make; ``options`` has the paths of options that differ."""

    def __init__(self, reason: str, options: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.options = tuple(options)


class Planned(NamedTuple):
    """The key that a program has with this jax, its components' digests, and the options to compile it with."""

    key: str
    components: dict[str, str]
    options: bytes


class Machine:
    """The jax of this process, with a client for one platform."""

    def __init__(self, platform_name: str) -> None:
        """Raise Refused without such a device."""
        import jax

        self._jax = jax_versions.probe()
        settings, _ = config.load_usable()
        self._surroundings = describe.Surroundings(
            self._jax.jaxlib_folder, self._jax.jaxlib_version, settings.own_dir, self._jax.cuda_folder
        )
        with cpu_clients.watched(), self._surroundings.watching_libtpu():
            try:
                devices = jax.local_devices(backend=platform_name)
            except RuntimeError:
                raise Refused(f"this machine has no {platform_name} device") from None
        self._client = devices[0].client
        self._devices = {device.id: device for device in self._client.devices()}

    def toolchain(self) -> str:
        """Return the digest of this process's toolchain."""
        return self._surroundings.made_with(self._client, self._client.local_devices()[:1])[2]

    def plan(self, program: bytes, texts: dict[str, str]) -> Planned:
        """Return the key that a stored program has now; raise Refused if that is not certain.

        ``texts`` describe the components of the key under which another toolchain has stored it.
        """
        module = self._parsed(program)
        serialized = self._options(texts["options"])
        placed = self._placed(serialized)
        try:
            parts = components_of(self._jax, self._surroundings, self._client, module, placed, serialized)
        except UncacheableError as error:
            raise Refused(f"it has no key: {error}") from None
        if parts["flags"].content.decode() != texts["flags"]:
            raise Refused("its XLA flags mean something else here, or files that they name have changed")
        if differing := _differing(texts["platform"], parts["platform"].content.decode()):
            raise Refused(f"it was compiled for another client: {', '.join(differing)}")
        key = keys.combine(parts)
        return Planned(key.digest, dict(key.components), serialized)

    def compile(self, program: bytes, serialized: bytes, components: dict[str, str]) -> dict[str, Any]:
        """Return the entry of a program whose key has these components, as messages; raise Refused if it has others."""
        from jaxlib import xla_client

        module = self._parsed(program)
        placed = self._placed(serialized)
        try:
            parts = components_of(self._jax, self._surroundings, self._client, module, placed, serialized)
        except UncacheableError as error:
            raise Refused(f"it has no key: {error}") from None
        key = keys.combine(parts)
        if key.components != components:
            others = [name for name, found in key.components.items() if found != components[name]]
            raise Refused(f"its key differs in the process that was to compile it: {', '.join(others)}")
        compile_options = xla_client.CompileOptions.ParseFromString(serialized)
        request = Request(
            key=key,
            module_name=stablehlo.name(module),
            platform=self._client.platform,
            device_kind=placed[0].device_kind,
            jaxlib_version=self._jax.jaxlib_version,
            program=parts["program"].content,
            details=lambda: describe.texts(parts),
            load=bytes,
            serialize=lambda executable: serialize(self._client, executable),
            toolchain_files=lambda: self._surroundings.toolchain_files(self._client.platform, serialized),
        )
        # Before XLA gets the module, which it may change.
        located = stablehlo.bytecode(module)
        start = monotonic()
        executable = self._jax.compiler.backend_compile_and_load(
            self._client, module, xla_client.DeviceList(placed), compile_options, []
        )
        seconds = monotonic() - start
        try:
            raw = request.serialize(executable)
        except UncacheableError as error:
            raise Refused(f"it cannot be stored: {error}") from None
        put, sealed, stored_program = stored_form(request, raw, seconds, located)
        announced = announcement_of(request)
        return {"put": put._asdict(), "sealed": sealed, "program": stored_program, "announce": announced._asdict()}

    def _parsed(self, program: bytes) -> Any:
        if any(name in program for name in _CALLBACKS):
            raise Refused("it calls Python functions of its process")
        if _PARTITIONING in program:
            raise Refused("it is partitioned by a Python function of its process (custom_partitioning)")
        try:
            module = stablehlo.parse(program)
        except Exception as error:  # noqa: BLE001 - MLIR's own class, which each version of jaxlib defines elsewhere
            raise Refused(f"this jaxlib cannot read it: {_first_line(error)}") from None
        if name := custom_calls.foreign(module, program):
            raise Refused(f"it calls code that its process has registered ({name})")
        return module

    def _placed(self, serialized: bytes) -> tuple[Any, ...]:
        """Return the devices that an executable with these options runs on."""
        lines = _split(options.lines_of(serialized).decode())
        ids = [number for value in lines.get(_DEVICES, ()) for number in options.device_numbers(bytes.fromhex(value))]
        if missing := [number for number in ids if number not in self._devices]:
            raise Refused(f"it needs the device number {missing[0]}, and there are {len(self._devices)} here")
        if not ids:
            raise Refused("its options name no device")
        return tuple(self._devices[number] for number in ids)

    def _options(self, text: str) -> bytes:
        """Return the options that jax gives XLA for a program now, if they are those that it was compiled with.

        jax makes them of its settings and of what the program itself says. XLA's defaults may have changed since: they
        belong to the toolchain. If anything else differs, programs that run now would be compiled with something else.
        """
        then = _split(text)
        if any(name.startswith("content of ") for name in then):
            raise Refused("its compile options name files")
        try:
            replicas, partitions = (int(then.get(path, ["1"])[0]) for path in (_REPLICAS, _PARTITIONS))
            ids = [_device_ids(value) for value in then[_DEVICES]]
            made = self._jaxs_options(replicas, partitions, ids)
            made.parameter_is_tupled_arguments = then.get(_IN_A_TUPLE) == ["1"]
            build = made.executable_build_options
            build.allow_spmd_sharding_propagation_to_output = _flags(then.get(_TO_RESULTS, ()))
            build.allow_spmd_sharding_propagation_to_parameters = _flags(then.get(_TO_ARGUMENTS, ()))
            own = b"".join(map(_overriding, then.get(_OVERRIDES, ())))
        except (KeyError, ValueError, IndexError):
            raise Refused("its compile options cannot be read") from None
        serialized = bytes(made.SerializeAsString()) + own
        places = platform.places(self._client) if self._client.platform in platform.GPU else None
        now = _split(options.lines_of(serialized, places=places).decode())
        others = [
            path
            for path in sorted({*then, *now})
            if then.get(path) != now.get(path) and (not path.startswith(_DEBUG) or path in _DEBUG_BY_JAX)
        ]
        if others:
            raise Refused("jax here, with the settings of this environment, gives it other options", others)
        return serialized

    def _jaxs_options(self, replicas: int, partitions: int, ids: list[list[int]]) -> Any:
        import numpy

        # One row of devices for each computation of the assignment.
        assignment = numpy.array(ids, dtype=object).T
        if assignment.shape != (replicas, partitions):
            raise Refused("its devices cannot be read")
        devices = numpy.vectorize(lambda number: self._devices.get(number), otypes=[object])(assignment)
        if any(device is None for device in devices.flat):
            raise Refused(f"it needs {replicas * partitions} devices, and there are {len(self._devices)} here")
        return self._jax.compiler.get_compile_options(
            num_replicas=replicas,
            num_partitions=partitions,
            device_assignment=devices,
            detailed_logging=False,
            backend=self._client,
        )


def _differing(then: str, now: str) -> list[str]:
    """Return the facts of two platforms that differ, but those of the machine and its toolchain."""
    before, after = dict(facts(then)), dict(facts(now))
    return [
        f"{name} {before.get(name)}, here {after.get(name)}"
        for name in sorted({*before, *after} - _OF_THE_MACHINE)
        if before.get(name) != after.get(name)
    ]


def _split(text: str) -> dict[str, list[str]]:
    """Return the values of each path among the lines of compile options."""
    found: dict[str, list[str]] = {}
    for line in text.split("\n"):
        path, _, value = line.partition("=")
        found.setdefault(path, []).append(value)
    return found


def _device_ids(value: str) -> list[int]:
    """Return the devices of one computation; those of a GPU are written as device@process/slice."""
    if "@" in value:
        return [int(word.partition("@")[0]) for word in value.split(" ")]
    return options.device_numbers(bytes.fromhex(value))


def _flags(values: Sequence[str]) -> list[bool]:
    """Return the flags of a packed field."""
    return [byte != 0 for value in values for byte in bytes.fromhex(value)]


def _overriding(value: str) -> bytes:
    """Return an option for a program alone as it stands in serialized options."""
    content = bytes.fromhex(value)
    return varint_bytes(int(_OVERRIDES) << 3 | 2) + varint_bytes(len(content)) + content


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    # MLIR says only in a later line what is wrong.
    return next((line for line in lines if line.startswith("error:")), lines[0] if lines else type(error).__name__)
