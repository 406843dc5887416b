"""What Slurm's commands print; doctor; runs of others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusterkit import backends, doctor
from clusterkit.backends.slurm import probe, queue
from clusterkit.cluster import SlurmCluster, SlurmFacts
from clusterkit.errors import BadInput, RunFolderError, RunNotFound, Unavailable
from clusterkit.run.status import State
from clusterkit.spec import JobSpec
from clusterkit.transport import Completed, LocalTransport
from tests.unit.slurm.commands import RUN_DIR, Slurm, job

MAIN = "main*|up|2-00:00:00|1-4|22.05.8|"


# ---------------------------------------------------------------- what commands print


def test_squeue_jobs_are_parsed_and_other_lines_skipped(plan):
    made = plan()
    text = "a plugin complains\n" + job(number=12) + job("PENDING", 9, "(ReqNodeNotAvail, x|y)")
    transport = Slurm(squeue=text.replace(RUN_DIR, made.run_dir))
    found = queue.jobs_of(made, transport)
    assert [(each.id, each.state) for each in found] == [(9, "PENDING"), (12, "RUNNING")]
    assert "--name=demo-1" in transport.asked[0]
    assert found[0].waiting == (
        "ReqNodeNotAvail: nodes it needs are down, drained or reserved (job 9)"
    )


@pytest.mark.parametrize(
    ("state", "means"),
    [
        ("PENDING", "PENDING"), ("CONFIGURING", "PENDING"), ("RUNNING", "RUNNING"),
        ("COMPLETING", "RUNNING"), ("SUSPENDED", "RUNNING"), ("COMPLETED", "SUCCEEDED"),
        ("CANCELLED", "CANCELLED"), ("TIMEOUT", "FAILED"), ("PREEMPTED", "FAILED"),
        ("NODE_FAIL", "FAILED"), ("OUT_OF_MEMORY", "FAILED"), ("HIBERNATING", "UNKNOWN"),
    ],
)  # fmt: skip
def test_slurm_job_state_maps_to_run_state(state, means):
    assert queue.Job(id=1, slurm_state=state).state is State[means]


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Priority", "Priority: jobs with a higher priority go first (job 1)"),
        ("QOSMaxJobsPerUserLimit", "QOSMaxJobsPerUserLimit: it exceeds a limit of its QOS (job 1)"),
        ("AssocGrpGRES", "AssocGrpGRES: it exceeds a limit of its account (job 1)"),
        ("SomethingNew", "SomethingNew (job 1)"),
    ],
)
def test_pending_reason_is_explained_with_expected_start(reason, words):
    assert queue.Job(id=1, slurm_state="PENDING", reason=reason, start="N/A").waiting == words
    expected = f"{words}; expected to start 2026-11-24T01:00:00"
    due = queue.Job(id=1, slurm_state="PENDING", reason=reason, start="2026-11-24T01:00:00")
    assert due.waiting == expected


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("30", 30), ("30:30", 31), ("1:30:00", 90), ("2-00:00:00", 2880), ("1-12", 2160),
        ("UNLIMITED", None), ("soon", None),
    ],
)  # fmt: skip
def test_slurm_times_are_parsed_to_minutes(text, found):
    assert probe.minutes(text) == found


def test_sinfo_gives_partition_limits_and_nodes():
    nodes = (
        "n0|idle|96|1031000|gpu:h100:8(S:0-1)", "n1|down*|96+|1031000|gpu:h100:8",
        "n2|mixed|48|512000|gpu:4,shard:8", "n3|idle|8|1000|(null)",
    )  # fmt: skip
    listed = "\n".join(["a plugin complains", "long|up|infinite|1-infinite|22.05.8|n9|idle|8|1|",
                        *(MAIN + node for node in nodes)])  # fmt: skip
    found = probe.partition(SlurmCluster(), Slurm(sinfo=listed))
    assert found.facts == SlurmFacts(
        version="22.05.8", partition="main", nodes=4, minutes=2880, most_nodes=4
    )
    assert [(n.name, n.usable, n.cpus, len(n.gpus)) for n in found.nodes] == [
        ("n0", True, 96, 8), ("n1", False, 96, 8), ("n2", True, 48, 4), ("n3", True, 8, 0),
    ]  # fmt: skip
    assert found.nodes[0].gpus[0].name == "h100"


@pytest.mark.parametrize(
    ("cluster", "error", "words"),
    [
        ({"partition": "gpu"}, BadInput, "Slurm has no partition gpu"),
        ({"partition": "long"}, Unavailable, "partition long has no nodes"),
        ({}, BadInput, "partition: Slurm has no default"),
    ],
)
def test_missing_or_empty_partition_is_refused(cluster, error, words):
    with pytest.raises(error, match=words) as raised:
        probe.partition(SlurmCluster(**cluster), Slurm(sinfo="long\nmain\n"))
    assert raised.value.hint in ("one of long, main", None)


OUTPUTS = Path(__file__).parents[2] / "data/slurm"
"""What versions of Slurm print; the first line of a file says whether it was recorded."""
PRINTED = {
    # Limits of the default partition, in minutes and nodes; its nodes and GPUs, and which can be
    # used; states of jobs 101 to 103, or as they were recorded.
    "20.11": (4320, None, "8 8 8 8", "n0 n1 n2", "PENDING PENDING PENDING"),
    "22.05": (30, None, "0 0", "n0 n1", "PENDING PENDING PENDING RUNNING"),
    "23.11": (None, 16, "8 8 8 8", "n0 n1", "PENDING RUNNING FAILED"),
    "24.11": (2880, None, "8 8 8 8", "n0 n1", "PENDING PENDING FAILED"),
    "25.05": (2160, None, "8 8 8 0", "n0 n1 n3", "PENDING UNKNOWN FAILED"),
}


def printed(version):
    """What each command of a version's file prints."""
    parts = (OUTPUTS / f"{version}.txt").read_text().split("\n$ ")[1:]
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in parts}


