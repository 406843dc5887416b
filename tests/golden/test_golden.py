"""Plans, letter by letter: what `clusterkit plan` prints must not change by accident.

``expected/BACKEND/CASE.txt`` is a whole plan, one for each kind of job. ``launchers.txt`` beside it
has the notes of a plan and the command of a node: for `local` of every case, for the other backends
of one case for each launcher, since the command is made by the same code. ``pytest tests/golden
--update-golden`` rewrites them and removes files that no case needs; read the diff before you
commit.
"""

import difflib
import pprint
import subprocess
from pathlib import Path

import msgspec
import pytest

from clusterkit import backends
from clusterkit.cluster import (
    CLUSTER_TYPES,
    Claim,
    Engine,
    Host,
    KubernetesFacts,
    Project,
    SlurmFacts,
)
from clusterkit.jobfile import loader

HERE = Path(__file__).resolve().parent
EXPECTED = HERE / "expected"

# Job file, GPUs of the machine or of all hosts together, changes to the job.
CASES = {
    "forkserver-1-node": ("plain.yaml", 0, {}),
    "forkserver-2x2": ("plain.yaml", 0, {"nodes": 2, "gpus_per_node": 2}),
    "forkserver-8-gpus": ("plain.yaml", 8, {}),
    "forkserver-2-nodes-of-4-gpus": ("plain.yaml", 8, {"nodes": 2}),
    "torchrun-1-node": ("plain.yaml", 0, {"launcher": "torchrun"}),
    "torchrun-2x2": ("plain.yaml", 0, {"launcher": "torchrun", "nodes": 2, "gpus_per_node": 2}),
    "torchrun-elastic": ("elastic.yaml", 0, {}),
    "deepspeed-zero3": ("zero3.yaml", 0, {"gpus_per_node": 2}),
    "deepspeed-zero3-2-nodes-of-4-gpus": ("zero3.yaml", 8, {"nodes": 2}),
    "deepspeed-launcher": ("zero3.yaml", 8, {"nodes": 2, "launcher": "deepspeed"}),
    "deepspeed-elastic": ("zero3.yaml", 0, {"nodes": "1:2"}),
    "mpirun-2x2": ("plain.yaml", 0, {"launcher": "mpirun", "nodes": 2, "gpus_per_node": 2}),
    "forkserver-ugly": ("ugly.yaml", 0, {}),
    "torchrun-ugly-2x2": ("ugly.yaml", 0, {"launcher": "torchrun", "nodes": 2}),
    "mpirun-ugly": ("ugly.yaml", 0, {"launcher": "mpirun"}),
    "command": ("command.yaml", 0, {}),
    "command-of-python": ("command.yaml", 0, {"command": ("python", "-X", "dev", "a.py", "b.py")}),
    "command-torchrun": ("command.yaml", 0, {"launcher": "torchrun"}),
    "module": ("module.yaml", 0, {}),
}

WHOLE = ("torchrun-2x2", "deepspeed-zero3-2-nodes-of-4-gpus", "mpirun-ugly")
LAUNCHERS = (
    "forkserver-1-node", "forkserver-2-nodes-of-4-gpus", "torchrun-elastic", "deepspeed-launcher",
    "mpirun-2x2", "command",
)  # fmt: skip
"""Cases in ``launchers.txt`` of the backends other than `local`."""


