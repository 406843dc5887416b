"""Job files: scalars, programs, mistakes and `--set`."""

import json
import os
import zipfile

import pytest

from clusterkit.backends.ssh import inventory
from clusterkit.cli.common import read_facts
from clusterkit.cluster import (
    LocalCluster,
)
from clusterkit.errors import BadInput
from clusterkit.jobfile import request, sources
from clusterkit.jobfile.loader import (
    job_from_command,
    load_job,
    locate_program,
)
from clusterkit.jobfile.yaml_file import parse_yaml
from tests.unit.loader.loading import data, load_cluster

# ---------------------------------------------------------------- scalars


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        ("2:4", "2:4"),
        ("1e-3", 1e-3),
        ("1E5", 1e5),
        ("3", 3),
        ("-3", -3),
        ("0x10", 16),
        ("010", 10),
        ("0o17", "0o17"),
        ("1.5", 1.5),
        (".5", 0.5),
        ("5.", 5.0),
        (".inf", float("inf")),
        ("on", "on"),
        ("no", "no"),
        ("yes", "yes"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("2026-01-01", "2026-01-01"),
        ("12:30:45", "12:30:45"),
        ("'3'", "3"),
    ],
)
def test_yaml_scalar_is_read_with_expected_type(scalar, value):
    found = data(f"key: {scalar}\n")["key"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("scalar", ["010", "1e-3", "true", "null", "2:4", "0x1F", "1_000", "~"])
def test_env_and_args_keep_every_scalar_as_written_text(scalar):
    assert data(f"env: {{A: {scalar}}}")["env"] == {"A": scalar}
    assert data(f"args: [{scalar}]")["args"] == [scalar]
    clusters = parse_yaml(f"lab: {{env: {{A: {scalar}}}}}", "x.yaml", depth=1).data
    assert clusters["lab"]["env"] == {"A": scalar}


def test_deepspeed_section_keeps_types_under_key_named_env():
    found = data("deepspeed: {env: {a: 3}, fp16: {enabled: true}, lr: 1e-4}")["deepspeed"]
    assert found == {"env": {"a": 3}, "fp16": {"enabled": True}, "lr": 1e-4}


def test_cluster_named_env_keeps_types(cwd):
    (cwd / "clusters.yaml").write_text("env: {backend: local, gpus: 0, stop_grace: 2.5}\n")
    assert load_cluster("env") == LocalCluster(gpus=0, stop_grace=2.5)


def test_empty_env_and_args_load_as_empty(write_job):
    job = load_job(write_job("env:\n  # A: 1\nargs:\n"))
    assert (job.env, job.args) == ({}, ())


def test_yaml_anchors_and_merge_keys_are_resolved():
    text = "base: &b {a: 1, c: 2}\nother:\n  <<: *b\n  c: 3\n"
    assert data(text)["other"] == {"a": 1, "c": 3}


# ---------------------------------------------------------------- bad job files


BAD_JOBS = {
    "unknown key": ("nodez: 2\n", r"job\.yaml:3: nodez: unknown key \(did you mean nodes\?\)"),
    "unknown key without a value": ("nodez:\n", r"job\.yaml:3: nodez: unknown key"),
    "key without a name": ("'': 2\n", r"job\.yaml:3: unknown key"),
    "unknown key below": ("batch:\n  globl: 1\n", r"job\.yaml:4: batch\.globl: unknown key"),
    "unknown checkpoint key": ("checkpoint: {evry: 3}\n", r"job\.yaml:3: checkpoint\.evry: unkn"),
    "text for a number": ("nodes: 1\nrestarts: many\n", r"job\.yaml:4: restarts: 'many' is text"),
    "number for text": (
        "description: 3\n",
        r"job\.yaml:3: description: 3 is a whole number, not t",
    ),
    "list for text": ("env: {A: [1]}\n", r"job\.yaml:3: env\.A: \['1'\] is a list, not text"),
    "list for a mapping": ("env: [a]\n", r"job\.yaml:3: env: \['a'\] is a list, not a mapping"),
    "text for a list": ("args: --fast\n", r"job\.yaml:3: args: '--fast' is text, not a list"),
    "list in args": ("args:\n  - a\n  - [b]\n", r"job\.yaml:5: args\[1\]: \['b'\] is a list"),
    "number for a mapping": ("batch: 3\n", r"job\.yaml:3: batch: 3 is a whole number, not a map"),
    "bool for a number": (
        "nodes: true\n",
        r"job\.yaml:3: nodes: true is a boolean, not a whole number or t",
    ),
    "a nested value out of range": (
        "batch:\n  global: 64\n  micro: 0\n",
        r"job\.yaml:5: batch\.mic",
    ),
    "negative restarts": ("restarts: -1\n", r"job\.yaml:3: restarts: -1: it has to be at least 0"),
    "no nodes": ("nodes: 0\n", r"job\.yaml:3: nodes: 0: a run needs at least 1 node"),
    "nodes the wrong way round": ('nodes: "4:2"\n', r"job\.yaml:3: nodes: 4:2: the minimum"),
    "half a node": ("nodes: 1.5\n", r"job\.yaml:3: nodes: 1\.5 is a number, not a whole number"),
    "no ranks": ("gpus_per_node: 0\n", r"job\.yaml:3: gpus_per_node: 0: it has to be at"),
    "unknown launcher": ("launcher: torchrn\n", r"job\.yaml:3: launcher: 'torchrn'"),
    "unknown device": ("device: gpu\n", r"job\.yaml:3: device: 'gpu'"),
    "empty folder name": ("checkpoint: {dir: ''}\n", r"job\.yaml:3: checkpoint\.dir: it is empty"),
    "duplicate key": ("nodes: 1\nnodes: 2\n", r"job\.yaml:4: nodes: is already set in line 3"),
    "duplicate name": ("name: again\n", r"job\.yaml:3: name: is already set in line 1"),
    "duplicate key below": (
        "env:\n  A: 1\n  A: 2\n",
        r"job\.yaml:5: env\.A: is already set in line 4",
    ),
    "duplicate key in braces": (
        "env: {A: 1, A: 2}\n",
        r"job\.yaml:3: env\.A: is already set in line 3",
    ),
    "tab": ("env:\n\tA: 1\n", r"job\.yaml:4: a tab where YAML needs spaces"),
    "not YAML": ("env: {A: 1\nnodes: 2\n", r"job\.yaml:\d+: not YAML: "),
    "a key that is a list": ("? [a, b]\n: 1\n", r"job\.yaml:3: a key must be a word"),
    "a Python object": ("restarts: !!python/object:os.system x\n", r"job\.yaml:3: not YAML: "),
    "an alias to nothing": ("env: *nobody\n", r"job\.yaml:3: not YAML: found undefined alias"),
    "a number that is none": ("restarts: !!int abc\n", r"job\.yaml:3: .*abc"),
    "a truth that is none": ("restarts: !!bool maybe\n", r"job\.yaml:3: .*maybe"),
    "a date that is none": ("restarts: !!timestamp 2020-13-45\n", r"job\.yaml:3: .*2020-13-45"),
    "thousands of digits": ("restarts: " + "9" * 5000 + "\n", r"job\.yaml:3: "),
    "thousands of digits as text": (f'nodes: "{"9" * 5000}"\n', r"job\.yaml:3: nodes: "),
    "NUL in args": ('args: ["a\\0b"]\n', r"job\.yaml:3: args.*NUL"),
    "NUL in a folder": ('checkpoint: {dir: "a\\0b"}\n', r"job\.yaml:3: checkpoint.*NUL"),
    "half a character in env": ('env: {A: "\\ud800"}\n', r"job\.yaml:3: env\.A: "),
    "half a character in args": ('args: ["\\ud800"]\n', r"job\.yaml:3: args"),
    "bad variable name": (
        "env: {1A: x}\n",
        r"job\.yaml:3: env: '1A' is not a valid name of an environment",
    ),
    "set twice": ("env: {A: 1}\nsecrets: [A]\n", r"job\.yaml:4: secrets: A is set in env as well"),
    "two programs": ("module: pkg.train\n", r"job\.yaml:\d+: program and module: give only one"),
    "unknown folder": ("workdir: nowhere\n", r"job\.yaml:3: workdir: nowhere is not a folder"),
    "elastic with mpirun": (
        'nodes: "1:2"\nlauncher: mpirun\n',
        r"job\.yaml:3: nodes: 1:2: launcher",
    ),
}


@pytest.mark.parametrize("case", BAD_JOBS)
def test_job_file_error_names_file_line_and_key(case, write_job):
    text, message = BAD_JOBS[case]
    with pytest.raises(BadInput, match=rf"\A{message}") as error:
        load_job(write_job(text))
    assert "\n" not in error.value.message
    assert len(error.value.message) < 400


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("nodez: 2\n", "allowed: name, description, program"),
        ("batch: {globl: 1}\n", "allowed: global, micro, accumulation"),
        (
            "launcher: torchrn\n",
            "allowed: deepspeed, forkserver, mpirun, torchrun, auto, python; did you mean torchru",
        ),
        ("device: gpu\n", "allowed: auto, cpu, cuda"),
        ('nodes: "4:2"\n', 'did you mean "2:4"?'),
        ("env:\n\tA: 1\n", "indent with two spaces"),
        ("name: again\n", "keep one of the two"),
        ("module: x\n", "one of `program: train.py`"),
    ],
)
def test_job_file_error_hint_lists_allowed_values_or_correction(text, hint, write_job):
    with pytest.raises(BadInput, match=r"job\.yaml") as error:
        load_job(write_job(text))
    assert (error.value.hint or "").startswith(hint)


