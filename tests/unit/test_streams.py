"""Speaking with commands, and working on many hosts at once."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from clusterkit import execute
from clusterkit.errors import BadInput, SubmitFailed, Unavailable
from clusterkit.plan import Plan, Step
from clusterkit.transport import (
    Completed,
    LocalTransport,
    fan_out,
    in_order,
)

LOCAL = LocalTransport()


# ---------------------------------------------------------------- streams


def test_local_stream_writes_reads_and_returns_exit_code():
    with LOCAL.open("h", ["sh", "-c", 'read a; echo "$A $a"; cat; exit 4'], env={"A": "x y"}) as s:
        s.write(b"first\n")
        assert s.read(60) == b"x y first\n"
        s.write(b"\0second")
        assert s.read(60) == b"\0second"
        s.close_input()
        assert s.read(60) == b""
        assert s.exit_code(60) == 4


def test_stream_read_fails_when_command_prints_nothing():
    with (
        LOCAL.open("h0", ["sleep", "60"]) as stream,
        pytest.raises(SubmitFailed, match="host h0 no longer answers"),
    ):
        stream.read(0.05)


def test_stream_exit_code_fails_when_command_does_not_end():
    with (
        LOCAL.open("h0", ["sleep", "60"]) as stream,
        pytest.raises(SubmitFailed, match="h0 did not report how the command ended"),
    ):
        stream.exit_code(0.05)


def test_stream_collects_stderr_and_replaces_invalid_bytes():
    with LOCAL.open("h", ["sh", "-c", r"echo one >&2; echo out; printf 't\377wo\n' >&2"]) as stream:
        while stream.read(60):
            pass
        assert stream.exit_code(60) == 0
        assert stream.stderr == "one\nt\ufffdwo\n"


def test_stream_large_stderr_does_not_block_command():
    with LOCAL.open("h", ["sh", "-c", "head -c 1000000 /dev/zero >&2; echo done"]) as stream:
        assert stream.read(60) == b"done\n"
        assert len(stream.stderr) == 1_000_000


def test_stream_write_to_ended_command_is_ignored():
    with LOCAL.open("h", ["true"]) as stream:
        assert stream.exit_code(60) == 0
        stream.write(b"x" * (1 << 20))
        stream.close_input()
        stream.close_input()
        assert stream.read(60) == b""


def test_stream_open_of_missing_command_fails_naming_host():
    with pytest.raises(SubmitFailed, match="cannot start /nope on h0: No such file"):
        LOCAL.open("h0", ["/nope"])


def test_stream_close_kills_command_and_leaves_no_zombie():
    with LOCAL.open("h", ["sh", "-c", "trap '' TERM HUP; echo $$; sleep 60 >&2"]) as stream:
        pid = int(stream.read(60))
    assert not Path(f"/proc/{pid}").exists()


def test_stream_exit_code_of_killed_command_is_negative_signal():
    with LOCAL.open("h", ["sh", "-c", "echo $$; exec sleep 60"]) as stream:
        os.kill(int(stream.read(60)), signal.SIGKILL)
        assert stream.read(60) == b""
        assert stream.exit_code(60) == -signal.SIGKILL


# ---------------------------------------------------------------- many hosts


def test_fan_out_keeps_error_of_one_host_beside_results():
    def work(host):
        if host == "b":
            raise Unavailable("b does not answer")
        return host.upper()

    found = fan_out(["c", "b", "a"], work)
    assert list(found) == ["c", "b", "a"]
    assert (found["c"], found["a"]) == ("C", "A")
    assert isinstance(found["b"], Unavailable)


def test_fan_out_works_on_hosts_concurrently():
    begun = threading.Barrier(8, timeout=60)
    assert set(fan_out([f"h{n}" for n in range(8)], lambda host: begun.wait() >= 0).values()) == {
        True
    }


def test_fan_out_respects_concurrency_limit():
    lock, now, most = threading.Lock(), [0], [0]

    def work(host):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.002)
        with lock:
            now[0] -= 1

    fan_out([f"h{n}" for n in range(40)], work, limit=3)
    assert most[0] <= 3


def test_fan_out_raises_programming_error():
    with pytest.raises(ZeroDivisionError):
        fan_out(["a", "b"], lambda host: 1 // 0)


def test_fan_out_handles_no_host_and_runs_one_host_inline():
    assert fan_out([], str.upper) == {}
    here = threading.get_ident()
    assert fan_out(["a"], lambda host: threading.get_ident() == here) == {"a": True}


def test_in_order_returns_results_without_errors():
    assert in_order({"a": 1, "b": 2}) == {"a": 1, "b": 2}
    assert in_order({}) == {}


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ([], "down"),
        (["x"], "down (and 1 further host: x)"),
        (["x", "y", "z"], "down (and 3 further hosts: x, y, z)"),
        (["x", "y", "z", "w"], "down (and 4 further hosts: x, y, z, ...)"),
    ],
)
def test_in_order_raises_first_error_and_names_further_hosts(others, said):
    errors = {"first": BadInput("down", hint="up")} | {n: Unavailable(n) for n in others}
    with pytest.raises(BadInput) as error:
        in_order({"well": 1, **errors})
    assert error.value.message == said
    assert error.value.hint == "up"


# ---------------------------------------------------------------- ports


def test_free_port_differs_despite_equal_random_seed():
    ports = set()
    for _ in range(4):
        random.seed(1)
        ports.add(LOCAL.free_port("h"))
    assert len(ports) > 1


# ---------------------------------------------------------------- steps on several hosts


class Slow:
    """Hosts whose starts wait for each other: only at once can they succeed."""

    def __init__(self, hosts, away=()):
        self.together = threading.Barrier(hosts, timeout=60)
        self.away = away
        self.order = []

    def start(self, host, argv, *, env=None):
        if host in self.away:
            raise Unavailable(f"host {host} does not answer")
        if not self.away:
            self.together.wait()
        self.order.append((host, argv[0]))

    def run(self, host, argv, *, env=None, timeout=None, stdin=b""):
        self.order.append((host, argv[0]))
        return Completed(tuple(argv), 0, "", "")


def plan_of(*steps):
    return Plan(
        run_id="r", run_dir="/r", backend="ssh", summary="", nodes=1, world_size=1, steps=steps
    )


def start(host, word="node"):
    return Step(kind="start", host=host, argv=(word,))


def test_run_steps_starts_hosts_concurrently_and_each_host_in_order():
    transport, records = Slow(3), []
    steps = [start(f"h{n}", f"{n}{k}") for k in (0, 1) for n in range(3)]
    execute.run_steps(
        plan_of(*steps), transport, record=lambda step, outcome: records.append((step, outcome))
    )
    assert sorted(transport.order) == sorted((step.host, step.argv[0]) for step in steps)
    for number in range(3):
        words = [word for host, word in transport.order if host == f"h{number}"]
        assert words == [f"{number}0", f"{number}1"]
    assert {outcome for _, outcome in records} == {"started"}
    assert len(records) == len(steps)


def test_run_steps_keeps_run_steps_before_and_after_starts():
    transport = Slow(2)
    run = Step(kind="run", host="h0", argv=("before",))
    after = Step(kind="run", host="h1", argv=("after",))
    execute.run_steps(plan_of(run, start("h0"), start("h1"), after), transport)
    assert transport.order[0] == ("h0", "before")
    assert transport.order[-1] == ("h1", "after")


def test_run_steps_starts_other_hosts_and_names_unreachable_ones():
    transport, records = Slow(1, away=("h1", "h2")), []
    steps = [start(f"h{n}") for n in range(4)]
    with pytest.raises(Unavailable) as error:
        execute.run_steps(
            plan_of(*steps),
            transport,
            record=lambda step, outcome: records.append((step.host, outcome)),
        )
    assert error.value.message == "host h1 does not answer (and 1 further host: h2)"
    assert sorted(transport.order) == [("h0", "node"), ("h3", "node")]
    assert dict(records) == {
        "h0": "started",
        "h1": "host h1 does not answer",
        "h2": "host h2 does not answer",
        "h3": "started",
    }
