"""Cluster files, and the schema of both kinds."""

import json
import re
from functools import cache
from pathlib import Path

import jsonschema
import pytest
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from clusterkit.cluster import (
    CLUSTER_TYPES,
    Entry,
    LocalCluster,
)
from clusterkit.errors import BadInput
from clusterkit.jobfile import loader, values
from clusterkit.jobfile.loader import (
    load_job,
)
from clusterkit.jobfile.schema import json_schema
from clusterkit.spec import JobSpec, Spec
from tests.unit.loader.loading import load_cluster

HERE = Path(__file__).resolve()


# ---------------------------------------------------------------- clusters


BAD_CLUSTERS = {
    "not YAML": ("lab: {", r"clusters\.yaml:1: not YAML"),
    "empty": ("", r"clusters\.yaml: the file is empty"),
    "tab": ("lab:\n\tbackend: local\n", r"clusters\.yaml:2: a tab where YAML needs spaces"),
    "duplicate names": (
        "lab: {backend: local}\nlab: {backend: local}\n",
        r"clusters\.yaml:2: lab: is already set in line 1",
    ),
    "a list": ("- lab\n", r"clusters\.yaml: a cluster file is a mapping"),
    "an entry that is a list": ("lab: [a]\n", r"clusters\.yaml:1: lab: an entry is a mapping"),
    "no backend": ("lab: {}\n", r"clusters\.yaml:1: lab\.backend: backend is missing"),
    "unknown backend": ("lab: {backend: locl}\n", r"clusters\.yaml:1: lab\.backend: 'locl' is no"),
    "unknown key": ("lab:\n  backend: local\n  gpuz: 1\n", r"clusters\.yaml:3: lab\.gpuz: unknown"),
    "removed key": ("lab: {backend: local, warm: 9}\n", r"yaml:1: lab\.warm: .*\(removed: it "),
    "unknown key in a list": (
        "lab:\n  backend: ssh\n  hosts:\n  - name: a\n  - {name: b, adress: c}\n",
        r"clusters\.yaml:5: lab\.hosts\[1\]\.adress: unknown key \(did you mean address\?\)",
    ),
    "wrong type": ("lab: {backend: local, port: x}\n", r"clusters\.yaml:1: lab\.port: 'x'"),
    "port out of range": ("lab: {backend: local, port: 70000}\n", r"yaml:1: lab\.port: 70000"),
    "negative gpus": ("lab: {backend: local, gpus: -1}\n", r"yaml:1: lab\.gpus: -1"),
    "grace without end": ("lab: {backend: local, stop_grace: .inf}\n", r"yaml:1: lab\.stop_grace"),
    "bad variable": ("lab: {backend: local, env: {1A: x}}\n", r"yaml:1: lab\.env.*'?1A'?"),
    "NUL in env": ('lab: {backend: local, env: {A: "\\0"}}\n', r"yaml:1: lab\.env.*NUL"),
    "unknown name": ("lab: {backend: local}\n", r"cluster 'lba' is unknown in .*clusters\.yaml"),
}


@pytest.mark.parametrize("case", BAD_CLUSTERS)
def test_cluster_file_error_names_file_and_mistake(case, cwd):
    text, message = BAD_CLUSTERS[case]
    (cwd / "clusters.yaml").write_text(text)
    with pytest.raises(BadInput, match=message) as error:
        load_cluster("lba" if case == "unknown name" else "lab")
    assert str(cwd / "clusters.yaml") in error.value.message
    assert "\n" not in error.value.message


def test_unknown_cluster_hint_lists_known_and_closest_names(cwd):
    (cwd / "clusters.yaml").write_text("lab: {backend: local}\nbig: {backend: local}\n")
    with pytest.raises(BadInput, match="'lba' is unknown") as error:
        load_cluster("lba")
    assert error.value.hint == "known: big, lab, local; did you mean lab?"


