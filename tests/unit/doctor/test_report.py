"""What was found, for people, for programs, and as the words of a refused submit."""

import msgspec
import pytest

from clusterkit.doctor.base import Finding, shortened
from clusterkit.doctor.hosts.helpers import size_text
from clusterkit.doctor.report import Report, ranges, refusal
from clusterkit.errors import EXIT_REFUSED

HOSTS = tuple(f"h{i}" for i in range(64))


def report(*findings, hosts=HOSTS, checks=("reachable", "clock", "packages")):
    """Every check ok on every host, but where a finding says otherwise."""
    told = {(finding.check, finding.host) for finding in findings}
    rest = [
        Finding(check, host, "ok", "fine")
        for check in checks
        for host in hosts
        if (check, host) not in told
    ]
    return Report(cluster="lab", hosts=hosts, checks=checks, findings=(*findings, *rest))


# ---------------------------------------------------------------- ranges


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ([], ""),
        (["a"], "a"),
        (["h1", "h2"], "h1, h2"),
        (["h1", "h2", "h3"], "h1-h3"),
        (["h0", "h2", "h3", "h4", "h9"], "h0, h2-h4, h9"),
        (["node08", "node09", "node10"], "node08-node10"),
        (["h8", "h9", "h10"], "h8-h10"),
        (["h08", "h9", "h10"], "h08, h9, h10"),
        (["gpu1.lab", "gpu2.lab", "gpu3.lab"], "gpu1.lab-gpu3.lab"),
        (["a1", "b2", "c3"], "a1, b2, c3"),
        (["10.0.0.1", "10.0.0.2", "10.0.0.3"], "10.0.0.1-10.0.0.3"),
        (["h1", "h1", "h1"], "h1"),
        (["h3", "h2", "h1"], "h3, h2, h1"),
        (["", "x", "²"], ", x, ²"),
    ],
)
def test_names_that_count_up_become_ranges(hosts, text):
    assert ranges(hosts) == text


def test_all_of_them_are_called_so():
    assert ranges(HOSTS, HOSTS) == "all 64 hosts"
    assert ranges(HOSTS[:63], HOSTS) == "h0-h62"
    assert ranges(["h0", "h1"], ("h0", "h1")) == "h0, h1"


# ---------------------------------------------------------------- the table


def test_64_hosts_that_agree_are_one_column():
    assert report().table() == (
        "           all 64 hosts\n"
        "reachable  ok            fine\n"
        "clock      ok            fine\n"
        "packages   ok            fine\n"
        "\n"
        "lab: 64 hosts, 3 checks: all is well"
    )


def test_hosts_with_a_fault_stand_beside_the_others_and_the_fault_is_told_once():
    found = report(
        Finding("packages", "h6", "fail", "torch 2.12.0", "pip install torch==2.13.0"),
        Finding("packages", "h7", "fail", "torch 2.12.0", "pip install torch==2.13.0"),
        Finding("clock", "h9", "warn", "3 s behind"),
    )
    assert found.table() == (
        "           h0-h5, h8, h10-h63  h6, h7  h9\n"
        "reachable  ok                  ok      ok    fine\n"
        "clock      ok                  ok      warn\n"
        "packages   ok                  FAIL    ok\n"
        "\n"
        "FAIL  packages on h6, h7: torch 2.12.0\n"
        "  fix: pip install torch==2.13.0\n"
        "\n"
        "warn  clock on h9: 3 s behind\n"
        "\n"
        "lab: 64 hosts, 3 checks: 1 check fails, 1 check warns"
    )


def test_64_hosts_of_which_no_two_agree_still_fit_the_line():
    checks = tuple(f"check-{i}" for i in range(64))
    found = report(
        *(Finding(checks[i], f"h{i}", "fail", f"cause {i}") for i in range(64)), checks=checks
    )
    lines = found.table().splitlines()
    assert max(map(len, lines[:65])) <= 100
    assert lines[0].endswith(" others")
    for i in range(64):
        assert f"FAIL  check-{i} on h{i}: cause {i}" in lines


@pytest.mark.parametrize("width", [1, 20, 40, 80, 200])
def test_any_width_gives_a_table(width):
    found = report(Finding("clock", "h1", "fail", "c"), Finding("packages", "h2", "warn", "p"))
    assert found.table(width=width).splitlines()[1].startswith("reachable  ok")


def test_the_same_words_about_another_host_are_the_same_fault():
    found = report(
        *(
            Finding("reachable", host, "fail", f"host {host} does not answer", f"ssh {host} true")
            for host in HOSTS[3:10]
        )
    )
    table = found.table()
    assert "FAIL  reachable on h3-h9: host h3 does not answer\n  fix: ssh h3 true" in table
    assert table.count("does not answer") == 1


def test_a_remedy_that_names_all_hosts_does_not_part_them():
    remedy = "printf '%s' '10.0.0.1 h1' '10.0.0.2 h2' | sudo tee -a /etc/hosts"
    found = report(
        *(Finding("clock", host, "fail", "slow", remedy) for host in ("h1", "h2")),
        hosts=("h1", "h2"),
    )
    assert len(found.faults()) == 1


