"""What other tools take becomes a job that loads and plans. Each file in ``cases`` is a table.

``=== NAME`` begins a case; then the input (``$ COMMAND``, or a file's text), ``+++ NAME`` further
files that it names, and what it becomes: ``--- job``, ``--- cluster``, ``--- said`` or, where it is
refused, ``--- error``. `pytest --update-golden` writes these anew.
"""

import re
from functools import partial
from pathlib import Path

import msgspec
import pytest

from clusterkit import backends, shell
from clusterkit.convert import convert, nested
from clusterkit.errors import BadInput
from clusterkit.jobfile import loader
from clusterkit.jobfile.command import take_over
from clusterkit.jobfile.yaml_file import parse_yaml
from clusterkit.spec import check_job
from tests.golden.test_golden import place

CASES = Path(__file__).parent / "cases"
BEGINS = re.compile(r"^(?:=== |\+\+\+ |--- )", re.MULTILINE)


def sections(path):
    """Cases of a table: heading to text, of each case in order."""
    text = path.read_text()
    for case in re.split(r"^=== ", text, flags=re.MULTILINE)[1:]:
        parts = re.split(r"^(\+\+\+ .*|--- (?:job|cluster|said|error))\n", case, flags=re.MULTILINE)
        name, _, given = parts[0].partition("\n")
        yield name, given, dict(zip(parts[1::2], parts[2::2], strict=True))


TABLE = [
    (path.stem, name, given, rest)
    for path in sorted(CASES.glob("*.txt"))
    for name, given, rest in sections(path)
]


def converted(name, given, rest):
    """A case's result, as in its table."""
    files = {key[4:]: text for key, text in rest.items() if key.startswith("+++ ")}
    words = []
    if given.startswith("$ "):
        words = shell.split(given[2:].replace("\\\n", " "))
        given = None
    file, _, after = name.partition(" -- ")
    words = words or after.split()
    return convert(given, words, name="" if given is None else file, read=files.get)


def as_written(found):
    text = ""
    if found.job is not None:
        text += f"--- job\n{found.job_text()}"
    if found.cluster is not None:
        text += f"--- cluster\n{found.cluster_text()}"
    return text + "--- said\n" + "".join(f"{note}\n" for note in found.notes)


def outcome(name, given, rest):
    try:
        return as_written(converted(name, given, rest))
    except BadInput as error:
        return f"--- error\n{error}\n"


@pytest.mark.parametrize("table", sorted(CASES.glob("*.txt")), ids=lambda path: path.stem)
def test_convert_output_matches_case_tables(table, pytestconfig):
    text = "".join(
        f"=== {name}\n{given}"
        + "".join(f"{key}\n{part}" for key, part in rest.items() if key.startswith("+++ "))
        + outcome(name, given, rest)
        + "\n"
        for name, given, rest in sections(table)
    )
    head = table.read_text().partition("=== ")[0]
    if pytestconfig.option.update_golden:
        table.write_text(head + text)
    assert table.read_text() == head + text


@pytest.mark.parametrize("table", sorted(CASES.glob("*.txt")), ids=lambda path: path.stem)
def test_every_converted_job_loads_and_plans(table, tmp_path, make_facts):
    for name, given, rest in sections(table):
        if "--- error" not in rest:
            plans(converted(name, given, rest), tmp_path, make_facts)


def plans(found, folder, make_facts):
    cluster = loader.read_cluster("local").cluster
    if found.cluster is not None:
        file = folder / "clusters.yaml"
        file.write_text(found.cluster_text())
        cluster = loader.read_cluster(next(iter(found.cluster)), file).cluster
    if found.job is None:
        return
    path = folder / "job.yaml"
    path.write_text(found.job_text())
    assert loader.read_job(path)[1].data == parse_yaml(found.job_text(), "job").data
    job = loader.read_job(path)[0]
    check_job(job)
    nested.check(job, lambda path: None)
    take_over(job, {key: f"{key}: {value}" for key, value in found.job.items()})
    job = msgspec.structs.replace(job, workdir=job.workdir or "/srv/project")
    nodes = job.node_range[1]
    ranks = 8 if job.gpus_per_node == "auto" else job.gpus_per_node
    gpus = 0 if job.device == "cpu" or cluster.backend == "local" else nodes * ranks
    python = {} if job.python is None else {"python": job.python}
    _, facts = place(cluster.backend, make_facts(gpus=gpus, **python), nodes)
    if cluster.backend == "ssh":
        hosts = [
            msgspec.structs.replace(
                facts.hosts[0], host=host.name, address=f"10.0.0.{number}", slots=host.slots
            )
            for number, host in enumerate(cluster.hosts)
        ]
        facts = msgspec.structs.replace(facts, hosts=tuple(hosts[:nodes]))
    plan = backends.backend(cluster.backend).plan(job, cluster, facts, "converted-1121201158-abcd")
    assert plan.topology["nodes"] == nodes


