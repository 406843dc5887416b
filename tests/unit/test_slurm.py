"""The Slurm backend without a Slurm: what commands print, what states mean, the batch script."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from clusterkit import backends, doctor
from clusterkit.agent.member import not_returned
from clusterkit.backends.slurm import observe, place, probe, queue
from clusterkit.cluster import SlurmCluster, SlurmFacts
from clusterkit.errors import BadInput, RunFolderError, RunNotFound, Unavailable
from clusterkit.run import folder as run_folder
from clusterkit.run.status import State
from clusterkit.spec import JobSpec
from clusterkit.transport import Completed, LocalTransport

MAIN = "main*|up|2-00:00:00|1-4|22.05.8|"


class Slurm(LocalTransport):
    """A login node whose Slurm prints what it is told to; files are this machine's."""

    def __init__(self, **printed: str) -> None:
        self.printed = printed
        self.asked: list[tuple[str, ...]] = []

    def run(self, host, argv, **options):
        self.asked.append(tuple(argv))
        text = self.printed.get(argv[0], "")
        if text.startswith("error"):
            return Completed(tuple(argv), 1, "", text)
        return Completed(tuple(argv), 0, text, "")


RUN_DIR = "/home/u/runs/demo-1"


def job(state="RUNNING", number=7, reason="None", start="N/A", folder=RUN_DIR):
    return f"{number}|{state}|{start}|{reason}|{folder}\n"


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


OUTPUTS = Path(__file__).parents[1] / "data/slurm"
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


# ---------------------------------------------------------------- the plan


@pytest.fixture
def plan(make_facts):
    def make(cluster=None, slurm=None, **fields):
        given = {"version": "22.05.8", "partition": "main", "nodes": 16, "minutes": 2880}
        facts = msgspec.structs.replace(make_facts(), slurm=SlurmFacts(**(given | (slurm or {}))))
        asked = JobSpec(**{"name": "demo", "command": ("true",), "nodes": 2, **fields})
        entry = SlurmCluster(**(cluster or {}))
        return backends.backend("slurm").plan(asked, entry, facts, "demo-1")

    return make


def options(plan):
    (script,) = (file.text for file in plan.files if file.path.endswith("slurm.sh"))
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if "#SBATCH" in line]


@pytest.mark.parametrize(
    ("fields", "slurm", "message"),
    [
        ({"nodes": 17}, {}, "17 needed, partition main allows 16 nodes"),
        ({"nodes": 5}, {"most_nodes": 4}, "5 needed, partition main allows 4 nodes"),
        ({"nodes": 2, "spares": 3}, {"nodes": 4}, "2 and 3 spares needed, partition main"),
        ({"cluster": {"time": "3-0"}}, {}, "3-0 is more than partition main allows"),
        ({"cluster": {"time": "soon"}}, {}, "soon is not a Slurm time limit"),
    ],
)
def test_plan_refuses_nodes_or_time_that_partition_does_not_allow(plan, fields, slurm, message):
    with pytest.raises(BadInput, match=message):
        plan(slurm=slurm, **fields)


def test_job_time_limit_sets_sbatch_time_option(plan):
    assert "--time=65" in options(plan(time_limit="1h"))
    assert "--time=2880" in options(plan(time_limit="48h"))
    assert "--time=90" in options(plan(time_limit="1h", cluster={"time": "90"}))
    assert not any("--time" in option for option in options(plan()))


def test_sbatch_options_are_quoted_for_sbatch(plan):
    found = options(plan(cluster={"constraint": "a&b", "options": ["--comment=it's"]}))
    assert "'--constraint=a&b'" in found
    assert "'--comment=it'\"'\"'s'" in found
    with pytest.raises(BadInput, match="line break or a backslash"):
        plan(cluster={"account": "a\nb"})


