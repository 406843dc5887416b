"""What Python code gives to the API is checked as a job file is, and named in the same words."""

import pathlib
import re
import shutil
import typing

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clusterkit import api
from clusterkit.cluster import CLUSTER_TYPES, Facts
from clusterkit.errors import BadInput, ClusterkitError, RunNotFound
from clusterkit.jobfile import values
from clusterkit.jobfile.yaml_file import Document
from clusterkit.spec import BatchSpec, CheckpointSpec, JobSpec

pytestmark = pytest.mark.usefixtures("no_gpus")

WRONG = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=3),
    st.dates(),
    st.sets(st.text(max_size=3), max_size=2),
    st.builds(object),
    st.just(msgspec.UNSET),
    st.just(pathlib.Path("x")),
    st.just(len),
    st.just(BatchSpec(micro=typing.cast(int, "x"))),
    st.just(CheckpointSpec()),
)
VALUES = st.recursive(
    WRONG,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.lists(inner, max_size=2).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), inner, max_size=2),
    ),
    max_leaves=4,
)
ANY = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
DEVELOPERS_WORDS = re.compile(
    r"`(int|str|float|bool|array|object|null)|Expected|regex|enum|msgspec|NoneType|\$\."
)


def keys_of(kind: type[msgspec.Struct]) -> list[str]:
    return [field.name for field in msgspec.structs.fields(kind)]


def told(error: ClusterkitError, key: str, value: object) -> None:
    assert key in error.message
    for found in DEVELOPERS_WORDS.finditer(str(error)):
        assert found[0] in repr(value), str(error)  # the value may hold any word


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("project")
        (path / "train.py").write_text("print(1)\n")
        patch.chdir(path)
        patch.setenv("CLUSTERKIT_HOME", str(path / "home"))
        yield path


def spec_with(field: str, value: object) -> JobSpec:
    base = {"name": "demo", "launcher": "forkserver"}
    other = {} if field in ("program", "module", "command") else {"program": "train.py"}
    return JobSpec(**typing.cast(typing.Any, base | other | {field: value}))


def planned(job: JobSpec, facts: Facts, folder: pathlib.Path) -> None:
    """Plan a job, and check that what submit would record of it can be read again."""
    with api.prepare(job, facts=facts) as ready:
        assert msgspec.json.decode(msgspec.json.encode(ready.job), type=JobSpec) == ready.job
    assert not (folder / "home").exists()


@pytest.mark.parametrize("field", keys_of(JobSpec))
@ANY
@given(value=VALUES)
def test_job_spec_of_any_value_is_planned_or_refused_by_field(field, value, folder, facts):
    try:
        planned(spec_with(field, value), facts, folder)
    except ClusterkitError as error:
        none = value is None and field in ("program", "module", "command")
        told(error, "program" if none else field, value)


@pytest.mark.parametrize(
    ("outer", "field"),
    [("batch", field) for field in keys_of(BatchSpec)]
    + [("checkpoint", field) for field in keys_of(CheckpointSpec)],
)
@ANY
@given(value=VALUES)
def test_nested_spec_with_any_value_is_planned_or_refused_by_section(
    outer, field, value, folder, facts
):
    kind = {"batch": BatchSpec, "checkpoint": CheckpointSpec}[outer]
    try:
        planned(spec_with(outer, kind(**{field: value})), facts, folder)
    except ClusterkitError as error:
        told(error, outer, value)


@pytest.mark.parametrize("kind", CLUSTER_TYPES.values())
@settings(max_examples=100, deadline=None)
@given(data=st.data(), value=VALUES)
def test_cluster_file_value_is_accepted_or_refused_in_plain_words(kind, data, value):
    field = data.draw(st.sampled_from(keys_of(kind)))
    try:
        values.convert(Document("clusters.yaml", None, {}), ("lab",), {field: value}, kind)
    except BadInput as error:
        told(error, f"clusters.yaml: lab.{field}", value)


