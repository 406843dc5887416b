"""The batch script of a plan."""

import os
import subprocess

import pytest

from clusterkit import backends
from clusterkit.agent.member import not_returned
from clusterkit.backends.slurm import place, queue
from clusterkit.errors import BadInput


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