@pytest.mark.parametrize(
    ("fields", "nodes"),
    [({"spares": 1}, 3), ({"nodes": "2:4", "on_node_loss": "shrink"}, 4)],
)
def test_allocation_of_elastic_or_spare_run_survives_node_loss(plan, fields, nodes):
    for requeue, then in ((True, "scontrol requeue"), (False, "scancel")):
        made = plan({"requeue": requeue}, **fields)
        (script,) = (file.text for file in made.files if file.path.endswith("slurm.sh"))
        assert f"#SBATCH --nodes={nodes}" in script
        assert "#SBATCH --no-kill" in script
        (step,) = (line for line in script.splitlines() if line.startswith("srun "))
        assert f"--nodes={nodes} --ntasks={nodes} " in step
        assert " --no-kill " in step
        assert f'grep -q "{queue.NODE_0_LOST}" "$ended"; then' in script
        assert then in script.partition("trap notice")[2].partition("code=0")[0]
    assert queue.NODE_0_LOST in not_returned([0], 15.0)
    assert made.nodes == nodes
    assert backends.backend("slurm").node_plan(made, 1).steps == ()  # no node is started alone


@pytest.mark.parametrize(
    ("later", "again"),
    [((), False), (("{}",), False), (("lost",), True), (("{}", "lost"), True)],
)
def test_loss_of_node_0_counts_only_if_recorded_since_current_start(tmp_path, later, again):
    """The job was started again as attempt 2; its agent may go on with the next ones."""
    began = 1_000_000
    for attempt, ended in enumerate(("lost", *later), start=1):
        path = tmp_path / f"attempts/{attempt}/node-1/exit.json"
        path.parent.mkdir(parents=True)
        path.write_text(queue.NODE_0_LOST if ended == "lost" else ended)
        os.utime(path, (began + 100 * attempt - 150,) * 2)
    pid = tmp_path / "attempts/2/node-1/pid"
    pid.parent.mkdir(exist_ok=True, parents=True)
    pid.touch()
    os.utime(pid, (began, began))
    done = subprocess.run(
        ["/bin/sh", "-c", place._OUTLIVE_NODE_0.format(then="echo again"), tmp_path, "false"],
        env={**os.environ, "NODE_RANK": "1", "CLUSTERKIT_ATTEMPT": "2"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (1, "again\n" * again, "")


def test_agents_run_in_container_image_of_cluster(plan):
    """And what ends them, too. Rendered only: neither pyxis nor apptainer is here to be tried."""

    def script(**fields):
        entry = {"python": "python3", "container_mounts": ["/data:/d"], **fields}
        made = plan(entry, workdir="/job", launcher="torchrun")
        (text,) = (file.text for file in made.files if file.path.endswith("slurm.sh"))
        ending, _, starting = text.partition("trap notice USR1")
        return made, ending.partition("--gres=none")[2], starting.partition("srun ")[2]

    made, ending, starting = script(container="/img/a b.sqsh")
    mounts = f"{made.run_dir}:{made.run_dir},/job:/job,/data:/d"
    options = f"'--container-image=/img/a b.sqsh' --container-mounts={mounts} "
    assert f"--wait=0 {options}\\\n    /bin/sh -c" in starting
    assert options in ending
    assert made.python == "python3"

    made, ending, starting = script(container="/img/t.sif", container_with="apptainer")
    mounts = f"{made.run_dir}:{made.run_dir},/job:/job,/data:/d"
    words = f"apptainer exec --bind {mounts} /img/t.sif "
    assert f"{words}/bin/sh {made.run_dir}/files/node.sh" in starting
    assert words in ending

    with pytest.raises(BadInput, match="a run that survives the loss of a node calls Slurm"):
        plan({"container": "/img/t.sif"}, nodes="1:2", launcher="torchrun")


# ---------------------------------------------------------------- what a job means for its nodes


@pytest.fixture
def seen(plan, tmp_path):
    """An attempt with these files, and this job: its state, and each node's state and reason."""

    def look(squeue, *nodes, attempt=1, patient=False, sacct="error: no accounting", **files):
        made = plan()
        squeue = squeue.replace(RUN_DIR, made.run_dir)
        folder = run_folder.RunFolder(Path(made.run_dir))
        for name, text in {"run_json": "{}", **files}.items():
            path = folder.path / name.replace("run_json", "run.json").replace("_", "-")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for node, written in enumerate(nodes):
            path = folder.node_dir(attempt, node)
            shutil.rmtree(path, ignore_errors=True)  # of an earlier call
            path.mkdir(parents=True)
            for name, document in (written or {}).items():
                (path / f"{name}.json").write_text(json.dumps(document))
        handle = run_folder.RunHandle(folder, made, attempt)
        if patient:
            transport = Slurm(squeue=squeue, sacct=sacct)
            taken = observe.read(handle)
            number = observe.newest(handle, transport)
            return observe.observation(handle, taken, number, files_delayed=True)
        return backends.backend("slurm").status(handle, Slurm(squeue=squeue, sacct=sacct))

    return look


RUNS = {"started": {"pid": 1, "host": "gpu-3"}}


@pytest.mark.parametrize(
    ("sacct", "state", "reason"),
    [
        ("TIMEOUT\n", "FAILED", "TIMEOUT: job 7 reached its Slurm time limit"),
        ("NODE_FAIL\nOUT_OF_MEMORY\n", "FAILED",
         "OUT_OF_MEMORY: job 7 used more than its memory limit"),
        ("CANCELLED by 1000\n", "CANCELLED", "CANCELLED: job 7 was cancelled (scancel)"),
        ("error: Slurm accounting storage is disabled", "FAILED", "its agent ended without"),
        ("RUNNING\n", "FAILED", "its agent ended without"),
    ],
)  # fmt: skip
def test_ended_job_missing_from_squeue_is_read_from_sacct(seen, sacct, state, reason):
    found = seen("", RUNS, RUNS, sacct=sacct, job_1="7\n")
    assert {node.state.value for node in found.nodes} == {state}
    assert all(node.reason.startswith(reason) for node in found.nodes)


def test_completing_job_is_queued_only_until_all_agents_have_ended(seen):
    assert not seen(job("COMPLETING"), DONE, DONE).queued
    # An agent that was killed may have left ranks, which Slurm still ends.
    assert seen(job("COMPLETING"), DONE, RUNS).queued


def test_slurm_warning_is_reason_of_stopped_nodes(seen):
    words = f"{queue.WARNED} (time limit, or preemption)"
    ended = {"exit": {"exit_code": 143, "reason": "stopped on request", "stopped_by": words,
                      "at": 1.0, "processes": []}}  # fmt: skip
    found = seen(job("TIMEOUT"), {**RUNS, **ended}, {**RUNS, **ended}, stop_7="x")
    assert [node.reason for node in found.nodes] == [words, words]


DONE = {**RUNS, "exit": {"exit_code": 0, "at": 1.0, "reason": None}}
ENDED = {**RUNS, "exit": {"exit_code": 143, "at": 1.0, "reason": "stopped on request"}}
CRASHED = {**RUNS, "exit": {"exit_code": 7, "at": 1.0, "reason": None}}


def states(found):
    return found.state.value, [node.state.value for node in found.nodes], found.nodes[1].reason


def test_node_is_running_once_its_agent_has_started(seen):
    found = seen(job(), RUNS, None)
    assert states(found) == ("RUNNING", ["RUNNING", "PENDING"], None)
    assert found.nodes[0].host == "gpu-3"


def test_pending_job_shows_slurm_reason_and_is_queued(seen):
    reason = "Priority: jobs with a higher priority go first (job 7)"
    found = seen(job("PENDING", reason="Priority"), None, None)
    assert states(found) == ("PENDING", ["PENDING"] * 2, reason)
    assert found.next_attempt is None
    assert found.queued
    assert seen(job(), None, None).queued  # its agents are about to begin
    assert not seen("", None, None).queued


def test_requeued_job_continues_as_next_attempt(seen):
    assert seen(job("PENDING", reason="BeginTime"), ENDED, RUNS).next_attempt == 2
    assert seen(job(), ENDED, ENDED, **{"attempts/1/next": "2\n"}).next_attempt == 2


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("TIMEOUT", "job 7 reached its Slurm time limit"),
        ("PREEMPTED", "Slurm preempted job 7 for another one"),
        ("OUT_OF_MEMORY", "job 7 used more than its memory limit"),
    ],
)
def test_job_ended_by_slurm_fails_with_slurm_reason(seen, state, words):
    reason = f"{state}: {words}"
    assert states(seen(job(state), RUNS, ENDED)) == ("FAILED", ["FAILED"] * 2, reason)
    assert seen(job(state), RUNS, ENDED).causes[0].words == reason