def test_without_cluster_file_only_local_cluster_is_known(cwd):
    assert load_cluster("local") == LocalCluster()
    with pytest.raises(
        BadInput, match=r"there is no clusters\.yaml in this folder or above"
    ) as error:
        load_cluster("lab")
    assert error.value.hint == "known: local; clusterkit init writes a clusters.yaml"


def test_cluster_file_overrides_local_cluster_without_backend_key(cwd):
    (cwd / "clusters.yaml").write_text("local: {port: 29600}\n")
    assert load_cluster("local") == LocalCluster(port=29600)


def test_cluster_file_is_found_in_folder_above(cwd, monkeypatch):
    (cwd / "clusters.yaml").write_text("lab: {backend: local}\n")
    (cwd / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(cwd / "a" / "b")
    assert load_cluster("lab") == LocalCluster()
    assert loader.cluster_names() == ["lab", "local"]


def test_cluster_file_argument_overrides_environment_variable(cwd, monkeypatch):
    (cwd / "one.yaml").write_text("a: {backend: local, port: 1}\n")
    (cwd / "two.yaml").write_text("a: {backend: local, port: 2}\n")
    monkeypatch.setenv("CLUSTERKIT_CLUSTERS", str(cwd / "one.yaml"))
    assert load_cluster("a").port == 1
    assert load_cluster("a", cwd / "two.yaml").port == 2


def test_cluster_file_named_by_environment_must_exist(cwd, monkeypatch):
    monkeypatch.setenv("CLUSTERKIT_CLUSTERS", "/nowhere/clusters.yaml")
    with pytest.raises(BadInput, match=r"/nowhere/clusters\.yaml: no such file"):
        load_cluster("local")


# ---------------------------------------------------------------- schema


def test_schema_describes_every_key_and_forbids_others():
    definitions = json_schema()["$defs"]
    for name in ("JobSpec", "BatchSpec", "CheckpointSpec", "LocalCluster"):
        assert definitions[name]["additionalProperties"] is False
        for key, described in definitions[name]["properties"].items():
            assert described.get("description") or "$ref" in json.dumps(described), f"{name}.{key}"


def test_schema_describes_every_field_of_every_spec_and_cluster_type():
    definitions = json_schema()["$defs"]
    for kind in {*Spec.__subclasses__(), *CLUSTER_TYPES.values()} - {Entry}:
        for key, described in definitions[kind.__name__]["properties"].items():
            assert described.get("description"), f"{kind.__name__}.{key}"


def test_schema_contains_keys_of_job_and_batch():
    properties = json_schema()["$defs"]["JobSpec"]["properties"]
    assert set(properties) >= {"name", "program", "batch", "env", "nodes", "deepspeed", "secrets"}
    assert set(json_schema()["$defs"]["BatchSpec"]["properties"]) == {
        "global",
        "micro",
        "accumulation",
    }


def test_schema_does_not_require_job_name():
    assert "required" not in json_schema()["$defs"]["JobSpec"]


def ends_at_the_end(validator, pattern, instance, schema):
    """As in ECMAScript, JSON schema's dialect: ``$`` matches before no last line break."""
    if isinstance(instance, str) and not re.search(re.sub(r"\$\Z", r"\\Z", pattern), instance):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


Validator = jsonschema.validators.extend(
    jsonschema.Draft202012Validator, {"pattern": ends_at_the_end}
)
TEXTS = st.text(
    st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]), max_size=4
) | st.sampled_from(
    ["train.py", "1:2", "2:2", "02:2", " 1:04 ", "4:2", "0", "007", "auto", "90m", "0s", "a\0"]
)
SCALARS = (
    st.none() | st.booleans() | st.integers(-2, 3) | st.integers() | st.floats(-1e3, 1e3) | TEXTS
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(TEXTS | st.just("A"), inner, max_size=3)
    ),
    max_leaves=4,
)
WORDS = st.lists(SCALARS, min_size=1, max_size=3)
NODES = st.sampled_from([0, 1, 100_000, 100_001, "1:2", "2:2", "02:2", " 1:04 ", "2", "0:2", "00"])
LIKELY = {
    "name": st.just("demo") | TEXTS,
    "program": st.just("train.py"),
    "command": WORDS,
    "args": WORDS,
    "nodes": NODES,
    "gpus_per_node": st.sampled_from([0, 1, 10_000, 10_001, 10**9, "auto"]),
    "estimate": st.sampled_from(["gpt", "qwen", "sentiment", "bert"]),
    "launcher": st.sampled_from(["auto", "torchrun", "forkserver", "python", "mpirun"]),
    "batch": st.fixed_dictionaries({}, optional={"global": SCALARS, "micro": SCALARS}),
    "checkpoint": st.fixed_dictionaries({}, optional={"dir": SCALARS, "every": SCALARS}),
    "env": st.dictionaries(st.sampled_from(["A", "b_1", "1b", ""]), SCALARS, max_size=2),
    "secrets": st.lists(st.sampled_from(["S", "T2", "2T", ""]), max_size=2),
    "time_limit": st.sampled_from([0, 1, 0.5, 1e9, "90", "1d2h", "0m", " 5s ", "5 s", "1h\n"]),
    "hang_timeout": st.sampled_from([0, 0.0, "0", " 0 ", -1, 0.5, "90", "0m", "2m", "m"]),
}
KEYS = sorted(values.fields_of(JobSpec))
RUNS = st.sampled_from([{"program": "train.py"}] * 4 + [{"command": ["a"]}, {"module": "m"}, {}])
CHANGES = st.lists(st.sampled_from(KEYS), max_size=3, unique=True).flatmap(
    lambda keys: st.fixed_dictionaries({key: LIKELY.get(key, VALUES) | VALUES for key in keys})
)
UNSAYABLE = (
    r"the minimum comes first|is set in env as well|above 0, and finite"
    r"|\.0 is a number, not a whole number|is neither in|is not in /|is not a folder"
    r"|not a Python file|is a folder|deepspeed|cannot preload modules|not of a command"
)
"""What the loader alone can know: sums, files, keys that do not go together, 1.0 beside 1."""


