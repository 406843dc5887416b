"""All checks, and those of the connection and clocks."""

import ipaddress
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterkit import errors
from clusterkit.doctor.base import LEVELS
from clusterkit.doctor.hosts.base import Output
from clusterkit.doctor.hosts.checks import CHECKS
from clusterkit.doctor.hosts.checks.system import agreed, offset
from clusterkit.doctor.hosts.examine import judge
from clusterkit.doctor.hosts.helpers import most_common, parsed_address
from tests.unit.doctor.checks.answers import silent
from tests.unit.doctor.conftest import make_answer, make_subject, needs, raw

LOOKING = [check for check in CHECKS if check.collectors]
"""The others judge the connection alone."""
COLLECTORS = {each.name: each for check in CHECKS for each in check.collectors}


# ---------------------------------------------------------------- all of them


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_every_check_has_valid_name_and_purpose(check):
    assert re.fullmatch(r"[a-z][a-z-]*", check.name)
    assert check.purpose.endswith(".")
    assert "\n" not in check.purpose


def test_check_names_are_unique():
    assert len({check.name for check in CHECKS}) == len(CHECKS)


@pytest.mark.parametrize("check", LOOKING, ids=lambda check: check.name)
@pytest.mark.parametrize(
    ("output", "level", "words"),
    [
        (Output(timed_out="D"), "fail", "a disk or a mount does not answer"),
        (Output(timed_out="S"), "warn", "the host is slow"),
        (Output(error="OSError: [Errno 24] Too many open files"), "warn", "Too many open files"),
        (Output(value=msgspec.Raw(b'"gar')), "warn", "invalid output"),
        (Output(value=msgspec.Raw(b'"text"')), "warn", "invalid output"),
        (None, "warn", "truncated"),
    ],
    ids=["hangs", "slow", "error", "torn", "of another shape", "nothing"],
)
def test_every_check_reports_missing_or_broken_output(check, output, level, words):
    subject = make_subject(2, shared="/shared", needs=needs(deepspeed=True, device="cuda"))
    outputs = {} if output is None else dict.fromkeys(COLLECTORS, output)
    findings = judge(check, {"h0": make_answer(outputs), "h1": make_answer(outputs)}, subject)
    told = [finding for finding in findings if words in finding.cause]
    assert told
    assert {finding.level for finding in told} == {level}
    assert not [finding for finding in findings if finding.level == "ok"]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_checks_skip_unreachable_host_except_reachable_which_fails(check):
    subject = make_subject(2, shared="/shared", needs=needs(deepspeed=True))
    dead = make_answer(error=errors.Unavailable("no"), began=None, ended=None, interpreter="")
    findings = judge(check, {"h0": dead, "h1": dead}, subject)
    levels = {finding.level for finding in findings}
    assert levels == ({"fail"} if check.name == "reachable" else {"skip"})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.text(max_size=20)
    | st.sampled_from(["10.0.0.1", "::1", "0x40", "²", "1,2,3,4", "index, uuid, name"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)  # fmt: skip


@given(value=JSON, data=st.data())
def test_judge_handles_arbitrary_collector_values(value, data):
    check = data.draw(st.sampled_from(CHECKS))
    subject = make_subject(
        data.draw(st.integers(1, 3)),
        shared="/shared",
        slots=data.draw(st.sampled_from([None, 1, 8])),
        needs=needs(deepspeed=True, device=data.draw(st.sampled_from(["auto", "cuda"]))),
    )
    hosts = [machine.name for machine in subject.hosts]
    answers = {
        host: make_answer({name: Output(raw(value)) for name in COLLECTORS}) for host in hosts
    }
    for finding in judge(check, answers, subject):
        assert finding.level in LEVELS
        assert finding.host in hosts
        assert finding.level in ("ok", "skip") or finding.cause


def test_most_common_prefers_first_among_equals():
    assert most_common([1, 2, 2], 0) == 2
    assert most_common([1, 2], 0) == 1
    assert most_common([], 0) == 0


@pytest.mark.parametrize(
    ("text", "address"),
    [("10.0.0.1", "10.0.0.1"), ("::ffff:10.0.0.1", "10.0.0.1"), ("fe80::1%eth0", "fe80::1"),
     ("h1", None), ("", None), ("10.0.0", None), ("10.0.0.256", None)],
)  # fmt: skip
def test_parsed_address_normalizes_ip_and_rejects_names(text, address):
    assert parsed_address(text) == (None if address is None else ipaddress.ip_address(address))


# ---------------------------------------------------------------- the connection


def test_reachable_fails_with_transport_error_and_hint(judged):
    found = judged("reachable", make_subject(2), h1=silent("host h1 refuses", "is sshd running?"))
    assert found["h0"].level == "ok"
    assert (found["h1"].level, found["h1"].cause) == ("fail", "host h1 refuses")
    assert found["h1"].remedy == "is sshd running?"


def test_reachable_warns_of_host_slow_to_begin(judged):
    slow = make_answer(sent=0.0, received=12.0, began=11.0, ended=11.5)
    busy = make_answer(sent=0.0, received=12.0, began=0.5, ended=11.5)
    found = judged("reachable", make_subject(2), h0=slow, h1=busy)
    assert found["h0"].level == "warn"
    assert found["h1"].level == "ok"


def test_changed_host_key_fails_host_key_check_only(judged):
    subject = make_subject(3)
    changed = silent("host h1: its host key has changed: known is A, now it offers B", "remove it")
    answers = {"h1": changed, "h2": silent("host h2 does not answer")}
    keys = judged("host-key", subject, **answers)
    assert keys["h0"].level == "ok"
    assert (keys["h1"].level, keys["h1"].remedy) == ("fail", "remove it")
    assert keys["h2"].level == "skip"
    assert judged("reachable", subject, **answers)["h1"].level == "skip"


def test_host_key_check_skips_without_ssh(judged):
    found = judged("host-key", make_subject(1, over_ssh=False))
    assert (found["h0"].level, found["h0"].cause) == ("skip", "not reached over SSH")


USER = {
    "user": "ann", "uid": 1000, "home": "/home/ann", "home_exists": True, "home_writable": True,
    "sudo": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "level", "words"),
    [
        ({}, "ok", "ann, no sudo"),
        ({"sudo": "bob"}, "warn", "through sudo by bob"),
        ({"user": ""}, "fail", "has no passwd entry"),
        ({"home_exists": False}, "warn", "is not there"),
        ({"home_writable": False}, "warn", "cannot be written to"),
        ({"uid": 1001}, "fail", "has uid 1001, but 1000"),
    ],
)
def test_user_check_judges_sudo_home_and_uid(judged, changed, level, words):
    found = judged("user", make_subject(3, shared="/shared"), USER, h2=USER | changed)
    assert found["h0"].level == "ok"
    found.says("h2", level, words)


