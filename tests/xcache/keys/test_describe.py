"""Another compiler or another kind of device makes another key."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import time
import weakref
from pathlib import Path

import jaxlib
import pytest
from jaxlib import xla_client
from support.program_files import program_text

from xcache import keys
from xcache.errors import UncacheableError
from xcache.keys import cpu_clients, file_digests, platform, toolchain
from xcache.keys.describe import Surroundings


@pytest.fixture
def jaxlib_folder(tmp_path):
    """A folder with jaxlib's native libraries, last changed long ago."""
    folder = tmp_path / "site-packages" / "jaxlib"
    folder.mkdir(parents=True)
    for name in ("libjax_common.so", "_jax.so"):
        (folder / name).write_bytes(name.encode() * 1000)
        os.utime(folder / name, (1e9, 1e9))
    return folder


def describe(folder: Path, memo: Path | None = None, version: str = "1.0") -> bytes:
    return toolchain.describe("cpu", folder, version, memo).content


def test_a_library_of_the_same_version_with_other_bytes_has_another_key(jaxlib_folder, tmp_path):
    before = describe(jaxlib_folder, tmp_path)
    library = jaxlib_folder / "libjax_common.so"
    content = bytearray(library.read_bytes())
    content[500] ^= 1
    library.write_bytes(content)
    os.utime(library, (1e9, 1e9))
    assert describe(jaxlib_folder, tmp_path) != before