@pytest.mark.parametrize(
    "who", ["SIGTERM from process 9 (slurmstepd: [7.0])", queue.WARNED, queue.NODE_0_LOST]
)
def test_nodes_stopped_by_slurm_are_running_until_job_has_ended(seen, who):
    """Its job may wait again: who takes the run for failed meanwhile would cancel that."""
    exit_by_slurm = {"exit_code": 143, "at": 1.0, "reason": f"stopped by {who}"}
    nodes = ({**RUNS, "exit": exit_by_slurm}, CRASHED)
    for state in ("COMPLETING", "RUNNING"):
        found = seen(job(state), *nodes)
        assert states(found) == ("RUNNING", ["RUNNING"] * 2, "Slurm is stopping its job")
    assert seen(job("PENDING", reason="BeginTime"), *nodes).next_attempt == 2
    assert states(seen(job("NODE_FAIL"), *nodes))[0] == "FAILED"
    assert states(seen("", *nodes))[0] == "FAILED"
    ours = seen(job("COMPLETING"), *nodes, stop_7="cancelled")
    assert states(ours)[1] == ["FAILED"] * 2


@pytest.mark.parametrize("lost", [0, 1])
def test_requeued_job_names_node_without_exit_record_as_cause(seen, lost):
    """Slurm ends the agents of the others then, who say so."""
    why = "stopped by SIGTERM from process 9 of user 0 (slurmstepd: [7.0])"
    told = {"exit_code": 1, "at": 1.0, "reason": "stopped on request", "causes": [why]}
    nodes = [{**RUNS, "exit": told}] * 2
    nodes[lost] = RUNS
    first = seen(job("PENDING", reason="BeginTime"), *nodes).causes[0]
    assert (first.node, first.words) == (lost, "Slurm requeued its job")