@pytest.mark.parametrize("name", ["x" * 300, "a/b", "../../etc/passwd", "/abs", "", "-rf", "a\nb"])
def test_invalid_job_name_is_refused(name, write_job):
    job = write_job(f"name: {json.dumps(name)}\nprogram: train.py\n", base=False)
    with pytest.raises(BadInput, match=r"job\.yaml:1: name: .* is not a valid job name"):
        load_job(job)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"# only a comment\n", "the file is empty"),
        (b"---\n...\n", "empty|mapping"),
        (b"- a\n- b\n", "a job file is a mapping"),
        (b"just words\n", "a job file is a mapping"),
        (b"\xff\xfe\x00", r"not a text file \(byte 0 is not UTF-8\)"),
        (b"name: x\nprogram: train.py\n---\nname: y\n", ":3: a second YAML document begins here"),
        (b"a: &a [*a]\n", "alias that contains itself"),
        (b"[" * 1500, "nested too deeply|not YAML"),
        (b"a: \x00\n", "not YAML"),
    ],
    ids=lambda v: repr(v)[:25],
)
def test_job_file_that_is_not_yaml_mapping_is_refused(content, message, write_job):
    with pytest.raises(BadInput, match=rf"\Ajob\.yaml.*({message})"):
        load_job(write_job(content, base=False))


