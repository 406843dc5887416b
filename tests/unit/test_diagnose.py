"""Who failed first, and why: told from exit codes and log lines alone."""

import json
import signal

import pytest

from clusterkit.agent.failure import shell_code
from clusterkit.backends.node_status import observed
from clusterkit.output.diagnose import PORT_TAKEN, diagnose
from clusterkit.run.logs import LogLine
from clusterkit.run.status import NodeStatus, RankExit, State

VALUE_ERROR = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
ValueError: the loss is not finite"""
PEER_GONE = """\
Traceback (most recent call last):
  File "train.py", line 9, in <module>
    dist.all_reduce(x)
RuntimeError: [/pytorch/third_party/gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:4321"""


def node(number, code=1, state=State.FAILED, **more):
    given = {"host": "h", "ended_at": 10.0} | more
    return NodeStatus(node=number, state=state, exit_code=code, **given)


def said(node, rank, at, text, prefix=""):
    return [LogLine(at, node, rank, prefix + line) for line in text.splitlines()]


def torchrun_says(node, code, local, at):
    text = f"E1121 failed (exitcode: {code}) local_rank: {local} (pid: 77) of binary: sh"
    return [LogLine(at, node, None, text)]


def in_order(*blocks):
    return sorted((line for block in blocks for line in block), key=lambda line: line.time)


def test_rank_ended_by_sigterm_is_blamed_before_its_disconnected_peer():
    lines = said(0, 0, 1.0, PEER_GONE)
    lines += said(1, 2, 1.0, PEER_GONE)
    ends = [RankExit(0, 1, -15, 1.1, asked=False), RankExit(1, 2, 1, 1.05)]
    found = diagnose([node(0), node(1)], lines, rank_exits=ends, nproc_per_node=2)
    assert (found.rank, found.cause) == (1, "SIGTERM: the rank was ended by this signal")


def test_unasked_exit_on_stopped_node_beats_earlier_peer_error():
    def ended(code, reason, *ends):
        processes = [
            {"rank": rank, "exit_code": code, "at": at, "asked": asked}
            for rank, code, at, asked in ends
        ]
        return json.dumps({"exit_code": code, "reason": reason, "processes": processes}).encode()

    nodes = [node(0, 7, State.CANCELLED), node(1)]
    exits = {0: ended(7, "stopped: node 1 failed", (1, 7, 1.2, False), (0, -15, 1.3, True)),
             1: ended(1, None, (2, 1, 1.0, False))}  # fmt: skip
    seen = observed(nodes, exits)
    lines = said(1, 2, 0.9, PEER_GONE)
    found = diagnose(nodes, lines, rank_exits=seen.rank_exits, nproc_per_node=2)
    assert (found.rank, found.exit_code) == (1, 7)


def test_rank_with_exception_is_blamed_with_traceback():
    found = diagnose([node(0)], in_order(said(0, 1, 1.0, VALUE_ERROR)), nproc_per_node=2)
    assert (found.node, found.rank, found.exit_code) == (0, 1, 1)
    assert found.cause == "ValueError: the loss is not finite"
    assert found.traceback == VALUE_ERROR


@pytest.mark.parametrize(
    ("told", "hint"),
    [
        ("rank 3 was stopped (SIGSTOP)", "kill -CONT resumes a stopped process"),
        ("stopped by SIGTERM from process 7 of user 0 (bash)", None),
    ],
)
def test_stopped_node_is_blamed_before_rank_that_timed_out_waiting(told, hint):
    waited = VALUE_ERROR.replace("ValueError: the loss is not finite", "RuntimeError: Timed out "
                                 "waiting 30000ms for recv operation to complete")  # fmt: skip
    ended = json.dumps({"exit_code": 137, "causes": [told]}).encode()
    nodes = [node(0), node(1, 137, State.CANCELLED)]
    lines = in_order(said(0, 0, 1.0, waited), torchrun_says(0, 1, 0, 1.5))
    found = diagnose(nodes, lines, causes=observed(nodes, {1: ended}).causes)
    assert (found.node, found.rank, found.exit_code) == (1, None, 137)
    assert (found.cause, found.hint) == (told, hint)


def test_traceback_omits_torch_rank_prefix():
    lines = said(0, 1, 1.0, VALUE_ERROR, prefix="[rank1]: ")
    assert diagnose([node(0)], lines).traceback == VALUE_ERROR


def test_failure_before_rejoin_of_lost_nodes_is_not_blamed():
    again = "all 2 nodes have joined; starting again"
    lines = in_order(
        said(0, 0, 1.0, VALUE_ERROR.replace("the loss", "node 1")),
        torchrun_says(0, 1, 0, 1.5),
        [LogLine(5.0, 0, None, again), LogLine(5.0, 1, None, again)],
        said(1, 1, 9.0, VALUE_ERROR),
        torchrun_says(1, 3, 0, 9.5),
    )
    found = diagnose([node(0), node(1, 3)], lines)
    assert (found.node, found.rank, found.exit_code) == (1, 1, 3)
    assert found.cause.endswith("ValueError: the loss is not finite")


def test_peer_errors_are_not_blamed_even_when_logged_first():
    lines = in_order(
        said(0, 0, 1.0, PEER_GONE),
        said(1, 2, 1.1, VALUE_ERROR),
        said(0, 1, 1.2, PEER_GONE),
        torchrun_says(0, 1, 0, 2.0),
        torchrun_says(1, 1, 0, 2.0),
    )
    found = diagnose([node(0), node(1)], lines, nproc_per_node=2)
    assert (found.node, found.rank) == (1, 2)
    assert found.cause.startswith("ValueError")


@pytest.mark.parametrize(
    "echo",
    [
        "RuntimeError: Connection reset by peer",
        "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 3",
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
        "torch.distributed.DistStoreError: wait timeout",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "ConnectionResetError",
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 3 got signal: 15",
    ],
)
def test_known_peer_errors_are_not_blamed(echo):
    block = f"Traceback (most recent call last):\n  File x\n{echo}"
    lines = in_order(said(0, 0, 1.0, block), said(0, 1, 2.0, VALUE_ERROR))
    assert diagnose([node(0)], lines, nproc_per_node=2).rank == 1


def test_truncated_traceback_is_not_blamed_when_another_node_has_reason():
    cut_off = "\n".join(PEER_GONE.splitlines()[:2])
    stopped = node(0, 143, reason="stopped by SIGTERM from process 7 of user 0 (bash)")
    found = diagnose(
        [stopped, node(1)], said(1, 2, 1.0, cut_off), rank_exits=[RankExit(1, 2, 1, 1.1)]
    )
    assert (found.node, found.cause) == (0, stopped.reason)


def test_earliest_peer_error_is_blamed_without_other_cause():
    lines = in_order(said(0, 1, 2.0, PEER_GONE), said(0, 0, 1.0, PEER_GONE))
    assert diagnose([node(0)], lines, nproc_per_node=2).rank == 0


def test_chained_exception_is_kept_whole_and_named_by_last():
    block = (
        "Traceback (most recent call last):\n  File a\nKeyError: 'x'\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n  File b\nRuntimeError: no such key"
    )
    found = diagnose([node(0)], said(0, 0, 1.0, block))
    assert found.cause == "RuntimeError: no such key"
    assert found.traceback == block


def test_survived_exception_is_replaced_by_fatal_one():
    lines = in_order(
        said(0, 0, 1.0, "Traceback (most recent call last):\n  File a\nKeyError: 'survived'"),
        said(0, 0, 2.0, "going on"),
        said(0, 0, 3.0, VALUE_ERROR),
    )
    assert diagnose([node(0)], lines).traceback == VALUE_ERROR


def test_survived_exception_is_not_blamed_when_other_rank_was_killed():
    lines = in_order(
        said(0, 0, 1.0, "Traceback (most recent call last):\n  File a\nKeyError: 'survived'"),
        said(0, 0, 2.0, "going on for an hour"),
        torchrun_says(0, -9, 1, 3600.0),
    )
    found = diagnose([node(0)], lines, nproc_per_node=2)
    assert found.rank == 1
    assert "SIGKILL" in found.cause


def test_torchrun_report_names_rank_of_later_node():
    found = diagnose([node(0), node(1)], torchrun_says(1, -9, 1, 2.0), nproc_per_node=4)
    assert (found.node, found.rank, found.exit_code) == (1, 5, 137)


def test_deepspeed_report_goes_with_first_traceback_of_node():
    lines = in_order(
        said(0, 0, 1.0, VALUE_ERROR),
        [LogLine(2.0, 0, None, "[2026] [ERROR] [launch.py:341] exits with return code = 7")],
    )
    assert (found := diagnose([node(0)], lines)).rank == 0
    assert found.exit_code == 7


def test_deepspeed_report_does_not_override_known_rank_exit():
    lines = in_order(
        said(0, 0, 1.0, "Traceback (most recent call last):\n  File a\nKeyError: 'survived'"),
        [LogLine(9.0, 0, None, "[2026] [ERROR] [launch.py:341] exits with return code = 7")],
    )
    ends = [RankExit(0, 1, 7, 8.0)]
    found = diagnose([node(0)], lines, rank_exits=ends, nproc_per_node=2)
    assert (found.rank, found.exit_code, found.cause) == (1, 7, "exit code 7")


def test_deepspeed_report_without_traceback_blames_node():
    lines = [LogLine(2.0, 0, None, "exits with return code = -9")]
    found = diagnose([node(0)], lines)
    assert (found.node, found.rank, found.exit_code) == (0, None, 137)


def test_rank_exit_without_exception_quotes_last_output():
    lines = said(0, 0, 1.0, "disk check failed")
    found = diagnose([node(0, 3)], lines, rank_exits=[RankExit(0, 0, 3, 2.0)])
    assert (found.rank, found.exit_code) == (0, 3)
    assert found.cause == "exit code 3; last output: disk check failed"


def test_rank_asked_to_end_is_not_first_failure():
    ends = [RankExit(0, 0, -15, 1.0), RankExit(0, 1, 5, 2.0)]
    found = diagnose([node(0)], [], rank_exits=ends, nproc_per_node=2)
    assert (found.rank, found.exit_code) == (1, 5)


TIMED_OUT = PEER_GONE.replace(
    "Connection closed by peer", "Application timeout caused pair closure"
)
BARE_ECHO = "RuntimeError: Timed out waiting 1800000ms for recv operation to complete"


@pytest.mark.parametrize(
    ("text", "early"),
    [(PEER_GONE, "rank 1"), (TIMED_OUT, "rank 1"), (BARE_ECHO, "rank 1"),
     (PEER_GONE, "ranks 1, 3"), (VALUE_ERROR, None)],
)  # fmt: skip
def test_hint_names_ranks_that_exited_0_while_another_waited(text, early):
    # Rank 2 was asked to end, rank 4 ended after the failure.
    others = [RankExit(1, 2, 0, 0.9, asked=True), RankExit(1, 4, 0, 1.6, asked=False),
              RankExit(0, 0, 1, 1.5, asked=False)]  # fmt: skip
    zeros = [RankExit(0, 1, 0, 0.9, asked=False)]
    zeros += [RankExit(1, 3, 0, 0.8, asked=False)] if early == "ranks 1, 3" else []
    lines = said(0, 0, 1.0, text)
    nodes = [node(0), node(1, state=State.CANCELLED)]
    found = diagnose(nodes, lines, rank_exits=iter([*zeros, *others]))
    assert found.rank == 0
    if early is None:
        assert "exited with code 0" not in (found.hint or "")
    else:
        assert (found.hint or "").startswith(f"{early} exited with code 0 before")


def test_hint_names_exited_rank_of_succeeded_node():
    def ended(code, *ends):
        processes = [{"rank": rank, "exit_code": code, "at": at, "asked": False}
                     for rank, code, at in ends]  # fmt: skip
        return json.dumps({"exit_code": code, "processes": processes}).encode()

    nodes = [node(0), node(1, 0, State.SUCCEEDED)]
    seen = observed(nodes, {0: ended(1, (0, 1, 1.5)), 1: ended(0, (1, 0, 0.9))})
    found = diagnose(nodes, said(0, 0, 1.0, PEER_GONE), rank_exits=seen.rank_exits)
    assert (found.rank, (found.hint or "")[:30]) == (0, "rank 1 exited with code 0 befo")


def test_ranks_that_exited_0_are_not_blamed():
    ends = [RankExit(0, 0, 0, 1.0), RankExit(0, 1, 5, 2.0)]
    assert diagnose([node(0)], [], rank_exits=ends, nproc_per_node=2).rank == 1


def test_kernel_oom_kill_is_distinguished_from_manual_kill():
    ends = [RankExit(0, 0, -9, 1.0)]
    by_kernel = diagnose([node(0, 137)], [], rank_exits=ends, oom_kills=1)
    by_hand = diagnose([node(0, 137)], [], rank_exits=ends, oom_kills=0)
    assert by_kernel.cause.startswith("OOMKilled: the rank was killed by the kernel")
    assert "batch.micro" in (by_kernel.hint or "")
    assert "kill -9" in by_hand.cause
    assert by_kernel.exit_code == by_hand.exit_code == 137


@pytest.mark.parametrize(
    ("printed", "cause"),
    [
        ("/r/files/rank.sh: 17: exec: nope: not found", "exit code 127: nope: not found"),
        ("/r/rank.sh: line 17: exec: nope: not found", "exit code 127: nope: not found"),
        ("sh: 3: exec: ./a b.sh: not found", "exit code 127: ./a b.sh: not found"),
        ("run.sh: 3: exec: nope: not found", "exit code 127: run.sh: 3: exec: nope: not found"),
    ],
)
def test_missing_program_is_named_without_rank_script(printed, cause):
    found = diagnose([node(0)], said(0, 0, 1.0, printed), rank_exits=[RankExit(0, 0, 127, 1.0)])
    assert found.cause == cause
    assert "is not on the ranks' PATH" in (found.hint or "") or "does not exist" in (
        found.hint or ""
    )


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-signal.SIGSEGV, "SIGSEGV"),
        (-signal.SIGABRT, "SIGABRT"),
        (-signal.SIGBUS, "SIGBUS: the rank was ended by this signal"),
        (-100, "signal 100"),
        (139, "exit code 139: SIGSEGV as a shell reports it, or the program's own code"),
        (137, "exit code 137: SIGKILL as a shell reports it, or the program's own code"),
    ],
)
def test_signal_exit_is_named(code, words):
    found = diagnose([node(0)], [], rank_exits=[RankExit(0, 0, code, 1.0)])
    assert words in found.cause


@pytest.mark.parametrize(
    ("last", "hint"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "ZeRO stage"),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory", "smaller model"),
        ("ModuleNotFoundError: No module named 'flash_attn'", "install it"),
        ("OSError: [Errno 98] Address already in use", "listens on that port"),
        ("OSError: [Errno 28] No space left on device", "free space"),
        (
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, invalid usage "
            "(run with NCCL_DEBUG=WARN for details), NCCL version 2.29.7\nncclInvalidUsage: This "
            "usually reflects invalid usage of NCCL library.\nLast error:\nDuplicate GPU detected "
            ": rank 1 and rank 0 both on CUDA device 17000",
            "start fewer (--gpus)",
        ),
        ("RuntimeError: Error building extension 'cpu_adam'", "ninja"),
        ("AssertionError: Torch not compiled with CUDA enabled", "this node has no GPU"),
        (
            "RuntimeError: Found no NVIDIA driver on your system. Please check",
            "this node has no GPU",
        ),
        ("RuntimeError: No CUDA GPUs are available", "this node has no GPU"),
        ("RuntimeError: CUDA error: no CUDA-capable device is detected", "this node has no GPU"),
        ("/r/files/rank.sh: 12: exec: frobnicate: not found", "is not on the ranks' PATH"),
        ("/r/files/rank.sh: 12: exec: ./my run.sh: not found", "interpreter in its first line"),
        ("/r/files/rank.sh: 12: exec: /x/run.sh: Permission denied", "chmod +x"),
        ("/venv/bin/python: No module named my.train", "install it"),
        ("Explained: the loss is nan at step 12", "learning rate"),
        (
            "RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.",
            "learning rate",
        ),
        (
            "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central "
            "directory",
            "is damaged",
        ),
        ("EOFError: Ran out of input", "is damaged"),
        (
            "safetensors_rust.SafetensorError: Error while deserializing header: incomplete "
            "metadata, file not fully covered",
            "is damaged",
        ),
        (
            "RuntimeError: DDP expects same model across all ranks, but Rank 1 has 10 params, "
            "while rank 0 has inconsistent 12 params.",
            "doctor",
        ),
        (
            "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running "
            "collective: CollectiveFingerPrint(SequenceNumber=1, OpType=ALLREDUCE",
            "doctor",
        ),
    ],
)
def test_known_cause_has_hint(last, hint):
    block = f"Traceback (most recent call last):\n  File x\n{last}"
    found = diagnose([node(0)], said(0, 0, 1.0, block))
    assert found.cause == last
    assert hint in (found.hint or "")


@pytest.mark.parametrize(
    ("lacking", "hint"),
    [
        ([1], "missing on node 1 of 2 nodes: copy it to every node, or to a shared disk"),
        ([0, 1], "the file is missing on every node"),
    ],
)
def test_missing_file_hint_names_nodes_that_lack_it(lacking, hint):
    text = "FileNotFoundError: [Errno 2] No such file or directory: '/data/train.bin'"
    trace = f"Traceback (most recent call last):\n  File x\n{text}"
    lines = in_order(*(said(n, n, 1.0 + n, trace if n in lacking else PEER_GONE) for n in (0, 1)))
    found = diagnose([node(0, host="a"), node(1, host="b")], lines)
    assert (found.node, found.cause, found.hint) == (lacking[0], text, hint)
    one_machine = diagnose([node(0), node(1)], lines)
    assert one_machine.hint is None


def test_own_exit_code_beats_peer_error_but_not_earlier_exception():
    ends = [{"rank": 1, "exit_code": 7, "at": 1.2, "asked": True},
            {"rank": 0, "exit_code": 143, "at": 1.3, "asked": True}]  # fmt: skip
    other = [{"rank": 2, "exit_code": 1, "at": 1.0, "asked": False}]
    nodes = [node(0, 7, State.CANCELLED), node(1)]
    exits = {
        0: json.dumps({"exit_code": 7, "reason": "stopped: node 1 failed", "processes": ends}),
        1: json.dumps({"exit_code": 1, "reason": None, "processes": other}),
    }
    seen = observed(nodes, {number: text.encode() for number, text in exits.items()})
    found = diagnose(nodes, said(1, 2, 0.9, PEER_GONE), rank_exits=seen.rank_exits,
                     nproc_per_node=2)  # fmt: skip
    assert (found.rank, found.exit_code) == (1, 7)
    # One that failed by itself before is blamed, whatever others did when they were asked to end.
    found = diagnose(nodes, said(1, 2, 0.9, VALUE_ERROR), rank_exits=seen.rank_exits,
                     nproc_per_node=2)  # fmt: skip
    assert (found.rank, found.cause) == (2, "ValueError: the loss is not finite")


def test_first_failed_node_is_blamed_without_rank_output():
    nodes = [
        node(0, 0, State.SUCCEEDED),
        node(1, 1, ended_at=20.0),
        node(2, 126, ended_at=15.0, reason="Permission denied: /x"),
    ]
    found = diagnose(nodes, [])
    assert (found.node, found.rank, found.exit_code) == (2, None, 126)
    assert found.cause == "Permission denied: /x"


def test_cause_says_when_no_node_reported_exit_code():
    found = diagnose([NodeStatus(node=0, host="h", state=State.UNKNOWN)], [])
    assert found.cause == "no exit code: the run ended and no node reported one"
    assert found.exit_code == 1


def test_marked_lines_are_not_quoted_as_last_output():
    lines = said(0, 0, 1.0, 'giving up\n@clusterkit {"event": "end"}')
    found = diagnose([node(0, 3)], lines, rank_exits=[RankExit(0, 0, 3, 2.0)])
    assert "@clusterkit" not in found.cause


def test_shell_code_reports_signal_as_128_plus_number():
    assert (shell_code(-9), shell_code(7), shell_code(0)) == (137, 7, 0)


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("DistNetworkError: ... port: 29501 (errno: 98 - Address already in use).", True),
        ("EADDRINUSE", True),
        ("address in use by nobody", False),
    ],
)
def test_taken_port_is_recognised_in_output(text, taken):
    assert bool(PORT_TAKEN.search(text)) is taken


def test_interleaved_lines_of_ranks_are_kept_apart():
    a, b = said(0, 0, 1.0, VALUE_ERROR), said(0, 1, 1.0, PEER_GONE)
    mixed = [line for pair in zip(a, b, strict=True) for line in pair]
    found = diagnose([node(0)], mixed, nproc_per_node=2)
    assert (found.rank, found.traceback) == (0, VALUE_ERROR)