def test_output_of_several_slurm_versions_is_parsed():
    assert {path.stem for path in OUTPUTS.iterdir()} == set(PRINTED)
    for version, (minutes, most, gpus, usable, states) in PRINTED.items():
        found = printed(version)
        seen = probe.partition(SlurmCluster(), Slurm(sinfo=found["sinfo"]))
        assert seen.facts.version.startswith(version)
        assert (seen.facts.partition, seen.facts.minutes) == ("main", minutes), version
        assert seen.facts.most_nodes == most, version
        assert " ".join(str(len(node.gpus)) for node in seen.nodes) == gpus, version
        assert [node.name for node in seen.nodes if node.usable] == usable.split(), version
        jobs = queue.parse(found["squeue"], RUN_DIR)
        assert [job.state.value for job in jobs] == states.split(), version


def test_probe_with_own_interpreter_runs_sinfo_only():
    """And asks nothing of this very Python but what it knows already."""
    transport = Slurm(sinfo=f"{MAIN}n0|idle|8|1000|(null)")
    facts = backends.backend("slurm").probe(SlurmCluster(python=sys.executable), transport)
    assert [argv[0] for argv in transport.asked] == ["sinfo"]
    assert (facts.hosts[0].python, facts.slurm.nodes) == (sys.executable, 1)
    assert facts.port + 1 == facts.watch_port


def test_unreachable_controller_is_reported_as_unavailable(plan):
    away = "error: Unable to contact slurm controller (connect failure)"
    with pytest.raises(Unavailable, match="Unable to contact slurm controller"):
        queue.jobs_of(plan(), Slurm(squeue=away))


def test_job_with_same_name_in_other_folder_is_ignored(plan):
    """Another user's, or of another CLUSTERKIT_HOME: `cancel` by root would signal it."""
    made = plan()
    text = job(number=8, folder="/home/other/runs/demo-1") + job(number=5, folder=made.run_dir)
    text += job(number=9, folder=f"/else{made.run_dir}") + job(number=10, folder="")
    transport = Slurm(squeue=text)
    assert [each.id for each in queue.jobs_of(made, transport)] == [5]
    assert f"--user={os.getuid()}" in transport.asked[0]


