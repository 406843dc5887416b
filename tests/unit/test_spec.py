"""JobSpec: what types alone cannot say of a job."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterkit.errors import BadInput
from clusterkit.spec import JobSpec, check_job, launcher_of, parse_duration, parse_nodes


def job(**fields):
    return JobSpec(**({"name": "demo", "program": "train.py"} | fields))


@pytest.mark.parametrize(
    ("given_as", "range_"),
    [(1, (1, 1)), ("2", (2, 2)), ("2:4", (2, 4)), (" 3 ", (3, 3)), ("2:2", (2, 2))],
)
def test_parse_nodes_accepts_number_or_range(given_as, range_):
    assert parse_nodes(given_as) == range_


@pytest.mark.parametrize(
    ("given_as", "seconds"),
    [(90, 90), (1.5, 1.5), ("90", 90), ("90s", 90), ("1.5h", 5400), ("1d2h", 93600), ("2m", 120)],
)
def test_time_limit_accepts_seconds_or_units(given_as, seconds):
    assert parse_duration(given_as) == seconds
    assert job(time_limit=given_as).limit_seconds == seconds


@pytest.mark.parametrize("limit", ["", "soon", "-1", -1, 0, "0s", "1w", "h", "1 h", "1e9", "inf"])
def test_check_job_refuses_invalid_time_limit(limit):
    with pytest.raises(BadInput, match=r"^time_limit: "):
        check_job(job(time_limit=limit))


@given(st.integers(1, 10**4), st.integers(0, 9 * 10**4))
def test_parse_nodes_accepts_every_ascending_range(low, more):
    assert parse_nodes(f"{low}:{low + more}") == (low, low + more)


@pytest.mark.parametrize(
    "nodes", ["", "two", "1:", ":2", "1:2:3", "-1", -1, "1.5", "2-4", "1e3", "0x2"]
)
def test_parse_nodes_refuses_malformed_value_and_hints_both_forms(nodes):
    with pytest.raises(BadInput, match="neither a number nor MIN:MAX") as error:
        parse_nodes(nodes)
    assert error.value.hint == '2, or "2:4"'


@pytest.mark.parametrize("nodes", [0, "0", "0:2"])
def test_parse_nodes_refuses_zero_nodes(nodes):
    with pytest.raises(BadInput, match=r"nodes: 0.*at least 1 node"):
        parse_nodes(nodes)


def test_parse_nodes_suggests_ascending_range_for_reversed_one():
    with pytest.raises(BadInput, match="the minimum comes first") as error:
        parse_nodes("4:2")
    assert error.value.hint == 'did you mean "2:4"?'


def test_parse_nodes_refuses_number_with_thousands_of_digits():
    with pytest.raises(BadInput, match="nodes"):
        parse_nodes("9" * 5000)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nodes": 100_001}, "nodes: 100001: a run has 100000 nodes at most"),
        ({"nodes": "1:1000000"}, "nodes: 1:1000000: a run has 100000 nodes at most"),
        ({"gpus_per_node": 1_000_000_000}, "gpus_per_node: 1000000000: a node has 10000 at most"),
        ({"gpus_per_node": 0}, "gpus_per_node: 0: a node needs at least 1 rank"),
    ],
)
def test_check_job_refuses_impossible_node_and_gpu_counts(fields, message):
    with pytest.raises(BadInput) as error:
        check_job(job(**fields))
    assert error.value.message == message


def test_check_job_accepts_largest_node_and_gpu_counts():
    check_job(job(nodes=100_000, gpus_per_node=10_000))


def test_job_is_elastic_only_for_range_of_node_counts():
    assert job(nodes="1:2").elastic
    assert not job(nodes="2:2").elastic
    assert not job(nodes=2).elastic


@pytest.mark.parametrize(
    "name", ["a", "Zero 3", "gpt-1.5b_v2", "0", "é", "x" * 100, "日本"], ids=lambda n: n[:10]
)
def test_check_job_accepts_ordinary_job_names(name):
    check_job(job(name=name))


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../up", "a/b", "/abs", "-x", ".hidden", " lead", "a\nb", "a\0b", "a:b"]
)
def test_check_job_refuses_unsafe_job_names(name):
    with pytest.raises(BadInput, match="is not a valid job name"):
        check_job(job(name=name))


def test_refusal_of_overlong_job_name_shortens_name():
    with pytest.raises(BadInput, match=r"x{40}\.\.\. \(300 characters\)") as error:
        check_job(job(name="x" * 300))
    assert len(error.value.message) < 120
    assert "100 characters at most" in (error.value.hint or "")


@pytest.mark.parametrize(
    ("fields", "launcher"),
    [
        ({}, ("forkserver", "the default")),
        ({"deepspeed": {}}, ("forkserver", "the default")),
        ({"program": None, "command": ("x",)}, ("forkserver", "the default")),
        ({"launcher": "python"}, ("forkserver", "job: launcher python")),
        ({"launcher": "mpirun"}, ("mpirun", "job: launcher")),
        ({"nodes": "2:4"}, ("torchrun", "nodes: 2:4 is elastic")),
        ({"nodes": "2:4", "on_node_loss": "shrink"}, ("forkserver", "the default")),
        ({"nodes": "2:2"}, ("forkserver", "the default")),
        ({"nodes": "2:4", "launcher": "torchrun"}, ("torchrun", "job: launcher")),
    ],
)
def test_launcher_of_names_launcher_and_reason(fields, launcher):
    assert launcher_of(job(**fields)) == launcher
    assert job(**fields).started_by == launcher[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"program": None}, "program: missing"),
        ({"module": "m"}, "program and module: give only one"),
        ({"command": ("x",)}, "program and command: give only one"),
        ({"program": None, "command": ()}, "command: it is empty"),
        ({"nodes": "1:2", "launcher": "mpirun"}, "mpirun cannot run an elastic number"),
        ({"nodes": "1:2", "launcher": "deepspeed"}, "deepspeed cannot run an elastic number"),
        ({"nodes": "1:2", "launcher": "python"}, "python cannot run an elastic number"),
        ({"on_node_loss": "shrink", "nodes": 2}, "forkserver, not nodes: 2"),
        ({"on_node_loss": "shrink", "nodes": "1:2", "launcher": "deepspeed"}, "not launcher deep"),
        ({"spares": 1, "nodes": "2:3"}, "launcher torchrun cannot move a lost node's ranks"),
        ({"spares": 1, "nodes": 2, "on_node_loss": "fail"}, "on_node_loss: fail ends the run"),
        ({"env": {"1A": "x"}}, "'1A' is not a valid name of an environment variable"),
        ({"secrets": ("A-B",)}, "'A-B' is not a valid name of an environment variable"),
        ({"env": {"A": "a\0b"}}, r"env\.A: .* contains a NUL"),
        ({"env": {"A": "x"}, "secrets": ("A",)}, "secrets: A is set in env as well"),
    ],
)
def test_check_job_refuses_contradictory_fields(fields, message):
    with pytest.raises(BadInput, match=message):
        check_job(job(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"args": ("a\0b",)},
        {"program": None, "command": ("a\0b",)},
        {"program": None, "module": "a\0b"},
    ],
    ids=["args", "command", "module"],
)
def test_check_job_refuses_nul_in_program_words(fields):
    with pytest.raises(BadInput, match="NUL"):
        check_job(job(**fields))


def test_job_spec_is_immutable():
    with pytest.raises(AttributeError, match="immutable"):
        job().name = "other"


def test_job_spec_survives_json_round_trip():
    whole = job(
        args=("--a", "b c"), env={"A": "x\ny"}, nodes="2:4", deepspeed={"a": [1, {"b": None}]}
    )
    assert msgspec.json.decode(msgspec.json.encode(whole), type=JobSpec) == whole


def test_job_spec_json_omits_defaults():
    assert msgspec.to_builtins(job()) == {"name": "demo", "program": "train.py"}
