"""What a rank sees on every backend, and who sees a secret."""

import json
import os
import subprocess
from pathlib import Path

from clusterkit.agent import PEER_TOKEN
from clusterkit.run import folder as run_folder
from clusterkit.shell import Secret
from tests.contract.contracts import PROGRAMS, TOKEN

# ---------------------------------------------------------------- 3, 4: what a rank sees


def dumped(folder):
    ranks = {}
    for path in sorted(folder.iterdir()):
        seen = json.loads(path.read_text())
        ranks[int(seen["env"]["RANK"])] = seen
    return ranks


def test_every_rank_gets_all_environment_variables_and_workdir(stage, demo, run_nodes, dump_dir):
    job = demo(nodes=2, gpus_per_node=2, env={"DUMP_DIR": str(dump_dir)})
    plan = stage.plan(job)
    assert run_nodes(stage, plan) == [0, 0]
    seen = dumped(dump_dir)
    assert sorted(seen) == [0, 1, 2, 3]
    for rank, one in seen.items():
        env = one["env"]
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % 2),
            "NODE_RANK": str(rank // 2),
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": stage.address(plan),
            "MASTER_PORT": str(plan.port),
            "CLUSTERKIT_RUN_ID": plan.run_id,
            "CLUSTERKIT_RUN_DIR": plan.run_dir,
            "CLUSTERKIT_JOB": "demo",
        }
        assert {name: env.get(name) for name in expected} == expected
        assert one["cwd"] == str(PROGRAMS)


def test_env_and_args_reach_ranks_unaltered(stage, demo, run_nodes, dump_dir, ugly_values):
    words = [*ugly_values.values(), "--", "-x", "--nproc", "7"]
    scripts_own = dict.fromkeys(
        ["run_dir", "node_dir", "slot", "pipe", "IS_HOST", "name"], "user's"
    )
    of_cluster = {f"CLUSTER_{name}": value for name, value in ugly_values.items()}
    job = demo(args=tuple(words), env={**ugly_values, **scripts_own})
    cluster = stage.cluster(env={"DUMP_DIR": str(dump_dir), **of_cluster})
    assert run_nodes(stage, stage.plan(job, cluster=cluster)) == [0]
    (seen,) = dumped(dump_dir).values()
    for written in (ugly_values, of_cluster, scripts_own):
        assert {name: seen["env"].get(name) for name in written} == written
    assert seen["argv"] == words


def test_run_works_with_odd_folder_names_and_long_job_name(
    stage, demo, run_nodes, dump_dir, weird_tmp_path
):
    program = weird_tmp_path / "my $program's.py"
    program.write_bytes((PROGRAMS / "dump.py").read_bytes())
    name = "n" * 200
    job = demo(
        name=name, program=program.name, workdir=str(weird_tmp_path),
        env={"DUMP_DIR": str(dump_dir)},
    )  # fmt: skip
    home = str(weird_tmp_path / "home")
    plan = stage.plan(job, stage.facts_of(home=home), run_folder.new_run_id(name))
    assert run_nodes(stage, plan) == [0]
    (seen,) = dumped(dump_dir).values()
    assert seen["cwd"] == str(weird_tmp_path)
    assert seen["env"]["CLUSTERKIT_RUN_DIR"] == plan.run_dir
    assert seen["env"]["CLUSTERKIT_JOB"] == name


def test_stale_torchrun_variables_of_submitter_do_not_reach_ranks(stage, demo, run_nodes, dump_dir):
    job = demo(gpus_per_node=2, env={"DUMP_DIR": str(dump_dir)})
    stale = {
        "RANK": "9", "LOCAL_RANK": "9", "WORLD_SIZE": "99", "LOCAL_WORLD_SIZE": "99",
        "MASTER_ADDR": "elsewhere", "MASTER_PORT": "1", "GROUP_RANK": "9",
        "TORCHELASTIC_RUN_ID": "old",
    }  # fmt: skip
    plan = stage.plan(job)
    assert run_nodes(stage, plan, **stale) == [0]
    seen = dumped(dump_dir)
    assert sorted(seen) == [0, 1]
    for one in seen.values():
        assert one["env"]["WORLD_SIZE"] == "2"
        assert one["env"]["MASTER_ADDR"] == stage.address(plan)
        assert one["env"]["GROUP_RANK"] == "0"
        assert one["env"]["TORCHELASTIC_RUN_ID"] == plan.run_id


