"""The program of the process that uses the jaxlib of an entry. It runs by ``python -I -S -c``, without xcache.

It reads a task from its stdin: a line of JSON, the program and the executable. It writes texts into its current folder,
and ``result.json`` when all is done. It imports only the standard library and jaxlib, and jax for another platform than
the CPU. No file of the environment that runs code at start (``.pth``, ``sitecustomize``) is read.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import site
import subprocess
import sys
from pathlib import Path
from typing import Any


class RefusedError(Exception):
    """Why the task cannot be done here."""


def main() -> None:
    """Do what the task says."""
    task = json.loads(sys.stdin.buffer.readline())
    program = sys.stdin.buffer.read(task["program"])
    executable = sys.stdin.buffer.read(task["executable"])
    if not task["place"]:
        # The user has chosen this Python, with its packages.
        site.main()
    else:
        sys.path.insert(0, task["place"])
    if importlib.util.find_spec("numpy") is None:
        # An environment that takes some packages from the one it was made with.
        sys.path += site.getsitepackages()
    import jaxlib

    result = {"jaxlib": jaxlib.__version__}
    if jaxlib.__version__ != task["jaxlib"] and (task["place"] or executable):
        result["error"] = f"this one is there now, and jaxlib {task['jaxlib']} is needed"
    else:
        try:
            result["found"] = ACTIONS[task["action"]](task, program, executable)
        except RefusedError as error:
            result["error"] = str(error)
        except Exception as error:  # noqa: BLE001 - whatever jaxlib raises
            result["error"] = f"{type(error).__name__}: {error}"
    Path("result.json").write_text(json.dumps(result))


def stablehlo(task: dict[str, Any], program: bytes, _executable: bytes) -> None:
    """Write the program as MLIR text."""
    Path("program.mlir").write_text(str(parsed(task, program)))


def hlo(_task: dict[str, Any], program: bytes, _executable: bytes) -> None:
    """Write the program as HLO text."""
    Path("program.hlo.txt").write_text(computation(program).as_hlo_module().to_string())


def optimized(task: dict[str, Any], _program: bytes, executable: bytes) -> None:
    """Write the HLO that the executable was made from."""
    for number, module in enumerate(loaded(task, executable).hlo_modules()):
        Path(f"optimized{number or ''}.hlo.txt").write_text(module.to_string())


def compiled(task: dict[str, Any], program: bytes, _executable: bytes) -> bool:
    """Compile, and leave what XLA dumps; return whether assembly could be made of object files, which the CPU gets."""
    client, devices = placed(task)
    client.compile_and_load(program, devices, options(task))
    if not task["disassembler"]:
        return True
    if shutil.which(task["disassembler"]) is None:
        return False
    for file in Path().glob("*.o"):
        with open(file.with_suffix(".s"), "wb") as text:
            subprocess.run([task["disassembler"], "-d", "--no-show-raw-insn", file.name], stdout=text, check=True)
    return True


def graph(task: dict[str, Any], program: bytes, executable: bytes) -> str:
    """Write the graph of the program, or of the HLO that the executable was made from; return why it is not drawn."""
    from jaxlib import xla_client

    modules = loaded(task, executable).hlo_modules() if executable else [computation(program).as_hlo_module()]
    # It moved in 0.9.
    to_dot = getattr(xla_client._xla, "hlo_module_to_dot_graph", None) or hlo_names().hlo_module_to_dot_graph
    Path("graph.dot").write_text(to_dot(modules[0]))
    if not task["format"]:
        return ""
    command = ["dot", f"-T{task['format']}", "-o", f"graph.{task['format']}", "graph.dot"]
    try:
        subprocess.run(command, check=True, timeout=task["seconds"], capture_output=True)
    except FileNotFoundError:
        return "graphviz is not installed"
    except subprocess.TimeoutExpired:
        return f"graphviz did not draw it within {task['seconds']} s"
    except subprocess.CalledProcessError as error:
        return f"graphviz failed: {error.stderr.decode(errors='replace').strip()}"
    return ""


def cost(task: dict[str, Any], _program: bytes, executable: bytes) -> dict[str, dict[str, float]]:
    """Return what XLA knows of the executable's cost."""
    found = loaded(task, executable)
    analysis = found.cost_analysis()
    analysis = analysis[0] if isinstance(analysis, list) else analysis
    memory = found.get_compiled_memory_stats()
    sizes = {name: getattr(memory, name) for name in dir(memory) if name.endswith("_in_bytes")}
    return {"analysis": {name: value for name, value in analysis.items() if isinstance(value, float)}, "memory": sizes}


def parsed(task: dict[str, Any], program: bytes) -> Any:
    """Return the program as an MLIR module."""
    names: dict[str, Any] = {}
    # The source of xcache.keys.stablehlo, which imports only jaxlib.
    exec(task["parser"], names)  # noqa: S102
    return names["parse"](program)


def computation(program: bytes) -> Any:
    """Return the program as an XlaComputation."""
    from jaxlib import xla_client

    return xla_client._xla.mlir.mlir_module_to_xla_computation(program, use_tuple_args=False, return_tuple=False)


def hlo_names() -> Any:
    """Return the module of jaxlib that has the classes of HLO since 0.9."""
    from jaxlib import _hlo

    return _hlo


def loaded(task: dict[str, Any], executable: bytes) -> Any:
    """Return the loaded executable."""
    client, devices = placed(task)
    return client.deserialize_executable(executable, devices, options(task) if task["options"] else None)


def placed(task: dict[str, Any]) -> tuple[Any, Any]:
    """Return a client such as the entry's, and its devices."""
    from jaxlib import xla_client

    if task["platform"] == "cpu":
        client = xla_client.make_cpu_client(num_devices=task["devices"])
        devices = client.local_devices()
    else:
        import jax

        try:
            devices = jax.local_devices(backend=task["platform"])
        except RuntimeError:
            raise RefusedError(
                f"this machine has no {task['platform']} device; only stablehlo and hlo need none"
            ) from None
        client = devices[0].client
    by_id = {device.id: device for device in devices}
    ids = task["ids"] or list(by_id)[: task["count"]]
    if len(devices) < task["devices"] or not by_id.keys() >= set(ids):
        raise RefusedError(f"it needs {task['devices']} devices, and this machine has {len(devices)}")
    return client, xla_client.DeviceList(tuple(by_id[number] for number in ids))


def options(task: dict[str, Any]) -> Any:
    """Return the compile options."""
    from jaxlib import xla_client

    return xla_client.CompileOptions.ParseFromString(bytes.fromhex(task["options"]))


ACTIONS = {each.__name__: each for each in (stablehlo, hlo, optimized, compiled, graph, cost)}

if __name__ == "__main__":
    main()