@pytest.mark.parametrize(
    ("fields", "message", "hint"),
    [
        ({"restarts": "3"}, "restarts: '3' is text, not a whole number", "without quotes: 3"),
        ({"args": "--x"}, "args: '--x' is text, not a list", '["--x"]'),
        ({"env": {"A": 1}}, "env.A: 1 is a whole number, not text", 'quote it: "1"'),
        ({"env": {"A": "1", "B": None}}, "env.B: no value; expected text", None),
        ({"env": {1: "A"}}, "env: the key 1 is a whole number, not text", '"1"'),
        ({"env": {"A": "1", "B": True}}, "env.B: true is a boolean, not text", 'quote it: "true"'),
        ({"launcher": "slurm"}, "launcher: 'slurm' is not a valid value", "allowed: deepspeed, "),
        ({"track": ["wand"]}, "track[0]: 'wand' is not a valid value", "did you mean wandb?"),
        ({"batch": 3}, "batch: 3 is a whole number, not a mapping", "its keys: global, micro, "),
        ({"batch": BatchSpec(micro=0)}, "batch.micro: 0: it has to be at least 1", None),
        ({"batch": BatchSpec(micro="4")}, "batch.micro: '4' is text, not a whole number", None),
        ({"retry_on": [1, 300]}, "retry_on[1]: 300: it has to be at most 255", None),
        ({"preload": ("1x",)}, "preload[0]: '1x' is not a name of a module", None),
        ({"secrets": {"A"}}, "secrets: {'A'} is of type set, not a list", None),
        ({"args": [pathlib.Path("a")]}, "args[0]: PosixPath('a') is of type PosixPath, ", '"a"'),
        ({"restarts": True}, "restarts: true is a boolean, not a whole number", None),
        ({"restarts": 10**30}, "restarts: 1e+30: it has to be below 9,223,372", None),
        ({"deepspeed": {"a": [float("nan")]}}, "deepspeed.a[0]: nan is not a finite number", None),
        ({"deepspeed": {"a": {1: 2}}}, "deepspeed.a: the key 1 is a whole number", None),
        ({"name": None}, "name is missing", None),
    ],
)  # fmt: skip
def test_submit_refuses_wrong_spec_value_by_field_with_hint(fields, message, hint, folder, facts):
    job = JobSpec(**{"name": "demo", "program": "train.py"} | fields)
    with pytest.raises(BadInput) as caught:
        api.submit(job, facts=facts)
    assert caught.value.message.startswith(message)
    if hint is not None:
        assert hint in caught.value.hint
    assert not (folder / "home").exists()


def test_job_spec_accepts_lists_for_tuples(folder, facts):
    listed = JobSpec(name="demo", program="train.py", args=["-x"], secrets=[])  # type: ignore[arg-type]
    with api.prepare(listed, facts=facts) as ready:
        assert ready.job.args == ("-x",)
        assert hash(ready.job.args)