def test_unpaired_surrogate_in_job_file_is_refused(write_job):
    with pytest.raises(BadInput, match=r"\Ajob\.yaml:3: device: .* is half of a surrogate pair"):
        load_job(write_job('device: "\\ud800"\n'))


def test_job_file_larger_than_4_mib_is_refused(write_job):
    with pytest.raises(BadInput, match="larger than 4 MiB"):
        load_job(write_job("# " + "x" * (5 << 20)))


SPECIAL = ["/dev/zero", "pipe"]
"""Reading these would never end: one has no end, the other no writer."""


@pytest.fixture
def special(request, cwd):
    """A file of `SPECIAL`, the pipe also under a program's name."""
    os.mkfifo(cwd / "pipe")
    (cwd / "pipe.py").symlink_to("pipe")
    return request.param


@pytest.mark.timeout(20)
@pytest.mark.parametrize("special", SPECIAL, indirect=True)
def test_job_cluster_inventory_or_facts_file_must_be_regular_file(special, cwd):
    with pytest.raises(BadInput, match=rf"\A{special}: not a regular file\Z"):
        load_job(special)
    with pytest.raises(BadInput, match=rf"\A{special}: not a regular file\Z"):
        load_cluster("a", special)
    with pytest.raises(BadInput, match=rf"{special}: not a regular file"):
        inventory.read_hosts(cwd / special, "all")
    with pytest.raises(BadInput, match=rf"--facts {special}: not a regular file"):
        read_facts(None, None, special)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("special", SPECIAL, indirect=True)