def on_two_hosts(facts, nodes):
    """The machine's GPUs on as many hosts as are used, with what only hosts elsewhere need."""
    (machine,) = facts.hosts
    gpus = machine.gpus[: len(machine.gpus) // nodes]
    hosts = tuple(
        msgspec.structs.replace(
            machine, host=f"h{number}", address=f"10.0.0.1{number}", interface="eth0", gpus=gpus
        )
        for number in range(2)
    )
    project = Project(
        root="/srv/my project", digest="0123456789abcdef" * 2, files=312, bytes=4_200_000,
        how="tracked or new, not ignored",
    )  # fmt: skip
    return msgspec.structs.replace(
        facts, home="/home/u/cluster kit", hosts=hosts, interface="eth0", project=project,
        watch_port=29502,
    )  # fmt: skip


def place(backend, facts, nodes):
    """A cluster entry of this kind, and what probing it would have found."""
    kind = CLUSTER_TYPES[backend]
    if backend == "ssh":
        return kind(hosts=(Host(name="h0"), Host(name="h1"))), on_two_hosts(facts, nodes)
    if backend == "compose":
        engine = Engine(
            socket="unix:///var/run/docker.sock", version="27.3.1", image="clusterkit:gpu",
            image_id="sha256:" + "0123456789abcdef" * 4, workdir="/opt/clusterkit",
            user="1000:1000", package="/home/u/$venv/clusterkit",
        )  # fmt: skip
        found = msgspec.structs.replace(
            facts, engine=engine, port=29500, interface="eth0", watch_port=29501,
            port_origin="the run's own network",
        )  # fmt: skip
        entry = kind(
            memory="64g", cpus=7.5, ulimits={"memlock": -1}, subnet="10.99.0.0/24",
            volumes=("/data/sets:/data:ro", "cache:/cache"), env={"HF_HOME": "/cache/hf"},
        )  # fmt: skip
        # Half of the cases take what an empty entry gives.
        return (entry if facts.hosts[0].gpus else kind()), found
    if backend == "kubernetes":
        return in_pods(kind, facts, nodes)
    if backend == "slurm":
        return in_partition(kind, facts, nodes)
    return kind(), facts


def in_pods(kind, facts, nodes):
    """A cluster with every operator; half of the cases take what an empty entry gives."""
    (machine,) = facts.hosts
    pod = msgspec.structs.replace(
        machine, host="pods", address="node-0", gpus=machine.gpus[: len(machine.gpus) // nodes]
    )
    kubernetes = KubernetesFacts(
        version="v1.34.4", context="a cluster", namespace="research",
        kinds=("PyTorchJob", "MPIJob", "TrainJob"),
    )  # fmt: skip
    found = msgspec.structs.replace(
        facts, hosts=(pod,), port=29500, interface="eth0", watch_port=29501,
        port_origin="every pod has its own", kubernetes=kubernetes,
    )  # fmt: skip
    if not machine.gpus:
        return kind(), found
    entry = kind(
        image="registry.example/train:1", memory="64Gi", cpus=7.5, shared="/data/runs",
        volumes=(Claim(claim="data", path="/data"), Claim(claim="hf", path="/hf", read_only=True)),
        node_selector={"pool": "h100"}, queue="research", env={"HF_HOME": "/hf"},
        tolerations=({"key": "nvidia.com/gpu", "operator": "Exists"},), priority_class="low",
        resources={"rdma/hca": "1"}, image_pull_secrets=("registry",),
        patch={"containers": [{"name": "pytorch", "tty": True}], "hostNetwork": True},
        annotations={"team": "$(X) of research"},
    )  # fmt: skip
    return entry, found


def in_partition(kind, facts, nodes):
    """A cluster whose nodes have the GPUs; half of the cases take what an empty entry gives."""
    (machine,) = facts.hosts
    node = msgspec.structs.replace(
        machine, address="", gpus=machine.gpus[: len(machine.gpus) // nodes], cpus=96
    )
    slurm = SlurmFacts(version="24.11.5", partition="h100", nodes=16, minutes=2880)
    found = msgspec.structs.replace(
        facts, home="/shared/u/cluster kit", hosts=(node,), watch_port=29502, slurm=slurm,
        port_origin="free on the login node", interface="ib0" if machine.gpus else "",
    )  # fmt: skip
    if not machine.gpus:
        return kind(), found
    entry = kind(
        partition="h100", account="nlp", qos="long", constraint="h100&ib", reservation="tuesday",
        time="1-12:00:00", exclusive=True, memory="0", options=("--mail-type=FAIL",),
        modules=("cuda/12.8", "nccl"), setup=("ulimit -l unlimited",), interface="ib0",
        env={"HF_HOME": "/shared/hf"}, notice=300,
    )  # fmt: skip
    return entry, found


def plan(backend, case, make_facts):
    """The plan of a case on one backend; the same on every machine."""
    name, gpus, changes = CASES[case]
    job = msgspec.structs.replace(
        loader.load_job(HERE / "jobs" / name), workdir="/srv/my project", **changes
    )
    facts = make_facts(gpus=gpus, home="/home/u/.clusterkit", python="/opt/venv/bin/python")
    cluster, found = place(backend, facts, job.node_range[1])
    return backends.backend(backend).plan(job, cluster, found, "demo-1121201158-abcd")


def runs(backend, case):
    """Whether a backend takes the launcher of a case."""
    launcher = CASES[case][2].get("launcher")
    return f"launcher={launcher}" not in backends.backend_type(backend).unsupported


def whole(plan):
    """Return the plan as text, with its JSON files in fewer lines."""
    files = [
        msgspec.structs.replace(
            file,
            text=pprint.pformat(
                msgspec.json.decode(file.text), width=160, compact=True, sort_dicts=False
            ),
        )
        if file.path.endswith(".json")
        else file
        for file in plan.files
    ]
    return msgspec.structs.replace(plan, files=tuple(files)).to_text()


def launcher(case, plan):
    """Return the notes of a plan, and the command that a node runs."""
    (script,) = (file.text for file in plan.files if file.path.endswith("/node.sh"))
    command = script[script.rindex("\nexec ") + 1 :].rstrip("\n")
    head = plan.to_text().partition("\n\nfile ")[0].partition("\n\ntree ")[0]
    return f"== {case}\n{head}\n\n{command}\n"


def compare(path: Path, text: str, update: bool) -> None:
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    assert path.exists(), f"{path} is missing: pytest --update-golden writes it"
    expected = path.read_bytes().decode()
    if text != expected:
        changes = difflib.unified_diff(
            expected.split("\n"), text.split("\n"), "expected", "now", lineterm=""
        )
        pytest.fail(
            "\n".join(changes) + f"\n\nif {path.name} is right now: pytest --update-golden",
            pytrace=False,
        )


@pytest.mark.parametrize(
    ("backend", "case"), [(b, case) for b in backends.NAMES for case in WHOLE if runs(b, case)]
)
def test_plan_text_matches_golden_file(backend, case, make_facts, pytestconfig):
    text = whole(plan(backend, case, make_facts))
    compare(EXPECTED / backend / f"{case}.txt", text, pytestconfig.option.update_golden)


@pytest.mark.parametrize("backend", backends.NAMES)
def test_launcher_notes_and_node_commands_match_golden_file(backend, make_facts, pytestconfig):
    cases = CASES if backend == "local" else [each for each in LAUNCHERS if runs(backend, each)]
    text = "\n".join(launcher(case, plan(backend, case, make_facts)) for case in cases)
    compare(EXPECTED / backend / "launchers.txt", text, pytestconfig.option.update_golden)


@pytest.mark.parametrize("backend", backends.NAMES)
@pytest.mark.parametrize("case", CASES)
def test_plan_files_are_valid_posix_shell_scripts_and_json_objects(backend, case, make_facts):
    made = plan(backend, case, make_facts)
    scripts = [file for file in made.files if file.path.endswith(".sh")]
    assert scripts
    for script in scripts:
        for shell in ("sh", "bash"):
            done = subprocess.run([shell, "-n"], input=script.content(), capture_output=True)
            assert (done.returncode, done.stderr) == (0, b""), script.path
    for file in made.files:
        if file.path.endswith(".json"):
            assert isinstance(msgspec.json.decode(file.content()), dict)


@pytest.mark.parametrize("backend", backends.NAMES)
@pytest.mark.parametrize("case", CASES)
def test_plan_round_trips_through_json(backend, case, make_facts):
    made = plan(backend, case, make_facts)
    assert msgspec.json.decode(made.to_json(), type=type(made)) == made


def test_expected_folder_has_no_golden_file_without_case(pytestconfig):
    wanted = {
        EXPECTED / backend / f"{name}.txt"
        for backend in backends.NAMES
        for name in (*WHOLE, "launchers")
    }
    there = {path for path in EXPECTED.rglob("*") if path.is_file()}
    if pytestconfig.option.update_golden:
        for path in there - wanted:
            path.unlink()
        there &= wanted
    assert sorted(there - wanted) == []