def test_job_spec_accepts_path_of_deepspeed_config(folder, facts):
    (folder / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    job = msgspec.structs.replace(spec_with("deepspeed", "ds.json"), batch=BatchSpec(micro=1))
    with api.prepare(job, facts=facts) as ready:
        assert ready.job.deepspeed == {"zero_optimization": {"stage": 1}}


def test_plan_refuses_self_referencing_value(folder, facts):
    config: dict[str, object] = {}
    config["a"] = config
    with pytest.raises(BadInput, match="deepspeed: nested too deeply, or a value that contains"):
        api.plan(spec_with("deepspeed", config), facts=facts)


def test_plan_names_wrong_setting_as_set_option(folder, facts):
    with pytest.raises(BadInput, match=r"\A--set restarts: 'many' is text, not a whole number"):
        api.plan(spec_with("restarts", 1), facts=facts, settings=["restarts=many"])


# ---------------------------------------------------------------- arguments of functions

OPTIONS = {
    "clusters_file": 3, "cluster": None, "nodes": [2], "gpus": "2", "settings": "nodes=2",
    "more_args": "--steps", "include": 3, "exclude": ["h1"], "facts": {}, "doctor": "no",
    "run_id": 7,
}  # fmt: skip
CALLS = {
    **{f"plan {key}": (lambda job, k=key, v=value: api.plan(job, **{k: v}), key)
       for key, value in OPTIONS.items()},
    "a list of settings": (lambda job: api.plan(job, settings=[1]), "settings[0]"),
    "a list of arguments": (lambda job: api.plan(job, more_args=[1]), "more_args[0]"),
    "a job": (lambda job: api.plan(3), "job: 3 is neither a path nor"),
    "no job": (lambda job: api.plan(None), "job: None is neither"),
    "words of a job": (lambda job: api.plan(["python", 3]), "job: ['python', 3] is neither"),
    "form": (lambda job: api.plan_as(job, "x"), "form: 'x' is"),
    "a form that is none": (lambda job: api.plan_as(job, None), "form: no value"),
    "out": (lambda job: api.write_plan(job, 3), "out"),
    "gpu_memory": (lambda job: api.estimate(gpu_memory=80), "gpu_memory: 80 is a whole"),
    "an unknown question": (lambda job: api.estimate(gpu_mem="80GB"), "gpu_mem: unknown key"),
    "facts": (lambda job: api.estimate(job, facts=3), "facts: 3 is not Facts | None"),
    "values of facts": (lambda job: api.plan(job, facts=Facts(
        home="/h", hosts=(), port="1", port_origin="", interface="lo")), "facts: port: '1' is"),
    "run": (lambda job: api.get(3), "name: 3 is"),
    "status": (lambda job: api.status(None), "name: no value"),
    "web": (lambda job: api.web([3]), "name: 3 is"),
    "web's port": (lambda job: api.web([], port="x"), "port: 'x'"),
    "report": (lambda job: api.report(3, "x.html"), "name: 3 is"),
    "runs_of": (lambda job: api.runs_of(3), "cluster: 3 is"),
    "doctor": (lambda job: api.doctor(only="x"), "only: 'x' is text, not a list"),
    "bench": (lambda job: api.bench(nodes="2"), "nodes: '2' is text"),
    "convert": (lambda job: api.convert(3), "file: 3 is"),
    "convert's words": (lambda job: api.convert(None, "torchrun x.py"), "words: "),
    "notify": (lambda job: api.notify(3), "cluster: 3"),
    "init": (lambda job: api.init("train.py", hosts=3), "hosts: 3"),
    "example": (lambda job: api.example(3), "name: 3"),
    "resolved_cluster": (lambda job: api.resolved_cluster(3), "name: 3"),
    "attach": (lambda job: api.attach("x", cluster=3), "cluster: 3"),
    "watch": (lambda job: api.bench(watch=3), "watch: 3 is not"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), CALLS.values(), ids=CALLS)
def test_api_names_argument_of_wrong_type(call, message, folder):
    with pytest.raises(BadInput) as caught:
        call(JobSpec(name="demo", program="train.py"))
    assert caught.value.message.startswith(message)
    assert not (folder / "home").exists()


def test_deleted_run_raises_run_not_found(unstarted_run):
    run = unstarted_run("launcher: forkserver\n")
    shutil.rmtree(run.path)
    for use in (run.status, run.logs, run.metrics, run.events, run.cancel, run.attach, run.wait,
                run.delete, lambda: run.plan, lambda: run.tail(3), lambda: api.plot([run], "a.png"),
                lambda: api.prometheus(run), lambda: api.status(run)):  # fmt: skip
        with pytest.raises(RunNotFound, match=f"run {run.id} is deleted"):
            use()
    assert repr(run) == f"<Run {run.id}>"


def test_run_methods_name_argument_of_wrong_type(unstarted_run):
    run = unstarted_run("launcher: forkserver\n")
    for use, message in (
        (lambda: list(run.logs(rank="0")), "rank: '0' is text"),
        (lambda: run.tail("3"), "lines: '3' is text"),
        (lambda: run.wait(timeout="3"), "timeout: '3' is text"),
        (lambda: run.wait(until=3), "until: 3 is not"),
    ):
        with pytest.raises(BadInput) as caught:
            use()
        assert caught.value.message.startswith(message)


@pytest.mark.parametrize(
    ("call", "word", "near"),
    [
        (lambda: api.submit("x.yaml", node=2), "node", "nodes"),
        (lambda: api.plan("x.yaml", gpu=2), "gpu", "gpus"),
        (lambda: api.plan_as(["true"], form="job", node=2), "node", "nodes"),
        (lambda: api.bench(iteration=3), "iteration", "iterations"),
        (lambda: api.doctor(quik=True), "quik", "quick"),
        (lambda: api.init("x.py", host="a"), "host", "hosts"),
        (lambda: api.clusters(cluster_file="x"), "cluster_file", "clusters_file"),
    ],
)
def test_unknown_argument_is_refused_with_nearest_name(call, word, near, cwd):
    (cwd / "x.py").write_text("import torch.distributed\n")
    with pytest.raises(BadInput) as error:
        call()
    assert error.value.message == f"{word}: unknown argument"
    assert f"did you mean {near}?" in error.value.hint


def test_unknown_argument_of_run_is_refused_with_nearest_name(unstarted_run):
    run = unstarted_run()
    for call, near in (
        (lambda: run.logs(folow=True), "follow"),
        (lambda: api.log_lines(run, folow=True), "follow"),
        (lambda: run.wait(timout=1), "timeout"),
        (lambda: api.rerun(run, setting=[]), "settings"),
    ):
        with pytest.raises(BadInput, match=f"unknown argument\n.*did you mean {near}"):
            call()