def test_a_host_s_name_inside_another_word_is_no_problem():
    found = report(
        Finding("clock", "a", "fail", "a fault"), Finding("clock", "b", "fail", "a fault"),
        hosts=("a", "b"),
    )  # fmt: skip
    assert [(fault.cause, hosts) for fault, hosts in found.faults()] == [("a fault", ["a", "b"])]


def test_failures_come_before_warnings_in_the_order_of_the_checks():
    found = report(
        Finding("packages", "h1", "fail", "p"),
        Finding("reachable", "h2", "warn", "r"),
        Finding("clock", "h3", "fail", "c"),
    )
    assert [fault.check for fault, _ in found.faults()] == ["clock", "packages", "reachable"]


def test_several_faults_of_one_check_on_one_host_are_all_told():
    found = report(Finding("clock", "h1", "warn", "one"), Finding("clock", "h1", "fail", "two"))
    table = found.table()
    assert "FAIL  clock on h1: two" in table
    assert "warn  clock on h1: one" in table
    row = next(line for line in table.splitlines() if line.startswith("clock"))
    assert "FAIL" in row
    assert "warn" not in row


def test_a_remedy_of_several_lines_stays_below_its_mark():
    found = report(Finding("clock", "h1", "fail", "c", "first\nsecond"))
    assert "\n  fix: first\n       second\n" in found.table()


def test_colours_are_given_where_they_are_asked_for():
    found = report(Finding("clock", "h1", "fail", "c"))
    table = found.table(style=lambda text, level: f"<{level}>{text}</>")
    assert "<fail>FAIL</>" in table
    assert "<ok>ok" in table


def test_a_report_without_findings_is_well():
    empty = Report(cluster="x", hosts=(), checks=(), findings=())
    assert (empty.ok, empty.worst, refusal(empty)) == (True, "skip", None)
    assert empty.table().strip() == "x: 0 hosts, 0 checks: all is well"


# ---------------------------------------------------------------- for programs


def test_warnings_are_no_failure():
    assert report(Finding("clock", "h1", "warn", "c")).ok
    assert report(Finding("clock", "h1", "warn", "c")).worst == "warn"
    assert not report(Finding("clock", "h1", "fail", "c")).ok


def test_the_document_holds_every_finding():
    found = report(Finding("clock", "h1", "fail", "cause", "remedy"), hosts=("h0", "h1"))
    document = msgspec.json.decode(msgspec.json.encode(found.document()))
    assert document["ok"] is False
    assert document["worst"] == "fail"
    assert document["cluster"] == "lab"
    assert document["hosts"] == ["h0", "h1"]
    assert document["checks"] == ["reachable", "clock", "packages"]
    assert {
        "check": "clock", "host": "h1", "level": "fail", "cause": "cause", "remedy": "remedy",
    } in document["findings"]  # fmt: skip
    assert len(document["findings"]) == 6


# ---------------------------------------------------------------- refusals


def test_nothing_is_refused_for_a_warning():
    assert refusal(report(Finding("clock", "h1", "warn", "c"))) is None


def test_a_submit_is_refused_with_the_same_words():
    found = report(Finding("packages", "h6", "fail", "torch 2.12.0", "pip install torch==2.13.0"))
    error = refusal(found)
    assert error.exit_code == EXIT_REFUSED
    assert error.message == "cluster lab failed its checks: packages on h6: torch 2.12.0"
    assert error.message.partition("fit: ")[2] in found.table()
    assert error.hint.splitlines()[0] == "h6: pip install torch==2.13.0"
    assert "clusterkit doctor --cluster lab" in error.hint
    assert "--no-doctor" in error.hint


@pytest.mark.parametrize("check", ["reachable", "host-key"])
def test_a_host_that_does_not_answer_is_no_bad_input(check):
    found = report(Finding(check, "h6", "fail", "no"), checks=(check,))
    assert refusal(found).exit_code == EXIT_REFUSED


def test_a_refusal_does_not_fill_the_screen():
    found = report(*(Finding("clock", host, "fail", f"{host}: x{host}y") for host in HOSTS[:3]),
                   *(Finding("packages", host, "fail", f"cause {i}") for i, host in
                     enumerate(HOSTS)))  # fmt: skip
    error = refusal(found)
    assert len(error.message.splitlines()) == 6
    assert error.message.endswith("and 60 more")


# ---------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (512 << 20, "512 MiB"),
     (3 << 29, "1.5 GiB"), (10 << 40, "10 TiB")],
)  # fmt: skip
def test_bytes_as_people_say_them(count, text):
    assert size_text(count) == text


def test_control_characters_do_not_reach_the_terminal():
    assert shortened("a\x1b[31mb\n\tc\0d\u2028e") == "a [31mb c d e"
    assert shortened("x" * 500, 20) == "x" * 17 + "..."
