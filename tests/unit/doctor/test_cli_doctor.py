"""clusterkit doctor: its table, its JSON, its exit codes."""

import threading

import pytest

from clusterkit import api, doctor
from clusterkit.doctor.base import Finding
from clusterkit.doctor.report import Report
from clusterkit.errors import Unavailable

FAULTS = Report(
    cluster="lab",
    hosts=("h0", "h1"),
    checks=("clock",),
    findings=(
        Finding("clock", "h0", "ok", "agrees"),
        Finding("clock", "h1", "fail", "10 min ahead", "sudo chronyc makestep"),
    ),
)
QUIET = "user,python,shm"


@pytest.fixture
def examined(monkeypatch):
    """What `api.doctor` is asked, and a report that it gives instead of looking."""
    asked = []

    def give(report):
        def doctor(job=None, *, progress, **options):
            asked.append({"job": job} | options)
            progress(1, [])
            return report

        monkeypatch.setattr(api, "doctor", doctor)
        return asked

    return give


def test_doctor_examines_local_machine(cli):
    done = cli("doctor", "--only", "python,shm,port,head-port,interface")
    progress = ("looking", "connecting", "cleaning up", "evaluating")  # what takes over a second
    assert all(line.startswith(progress) for line in done.err.splitlines())
    lines = done.out.splitlines()
    assert lines[0].split() == ["localhost"]
    assert lines[-1].startswith("local: 1 host, 5 checks: ")
    assert "127.0.0.1:" in done.out
    assert done.code == 0


def test_doctor_json_lists_hosts_checks_and_findings(cli):
    document = cli("doctor", "--json", "--only", QUIET).json
    assert document["hosts"] == ["localhost"]
    assert document["checks"] == ["user", "python", "shm"]
    assert {finding["check"] for finding in document["findings"]} == set(document["checks"])
    assert set(document["findings"][0]) == {"check", "host", "level", "cause", "remedy"}


def test_doctor_failure_exits_1_with_fix_on_stdout(cli, examined):
    examined(FAULTS)
    done = cli("doctor")
    assert done.code == 1
    assert "FAIL  clock on h1: 10 min ahead\n  fix: sudo chronyc makestep\n" in done.out
    assert done.err == ""


def test_doctor_json_failure_exits_1(cli, examined):
    examined(FAULTS)
    done = cli("doctor", "--json")
    assert (done.code, done.json["ok"], done.json["worst"]) == (1, False, "fail")


def test_doctor_warning_exits_0(cli, examined):
    warning = Finding("clock", "h1", "warn", "2 s ahead")
    examined(Report(cluster="x", hosts=("h1",), checks=("clock",), findings=(warning,)))
    assert cli("doctor").code == 0


def test_doctor_passes_options_to_api(cli, examined):
    asked = examined(FAULTS)
    cli("doctor", "job.yaml", "-c", "lab", "--cluster-file", "f.yaml", "-n", "2", "-g", "4",
        "--set", "device=cuda", "--include", "h1", "--quick", "--only", "user, clock,")  # fmt: skip
    assert asked == [{
        "job": "job.yaml", "cluster": "lab", "clusters_file": "f.yaml", "nodes": "2", "gpus": 4,
        "settings": ("device=cuda",), "include": "h1", "exclude": None, "quick": True,
        "only": ["user", "clock"],
    }]  # fmt: skip


def test_doctor_fails_when_host_has_too_few_gpus_for_job(write_job, cli, no_gpus):
    job = write_job("device: cuda\ngpus_per_node: 2\n")
    done = cli("doctor", job, "--only", "gpus", "--json")
    (finding,) = done.json["findings"]
    assert finding["level"] == "fail"
    assert "2 needed" in finding["cause"]
    assert done.code == 1


def test_doctor_ignores_unset_secret_of_job(write_job, cli, monkeypatch):
    monkeypatch.delenv("NOT_THERE", raising=False)
    assert cli("doctor", write_job("secrets: [NOT_THERE]\n"), "--only", "shm").code == 0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--only", "clok"], "check 'clok' is unknown"),
        (["--cluster", "nope"], "cluster 'nope' is unknown"),
        (["nope.yaml"], "nope.yaml"),
        (["--gpus", "0"], "at least 1 rank"),
        (["--nodes", "x"], "neither a number nor MIN:MAX"),
        (["--include", "h1"], "has no hosts to choose from"),
    ],
)
def test_doctor_refuses_bad_arguments(refused, argv, words):
    assert words in refused("doctor", *argv)


def test_doctor_prints_error_and_hint_without_traceback(cli, monkeypatch):
    def fail(*_, **__):
        raise Unavailable("nothing works", hint="mend it")

    monkeypatch.setattr(api, "doctor", fail)
    done = cli("doctor")
    assert (done.code, done.out) == (125, "")
    assert done.err == "error: nothing works\n hint: mend it\n"


def test_doctor_list_names_every_check_without_examination(cli, monkeypatch):
    monkeypatch.setattr(api, "doctor", None)
    done = cli("doctor", "--list")
    everything = [(of, c) for of, checks in doctor.every_check().items() for c in checks]
    assert {of for of, _ in everything} == {"hosts", "kubernetes", "slurm"}
    for of, check in everything:
        line = next(line for line in done.out.splitlines() if check.purpose in line)
        assert line.startswith(f"{check.name} ")
        assert f" {of} " in line
        assert (" quick " in line) == check.quick
    listed = cli("doctor", "--list", "--json").json
    assert [(check["of"], check["name"]) for check in listed] == [
        (of, check.name) for of, check in everything
    ]


def test_doctor_progress_names_awaited_hosts_after_delay(cli, monkeypatch):
    from clusterkit.ui import spinner

    monkeypatch.setattr(spinner, "DELAY_SECONDS", 0.0)

    def slow(job=None, *, progress, **options):
        progress(1, ["h3", "h4", "h5"])
        for thread in threading.enumerate():
            if thread.name == "spinner":  # until it has told
                thread.join(30)
        return FAULTS

    monkeypatch.setattr(api, "doctor", slow)
    # Either before or after the first word of progress.
    assert cli("doctor").err in ("looking at h3-h5\n", "looking\n")


@pytest.mark.parametrize(
    ("phase", "waiting", "words"),
    [
        (1, ["h0", "h1", "h2", "h3"], "looking at h0-h3"),
        (1, ["h0", "h1"], "looking at h0-h3, waiting for h0, h1"),
        (2, ["h3"], "connecting h0-h3, waiting for h3"),
        (3, ["h3"], "cleaning up on h0-h3, waiting for h3"),
        (2, [], "evaluating"),
    ],
)
def test_doctor_progress_text_names_phase_all_hosts_and_awaited_hosts(phase, waiting, words):
    from clusterkit.cli.doctor import _phase_text

    assert _phase_text(phase, waiting, ["h0", "h1", "h2", "h3"]) == words


def test_doctor_honors_no_color_over_force_color(cli, examined, monkeypatch):
    examined(FAULTS)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" not in cli("doctor").out


def test_doctor_only_option_completes_check_names():
    from clusterkit.cli.doctor import _complete_check

    assert _complete_check(None, None, "gpu") == [
        "gpu-driver", "gpus", "gpu-processes", "gpu-diagnosis",
    ]  # fmt: skip
    assert _complete_check(None, None, "user,cl") == ["user,clock"]
