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
def test_nodes_are_a_number_or_a_range(given_as, range_):
    assert parse_nodes(given_as) == range_


@pytest.mark.parametrize(
    ("given_as", "seconds"),
    [(90, 90), (1.5, 1.5), ("90", 90), ("90s", 90), ("1.5h", 5400), ("1d2h", 93600), ("2m", 120)],
)
def test_a_time_limit_is_seconds_or_says_its_units(given_as, seconds):
    assert parse_duration(given_as) == seconds
    assert job(time_limit=given_as).limit_seconds == seconds


@pytest.mark.parametrize("limit", ["", "soon", "-1", -1, 0, "0s", "1w", "h", "1 h", "1e9", "inf"])
def test_what_is_no_length_of_time_is_refused(limit):
    with pytest.raises(BadInput, match=r"^time_limit: "):
        check_job(job(time_limit=limit))


@given(st.integers(1, 10**4), st.integers(0, 9 * 10**4))
def test_every_range_in_ascending_order_is_taken(low, more):
    assert parse_nodes(f"{low}:{low + more}") == (low, low + more)


@pytest.mark.parametrize(
    "nodes", ["", "two", "1:", ":2", "1:2:3", "-1", -1, "1.5", "2-4", "1e3", "0x2"]
)
def test_what_is_no_number_of_nodes_is_refused_with_both_forms(nodes):
    with pytest.raises(BadInput, match="neither a number nor MIN:MAX") as error:
        parse_nodes(nodes)
    assert error.value.hint == '2, or "2:4"'


@pytest.mark.parametrize("nodes", [0, "0", "0:2"])
def test_no_nodes_at_all_are_refused(nodes):
    with pytest.raises(BadInput, match=r"nodes: 0.*at least 1 node"):
        parse_nodes(nodes)


def test_a_range_the_wrong_way_round_is_told_the_right_one():
    with pytest.raises(BadInput, match="the minimum comes first") as error:
        parse_nodes("4:2")
    assert error.value.hint == 'did you mean "2:4"?'


def test_a_number_of_nodes_with_thousands_of_digits_is_refused_and_no_accident():
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
def test_a_size_that_no_machine_has_is_refused(fields, message):
    with pytest.raises(BadInput) as error:
        check_job(job(**fields))
    assert error.value.message == message


def test_the_largest_sizes_are_taken():
    check_job(job(nodes=100_000, gpus_per_node=10_000))


def test_only_a_true_range_is_elastic():
    assert job(nodes="1:2").elastic
    assert not job(nodes="2:2").elastic
    assert not job(nodes=2).elastic


@pytest.mark.parametrize(
    "name", ["a", "Zero 3", "gpt-1.5b_v2", "0", "é", "x" * 100, "日本"], ids=lambda n: n[:10]
)
def test_ordinary_names_are_taken(name):
    check_job(job(name=name))


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../up", "a/b", "/abs", "-x", ".hidden", " lead", "a\nb", "a\0b", "a:b"]
)
def test_names_that_could_leave_a_folder_or_break_a_line_are_refused(name):
    with pytest.raises(BadInput, match="is not a valid job name"):
        check_job(job(name=name))


def test_a_name_of_300_characters_is_shown_shortened():
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
def test_what_starts_a_job_s_ranks_and_why(fields, launcher):
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
def test_jobs_that_contradict_themselves_are_refused(fields, message):
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
def test_words_with_nul_are_refused_because_no_process_can_be_given_them(fields):
    with pytest.raises(BadInput, match="NUL"):
        check_job(job(**fields))


def test_a_job_is_frozen():
    with pytest.raises(AttributeError, match="immutable"):
        job().name = "other"


def test_a_job_survives_its_json_form():
    whole = job(
        args=("--a", "b c"), env={"A": "x\ny"}, nodes="2:4", deepspeed={"a": [1, {"b": None}]}
    )
    assert msgspec.json.decode(msgspec.json.encode(whole), type=JobSpec) == whole


def test_defaults_are_left_out_of_the_json_form():
    assert msgspec.to_builtins(job()) == {"name": "demo", "program": "train.py"}
