"""Runs jax's own tests, small programs of libraries and ours in the recorder, for the jax of this environment."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import jax

SCRIPTS = Path(__file__).parent
ROOT = SCRIPTS.parent
RECORDER = "soundness_record"
# The files that lower the most in the least time come first; the others are all that compile for a processor.
TESTS = """
    pjit_test shard_map_test api_test lax_control_flow_test lax_test lax_numpy_test lax_numpy_operators_test
    lax_numpy_indexing_test lax_numpy_reducers_test lax_numpy_einsum_test lax_numpy_ufuncs_test lax_vmap_test
    lax_vmap_op_test lax_autodiff_test lax_scipy_test lax_scipy_special_functions_test nn_test linalg_test random_test
    random_lax_test random_impl_test export_test pallas/pallas_test pallas/pallas_vmap_test pallas/ops_test
    pallas/indexing_test sparse_test sparsify_test sparse_bcoo_bcsr_test layout_test memories_test state_test
    mutable_array_test scipy_stats_test scipy_signal_test fft_test image_test optimizers_test batching_test aot_test
    array_test custom_partitioning_test custom_linear_solve_test custom_root_test custom_api_test jet_test ode_test
    svd_test eigh_test qdwh_test x64_context_test xla_metadata_test debug_nans_test checkify_test shape_poly_test
    jaxpr_effects_test python_callback_test key_reuse_test stax_test polynomial_test unary_ops_accuracy_test
    scheduling_groups_test hijax_test pmap_test multi_device_test pallas/tpu_pallas_interpret_test
    ragged_collective_test shard_alike_test error_check_test stateful_rng_test name_stack_test metadata_test
    dtypes_test cholesky_update_test ann_test control_deps_test scipy_ndimage_test scipy_interpolate_test
    scipy_optimize_test scipy_spatial_test lobpcg_test generated_fun_test fused_test experimental_rnn_test
"""
EXAMPLES = ["flax_linen", "flax_nnx", "optax", "haiku", "equinox", "numpyro", "diffrax"]
OURS = ["hard_cases", "programs", "programs_of_many_devices"]


class Runner:
    """Runs programs with records in a folder, each no longer than a limit."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._folder = options.records / jax.__version__
        self._tests = options.records / "tests" / jax.__version__
        self._running: set[int] = set()

    def run(self) -> None:
        """Run everything that is wanted, under each seed."""
        wanted = self._options.only or [*OURS, *EXAMPLES, *TESTS.split()]
        self._tests.mkdir(parents=True, exist_ok=True)
        if not {*wanted} <= {*OURS, *EXAMPLES}:
            self._checkout()
        with concurrent.futures.ThreadPoolExecutor(self._options.processes) as pool:
            jobs = [pool.submit(self._run, name, seed) for name in wanted for seed in self._options.seeds.split(",")]
            for job in jobs:
                job.result()

    def _checkout(self) -> None:
        """Take jax's tests of this version out of the checkout."""
        (self._tests / "pytest.ini").write_text("[pytest]\nfilterwarnings = ignore\ntimeout = 120\n")
        if (self._tests / "tests").is_dir():
            return
        ref = self._options.ref or f"jax-v{jax.__version__}"
        packed = self._tests / "tests.tar"
        with packed.open("wb") as out:
            command = ("git", "-C", self._options.jax_source, "archive", ref, "tests")
            subprocess.run(command, stdout=out, check=True, timeout=600)
        with tarfile.open(packed) as archive:
            archive.extractall(self._tests, filter="data")
        packed.unlink()

    def _run(self, name: str, seed: str) -> None:
        command = self._command(name)
        if command is None:
            print(f"{jax.__version__} has no {name}", flush=True)
            return
        log = self._folder / "logs" / f"{name.replace('/', '-')}.{seed}"
        log.parent.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        with log.open("w") as out:
            process = subprocess.Popen(
                command, cwd=self._tests, env=self._environment(name, seed), start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            )  # fmt: skip
            self._running.add(process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self._options.minutes * 60)
            _kill(process.pid)
            self._running.remove(process.pid)
            process.wait()
        last = log.read_text(errors="replace").splitlines()[-1:] or [""]
        took = time.monotonic() - start
        print(f"{jax.__version__} {name}, seed {seed}: {took:.0f} s, {process.returncode}: {last[0][:90]}", flush=True)

    def stop(self, signum: int, _: object) -> None:
        """End at once, and leave nothing running."""
        for group in list(self._running):
            _kill(group)
        os._exit(128 + signum)

    def _command(self, name: str) -> list[str | Path] | None:
        if name == "hard_cases":
            return [sys.executable, SCRIPTS / f"{RECORDER}.py", ROOT / "tests/programs/lower_hard_cases.py"]
        if name in EXAMPLES or name in OURS:
            return [sys.executable, SCRIPTS / f"{RECORDER}.py", SCRIPTS / "soundness_examples.py", name]
        test = self._tests / "tests" / f"{name}.py"
        if not test.exists():
            return None
        pytest = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", "-p", RECORDER]
        return [*pytest, "-c", self._tests / "pytest.ini", "--rootdir", self._tests, test]

    def _environment(self, name: str, seed: str) -> dict[str, str]:
        variables = {
            "SOUNDNESS_RECORDS": str(self._folder),
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": str(SCRIPTS),
            "XCACHE": "0",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={1 if name == 'programs' else 8}",
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_GENERATED_CASES": self._options.cases,
        }
        if name in TESTS.split():
            # Compile fast and only once, because only lowering is under test. Our own programs are excepted: they
            # serialize executables, which some so compiled cannot.
            variables |= {
                "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
                "JAX_COMPILATION_CACHE_DIR": str(self._folder / "compiled"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            }
        return os.environ | variables


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--jax-source", default="../jax", help="a git checkout of jax, with its tags")
    parser.add_argument("--ref", help="what to take jax's tests from; the tag of the version without it")
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--cases", default="4", help="how many of each generated test")
    parser.add_argument("--minutes", type=float, default=10, help="at most, for each file of tests")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="names of test files, libraries, hard_cases or programs")
    options = parser.parse_args()
    options.records = options.records.resolve()
    runner = Runner(options)
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, runner.stop)
    runner.run()


if __name__ == "__main__":
    main()