@pytest.mark.parametrize(
    ("owner", "answers", "code", "printed"),
    [
        (None, "", 0, "began\n"),
        ("7", "", 0, "began\n"),  # requeued
        ("6", "COMPLETED\n", 0, "began\n"),
        ("6", "PENDING\n", 0, "began\n"),
        ("6", "slurm_load_jobs error: Invalid job id specified\n", 0, "began\n"),
        ("6", "COMPLETING\nslurm_load_jobs error: Unable to contact\nFAILED\n", 0, "began\n"),
        ("6", "RUNNING\n", 75, ""),
    ],
)
def test_batch_script_does_not_start_beside_running_job_of_same_plan(
    plan, tmp_path, owner, answers, code, printed
):
    (text,) = (file.text for file in plan().files if file.path.endswith("slurm.sh"))
    loop = text.partition("# Two jobs of one plan")[2].partition("# Slurm may start")[0]
    bin = tmp_path / "bin"
    bin.mkdir()
    (tmp_path / "answers").write_text(answers)
    # Says one line of its answers each time.
    (bin / "squeue").write_text(f"#!/bin/sh\ncd {tmp_path}; head -n 1 answers; sed -i 1d answers\n")
    (bin / "squeue").chmod(0o755)
    (bin / "sleep").symlink_to("/bin/true")
    if owner is not None:
        (tmp_path / "slurm-job").write_text(f"{owner}\n")
    done = subprocess.run(
        ["bash", "-u", "-c", f"run={tmp_path}\n#{loop}\necho began"],
        env={"PATH": f"{bin}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (code, printed), done.stderr
    assert (tmp_path / "slurm-job").read_text() == ("6\n" if code else "7\n")
    assert ("job 6 runs this plan already" in done.stderr) is bool(code)
    assert (tmp_path / "answers").read_text() == ""


# ---------------------------------------------------------------- doctor


class Fit(Slurm):
    """A cluster that is fit, but for what is printed otherwise."""

    def run(self, host, argv, **options):
        if argv[0] == "sbatch" and "sbatch" in self.printed:
            return Completed(tuple(argv), 1, "", self.printed["sbatch"])
        if argv[0] in ("sbatch", "srun"):
            self.asked.append((*argv, options.get("stdin", b"").decode()))
            return Completed(tuple(argv), 0, self.printed.get("srun", "gpu-3\n"), "sbatch: Job 4\n")
        if argv[0] in self.printed:
            return super().run(host, argv, **options)
        return LocalTransport.run(self, host, argv, **options)


def examined(transport, **job):
    asked = JobSpec(**{"name": "demo", "command": ("true",), "nodes": 2, **job})
    subject = backends.backend("slurm").subject("hpc", SlurmCluster(), asked)
    report = doctor.examine(subject, transport)
    return {finding.check: (finding.level, finding.cause) for finding in report.findings}


SINFO = f"{MAIN}n0|idle|8|1000|(null)\n{MAIN}n1|idle|8|1000|(null)\n"


def test_doctor_reports_ok_for_healthy_cluster(no_gpus):
    transport = Fit(sinfo=SINFO)
    found = examined(transport)
    assert found["partition"] == ("ok", "2 of 2 nodes of partition main can be used")
    assert found["admission"] == ("ok", "Job 4")
    assert found["compute"] == ("ok", "seen on gpu-3")
    (rehearsed,) = (asked[-1] for asked in transport.asked if asked[0] == "sbatch")
    assert "#SBATCH --nodes=2" in rehearsed


@pytest.mark.parametrize(
    ("printed", "job", "check", "verdict"),
    [
        (
            {"sinfo": SINFO.replace("n1|idle", "n1|drained")}, {}, "partition",
            ("warn", "1 of 2 nodes of partition main can be used, the job needs 2: it would wait"),
        ),
        (
            {}, {"nodes": 3}, "admission",
            ("fail", "nodes: 3 needed, partition main allows 2 nodes"),
        ),
        (
            {"sbatch": "sbatch: error: Invalid account\nallocation failure: Invalid account"}, {},
            "admission", ("fail", "error: Invalid account; allocation failure: Invalid account"),
        ),
        (
            {"srun": "no folder /srv\n"}, {}, "compute",
            ("fail", "a compute node has no folder /srv"),
        ),
    ],
)  # fmt: skip
def test_doctor_reports_partition_admission_and_compute_problems(
    printed, job, check, verdict, no_gpus
):
    assert examined(Fit(**{"sinfo": SINFO, **printed}), **job)[check] == verdict


# ---------------------------------------------------------------- runs of others


LISTED = """\
12|RUNNING|alice|2|1795435200|1795436400|zero3-1123133450-mzxe|/work/a b/runs/zero3-1123133450-mzxe
13|RUNNING|bob|1|1795435201|N/A|interactive|/home/bob
11|TIMEOUT|alice|2|1795435100|1795435199|zero3-1123133450-mzxe|/work/a b/runs/zero3-1123133450-mzxe
9|COMPLETED|carol|4|1795435000|1795435099|mine|/home/carol/.clusterkit/runs/mine
14|HIBERNATING|carol|4|soon|never|other|/home/carol/.clusterkit/runs/other
squeue: a plugin complains
"""


def test_listing_gives_jobs_with_run_folder_of_all_users():
    transport = Slurm(squeue=LISTED)
    found = backends.backend("slurm").listing(SlurmCluster(), transport)
    assert [(run.run, run.job, run.state.value, run.user, run.pods) for run in found] == [
        ("other", "other", "UNKNOWN", "carol", 4),
        ("zero3-1123133450-mzxe", "zero3", "RUNNING", "alice", 2),
        ("mine", "mine", "SUCCEEDED", "carol", 4),
    ]
    assert [(run.started_at, run.finished_at) for run in found] == [
        (None, None), (1795435200.0, None), (1795435000.0, 1795435099.0),
    ]  # fmt: skip


def test_recover_refuses_run_submitted_elsewhere_with_attach_hint():
    backend = backends.backend("slurm")
    with pytest.raises(RunFolderError, match="run mine: it was submitted elsewhere") as error:
        backend.recover("mine", SlurmCluster(), Slurm(squeue=LISTED))
    assert "CLUSTERKIT_HOME=/home/carol/.clusterkit clusterkit attach mine" in error.value.hint
    with pytest.raises(RunNotFound, match="'theirs' is unknown to Slurm"):
        backend.recover("theirs", SlurmCluster(), Slurm(squeue=LISTED))