def test_program_that_is_not_regular_file_is_refused(special, write_job):
    program = "pipe.py" if special == "pipe" else special
    with pytest.raises(BadInput, match=rf"job\.yaml:1: program: .*{program}: not a regular file"):
        load_job(write_job(f"program: {program}\n", base=False))


def test_missing_job_file_is_refused_with_closest_name(write_job):
    write_job(name="zero3.yaml")
    with pytest.raises(BadInput, match=r"zero33\.yaml: no such file") as error:
        load_job("zero33.yaml")
    assert error.value.hint == "did you mean zero3.yaml?"


def test_folder_given_as_job_file_is_refused(cwd):
    with pytest.raises(BadInput, match=r"\.: is a directory"):
        load_job(".")


# ---------------------------------------------------------------- programs


def test_missing_program_is_refused_with_closest_file_name(write_job):
    job = write_job("program: trian.py\n", base=False)
    with pytest.raises(BadInput, match=r"job\.yaml:1: program: trian\.py is neither in") as error:
        load_job(job)
    assert error.value.hint == "did you mean train.py?"


@pytest.mark.parametrize("old", ["jobs/dp.yaml", "jobs/train/dp.yaml"])
def test_path_of_file_that_was_moved_gets_hint_with_its_new_path(cwd, old):
    for name in ("jobs/tour/dp.yaml", "jobs/train/ddp.yaml", "jobs/ddp.yaml"):
        (cwd / name).parent.mkdir(parents=True, exist_ok=True)
        (cwd / name).touch()
    with pytest.raises(BadInput, match="no such file") as error:
        load_job(old)
    assert error.value.hint == "did you mean jobs/tour/dp.yaml?"


@pytest.mark.parametrize(
    ("name", "content"),
    [("run.sh", b"#!/bin/sh\n"), ("notes.txt", b"import this\n"), ("prog.py", b"\x7fELF\0\0")],
)
def test_program_that_is_not_python_is_refused_with_command_hint(name, content, cwd, write_job):
    (cwd / name).write_bytes(content)
    with pytest.raises(BadInput, match=rf"job\.yaml:1: program: .*{name} is not a Py") as error:
        load_job(write_job(f"program: {name}\n", base=False))
    assert "command: [" in (error.value.hint or "")


def test_folder_given_as_program_is_refused(cwd, write_job):
    (cwd / "pkg.py").mkdir()
    with pytest.raises(BadInput, match=r"program: .*pkg\.py is a folder without a __main__\.py"):
        load_job(write_job("program: pkg.py\n", base=False))


def test_folder_or_zip_with_main_is_program_as_under_python(cwd):
    (cwd / "pkg").mkdir()
    (cwd / "pkg" / "__main__.py").write_text("import torch\n")
    with zipfile.ZipFile(cwd / "app.pyz", "w") as archive:
        archive.write("pkg/__main__.py", "__main__.py")
    with zipfile.ZipFile(cwd / "data.zip", "w") as archive:
        archive.write("pkg/__main__.py", "main.py")
    for name in ("pkg", "app.pyz"):
        assert locate_program(job_from_command(["python", name, "x"])).program == name
    job = request.read(["torchrun", "pkg"]).job
    assert sources.starts_of(job) == ([f"{cwd}/pkg/__main__.py"], [f"{cwd}/pkg"])
    with pytest.raises(BadInput, match=r"program: .*data\.zip has no __main__\.py in it"):
        locate_program(job_from_command(["python", "data.zip"]))


def test_program_without_py_suffix_is_accepted_by_python_shebang(cwd, write_job):
    (cwd / "trainer").write_text("#!/usr/bin/env python3\n")
    assert load_job(write_job("program: trainer\n", base=False)).program == "trainer"


def test_program_is_found_in_folder_above_job_file(cwd, monkeypatch, write_job):
    write_job()
    below = cwd / "jobs" / "deep"
    below.mkdir(parents=True)
    (below / "job.yaml").write_text("name: x\nprogram: train.py\n")
    monkeypatch.chdir("/")
    assert load_job(below / "job.yaml").workdir == str(cwd)


