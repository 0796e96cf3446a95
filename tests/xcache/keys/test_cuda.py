"""The CUDA tools and libraries that XLA could pick are in the toolchain, wherever they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from xcache.keys import cuda, toolchain

PLUGIN = "xla_cuda_plugin.so"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A jaxlib and a CUDA plugin in a folder for packages, and nothing of CUDA anywhere else."""
    packages = tmp_path / "env" / "lib" / "python3" / "site-packages"
    for path in (packages / "jaxlib" / "libjax_common.so", packages / "jax_plugins" / "xla_cuda12" / PLUGIN):
        written(path, path.name)
    monkeypatch.setattr(cuda, "_USUAL", (str(tmp_path / "usr" / "local"), str(tmp_path / "opt")))
    monkeypatch.setattr(cuda, "_LOADER_FOLDERS", (str(tmp_path / "usr" / "lib"),))
    monkeypatch.setattr(toolchain, "_mapped_files", lambda: {packages / "jax_plugins" / "xla_cuda12" / PLUGIN: 1})
    for variable in (*cuda._VARIABLES, "LD_LIBRARY_PATH", "PYTHON_RUNFILES"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", os.pathsep.join(str(tmp_path / name) for name in ("first", "second")))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return packages


def written(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    os.utime(path, (1e9, 1e9))
    return path


def describe(packages: Path, *folders: str) -> toolchain.Toolchain:
    return toolchain.describe("gpu", packages / "jaxlib", "1.0", None, folders)


# Below the test's folder, whose ``env`` is the environment.
PACKAGES = "env/lib/python3/site-packages"
PLACES = [
    "first/ptxas",
    "second/ptxas",
    "second/nvlink",
    "second/fatbinary",
    "usr/local/cuda/bin/ptxas",
    "usr/local/cuda-12.9/bin/ptxas",
    "usr/local/cuda/nvvm/libdevice/libdevice.10.bc",
    "opt/cuda/bin/ptxas",
    "opt/cuda/nvvm/libdevice/libdevice.10.bc",
    "here/libdevice.10.bc",
    "env/bin/ptxas",
    "env/nvvm/libdevice/libdevice.10.bc",
    f"{PACKAGES}/nvidia/cuda_nvcc/bin/ptxas",
    f"{PACKAGES}/nvidia/cuda_nvcc/nvvm/libdevice/libdevice.10.bc",
    f"{PACKAGES}/nvidia/cu13/bin/nvlink",
    f"{PACKAGES}/nvidia/cudnn/lib/libcudnn_engines_precompiled.so.9",
    f"{PACKAGES}/nvidia/cublas/lib/libcublasLt.so.12",
    f"{PACKAGES}/nvidia/nvjitlink/lib/libnvJitLink.so.12",
    f"{PACKAGES}/jax_plugins/xla_cuda12/cuda/nvvm/libdevice/libdevice.10.bc",
    "usr/lib/x86_64-linux-gnu/libcudnn.so.9",
    "usr/lib/libcublasLt.so.12",
    "told/bin/ptxas",
    "told/nvvm/libdevice/libdevice.10.bc",
]


@pytest.mark.parametrize("place", PLACES)
def test_each_candidate_counts_by_content_and_is_among_the_files(installed, tmp_path, place):
    folder = str(tmp_path / "told")
    # XLA passes over versions that it does not like: others being there before it hides none.
    written(tmp_path / "told/bin/nvlink", "other")
    written(tmp_path / "first/nvlink", "other")
    seen = [describe(installed, folder).content]
    for content in ("one", "two"):
        path = written(tmp_path / place, content)
        found = describe(installed, folder)
        assert str(path) in [file.path for file in found.files]
        seen.append(found.content)
    assert len(set(seen)) == 3


@pytest.mark.parametrize("variable", [*cuda._VARIABLES])
def test_folders_that_variables_name_are_searched(installed, tmp_path, monkeypatch, variable):
    before = describe(installed)
    written(tmp_path / "named/bin/ptxas", "one")
    monkeypatch.setenv(variable, str(tmp_path / "named"))
    assert describe(installed).content != before.content


def test_the_loaders_path_is_searched(installed, tmp_path, monkeypatch):
    before = describe(installed)
    written(tmp_path / "libraries/libcudnn.so.9", "one")
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{tmp_path / 'libraries'}")
    assert describe(installed).content != before.content


def test_the_order_of_the_path_counts(installed, tmp_path, monkeypatch):
    written(tmp_path / "first/ptxas", "one")
    written(tmp_path / "second/ptxas", "two")
    before = describe(installed)
    monkeypatch.setenv("PATH", os.pathsep.join(str(tmp_path / name) for name in ("second", "first")))
    assert describe(installed).content != before.content


def test_a_link_that_is_turned_to_another_toolkit_counts(installed, tmp_path):
    for version in ("12.8", "12.9"):
        written(tmp_path / f"usr/local/cuda-{version}/bin/ptxas", version)
    seen = []
    for version in ("12.8", "12.9"):
        (tmp_path / "usr/local/cuda").unlink(missing_ok=True)
        (tmp_path / "usr/local/cuda").symlink_to(f"cuda-{version}")
        seen.append(describe(installed).content)
    assert seen[0] != seen[1]


def test_the_folder_named_in_the_options_counts(installed, tmp_path):
    for name in ("one", "two"):
        written(tmp_path / name / "bin/ptxas", name)
    folders = [str(tmp_path / "one"), str(tmp_path / "two")]
    described = {describe(installed, *chosen).content for chosen in ([], folders[:1], folders[1:], folders)}
    assert len(described) == 4


def test_a_tool_that_is_replaced_while_the_program_runs_is_noticed(installed, tmp_path):
    """XLA starts it anew for each compile, unlike a library that stays mapped."""
    tool = written(tmp_path / "first/ptxas", "one")
    found = describe(installed)
    assert found.is_in_place()
    tool.unlink()
    assert not found.is_in_place()
    written(tool, "2")
    assert not found.is_in_place()
    assert describe(installed).is_in_place()


def test_the_plugins_versions_count(installed, monkeypatch):
    class Versions:
        @staticmethod
        def cudnn_get_version() -> int:
            return 90800

        @staticmethod
        def cublas_build_version() -> int:
            return 120900

        @staticmethod
        def cuda_runtime_get_version() -> int:
            raise RuntimeError("no library")

    monkeypatch.setitem(cuda.sys.modules, "jax_cuda12_plugin._versions", Versions)
    content = describe(installed).content.decode()
    assert "cudnn_get_version=90800" in content
    assert "cublas_build_version=120900" in content
    assert "cuda_runtime_get_version='RuntimeError'" in content