def test_failed_rank_keeps_its_own_reason_in_failed_job(seen):
    assert states(seen(job("FAILED"), ENDED, CRASHED)) == ("FAILED", ["CANCELLED", "FAILED"], None)


def test_scancel_by_user_cancels_run_but_own_scancel_does_not(seen):
    found = seen(job("CANCELLED"), ENDED, ENDED)
    assert states(found)[:2] == ("CANCELLED", ["CANCELLED"] * 2)
    folder = run_folder.home() / "runs/demo-1"
    assert (folder / "cancelled").exists()
    (folder / "cancelled").unlink()
    seen(job("CANCELLED"), ENDED, RUNS, stop_7="another node has ended")
    assert not (folder / "cancelled").exists()


def test_job_missing_from_squeue_is_judged_by_agent_records(seen):
    assert states(seen("", DONE, DONE))[0] == "SUCCEEDED"
    found = seen("", DONE, RUNS)
    assert states(found)[:2] == ("FAILED", ["SUCCEEDED", "FAILED"])
    assert "without reporting" in found.nodes[1].reason
    assert states(seen("", DONE, RUNS, patient=True))[0] == "RUNNING"


def test_node_without_exit_record_in_ended_job_is_failed(seen):
    for state in ("COMPLETED", "FAILED"):
        found = seen(job(state), DONE, RUNS)
        assert states(found)[:2] == ("FAILED", ["SUCCEEDED", "FAILED"])
        assert found.nodes[1].reason == "its agent ended without reporting an exit code"


def test_job_that_left_queue_before_start_is_failed(seen):
    assert states(seen("", None, None)) == ("PENDING", ["PENDING"] * 2, None)
    reason = "job 7 left Slurm's queue before it started"
    assert states(seen("", None, None, job_1="7\n")) == ("FAILED", ["FAILED"] * 2, reason)


def test_unrecognized_slurm_state_is_unknown(seen):
    reason = "Slurm reports job 7 as HIBERNATING"
    assert states(seen(job("HIBERNATING"), RUNS, RUNS)) == ("UNKNOWN", ["UNKNOWN"] * 2, reason)


def test_agent_records_decide_state_while_slurm_does_not_answer(seen):
    away = "error: Unable to contact slurm controller"
    assert states(seen(away, RUNS, RUNS))[:2] == ("RUNNING", ["RUNNING"] * 2)
    assert "Unable to contact" in seen(away, RUNS, RUNS).nodes[0].reason
    assert states(seen(away, DONE, DONE))[0] == "SUCCEEDED"


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
