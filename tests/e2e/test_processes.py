"""Several processes: a crowd, a fork, multiprocessing's ways to begin, and one job spread over two processes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import textwrap

import pytest
from support.program_files import program_text

COMPILE = """
import jax, jax.numpy as jnp, numpy as np
x = np.arange(4.0, dtype=np.float32)
jax.jit(lambda v: v * 2 + 1)(x).block_until_ready()
"""


@pytest.mark.once
@pytest.mark.slow
def test_many_programs_at_once_start_one_daemon_and_agree(place):
    source = COMPILE + "import xcache; print(xcache.stats().requests, xcache.stats().errors)"
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", source],
            env=place.env | {"XCACHE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(4)
    ]
    said = [program.communicate(timeout=120) for program in programs]
    assert {out for out, _ in said} == {b"1 {}\n"}
    assert {err for _, err in said} == {b""}
    assert (place.dir / "daemon.log").read_text().count(" serves ") == 1
    assert place.query("SELECT count(*) FROM entries") == [(1,)]


@pytest.mark.once
def test_a_forked_child_leaves_its_parents_connection_alone(place):
    result = place.run(program_text("fork_after_a_compile"), XCACHE="1")
    assert result.stdout.splitlines() == ["1", "child 0", "0", "2 {}"], result.stderr


SPAWNED = """
import multiprocessing, sys

def work(method):
    import jax, numpy as np
    jax.jit(lambda v: v * 2 + 1)(np.arange(4.0, dtype=np.float32)).block_until_ready()

if __name__ == "__main__":
    for method in sys.argv[1:]:
        process = multiprocessing.get_context(method).Process(target=work, args=(method,))
        process.start()
        process.join()
        assert process.exitcode == 0
"""


@pytest.mark.thorough
def test_children_of_multiprocessing_keep_their_executables(place, tmp_path):
    for method in ("fork", "spawn", "forkserver"):
        script = tmp_path / f"{method}.py"
        script.write_text(SPAWNED.replace("v * 2 + 1", f"v * 2 + {len(method)}"))
        subprocess.run([sys.executable, str(script), method], env=place.env | {"XCACHE": "1"}, timeout=120, check=True)
    assert place.query("SELECT count(*) FROM entries") == [(3,)]


JOB = """
import json, sys
import jax
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
import jax.numpy as jnp, numpy as np, xcache
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("d",))
rows = NamedSharding(mesh, P("d"))
x = jax.make_array_from_callback((4,), rows, lambda index: np.arange(4.0, dtype=np.float32)[index])
total = jax.jit(lambda v: (v * 2).sum(), out_shardings=NamedSharding(mesh, P()))(x)
print(json.dumps([float(total), xcache.stats().hits, xcache.stats().misses, xcache.stats().errors]))
jax.distributed.shutdown()
"""


def run_job(place, port: int) -> list[list[object]]:
    environment = place.env | {"XCACHE": "1", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo", "JAX_PLATFORMS": "cpu"}
    members = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(JOB), f"127.0.0.1:{port}", str(number)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    said = [member.communicate(timeout=150) for member in members]
    assert [member.returncode for member in members] == [0, 0], said
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.thorough
@pytest.mark.once
def test_both_processes_of_a_job_store_and_find_what_they_compile(place):
    cold = run_job(place, free_port())
    assert [total for total, *_ in cold] == [12.0, 12.0]
    warm = run_job(place, free_port())
    assert [total for total, *_ in warm] == [12.0, 12.0]
    for _, hits, misses, errors in warm:
        assert hits > 0
        assert (misses, errors) == (0, {})