def test_case_tables_hold_at_least_60_convertible_inputs():
    assert len([each for each in TABLE if "--- error" not in each[3]]) >= 60


@pytest.mark.parametrize(
    ("program", "refused"),
    [
        ("import os\nos.environ['SLURM_PROCID']\n", True),
        ("import os\nos.environ.get('RANK') or os.environ['SLURM_PROCID']\n", False),
        ("import torch\n", False),
    ],
)
def test_convert_refuses_program_that_needs_slurm_procid(program, refused):
    text = "#!/bin/bash\n#SBATCH -N 2 --ntasks-per-node=2 --gpus-per-node=2\nsrun python train.py\n"
    make = partial(convert, text, name="train.sbatch", read={"train.py": program}.get)
    if refused:
        with pytest.raises(BadInput, match="SLURM_PROCID: train"):
            make()
    else:
        assert make().job["gpus_per_node"] == 2


# ---------------------------------------------------------------- the command line

LINE = ("--", "deepspeed", "--hostfile", "hosts", "--no_local_rank", "train.py")


@pytest.fixture
def hosts(cwd):
    (cwd / "hosts").write_text("h1 slots=2\nh2 slots=2\n")
    return cwd


def test_convert_prints_loadable_job_with_cluster_entry_as_comment(hosts, cli):
    done = cli("convert", *LINE)
    assert done.code == 0
    assert "--no_local_rank: dropped, LOCAL_RANK is set in the environment\n" in done.err
    (hosts / "job.yaml").write_text(done.out)
    assert loader.read_job("job.yaml")[0].node_range == (2, 2)
    assert "# For clusters.yaml:\n# hosts:\n#   backend: ssh\n" in done.out


def test_convert_writes_files_and_replaces_none_without_force(hosts, cli):
    line = ("--clusters-out", "clusters.yaml", "-o", "job.yaml", *LINE)
    (hosts / "clusters.yaml").write_text("mine: {backend: local}\n")
    done = cli("convert", *line)
    assert (done.code, done.out) == (0, "")
    assert done.err.endswith("next: clusterkit plan job.yaml --cluster hosts\n")
    assert loader.cluster_names() == ["hosts", "local", "mine"]
    assert [each.name for each in loader.read_cluster("hosts").cluster.hosts] == ["h1", "h2"]
    assert cli("convert", *line).code == 125
    # The same entry once more is no other one.
    assert cli("convert", "--force", *line).code == 0
    (hosts / "hosts").write_text("h1 slots=2\n")
    done = cli("convert", "--force", *line)
    assert done.code == 125
    assert "clusters.yaml:3: cluster hosts is there already" in done.err


def test_convert_prints_hostfile_as_cluster_entry_and_job_as_json(hosts, cli):
    assert cli("convert", "hosts").out.startswith("hosts:\n  backend: ssh\n")
    found = cli("convert", "--json", *LINE).json
    assert found["job"]["nodes"] == 2
    assert list(found["cluster"]) == ["hosts"]
    became = "dropped, LOCAL_RANK is set in the environment"
    note = {"what": "--no_local_rank", "became": became, "fate": "dropped"}
    assert note in found["notes"]


def test_convert_refuses_bad_input_with_one_error_and_no_output(hosts, cli):
    (hosts / "job.yaml").write_text("program: train.py\n")
    (hosts / "image").write_bytes(b"\xff\xfe\0")
    for words, said in (
        ((), "Give a file, or a command after --"),
        (("nothing.sh",), "nothing.sh: no such file or directory"),
        (("job.yaml",), "job.yaml is a job file already"),
        (("image",), "image: not a text file"),
        (("hosts", "--", "python", "x.py"), "hosts names its own program"),
        (("--from", "accelerate", "--", "x.py"), "--from accelerate needs a file"),
        (("-o", "out.yaml", "--", "torchrun", "--turbo", "x.py"), "--turbo: clusterkit does not"),
    ):
        done = cli("convert", *words)
        assert (done.code, done.out) == (125, "")
        assert said in done.err
    assert not (hosts / "out.yaml").exists()