def test_user_check_accepts_other_uid_without_shared_folder(judged):
    assert judged("user", make_subject(2), USER, h1=USER | {"uid": 1001})["h1"].level == "ok"


def test_user_check_accepts_local_sudo(judged):
    local = make_subject(1, over_ssh=False)
    assert judged("user", local, USER | {"sudo": "bob"})["h0"].level == "ok"


SYSTEM = {"machine": "x86_64", "kernel": "6.1", "system": "debian 12", "libc": "glibc 2.36"}


@pytest.mark.parametrize(
    ("changed", "levels"),
    [
        ({}, ["ok"]),
        ({"machine": "aarch64"}, ["fail"]),
        ({"kernel": "5.15"}, ["warn"]),
        ({"system": "ubuntu 24.04", "libc": "glibc 2.39"}, ["warn", "warn"]),
        ({"system": "linux", "libc": "not glibc"}, ["warn", "warn"]),
    ],
)
def test_system_check_reports_differing_host(judged, changed, levels):
    found = judged("system", make_subject(3), SYSTEM, h1=SYSTEM | changed)
    assert found.levels() == {"h0": ["ok"], "h1": levels, "h2": ["ok"]}


# ---------------------------------------------------------------- clocks


def clocked(ahead, took=0.2, worked=0.0):
    """A host whose clock is ahead of ours, whose answer took so long, of which it worked."""
    way = (took - worked) / 2
    return make_answer(
        sent=1000.0, received=1000.0 + took,
        began=1000.0 + ahead + way, ended=1000.0 + ahead + way + worked,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ahead", "levels", "fields"),
    [
        ((0, 0.3, -0.4), ["ok", "ok", "ok"], {}),
        ((600, 0), ["fail", "ok"], {}),  # our own clock decides
        ((600, 600.1), ["ok", "ok"], {}),  # it is our own that is off
        ((600,), ["warn"], {}),  # nobody to disagree with
        ((0, 3, 0), ["ok", "warn", "ok"], {}),
        ((0, 3, 0), ["ok", "fail", "ok"], {"elastic": True}),
    ],
)
def test_clock_check_finds_wrong_host_among_disagreeing_clocks(judged, ahead, levels, fields):
    answers = {f"h{i}": clocked(seconds) for i, seconds in enumerate(ahead)}
    found = judged("clock", make_subject(len(ahead), needs=needs(**fields)), **answers)
    assert [finding.level for finding in found.findings] == levels


@pytest.mark.parametrize(
    ("ahead", "level", "words"),
    [(600, "fail", "10 min ahead"), (-600, "fail", "10 min behind"), (3, "warn", "2.9 s ahead"),
     (86400 * 365, "fail", "8760 h ahead"), (-45, "fail", "45 s behind")],
)  # fmt: skip
def test_clock_check_names_host_and_offset(judged, ahead, level, words):
    found = judged("clock", make_subject(3), h0=clocked(0), h1=clocked(ahead), h2=clocked(0))
    assert found["h0"].level == found["h2"].level == "ok"
    assert found["h1"].level == level
    assert f"at least {words}" in found["h1"].cause


def test_clock_check_accepts_slow_answers(judged):
    late = make_answer(sent=1000.0, received=1030.0, began=1029.0, ended=1029.5)
    early = make_answer(sent=1000.0, received=1030.0, began=1000.5, ended=1001.0)
    found = judged("clock", make_subject(3), h0=clocked(0), h1=late, h2=early)
    assert {finding.level for finding in found.findings} == {"ok"}


def test_clock_check_subtracts_collector_run_time(judged):
    found = judged("clock", make_subject(3), clocked(0), h1=clocked(3, took=30.2, worked=30))
    assert found["h1"].level == "warn"


@pytest.mark.parametrize("ended", [None, 1000.1])
def test_clock_offset_has_lower_and_upper_bound(ended):
    answer = make_answer(sent=1000.0, received=1000.2, began=1000.1, ended=ended)
    assert offset(answer) == pytest.approx((-0.1, 0.1))


def test_clock_offset_is_none_when_host_never_began():
    assert offset(make_answer(began=None)) is None


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(0, 100)), max_size=8))
def test_agreed_offset_lies_within_some_clock_bounds(spans):
    spans = [(low, low + width) for low, width in spans]
    value = agreed(spans)
    assert value == 0.0 or any(low <= value <= high for low, high in spans)
