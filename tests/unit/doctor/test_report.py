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
def test_ranges_joins_consecutive_host_names(hosts, text):
    assert ranges(hosts) == text


def test_ranges_says_all_hosts_for_complete_list():
    assert ranges(HOSTS, HOSTS) == "all 64 hosts"
    assert ranges(HOSTS[:63], HOSTS) == "h0-h62"
    assert ranges(["h0", "h1"], ("h0", "h1")) == "h0, h1"


# ---------------------------------------------------------------- the table


def test_table_shows_64_agreeing_hosts_as_one_column():
    assert report().table() == (
        "           all 64 hosts\n"
        "reachable  ok            fine\n"
        "clock      ok            fine\n"
        "packages   ok            fine\n"
        "\n"
        "lab: 64 hosts, 3 checks: all is well"
    )


def test_table_gives_faulty_hosts_own_columns_and_states_fault_once():
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


def test_table_of_64_differing_hosts_fits_line_width():
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
def test_table_renders_at_any_width(width):
    found = report(Finding("clock", "h1", "fail", "c"), Finding("packages", "h2", "warn", "p"))
    assert found.table(width=width).splitlines()[1].startswith("reachable  ok")


def test_report_merges_faults_that_differ_only_in_host_name():
    found = report(
        *(
            Finding("reachable", host, "fail", f"host {host} does not answer", f"ssh {host} true")
            for host in HOSTS[3:10]
        )
    )
    table = found.table()
    assert "FAIL  reachable on h3-h9: host h3 does not answer\n  fix: ssh h3 true" in table
    assert table.count("does not answer") == 1


def test_report_merges_faults_with_remedy_that_names_all_hosts():
    remedy = "printf '%s' '10.0.0.1 h1' '10.0.0.2 h2' | sudo tee -a /etc/hosts"
    found = report(
        *(Finding("clock", host, "fail", "slow", remedy) for host in ("h1", "h2")),
        hosts=("h1", "h2"),
    )
    assert len(found.faults()) == 1


def test_report_leaves_host_name_within_word_unchanged():
    found = report(
        Finding("clock", "a", "fail", "a fault"), Finding("clock", "b", "fail", "a fault"),
        hosts=("a", "b"),
    )  # fmt: skip
    assert [(fault.cause, hosts) for fault, hosts in found.faults()] == [("a fault", ["a", "b"])]


def test_report_orders_failures_before_warnings_by_check():
    found = report(
        Finding("packages", "h1", "fail", "p"),
        Finding("reachable", "h2", "warn", "r"),
        Finding("clock", "h3", "fail", "c"),
    )
    assert [fault.check for fault, _ in found.faults()] == ["clock", "packages", "reachable"]


def test_table_lists_every_fault_of_one_check_on_one_host():
    found = report(Finding("clock", "h1", "warn", "one"), Finding("clock", "h1", "fail", "two"))
    table = found.table()
    assert "FAIL  clock on h1: two" in table
    assert "warn  clock on h1: one" in table
    row = next(line for line in table.splitlines() if line.startswith("clock"))
    assert "FAIL" in row
    assert "warn" not in row


def test_table_indents_multiline_remedy():
    found = report(Finding("clock", "h1", "fail", "c", "first\nsecond"))
    assert "\n  fix: first\n       second\n" in found.table()


def test_table_applies_given_style_to_levels():
    found = report(Finding("clock", "h1", "fail", "c"))
    table = found.table(style=lambda text, level: f"<{level}>{text}</>")
    assert "<fail>FAIL</>" in table
    assert "<ok>ok" in table


def test_report_without_findings_is_ok():
    empty = Report(cluster="x", hosts=(), checks=(), findings=())
    assert (empty.ok, empty.worst, refusal(empty)) == (True, "skip", None)
    assert empty.table().strip() == "x: 0 hosts, 0 checks: all is well"


# ---------------------------------------------------------------- for programs


def test_report_with_warning_is_ok_and_with_failure_is_not():
    assert report(Finding("clock", "h1", "warn", "c")).ok
    assert report(Finding("clock", "h1", "warn", "c")).worst == "warn"
    assert not report(Finding("clock", "h1", "fail", "c")).ok


def test_report_document_holds_every_finding():
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


def test_refusal_is_none_for_warnings():
    assert refusal(report(Finding("clock", "h1", "warn", "c"))) is None


def test_refusal_repeats_fault_and_remedy_of_table():
    found = report(Finding("packages", "h6", "fail", "torch 2.12.0", "pip install torch==2.13.0"))
    error = refusal(found)
    assert error.exit_code == EXIT_REFUSED
    assert error.message == "cluster lab failed its checks: packages on h6: torch 2.12.0"
    assert error.message.partition("fit: ")[2] in found.table()
    assert error.hint.splitlines()[0] == "h6: pip install torch==2.13.0"
    assert "clusterkit doctor --cluster lab" in error.hint
    assert "--no-doctor" in error.hint


@pytest.mark.parametrize("check", ["reachable", "host-key"])
def test_refusal_for_unreachable_host_or_key_exits_as_refused(check):
    found = report(Finding(check, "h6", "fail", "no"), checks=(check,))
    assert refusal(found).exit_code == EXIT_REFUSED


def test_refusal_truncates_long_fault_list():
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
def test_size_text_uses_binary_units(count, text):
    assert size_text(count) == text


def test_shortened_removes_control_characters_and_truncates():
    assert shortened("a\x1b[31mb\n\tc\0d\u2028e") == "a [31mb c d e"
    assert shortened("x" * 500, 20) == "x" * 17 + "..."