def test_the_version_is_in_the_key_and_the_path_is_not(jaxlib_folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(jaxlib_folder, elsewhere)
    assert describe(elsewhere) == describe(jaxlib_folder)
    assert describe(jaxlib_folder, version="1.1") != describe(jaxlib_folder)


def test_digests_are_remembered_for_files_that_have_settled(jaxlib_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: (jaxlib_folder / "_jax.so").stat().st_ctime + 60)
    first = describe(jaxlib_folder, tmp_path / "memo")
    known = json.loads((tmp_path / "memo" / file_digests.MEMO).read_text())
    assert set(known) == {str(path) for path in jaxlib_folder.iterdir()}

    def never(*_):
        raise AssertionError("hashed again")

    monkeypatch.setattr(file_digests.hashlib, "file_digest", never)
    assert describe(jaxlib_folder, tmp_path / "memo") == first


def test_a_file_that_has_just_changed_is_not_remembered(jaxlib_folder, tmp_path):
    describe(jaxlib_folder, tmp_path / "memo")
    assert not (tmp_path / "memo" / file_digests.MEMO).exists()


@pytest.mark.parametrize("content", [b"", b"[1, 2", b"[]", b'{"x": 3}', b"\xff\xfe"])
def test_a_damaged_memo_is_as_good_as_none(jaxlib_folder, tmp_path, content):
    memo = tmp_path / file_digests.MEMO
    memo.write_bytes(content)
    memo.chmod(0o600)
    assert describe(jaxlib_folder, tmp_path) == describe(jaxlib_folder)


def test_a_memo_that_others_can_write_is_not_used(jaxlib_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: (jaxlib_folder / "_jax.so").stat().st_ctime + 60)
    true = describe(jaxlib_folder, tmp_path)
    memo = tmp_path / file_digests.MEMO
    memo.write_text(json.dumps({path: [*mark[:-1], "0" * 64] for path, mark in json.loads(memo.read_text()).items()}))
    memo.chmod(0o600)
    assert describe(jaxlib_folder, tmp_path) != true
    memo.chmod(0o666)
    assert describe(jaxlib_folder, tmp_path) == true


def test_an_unwritable_memo_is_ignored(jaxlib_folder, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: (jaxlib_folder / "_jax.so").stat().st_ctime + 60)
    assert describe(jaxlib_folder, Path("/proc/nowhere")) == describe(jaxlib_folder)


def test_a_memo_that_cannot_be_written_leaves_nothing_behind(jaxlib_folder, tmp_path, monkeypatch):
    """On a full disk every process would leave a file."""
    monkeypatch.setattr(time, "time", lambda: (jaxlib_folder / "_jax.so").stat().st_ctime + 60)
    memo = tmp_path / "memo"
    (memo / file_digests.MEMO).mkdir(parents=True)
    describe(jaxlib_folder, memo)
    assert [path.name for path in memo.iterdir()] == [file_digests.MEMO]


def test_without_a_native_library_nothing_is_cached(tmp_path):
    with pytest.raises(UncacheableError):
        describe(tmp_path)


def test_a_platform_whose_library_is_not_known_is_not_cached():
    with pytest.raises(UncacheableError, match="strange"):
        toolchain.describe("strange", Path(jaxlib.__file__).parent, "1.0", None)


@pytest.mark.slow
def test_a_library_replaced_on_disk_is_not_taken_for_the_mapped_one(tmp_path):
    """The bytes on disk are those that the next process runs, not this one."""
    site = Path(jaxlib.__file__).parent.parent
    copy = tmp_path / "site"
    shutil.copytree(site / "jaxlib", copy / "jaxlib")
    result = subprocess.run(
        [sys.executable, "-c", program_text("replace_the_library")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(copy), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "replaced" in result.stdout, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", ["link", "rename"])
def test_an_environment_switched_under_a_program_is_not_taken_for_its_own(tmp_path, how):
    """The next process runs the other library, whose file is as old as the first one's."""
    installed = Path(jaxlib.__file__).parent
    names = {"link": ("one", "other"), "rename": ("site", "other")}[how]
    for name in names:
        shutil.copytree(installed, tmp_path / name / "jaxlib")
    if how == "link":
        (tmp_path / "site").symlink_to("one")
    result = subprocess.run(
        [sys.executable, "-c", program_text("switch_the_environment"), how],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "replaced" in result.stdout, result.stderr


class Device:
    def __init__(self, number: int, kind: str, process: int = 0, *, limit: int | None = None, **facts: object) -> None:
        self.id, self.device_kind, self.process_index, self.limit = number, kind, process, limit
        self.__dict__ |= facts

    def memory_stats(self) -> dict[str, int] | None:
        return None if self.limit is None else {"bytes_limit": self.limit, "bytes_in_use": 3}


class Client:
    """A client with the attributes that keys read."""

    def __init__(self, platform: str, version: str, *devices: Device) -> None:
        self.platform, self.platform_version, self._devices = platform, version, devices

    def devices(self) -> list[Device]:
        return list(self._devices)

    local_devices = devices

    def device_count(self) -> int:
        return len(self._devices)

    local_device_count = device_count


def described(platform_name: str, version: str, *devices: Device) -> bytes:
    return platform.describe(Client(platform_name, version, *devices), devices)


@pytest.fixture
def host(monkeypatch):
    def be(features: str) -> None:
        monkeypatch.setattr(platform, "_host_cpu", lambda client: features)

    be("avx2")
    monkeypatch.setattr(cpu_clients, "threads_of", lambda client: 2)
    return be


@pytest.fixture
def topologies(monkeypatch):
    """Give any devices a topology; jaxlib has none for these."""
    monkeypatch.setattr(platform, "_topology", lambda devices: Topology(devices))


@pytest.fixture
def no_topologies(monkeypatch):
    """Make the platform refuse a topology, with the RuntimeError that jaxlib raises."""

    def fail(devices):
        raise xla_client.XlaRuntimeError("UNIMPLEMENTED: no topology")

    monkeypatch.setattr(xla_client, "get_topology_for_devices", fail)


class Topology:
    def __init__(self, devices) -> None:
        self.target_config = devices[0].device_kind
        self._fingerprint = len(devices)

    def fingerprint(self) -> int:
        return self._fingerprint


def test_the_processor_is_in_the_key_on_cpu(host):
    before = described("cpu", "cpu", Device(0, "cpu"))
    host("avx512")
    assert described("cpu", "cpu", Device(0, "cpu")) != before


def test_the_threads_and_devices_of_the_client_count(host, monkeypatch):
    one, eight = [Device(0, "cpu")], [Device(number, "cpu") for number in range(8)]
    two_threads = platform.describe(Client("cpu", "cpu", *one), one)
    more_devices = platform.describe(Client("cpu", "cpu", *eight), one)
    monkeypatch.setattr(cpu_clients, "threads_of", lambda client: 3)
    assert len({two_threads, more_devices, platform.describe(Client("cpu", "cpu", *one), one)}) == 3


def test_kind_version_and_number_of_devices_are_in_the_key(host, topologies):
    descriptions = [
        described("tpu", "1", Device(0, "v5e")),
        described("tpu", "2", Device(0, "v5e")),
        described("tpu", "1", Device(0, "v6e")),
        described("tpu", "1", Device(0, "v5e"), Device(1, "v5e")),
        described("tpu", "1", Device(0, "v5e"), Device(1, "v5e", 1)),
        described("gpu", "1", Device(0, "v5e")),
        described("cpu", "cpu", Device(0, "cpu")),
    ]
    assert len(set(descriptions)) == len(descriptions)


def test_the_allocators_limit_counts_where_there_is_one(no_topologies):
    limits = [described("gpu", "1", Device(0, "H100", limit=limit)) for limit in (None, 1000, 2000)]
    assert len(set(limits)) == 3
    gpu = Device(0, "H100", limit=1000)
    client = Client("gpu", "1", gpu)
    before = platform.describe(client, [gpu])
    gpu.limit = 2000
    assert platform.describe(client, [gpu]) != before


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError, AttributeError])
def test_a_device_without_statistics_is_described(no_topologies, monkeypatch, error):
    def fail(self):
        raise error("not here")

    monkeypatch.setattr(Device, "memory_stats", fail)
    assert b"memory=(None,)" in described("gpu", "1", Device(0, "H100"))


@pytest.mark.parametrize("fact", ["compute_capability", "core_count", "shared_memory_per_block_optin"])
def test_each_fact_of_a_gpu_is_in_the_key(no_topologies, fact):
    """The topology of a GPU lacks these before newer versions of jaxlib."""
    assert described("gpu", "1", Device(0, "GPU", **{fact: 8})) != described("gpu", "1", Device(0, "GPU", **{fact: 9}))


def test_the_target_of_a_topology_counts(topologies):
    assert b"target='H100'" in described("gpu", "1", Device(0, "H100"))


def test_devices_without_a_topology_are_described_by_their_kinds(no_topologies, caplog, capfd):
    assert b"topology='none'" in described("gpu", "1", Device(0, "H100"))
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_tpu_devices_without_the_first_are_not_cached(topologies):
    devices = [Device(number, "v6e") for number in range(4)]
    client = Client("tpu", "1", *devices)
    assert platform.describe(client, devices[:2])
    with pytest.raises(UncacheableError, match="TPU"):
        platform.describe(client, devices[2:])


@pytest.mark.parametrize(("name", "version"), [("rocm", "6"), ("gpu", "rocm 60300")])
def test_rocm_is_not_cached(name, version):
    with pytest.raises(UncacheableError, match="ROCm"):
        described(name, version, Device(0, "MI300"))


@pytest.mark.parametrize("name", ["neuron", "mtl"])
def test_a_platform_whose_keys_were_never_compared_with_code_is_not_cached(topologies, name):
    """Its compiler may read what no key holds, as Neuron's does with NEURON_CC_FLAGS."""
    with pytest.raises(UncacheableError, match=f"platform {name}"):
        described(name, "1", Device(0, "kind"))


def flags_of(surroundings: Surroundings, client: Client) -> str:
    return surroundings.made_with(client, client.devices())[0]


def test_libtpus_flags_count_as_they_were_when_the_client_appeared(host, jaxlib_folder, monkeypatch):
    """libtpu reads them once, before it makes the client."""
    surroundings = Surroundings(jaxlib_folder, "1.0", None)
    first, second = (Client("cpu", "cpu", Device(0, "cpu")) for _ in range(2))
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_a=1")
    before = flags_of(surroundings, first)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_a=2")
    assert flags_of(surroundings, first) == before != flags_of(surroundings, second)


def test_libtpus_flags_count_when_they_changed_before_the_client_appeared(host, jaxlib_folder, monkeypatch):
    """libtpu may have read them before or after: executables of either must not pass for those of the other."""

    def flags(at_first: str, afterwards: str) -> str:
        monkeypatch.setenv("LIBTPU_INIT_ARGS", at_first)
        surroundings = Surroundings(jaxlib_folder, "1.0", None)
        monkeypatch.setenv("LIBTPU_INIT_ARGS", afterwards)
        return flags_of(surroundings, Client("cpu", "cpu", Device(0, "cpu")))

    ways = [("", ""), ("a", "a"), ("a", ""), ("", "a"), ("a", "b"), ("b", "a")]
    texts = {"": "", "a": "--xla_tpu_a=1", "b": "--xla_tpu_a=2"}
    assert len({flags(texts[at_first], texts[afterwards]) for at_first, afterwards in ways}) == len(ways)


def test_libtpus_flags_count_that_were_taken_back_after_it_read_them(host, jaxlib_folder, monkeypatch):
    read = []
    owner = xla_client._xla
    monkeypatch.setattr(owner, "initialize_pjrt_plugin", lambda name: read.append(os.environ["LIBTPU_INIT_ARGS"]))
    replaced, keys_seen = owner.initialize_pjrt_plugin, set()
    for text in ("", "--xla_tpu_a=1"):
        monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
        surroundings = Surroundings(jaxlib_folder, "1.0", None)
        with surroundings.watching_libtpu():
            monkeypatch.setenv("LIBTPU_INIT_ARGS", text)
            owner.initialize_pjrt_plugin("tpu")
            monkeypatch.delenv("LIBTPU_INIT_ARGS")
        client = Client("cpu", "cpu", Device(0, "cpu"))
        keys_seen.add(surroundings.made_with(client, client.devices())[0])
    assert read == ["", "--xla_tpu_a=1"]
    assert len(keys_seen) == 2
    assert owner.initialize_pjrt_plugin is replaced


def test_libtpus_flags_from_elsewhere_are_refused_for_its_programs_only(host, topologies, jaxlib_folder, monkeypatch):
    """A text that libtpu may have read counts, whatever the text is afterwards."""
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--tryfromenv=xla_tpu_a")
    surroundings = Surroundings(jaxlib_folder, "1.0", None)
    monkeypatch.delenv("LIBTPU_INIT_ARGS")
    processor, tpu = (Client(name, "1", Device(0, name)) for name in ("cpu", "tpu"))
    assert surroundings.made_with(processor, processor.devices())
    with pytest.raises(UncacheableError, match="libtpu's flags"):
        surroundings.made_with(tpu, tpu.devices())


def test_describing_a_client_does_not_keep_it_alive(topologies):
    gpu = Device(0, "H100")
    client = Client("gpu", "1", gpu)
    platform.describe(client, [gpu])
    gone = weakref.ref(client)
    del client
    gc.collect()
    assert gone() is None


def test_a_key_needs_all_its_components_and_differs_with_each():
    parts = {name: keys.Component(name, name.encode()) for name in keys.COMPONENTS}
    whole = keys.combine(parts)
    others = [keys.combine(parts | {name: keys.Component(name, b"other")}).digest for name in keys.COMPONENTS]
    assert len({whole.digest, *others}) == 1 + len(parts)
    swapped = parts | {"program": parts["options"], "options": parts["program"]}
    assert keys.combine(swapped).digest != whole.digest
    with pytest.raises(ValueError, match="exactly"):
        keys.combine({name: parts[name] for name in keys.COMPONENTS[:-1]})


def test_a_value_with_a_line_break_cannot_pass_for_two_facts():
    assert keys.lines({"a": "1'\nb='2"}) != keys.lines({"a": "1", "b": "2"})


def test_two_threads_that_see_the_client_at_once_agree_on_libtpus_flags(host, jaxlib_folder, monkeypatch):
    class Flags(str):
        """A text whose comparison lets the other thread go first."""

        __slots__ = ()
        __hash__ = str.__hash__

        def __ne__(self, other):
            if there:
                there.pop()
                seen.append(flags_of(surroundings, client))
            return str.__ne__(self, other)

    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    surroundings, alone = (Surroundings(jaxlib_folder, "1.0", None) for _ in range(2))
    client = Client("cpu", "cpu", Device(0, "cpu"))
    there, seen = ["another thread"], []
    with monkeypatch.context() as patched:
        patched.setattr(os, "environ", {"LIBTPU_INIT_ARGS": Flags("--xla_tpu_a=1")})
        seen.append(flags_of(surroundings, client))
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_a=1")
    assert seen == [flags_of(alone, client)] * 2
