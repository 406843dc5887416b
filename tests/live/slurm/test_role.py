"""Ansible's role `slurm`: hosts become a partition that doctor passes, and on which a job runs.

The hosts are the lab's, which have no systemd: what that would start is started here.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from clusterkit import api
from clusterkit.run.status import State
from tests import own_ssh, tested
from tests.lab import CHECKOUT, Lab
from tests.live.slurm import daemons
from tests.live.ssh.test_ansible import NODES, Site, skip_without_lab

pytestmark = [tested.when_changed("ansible"), pytest.mark.timeout(300)]
SETTINGS = {
    "slurm_enabled": True,
    "slurm_partition": "gpu",
    # A host of the lab is a container: its jobs have no cgroups of their own.
    "slurm_cgroup": {"CgroupPlugin": "cgroup/v1"},
    "slurm_config": {
        "ProctrackType": "proctrack/linuxproc", "TaskPlugin": "task/none", "MpiDefault": "none",
        "SelectType": "select/cons_tres", "SelectTypeParameters": "CR_Core_Memory",
        "ReturnToService": 2,
    },
}  # fmt: skip
START = """set -e
install -d -o munge -g munge /run/munge
setpriv --reuid=munge --regid=munge --clear-groups /usr/sbin/munged
for daemon in "$@"; do "/usr/sbin/$daemon"; done
"""


def test_slurm_role_makes_partition_that_doctor_passes_and_jobs_run_on(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_lab()
    if why := daemons.missing():
        pytest.skip(why)
    variables = tmp_path / "variables.yaml"
    variables.write_text(json.dumps(SETTINGS))
    place = tempfile.mkdtemp(prefix="clusterkit-lab-")
    with tempfile.TemporaryDirectory(prefix="cka") as ansible, Lab(place, 2, shared=True) as lab:
        site = Site(lab, tmp_path, variables, Path(ansible))
        play = site.play("--tags", "slurm", "-e", f"@{CHECKOUT}/ansible/lab.yml")
        site.hang_up()
        assert play.code == 0, play.said
        for host, names in zip(NODES, (["slurmctld", "slurmd"], ["slurmd"]), strict=True):
            started = lab.ssh(host, "sh", "-c", START, "sh", *names)
            assert started.returncode == 0, started.stderr
        idle = "until sinfo -h -o %D/%t | grep -x 2/idle; do :; done"
        waited = lab.ssh("h0", "timeout", "60", "sh", "-c", idle, timeout=70)
        assert waited.stdout == "2/idle\n", lab.ssh("h0", "sinfo", "-R", "-l").stdout

        own_ssh.configure(tmp_path, lab.ssh_config.read_text(), monkeypatch)
        monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
        entry = {"backend": "slurm", "ssh": "h0", "workdir": "/srv/shared/clusterkit",
                 "partition": "gpu", "python": "/usr/bin/python3"}  # fmt: skip
        (tmp_path / "clusters.yaml").write_text(json.dumps({"hpc": entry}))
        monkeypatch.setenv("CLUSTERKIT_CLUSTERS", str(tmp_path / "clusters.yaml"))
        (tmp_path / "project").mkdir()
        monkeypatch.chdir(tmp_path / "project")
        report = api.doctor(cluster="hpc", nodes=2)
        levels = {each.check: each.level for each in report.findings}
        ok = {"partition": "ok", "admission": "ok", "compute": "ok"}
        assert report.ok, report.findings
        assert levels.items() >= ok.items()
        words = ["sh", "-c", "echo rank $RANK of $WORLD_SIZE on $(hostname)"]
        run = api.submit(words, cluster="hpc", nodes=2, settings=["launcher=forkserver"])
        status = run.wait(120)
        assert status.state is State.SUCCEEDED, status
        said = sorted(line.text for line in run.logs() if line.text.startswith("rank "))
        assert said == ["rank 0 of 2 on h0", "rank 1 of 2 on h1"]