# ---------------------------------------------------------------- 5: secrets


def test_plan_text_json_and_repr_omit_secret_value(stage, demo, monkeypatch):
    monkeypatch.setenv("API_TOKEN", TOKEN)
    plan = stage.plan(demo(secrets=("API_TOKEN",)))
    assert "API_TOKEN" in plan.to_text()
    assert TOKEN not in plan.to_text()
    assert TOKEN not in plan.to_json().decode()
    assert TOKEN not in repr(plan)


def test_secret_reaches_ranks_but_no_file_of_run_folder(
    stage, demo, run_nodes, dump_dir, clusterkit_home
):
    job = demo(secrets=("API_TOKEN",), env={"DUMP_DIR": str(dump_dir)})
    plan = stage.plan(job)
    assert run_nodes(stage, plan, API_TOKEN=TOKEN) == [0]
    (seen,) = dumped(dump_dir).values()
    assert seen["env"]["API_TOKEN"] == TOKEN
    written = [path for path in Path(plan.run_dir).rglob("*") if path.is_file()]
    assert len(written) >= 5
    for path in written:
        assert TOKEN.encode() not in path.read_bytes(), path


def test_secret_is_absent_from_command_lines_of_all_processes(stage, demo, tmp_path):
    ready, go = tmp_path / "ready", tmp_path / "go"
    os.mkfifo(ready)
    os.mkfifo(go)
    job = demo(
        program=str(PROGRAMS / "wait.py"),
        secrets=("API_TOKEN",),
        env={"READY": str(ready), "GO": str(go)},
    )
    plan = stage.plan(job)
    stage.write_files(plan)
    (step,) = stage.node_steps(plan)
    node = subprocess.Popen(
        step.argv, env={"PATH": os.environ["PATH"], **step.env, "API_TOKEN": TOKEN}
    )
    assert ready.read_text() == "here\n"  # waits for the rank
    shown, theirs = [], 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            theirs += os.fsencode(plan.run_dir) in command
            shown.append(command)
    go.write_text("")  # lets the rank end
    assert node.wait(60) == 0
    assert theirs >= 1
    assert not [command for command in shown if TOKEN.encode() in command]


def test_recorded_submit_steps_omit_secret_value(stage, demo, recording):
    records, plan = [], stage.plan(demo(secrets=("API_TOKEN",)))
    stage.begin(plan)
    stage.backend.submit(
        plan,
        recording(),
        secrets={"API_TOKEN": Secret("API_TOKEN", TOKEN)},
        record=lambda step, outcome: records.append((step, outcome)),
    )
    assert records
    assert TOKEN not in repr(records)


def test_nodes_that_watch_each_other_share_new_peer_token_per_attempt(stage, demo, recording):
    alone, several = stage.plan(demo()), stage.plan(demo(nodes=2))
    assert not any(PEER_TOKEN in step.secrets for step in alone.steps)
    watching = any("CLUSTERKIT_COORDINATOR=" in (file.text or "") for file in several.files)
    assert watching == (stage.watch_each_other)
    given = []
    stage.begin(several)
    for attempt in (1, 2):
        transport = recording()
        stage.backend.submit(several, transport, attempt=attempt)
        given.append({env[PEER_TOKEN] for *_, env in transport.commands if PEER_TOKEN in env})
        for token in given[-1]:
            assert all(token.encode() not in put[2] for put in transport.puts)
            assert all(token not in word for command in transport.commands for word in command[2])
    assert [len(tokens) for tokens in given] == [watching, watching]
    assert not given[0] & given[1]