@cache
def validator():
    return Validator(json_schema())


@settings(max_examples=250, suppress_health_check=list(HealthCheck))
@given(data=st.builds(dict.__or__, RUNS, CHANGES))
@example(data={"program": "train.py", "args": ["--steps", 40]})
@example(data={"program": "train.py", "nodes": 0})
@example(data={"program": "train.py", "command": ["a"]})
@example(data={"name": "demo"})
@example(data={"command": ["a"], "nodes": "1:2", "launcher": "forkserver"})
@example(data={"program": "train.py", "deepspeed": "\0"})
@example(data={"command": ["a"], "nodes": "2:2", "launcher": "forkserver"})
@example(data={"command": ["a"], "env": {"A": True}, "name": None})
def test_schema_agrees_with_loader_on_random_job_files(data, cwd):
    (cwd / "train.py").write_text("")
    (cwd / "job.yaml").write_text(json.dumps(data))
    valid = validator().is_valid(data)
    try:
        load_job("job.yaml")
        refusal = None
    except BadInput as error:
        refusal = error.message
    event("taken" if refusal is None else "refused")
    assert valid == (refusal is None) or (valid and re.search(UNSAYABLE, refusal)), refusal


def test_schema_is_equal_on_every_call():
    assert json_schema() == json_schema()


@pytest.mark.parametrize(
    "path", sorted((HERE.parents[3] / "jobs").rglob("*.yaml")), ids=lambda path: path.name
)
def test_every_job_file_in_repository_loads(path, monkeypatch):
    monkeypatch.chdir(HERE.parents[3])
    assert re.match(r"[a-z0-9-]+\Z", load_job(path).name)