def test_program_is_searched_only_in_explicit_workdir(cwd, write_job):
    (cwd / "elsewhere").mkdir()
    with pytest.raises(BadInput, match=rf"train\.py is not in {cwd}/elsewhere$"):
        load_job(write_job("workdir: elsewhere\n"))


def test_job_without_name_is_named_after_its_file(write_job):
    assert load_job(write_job("program: train.py\n", "zero3.yaml", base=False)).name == "zero3"


# ---------------------------------------------------------------- set


@pytest.mark.parametrize(
    ("setting", "field", "value"),
    [
        ("nodes=2:4", "nodes", "2:4"),
        ("restarts=3", "restarts", 3),
        ("args=[--a, 'b c', 010]", "args", ("--a", "b c", "010")),
        ("env.A=x=y", "env", {"A": "x=y"}),
        ("env.A=1,2", "env", {"A": "1,2"}),
        ("env.A=010", "env", {"A": "010"}),
        ("env.A=a: b", "env", {"A": "a: b"}),
        ("env.A='quoted'", "env", {"A": "'quoted'"}),
        ("env.A=a}b", "env", {"A": "a}b"}),
        ("env.A=", "env", {"A": ""}),
        ("description=hello, world", "description", "hello, world"),
        ("deepspeed.zero_optimization.stage=2", "deepspeed", {"zero_optimization": {"stage": 2}}),
    ],
)
def test_set_option_sets_field_to_exact_value(setting, field, value, write_job):
    assert getattr(load_job(write_job(), [setting]), field) == value


def test_set_option_changes_one_nested_key_only(write_job):
    job = load_job(write_job("batch: {global: 64, micro: 8}\n"), ["batch.micro=4"])
    assert (job.batch.global_size, job.batch.micro) == (64, 4)


def test_later_set_option_overrides_earlier(write_job):
    assert load_job(write_job(), ["nodes=2", "nodes=3"]).nodes == 3


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("nodes", "--set 'nodes': not of the form key=value"),
        ("=3", "--set '=3': not of the form key=value"),
        ("nodes=[", "--set 'nodes=[': the value is not YAML"),
        ("name.x=1", "--set name.x: name is not a mapping"),
        ("args.0=x", "--set args: {'0': 'x'} is a mapping, not a list"),
        ("nodez=2", "--set nodez: unknown key (did you mean nodes?)"),
        ("extends=base.yaml", "--set extends: unknown key"),
        ("foo.bar=3", "--set foo: unknown key"),
        ("batch.globl=3", "--set batch.globl: unknown key (did you mean global?)"),
        ("batch={micro: 0}", "--set batch.micro: 0: it has to be at least 1"),
        ("batch.micro=x", "--set batch.micro: 'x' is text, not a whole number"),
        ("nodes=0", "--set nodes: 0: a run needs at least 1 node"),
        ("nodes=true", "--set nodes: true is a boolean, not a whole number or text"),
        ("launcher=torchrn", "--set launcher: 'torchrn' is not a valid value"),
        ("name=2026", "--set name: 2026 is a whole number, not text"),
        ("program=nope.py", "--set program: nope.py is "),
        ("deepspeed=nope.json", "--set deepspeed: nope.json: no such file"),
    ],
)
def test_invalid_set_option_is_refused_naming_option(setting, message, write_job):
    text = "batch:\n  global: 64\n  micro: 8\n" if setting != "foo.bar=3" else ""
    with pytest.raises(BadInput) as caught:
        load_job(write_job(text), [setting])
    whole = caught.value.message if setting.partition("=")[0] != "extends" else str(caught.value)
    assert whole.startswith(message)
    assert "did you mean" not in whole or "did you mean" in message


def test_error_in_key_beside_set_option_names_line_of_job_file(write_job):
    with pytest.raises(BadInput, match=r"\Ajob\.yaml:4: batch\.global: 'x' is text"):
        load_job(write_job("batch:\n  global: x\n"), ["batch.micro=8"])


def test_error_in_config_named_by_set_option_names_line_of_config(write_job, cwd):
    (cwd / "ds.json").write_text('{\n"a": 1,\n"a": 2}')
    with pytest.raises(BadInput, match=r"\A--set deepspeed: ds\.json:3: deepspeed\.a: is already"):
        load_job(write_job(), ["deepspeed=ds.json"])
