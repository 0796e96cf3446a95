"""The recipes in deploy/: right by the schema, and of one mind with each other and with the settings."""

from __future__ import annotations

import re
import signal
from typing import Any

import pytest
from support.places import REPOSITORY

from xcache.config import config

yaml = pytest.importorskip("yaml", reason="PyYAML comes with the extra test")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="it comes with the extra test")

CONTAINERFILE = (REPOSITORY / "deploy" / "Containerfile").read_text()
# A version of Kubernetes that is in use for years to come; what the manifest says is much older.
KUBERNETES = "1.30"


def documents() -> dict[str, Any]:
    found = yaml.safe_load_all((REPOSITORY / "deploy" / "kubernetes.yaml").read_text())
    return {document["kind"]: document for document in found}


def test_the_manifest_is_right_by_the_schema():
    found = documents()
    assert found.keys() == {"Namespace", "ConfigMap", "DaemonSet", "Pod"}
    for document in found.values():
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_the_schema_would_find_what_is_wrong():
    wrong = documents()["DaemonSet"]
    wrong["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


def test_all_of_them_mean_the_same_account_and_folders(tmp_path):
    found = documents()
    (tmp_path / "config.toml").write_text(found["ConfigMap"]["data"]["config.toml"])
    daemons = config.load({"XCACHE_CONFIG": str(tmp_path / "config.toml")})
    uid = re.search(r"XCACHED_UID=(\d+)", CONTAINERFILE)[1]
    assert daemons.daemon_user == uid
    assert daemons.idle_exit == 0
    pod = found["DaemonSet"]["spec"]["template"]["spec"]
    assert str(pod["securityContext"]["runAsUser"]) == uid
    assert f"os.chown(folder, {uid}, {uid})" in pod["initContainers"][0]["command"][2]
    program = found["Pod"]["spec"]["containers"][0]
    theirs = config.load({one["name"]: one["value"] for one in program["env"]})
    assert (theirs.daemon_user, theirs.socket, theirs.dir) == (uid, daemons.socket, daemons.dir)
    folders = {one["name"]: one["hostPath"]["path"] for one in pod["volumes"] if "hostPath" in one}
    assert folders == {"store": str(daemons.dir), "socket": str(daemons.socket.parent)}
    for container in (*pod["initContainers"], *pod["containers"]):
        mounted = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        assert mounted.items() >= folders.items()
    assert program["volumeMounts"] == [{"name": "socket", "mountPath": folders["socket"], "readOnly": True}]
    for folder in folders.values():
        assert f" {folder}" in CONTAINERFILE
    # Each container drops all capabilities, and cannot gain privileges.
    for container in (*pod["initContainers"], *pod["containers"], program):
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]


def test_the_probe_tells_whether_it_answers_and_nothing_else(place):
    """A daemon with wrong settings goes on, and so must its container."""
    container = documents()["DaemonSet"]["spec"]["template"]["spec"]["containers"][0]
    *_, program = container["livenessProbe"]["exec"]["command"]
    impatient = program.replace("10", "0.2").replace("/run/xcache/xcached.sock", str(place.socket))
    program = program.replace("/run/xcache/xcached.sock", str(place.socket))
    child = place.start_daemon()
    (place.root / "wrong.toml").write_text('max_size = "lots"')
    assert place.run(program, XCACHE_CONFIG=str(place.root / "wrong.toml")).returncode == 0
    child.send_signal(signal.SIGSTOP)
    try:
        hung = place.run(impatient)
    finally:
        child.send_signal(signal.SIGCONT)
    assert (hung.returncode, "did not answer" in hung.stderr) == (1, True), hung.stderr
    health = re.search(r'"-c", "(.*)"\]$', CONTAINERFILE, re.MULTILINE)[1]
    assert place.run(health.replace("/run/xcache/xcached.sock", str(place.socket))).returncode == 0


def test_the_container_runs_what_there_is():
    entry = re.search(r"^ENTRYPOINT (.*)$", CONTAINERFILE, re.MULTILINE)[1]
    assert entry == '["python", "-P", "-m", "xcached"]'
    images = re.findall(r"^FROM (\S+)", CONTAINERFILE, re.MULTILINE)
    assert set(images) == {"python:3.13-slim"}
    # It may write nothing but the store and its socket, and nobody starts it again when it has left.
    assert "SQLITE_TMPDIR=/var/cache/xcache " in CONTAINERFILE
    assert 'echo "idle_exit = 0" > /etc/xcache/config.toml' in CONTAINERFILE


def test_the_warm_image_finds_the_bundle_that_its_build_makes():
    recipe = (REPOSITORY / "deploy" / "warm-image" / "Containerfile").read_text()
    environ = dict(
        line.split("=", 1) for line in re.findall(r"^(?:ENV| {3}) (XCACHE\w*=[^ \n]+)", recipe, re.MULTILINE)
    )
    (bundle,) = config.load(environ).tiers()
    assert (bundle.is_bundle, str(bundle.path)) == (True, "/opt/app/cache.xcb")
    made, there = re.search(r"^COPY --from=compiled (\S+) (\S+)", recipe, re.MULTILINE).groups()
    assert (f"-o {made} " in recipe, there) == (True, str(bundle.path))
