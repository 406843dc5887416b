"""The text format of Prometheus, read back by Prometheus' own parser for Python."""

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from clusterkit.run.folder import RunFolder
from clusterkit.run.status import NodeStatus, RunStatus, State
from clusterkit.web import prometheus
from clusterkit.web.prometheus import Reported


def status(run="demo-1", state=State.RUNNING, **fields):
    return RunStatus(run=run, job="demo", cluster="lab", backend="local", state=state, **fields)


def samples(*runs):
    text = prometheus.text(runs)
    assert text.endswith("\n")
    found = {}
    names = []
    for family in text_string_to_metric_families(text):
        assert family.type == "gauge"
        assert family.documentation
        names.append(family.name)
        for sample in family.samples:
            key = (sample.name, *sorted(sample.labels.items()))
            assert key not in found
            assert sample.timestamp is None  # which the textfile collector refuses
            found[key] = sample.value
    assert len(names) == len(set(names))  # the samples of a name stand together
    return found


OF_RUN = (("cluster", "lab"), ("job", "demo"), ("run", "demo-1"))


def test_run_state_gauge_is_1_for_current_state_only():
    found = samples(Reported(status(), {}))
    states = {key[-1][1]: value for key, value in found.items() if key[0].endswith("_state")}
    assert states == {state.value: float(state is State.RUNNING) for state in State}


def test_prometheus_parser_reads_back_values_names_and_labels():
    node = NodeStatus(node=0, host='h\\o"s\nt', state=State.FAILED, hang="rank 1 has not come")
    found = samples(
        Reported(
            status(nodes=(node,), exit_code=7, started_at=1.7e9),
            {"loss": 2.5, "a b": 1, "a.b": 2, "näh": 3, "bad": math.nan, "up": math.inf,
             "down": -math.inf, "text": "x", "flag": True, "huge": 10**400, "big": 2**70},
        )
    )  # fmt: skip
    assert found["clusterkit_metric_loss", *OF_RUN] == 2.5
    assert found["clusterkit_metric_a_b", *OF_RUN] == 1
    assert found["clusterkit_metric_n_h", *OF_RUN] == 3
    assert math.isnan(found["clusterkit_metric_bad", *OF_RUN])
    assert found["clusterkit_metric_up", *OF_RUN] == math.inf
    assert found["clusterkit_metric_down", *OF_RUN] == -math.inf
    assert found["clusterkit_metric_big", *OF_RUN] == float(2**70)
    assert not [key for key in found if key[0].endswith(("text", "flag", "huge"))]
    assert found["clusterkit_run_exit_code", *OF_RUN] == 7
    assert found["clusterkit_run_started_timestamp_seconds", *OF_RUN] == 1.7e9
    assert found["clusterkit_run_hang", *OF_RUN] == 1
    where = (("cluster", "lab"), ("host", 'h\\o"s\nt'), ("job", "demo"), ("node", "0"))
    assert found["clusterkit_node_running", *where, ("run", "demo-1")] == 0


def test_samples_of_several_runs_are_grouped_by_metric():
    found = samples(Reported(status("a"), {"loss": 1.0}), Reported(status("b"), {"loss": 2.0}))
    values = [value for key, value in found.items() if key[0] == "clusterkit_metric_loss"]
    assert values == [1.0, 2.0]


@pytest.mark.usefixtures("no_gpus")
def test_metrics_command_prints_prometheus_text(cli, unstarted_run, by_hand):
    run = unstarted_run()
    stamp = "2026-11-21T20:11:58.123450Z"
    log = f'{stamp} 0 @clusterkit {{"event": "metrics", "step": 1, "loss": 2.5}}\n'
    by_hand(run).node(log=log)
    RunFolder(run.path).write_json("state.json", status(run.id))
    done = cli("metrics", run.id, "--prometheus")
    assert done.code == 0
    assert "\nclusterkit_metric_loss{" in done.out
    assert "} 2.5\n" in done.out
