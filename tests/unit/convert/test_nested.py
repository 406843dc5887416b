"""A launcher inside a command or its script is refused, and nothing else is."""

import shlex

import pytest

from clusterkit.convert import nested
from clusterkit.errors import BadInput
from clusterkit.spec import JobSpec


def check(line, folder, **fields):
    words = tuple(shlex.split(line))
    nested.check(JobSpec(name="demo", command=words, workdir=str(folder), **fields))


RUN = "torchrun --nproc_per_node 2 train.py"


@pytest.mark.parametrize(
    "line",
    [
        f"nice -n 10 {RUN}",
        f"numactl --cpunodebind=0 {RUN}",
        f"stdbuf -oL {RUN}",
        f"timeout -k 5 60 {RUN}",
        f"uv run --with deepspeed {RUN}",
        f"conda run -n deepspeed {RUN}",
        "poetry run deepspeed train.py",
        "uv run accelerate launch train.py",
        "uv run python -m torch.distributed.run train.py",
        "python -m debugpy --listen 1 -m torch.distributed.run train.py",
        f"bash -lc 'cd x && {RUN}'",
        f"sh -euxc '{RUN} | tee log'",
        "srun python train.py",
        "horovodrun -np 2 python train.py",
        "xargs -a list torchrun",
    ],
)
def test_nested_launcher_in_command_is_refused_except_with_forkserver(line, tmp_path):
    if line.startswith("xargs"):
        line += " x.py"
    with pytest.raises(BadInput, match="would start that once for every rank") as error:
        check(line, tmp_path)
    assert "--set launcher=forkserver --gpus 1" in error.value.hint
    check(line, tmp_path, launcher="forkserver", gpus_per_node=1)


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        (
            "srun -N 2 python train.py",
            "without srun: clusterkit submit --nodes N --gpus RANKS -- ",
        ),
        ("sudo -u me python train.py --lr 1", "clusterkit submit -- python train.py --lr 1"),
        ("sh -c 'cd x; torchrun train.py'", "the launcher first: clusterkit submit -- torchrun tr"),
        (
            "nice torchrun train.py",
            "the launcher first: nice clusterkit submit -- torchrun ",
        ),
    ],
)
def test_nested_launcher_hint_gives_command_line_to_type(line, remedy, tmp_path):
    with pytest.raises(BadInput) as error:
        check(line, tmp_path)
    assert remedy in error.value.hint
    check(line.replace("sudo", "sudo -E"), tmp_path, launcher="forkserver")


@pytest.mark.parametrize(
    "text",
    [
        RUN,
        f'exec {RUN} "$@"',
        f"if true; then\n  {RUN}\nfi",
        f"go() {{ {RUN}; }}\ngo",
        f"A=1 nohup {RUN} >log 2>&1 &",
        "L='torchrun --nproc_per_node 2'\n$L train.py",
        "export L='torchrun'\n$L train.py",
        "python -mtorch.distributed.run train.py",
        "bash inner.sh",
        ". ./inner.sh",
        f"for r in 1 2; do {RUN}; done",
        f"({RUN})",
        "mpirun -np 2 \\\n  python train.py",
    ],
)
@pytest.mark.parametrize("line", ["./run.sh --fast", "bash run.sh", "env B=2 ./run.sh"])
def test_nested_launcher_in_script_is_refused_with_its_line(text, line, tmp_path):
    (tmp_path / "run.sh").write_text(f"#!/bin/bash\n# {RUN}\nset -e\n{text}\n")
    (tmp_path / "inner.sh").write_text(f"\n{RUN}\n")
    with pytest.raises(BadInput, match=r"(run\.sh:[45]|inner\.sh:2) starts ") as error:
        check(line, tmp_path)
    assert "start its line: clusterkit submit -- " in error.value.hint


@pytest.mark.parametrize(
    "line",
    [
        "./run.sh torchrun",
        "bash run.sh",
        "python train.py --launcher torchrun -- deepspeed",
        "echo torchrun train.py",
        "grep torchrun train.py",
        "torchrun --help",
        "mpirun --version",
        "accelerate config",
        "conda run -n deepspeed python train.py",
        "uv run --with deepspeed train.py",
        "uv run python train.py --backend deepspeed",
        "nice -n 10 python train.py",
        "env DS=deepspeed python train.py",
        "bash -c 'python train.py # torchrun train.py'",
        "bash -c \"echo 'torchrun train.py'\"",
        "./entry.py torchrun train.py",
        "cat torchrun.sh",
        "/no/such/file",
    ],
)
def test_launcher_name_without_launch_is_accepted(line, tmp_path):
    (tmp_path / "run.sh").write_text(
        "#!/bin/bash\n# torchrun train.py\necho torchrun train.py; echo 'x; torchrun train.py'\n"
        "cat <<E\ntorchrun train.py\nE\nMODE=torchrun\ncase $1 in torchrun) echo;; esac\n"
        "python train.py --launcher torchrun # torchrun train.py\nls torchrun train.py\n"
        "which torchrun\npip install deepspeed\n"
    )
    (tmp_path / "entry.py").write_text("#!/usr/bin/env python\nimport os\n")
    (tmp_path / "torchrun.sh").write_text("torchrun train.py\n")
    check(line, tmp_path)


def test_script_that_executes_launcher_from_its_arguments_is_refused(tmp_path):
    (tmp_path / "entry.sh").write_text('#!/bin/sh\n. /env\nexec "$@"\n')
    with pytest.raises(BadInput, match=r"entry\.sh:3 starts torchrun"):
        check(f"./entry.sh {RUN}", tmp_path)
    check("./entry.sh python train.py", tmp_path)
