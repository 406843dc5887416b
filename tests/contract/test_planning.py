"""Backends register themselves, plan without side effects and refuse what they cannot do."""

import copy
import os
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from clusterkit import backends
from clusterkit.backends.base import Backend, check_capabilities
from clusterkit.cluster import CLUSTER_TYPES
from clusterkit.errors import BadInput, CapabilityError, Unavailable
from clusterkit.jobfile import loader
from clusterkit.plan import Plan
from clusterkit.run import folder as run_folder
from clusterkit.spec import BatchSpec, JobSpec

ROOT = Path(__file__).resolve().parents[2]
JOB_FILES = sorted((ROOT / "jobs").rglob("*.yaml"))


# ---------------------------------------------------------------- registration


def test_every_registered_backend_has_contract_stage(staged_names):
    assert staged_names == set(backends.NAMES)


def test_every_backend_has_cluster_entry_type():
    assert set(CLUSTER_TYPES) == set(backends.NAMES)


def test_backend_type_of_name_is_concrete_and_has_summary(stage):
    kind = backends.backend_type(stage.name)
    assert issubclass(kind, Backend)
    assert kind.name == stage.name
    assert kind.summary
    assert not kind.__abstractmethods__


def test_unsupported_features_are_job_fields_with_reason(stage):
    fields = {field.name for field in msgspec.structs.fields(JobSpec)}
    for field, reason in type(stage.backend).unsupported.items():
        assert field.partition("=")[0] in fields
        assert reason


# ---------------------------------------------------------------- 1, 2: purity


def test_planning_same_job_twice_gives_identical_plan(stage, any_job):
    first, second = stage.plan(any_job), stage.plan(any_job)
    assert first == second
    assert first.to_json() == second.to_json()
    assert first.to_text() == second.to_text()


def test_planning_does_not_touch_files_env_processes_clock_or_random(stage, any_job, forbidden):
    expected, facts = stage.plan(any_job), stage.facts_of()
    with forbidden():
        plan = stage.plan(any_job, facts)
        text, document = plan.to_text(), plan.to_json()
    assert plan == expected
    assert (text, document) == (expected.to_text(), expected.to_json())


def test_forbidden_fixture_catches_files_env_processes_clock_and_random(forbidden):
    for touch in (
        lambda: open("/dev/null"),  # noqa: SIM115 (it is never opened)
        lambda: Path("/").exists(),
        lambda: os.environ["PATH"],
        lambda: os.environ.get("PATH"),
        lambda: subprocess.run(["true"]),
        lambda: threading.Thread(target=print).start(),
        lambda: __import__("time").time(),
        lambda: __import__("random").random(),
        lambda: __import__("uuid").uuid4(),
        lambda: __import__("socket").socket(),
    ):
        with forbidden(), pytest.raises(AssertionError, match="a plan must not touch"):
            touch()


def test_forbidden_fixture_does_not_affect_other_threads(forbidden):
    begin = threading.Event()

    def others():
        begin.wait()
        with open(os.devnull) as file, socket.socket() as made:
            return (
                file.read(), Path("/").exists(), os.environ["PATH"],
                isinstance(made, socket.socket), subprocess.run(["true"]).returncode,
                time.time() > 0,
            )  # fmt: skip

    with ThreadPoolExecutor() as pool:
        seen = pool.submit(others)
        try:
            with forbidden():
                begin.set()
                found = seen.result(60)
        finally:
            begin.set()  # the pool waits for its thread
    assert found == ("", True, os.environ["PATH"], True, 0, True)


def test_planning_does_not_modify_job_cluster_or_facts(stage, any_job):
    facts, cluster = stage.facts_of(), stage.cluster()
    before = copy.deepcopy((any_job, cluster, facts))
    stage.plan(any_job, facts, cluster=cluster)
    assert (any_job, cluster, facts) == before


def test_plan_is_unaffected_by_later_changes_to_job(stage, demo):
    job = demo(deepspeed={"zero_optimization": {"stage": 1}}, env={"A": "1"})
    plan = stage.plan(job)
    before = plan.to_json()
    job.deepspeed["zero_optimization"]["stage"] = 3
    job.env["A"] = "2"
    assert plan.to_json() == before


@pytest.mark.parametrize("path", JOB_FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("nodes", [1, 2])
def test_every_repository_job_file_can_be_planned(stage, path, nodes, monkeypatch):
    monkeypatch.chdir(ROOT)
    job = msgspec.structs.replace(loader.load_job(path), nodes=nodes)
    plan = stage.plan(job)
    assert plan.world_size >= nodes
    assert plan == stage.plan(job)


def test_plan_round_trips_through_json(stage, any_job):
    plan = stage.plan(any_job)
    assert msgspec.json.decode(plan.to_json(), type=Plan) == plan


# ---------------------------------------------------------------- 6: capabilities


def test_unsupported_job_field_is_refused_by_name(stage, demo):
    kind = type(stage.backend)
    everyone = [backends.backend_type(name) for name in backends.NAMES]
    check_capabilities(kind, demo(), everyone)
    for field in kind.unsupported:
        key, _, value = field.partition("=")
        job = msgspec.structs.replace(demo(), **{key: value or ("x",)})
        with pytest.raises(CapabilityError, match=f"{kind.name} does not support {field}: "):
            check_capabilities(kind, job, everyone)


@pytest.mark.parametrize(
    "fields",
    [
        {"env": {"RANK": "0"}},
        {"args": ("${clusterkit.nothing}",)},
        {"batch": BatchSpec(global_size=7, micro=2)},
        {"device": "cuda"},
        {"deepspeed": {"train_batch_size": 3}, "batch": BatchSpec(global_size=4)},
    ],
    ids=str,
)
def test_planning_refuses_invalid_job_and_names_field(stage, demo, fields):
    with pytest.raises(BadInput, match=r"env\.RANK|args|batch|device|deepspeed"):
        stage.plan(demo(**fields))


# ---------------------------------------------------------------- 7: names


@pytest.mark.parametrize("name", ["x" * 200, "Weird Name_ü.v2", "--", "日本"])
def test_any_job_name_gives_valid_run_id_and_file_names(stage, demo, name):
    run_id = run_folder.new_run_id(name)
    plan = stage.plan(demo(name=name), run_id=run_id)
    assert run_folder.RUN_ID.match(plan.run_id)
    assert len(plan.run_id) <= run_folder.RUN_ID_MAX
    assert all(len(part.encode()) <= 255 for file in plan.files for part in file.path.split("/"))


# ---------------------------------------------------------------- 13: what is missing


@pytest.mark.parametrize(
    ("fields", "host", "missing"),
    [
        ({"launcher": "torchrun"}, {"versions": {}}, "torch"),
        ({"launcher": "deepspeed"}, {"versions": {}}, "deepspeed"),
        ({"launcher": "mpirun"}, {"tools": {}}, "Open MPI"),
    ],
)
def test_planning_names_missing_launcher_tool_and_install_hint(stage, demo, fields, host, missing):
    with pytest.raises(Unavailable, match=f"needs {missing}") as error:
        stage.plan(demo(**fields), stage.facts_of(**host))
    assert error.value.exit_code == 125
    assert "install" in (error.value.hint or "")
