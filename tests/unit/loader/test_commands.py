"""Commands in the place of a job file."""

import os
import shlex

import pytest

from clusterkit import api
from clusterkit.cluster import (
    ComposeCluster,
    KubernetesCluster,
    LocalCluster,
    SlurmCluster,
    SshCluster,
)
from clusterkit.errors import BadInput
from clusterkit.jobfile import request
from clusterkit.jobfile.command import file_of
from clusterkit.jobfile.loader import (
    job_from_command,
    load_job,
    locate_program,
)


@pytest.mark.parametrize(
    ("argv", "fields"),
    [
        (["python", "train.py", "--a"], {"program": "train.py", "args": ("--a",), "name": "train"}),
        (["python3.11", "-u", "train.py"], {"program": "train.py", "args": ()}),
        (["/usr/bin/python3", "train.py", "--", "-x"], {"args": ("--", "-x")}),
        (["python", "-m", "a.b", "c"], {"module": "a.b", "args": ("c",), "name": "b"}),
        (["./go.sh", "x y"], {"command": ("./go.sh", "x y"), "name": "go"}),
        (["python", "-c", "1"], {"command": ("python", "-c", "1"), "name": "python"}),
        (["./***"], {"command": ("./***",), "name": "command"}),
        (["A=1", "sh", "-c", "x"], {"command": ("sh", "-c", "x"), "env": {"A": "1"}, "name": "sh"}),
        (["nohup", "python", "train.py"], {"program": "train.py", "name": "train"}),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_command_line_is_converted_to_job(argv, fields, cwd, write_job):
    write_job()
    job = locate_program(job_from_command(argv))
    assert {key: getattr(job, key) for key in fields} == fields
    assert job.workdir == str(cwd)


def test_command_line_without_program_is_refused():
    with pytest.raises(BadInput, match="no command after --"):
        job_from_command([])
    with pytest.raises(BadInput, match="command: A=1 B=2 starts no program"):
        job_from_command(["A=1", "B=2"])


@pytest.mark.parametrize("front", ["CUDA_VISIBLE_DEVICES=0", "PET_NNODES=2"])
def test_reserved_variable_before_command_is_refused(front):
    with pytest.raises(BadInput, match=f"command: {front}"):
        job_from_command([front, "python", "train.py"])


def test_command_with_missing_program_is_refused(cwd):
    with pytest.raises(BadInput, match=rf"program: nope\.py is not in {cwd}$"):
        locate_program(job_from_command(["python", "nope.py"]))


@pytest.mark.parametrize(
    ("content", "mode", "message", "hint"),
    [
        ("#!/bin/sh\n", 0o644, "is not executable", "chmod +x ./run.sh"),
        ("#!/bin/sh\r\necho\r\n", 0o755, "has Windows line ends", "sed -i 's/\\r$//' ./run.sh"),
    ],
)
def test_script_not_executable_or_with_crlf_is_refused_with_fix(cwd, content, mode, message, hint):
    script = cwd / "run.sh"
    script.write_text(content)
    script.chmod(mode)
    with pytest.raises(BadInput, match=rf"command: \./run\.sh {message}") as error:
        locate_program(job_from_command(["./run.sh"]))
    assert error.value.hint == hint
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    assert locate_program(job_from_command(["./run.sh"])).workdir == str(cwd)


def test_unreadable_or_absolute_command_is_accepted_without_check(cwd, monkeypatch):
    (cwd / "tool").touch(0o111)
    (cwd / "data").touch(0o644)
    may = os.access

    def unreadable(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "access", lambda path, how: how != os.R_OK and may(path, how))
    monkeypatch.setattr("clusterkit.jobfile.loader.read_file", unreadable)
    for word in ("./tool", f"{cwd}/data"):
        assert locate_program(job_from_command([word])).command == (word,)


@pytest.mark.parametrize(
    "words",
    ["./run.sh", "bash run.sh", "python run.sh", "python -X dev run.sh", "A=1 timeout 9 sh run.sh"],
)
def test_file_of_command_is_looked_up_as_program_is(words, cwd, monkeypatch, write_job):
    (cwd / "jobs").mkdir()
    (cwd / "jobs" / "run.sh").touch(0o755)
    job = write_job(f"command: [{words.replace(' ', ', ')}]\n", "jobs/job.yaml", base=False)
    monkeypatch.chdir("/")
    assert load_job(cwd / job).workdir == str(cwd / "jobs")
    (cwd / "jobs" / "run.sh").unlink()
    error = request.read(cwd / job).missing
    assert error is not None
    assert error.message.startswith(f"command: {words.split()[-1]} is neither in / nor in the job")


@pytest.mark.parametrize("words", ["python -m run", "python -c 1", "true", "sh -c 'x; y'", "bash"])
def test_command_without_file_has_none_to_look_up(words):
    assert file_of(shlex.split(words)) is None


def test_missing_file_of_command_is_refused_where_ranks_have_files_of_this_machine(
    cwd, write_job, facts
):
    job = write_job("command: [python, none.py]\nlauncher: forkserver\n", base=False)
    with pytest.raises(BadInput, match=r"job\.yaml:1: command: none\.py is neither in"):
        api.plan(job, facts=facts)
    (cwd / "job.yaml").write_text("command: [/none/x]\nlauncher: forkserver\n")
    with pytest.raises(BadInput, match=r"job\.yaml:1: command: /none/x is missing"):
        api.plan(job, facts=facts)


def test_image_and_hosts_may_have_file_of_command_of_their_own():
    def needed(cluster, path="x.py"):
        return cluster.starts_from_here(path)

    assert needed(LocalCluster(), "/x.py")
    assert needed(SshCluster())
    assert not needed(SshCluster(), "/x.py")
    assert not needed(SshCluster(sync=False))
    assert needed(ComposeCluster())
    assert not needed(ComposeCluster(code="baked"))
    assert not needed(KubernetesCluster())
    assert needed(KubernetesCluster(code="copied"))
    assert needed(SlurmCluster())
    assert not needed(SlurmCluster(container="image"))
    assert not needed(SlurmCluster(setup=("make x.py",)))


def test_working_folder_with_name_not_utf8_is_refused(cwd, monkeypatch):
    folder = cwd / os.fsdecode(b"b\xfcd")
    folder.mkdir()
    (folder / "train.py").touch()
    monkeypatch.chdir(folder)
    with pytest.raises(BadInput, match=r"xfcd': character \d+ is not valid UTF-8"):
        locate_program(job_from_command(["python", "train.py"]))


@pytest.mark.parametrize("key", ["args", "command"])
def test_text_for_args_or_command_is_refused_with_list_in_hint(write_job, key):
    with pytest.raises(BadInput, match=rf"{key}: '--lr 0\.1' is text, not a list") as error:
        load_job(write_job(f"name: x\n{key}: --lr 0.1\n", base=False))
    assert error.value.hint == '["--lr", "0.1"]'


def test_hint_for_args_text_keeps_quoted_words_together(write_job):
    for args, words in (("--tag 'a b'", '["--tag", "a b"]'), ("it's", '["it\'s"]')):
        with pytest.raises(BadInput) as error:
            load_job(write_job(f"args: {args}\n"))
        assert error.value.hint == words


def test_truncated_yaml_error_has_no_hint(write_job):
    with pytest.raises(BadInput, match=r"job\.yaml:3: .*but got the end of the file$") as error:
        load_job(write_job("name: x\nargs: [--lr\n", base=False))
    assert error.value.hint is None


@pytest.mark.parametrize(
    ("named", "found"),
    [
        (".venv/bin/python", "{cwd}/.venv/bin/python"),
        ("~/v/bin/python", "{home}/v/bin/python"),
        ("/p/python3.12", "/p/python3.12"),
        ("python3.12", "python3.12"),
    ],
)
def test_relative_interpreter_path_is_resolved_from_workdir_or_home(
    named, found, write_job, cwd, monkeypatch
):
    monkeypatch.setenv("HOME", "/home/me")
    assert load_job(write_job(f"python: {named}\n")).python == found.format(
        cwd=cwd, home="/home/me"
    )


def test_python_file_that_is_not_executable_is_refused_as_command(write_job):
    write_job()
    with pytest.raises(BadInput, match=r"train\.py is a Python file, not a command") as error:
        job_from_command(["./train.py", "--a b"])
    assert error.value.hint == "clusterkit submit -- python ./train.py '--a b'"


def test_executable_python_file_is_accepted_as_command(write_job, cwd):
    write_job()
    (cwd / "train.py").chmod(0o755)
    assert job_from_command(["./train.py"]).command == ("./train.py",)
