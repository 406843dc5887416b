"""SSH hosts on which no run can start, and how it is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterkit import api, backends
from clusterkit.backends.ssh.config import HostUnreachable
from clusterkit.backends.ssh.known_hosts import HostKeyProblem
from clusterkit.errors import BadInput, ClusterkitError, SubmitFailed, Unavailable
from clusterkit.run.status import State
from tests.conftest import noted
from tests.lab import Lab
from tests.live import inside
from tests.live.ssh.runs.running import Submit, describe, ended, on, saying

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


def refused(submit: Submit, kind: type[ClusterkitError], **options: object) -> str:
    """What a submit says that is refused; nothing of the run was found."""
    with pytest.raises(kind) as error:
        submit(**options)
    assert api.runs() == []
    return str(error.value)


def test_submit_refuses_host_that_is_down(submit: Submit, lab: Lab) -> None:
    lab.fault("crash", "h1")
    said = refused(submit, HostUnreachable)
    assert "host h1" in said
    assert "is sshd running there?" in said


def test_submit_refuses_changed_host_key_with_both_fingerprints(submit: Submit, lab: Lab) -> None:
    lab.fault("new-host-key", "h1")
    said = refused(submit, HostKeyProblem)
    assert "host h1" in said
    assert "its host key has changed" in said
    assert said.count("SHA256:") == 2
    assert "ssh-keygen -R" in said


def test_submit_refuses_unknown_host_key(submit: Submit, lab: Lab, tmp_path: Path) -> None:
    empty = tmp_path / "known_hosts"
    empty.write_text("")
    hosts = [
        {
            "name": host.name, "address": host.address, "user": "root", "identity": str(lab.key),
            "known_hosts": str(empty), "python": sys.executable,
        }
        for host in lab.hosts
    ]  # fmt: skip
    entry = {"lab": {"backend": "ssh", "hosts": hosts}}
    Path(os.environ["CLUSTERKIT_CLUSTERS"]).write_text(json.dumps(entry))
    said = refused(submit, HostKeyProblem)
    assert "host key verification failed: its key is not known" in said
    assert f"ssh-keyscan {lab.hosts[0].address} >>{empty}" in said


def test_submit_refuses_full_disk_and_leaves_no_partial_copy(submit: Submit, lab: Lab) -> None:
    lab.fault("full-disk", "h1")
    said = refused(submit, SubmitFailed)
    assert "host h1" in said
    assert "No space left on device" in said
    listing = on(lab, "h1", "find /root/clusterkit -name '.*.*' -type d 2>/dev/null").stdout
    assert listing == ""


def test_plan_notes_torch_version_that_differs_between_hosts(submit: Submit, lab: Lab) -> None:
    lab.fault("versions", "h1")
    run = submit(1)
    remarks = [str(note) for note in run.plan.notes if not note.name]
    assert any("the hosts differ in torch" in remark for remark in remarks), remarks
    ended(run)


def test_submit_refuses_missing_python_of_cluster_entry(submit: Submit, lab: Lab) -> None:
    describe(lab, python="/nowhere/python", inventory=str(lab.hostfile))
    said = refused(submit, ClusterkitError)
    assert "/nowhere/python" in said or "host key" in said or "Permission denied" in said


def test_submit_uses_job_python_and_refuses_missing_one(submit: Submit) -> None:
    for doctor in (True, False):
        said = refused(submit, ClusterkitError, settings=["python=/nowhere/python"], doctor=doctor)
        assert "/nowhere/python" in said
    run = submit(2, settings=("python=/usr/bin/python3",))
    assert ended(run)[0].state is State.SUCCEEDED
    assert noted(run.plan, "python") == "/usr/bin/python3"


def test_submit_refuses_more_nodes_than_hosts(submit: Submit) -> None:
    said = refused(submit, BadInput, nodes=3)
    assert "nodes: 3 needed, the cluster has 2 hosts (h0, h1)" in said


def test_include_and_exclude_choose_hosts(submit: Submit) -> None:
    run = submit(1, nodes=1, include="h1")
    assert ended(run)[0].nodes[0].host == "h1"
    run = submit(1, nodes=1, exclude="h0")
    assert ended(run)[0].nodes[0].host == "h1"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda key: key.unlink(), "does not exist"),
        (lambda key: key.chmod(0o644), "can be read by others (mode 0644)"),
        (lambda key: key.write_text("no key\n"), "is not a private key"),
        (
            lambda key: subprocess.run(
                ["ssh-keygen", "-p", "-q", "-N", "secret", "-P", "", "-f", str(key)], check=True
            ),
            "is protected by a passphrase",
        ),
    ],
    ids=["missing", "permissions", "garbage", "passphrase"],
)
def test_submit_explains_unusable_private_key(
    submit: Submit,
    lab: Lab,
    tmp_path: Path,
    spoil: Callable[[Path], object],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    key = tmp_path / "key"
    key.write_bytes(lab.key.read_bytes())
    key.chmod(0o600)
    inventory = tmp_path / "inventory.yaml"
    inventory.write_text(lab.inventory.read_text().replace(str(lab.key), str(key)))
    describe(lab, inventory=str(inventory))
    spoil(key)
    said = refused(submit, Unavailable)
    assert words in said
    assert "host h0" in said


def behind_jump_host(lab: Lab, tmp_path: Path) -> None:
    """Write the cluster file for a lab whose second host is reached through its first.

    User, HostName, IdentityFile, UserKnownHostsFile and ProxyJump, all from ssh_config.
    """
    config = tmp_path / "ssh_config"
    common = (
        f"  User root\n  IdentityFile {lab.key}\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {lab.known_hosts}\n"
    )
    config.write_text(
        f"Host first\n  HostName {lab.hosts[0].address}\n{common}"
        f"Host behind\n  HostName {lab.hosts[1].address}\n  ProxyJump first\n{common}"
    )
    hosts = [
        {"name": name, "ssh_config": str(config), "python": sys.executable}
        for name in ("first", "behind")
    ]
    entry = {"lab": {"backend": "ssh", "hosts": hosts}}
    Path(os.environ["CLUSTERKIT_CLUSTERS"]).write_text(json.dumps(entry))


def test_ssh_config_with_proxy_jump_is_honoured(submit: Submit, lab: Lab, tmp_path: Path) -> None:
    behind_jump_host(lab, tmp_path)
    run = submit(1)
    status, _ = ended(run)
    assert status.state is State.SUCCEEDED
    assert {line.text for line in run.logs()} >= {"hello from 0 h0", "hello from 1 h1"}


def test_run_succeeds_despite_greeting_of_login_shell(submit: Submit, lab: Lab) -> None:
    bashrc = lab.root("h1") / "root" / ".bashrc"
    before = bashrc.read_text()
    bashrc.write_text("echo welcome to h1; echo and mind the step >&2\n")
    try:
        run = submit(1)
        assert ended(run)[0].state is State.SUCCEEDED
    finally:
        bashrc.write_text(before)


def test_transport_reuses_connection_to_host(lab: Lab) -> None:
    describe(lab)
    cluster = api.resolved_cluster("lab")
    transport = backends.transport_for(cluster)
    first = transport.connection("h0")
    for _ in range(5):
        assert transport.run("h0", ["true"], timeout=30).exit_code == 0
    assert transport.connection("h0") is first
    transport.close()
    assert not first.is_active()


def test_commands_inside_run_on_hosts_one_behind_jump_host(
    submit: Submit, lab: Lab, tmp_path: Path
) -> None:
    behind_jump_host(lab, tmp_path)
    run = submit(100_000)
    saying(run, "hello", 2)
    inside.exec_works(run)
    inside.files_are_copied(run, tmp_path)
    inside.port_is_forwarded(run)
    run.cancel()
    inside.refused_after_end(run)
