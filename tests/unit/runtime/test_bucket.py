"""Checkpoints in a bucket of a real S3 server, which ../shared/s3 has."""

from __future__ import annotations

import lzma
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import gpt_store as module
import pytest
from gpt_ranks import BadInput, Unavailable
from gpt_store import Bucket

SERVER = Path(__file__).parents[4] / "shared/s3/versitygw.xz"
SHORT = ["--steps", "4", "--global-batch", "8", "--micro-batch", "2", "--context", "16",
         "--checkpoint-every", "1", "--checkpoint-dir", "s3://runs/a/b c"]  # fmt: skip


class Server:
    """A server; its buckets are folders."""

    def __init__(self, folder: Path) -> None:
        program, self.buckets = folder / "versitygw", folder / "buckets"
        program.write_bytes(lzma.decompress(SERVER.read_bytes()))
        program.chmod(0o755)
        (self.buckets / "runs").mkdir(parents=True)
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = found.getsockname()[1]
        self.env = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "testkey", "AWS_SECRET_ACCESS_KEY": "testsecret",
        }  # fmt: skip
        self.process = subprocess.Popen(
            [program, "--port", f"127.0.0.1:{port}", "posix", self.buckets],
            env={"ROOT_ACCESS_KEY": "testkey", "ROOT_SECRET_KEY": "testsecret"},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder,
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while True:
            with socket.socket() as trial:
                if trial.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert self.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def steps(self) -> list[str]:
        return sorted(path.name for path in (self.buckets / "runs/a/b c").iterdir())


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not SERVER.exists():
        pytest.skip(f"there is no {SERVER}")
    server = Server(tmp_path_factory.mktemp("s3"))
    yield server
    server.process.terminate()
    server.process.wait()


@pytest.fixture
def server(started: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    for name, value in started.env.items():
        monkeypatch.setenv(name, value)
    return started


def test_bucket_stores_and_removes_files_of_any_size_and_name(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART", 5 << 20)  # no server takes smaller ones but the last
    held = Bucket("s3://runs/files")
    assert held.sizes() == {}
    large, back = tmp_path / "large", tmp_path / "back/large"
    large.write_bytes(os.urandom(11 << 20))
    held.write("x/__0_0.distcp", large)
    held.write("x/ü +&=.json", b"{}")
    held.write("empty", b"")
    assert held.sizes() == {"x/__0_0.distcp": 11 << 20, "x/ü +&=.json": 2, "empty": 0}
    assert held.read("x/ü +&=.json") == b"{}"
    held.download("x/__0_0.distcp", back)
    assert back.read_bytes() == large.read_bytes()
    for name in held.sizes():
        held.remove(name)
    held.remove("x/not there")
    assert held.sizes() == {}


def test_bucket_listing_follows_all_pages(server: Server) -> None:
    folder = server.buckets / "runs/pages"
    folder.mkdir()
    names = {f"{number:04}" for number in range(1001)}  # one more than a page holds
    for name in names:
        (folder / name).touch()
    assert Bucket("s3://runs/pages").sizes() == dict.fromkeys(names, 0)


def test_bucket_without_obstore_names_extra(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(
        BadInput, match=r"s3://runs/x: a bucket needs the package obstore"
    ) as caught:
        Bucket("s3://runs/x")
    assert caught.value.hint == "pip install 'clusterkit[s3]', or obstore alone"


@pytest.mark.parametrize(
    ("url", "env", "said"),
    [
        ("s3://none/x", {}, "s3://none/x: there is no such bucket"),
        ("s3://runs/x", {"AWS_ACCESS_KEY_ID": "other"},
         "s3://runs/x: AWS_ACCESS_KEY_ID is not known there"),
        ("s3://runs/x", {"AWS_SECRET_ACCESS_KEY": "other"},
         "s3://runs/x: AWS_SECRET_ACCESS_KEY is wrong"),
        ("s3://runs/x", {"AWS_SECRET_ACCESS_KEY": None},
         "s3://runs/x: AWS_SECRET_ACCESS_KEY is not set"),
        ("s3://runs/x", {"AWS_ENDPOINT_URL": "localhost"}, "AWS_ENDPOINT_URL is 'localhost'"),
        ("gs://runs/x", {}, "checkpoint folder gs://runs/x: only s3://BUCKET/PREFIX is known"),
    ],
)  # fmt: skip
def test_bucket_names_bad_url_credential_or_endpoint(
    started: Server, url: str, env: dict[str, str | None], said: str
) -> None:
    given = {key: value for key, value in {**started.env, **env}.items() if value is not None}
    with pytest.raises(BadInput) as caught:
        Bucket(url, given).sizes()
    assert caught.value.message == said


def test_bucket_raises_unavailable_when_server_refuses_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_RETRY", {"max_retries": 0})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        server = f"http://127.0.0.1:{taken.getsockname()[1]}"
        env = {"AWS_ENDPOINT_URL": server, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        with pytest.raises(Unavailable, match=r"does not answer: .*refused"):
            Bucket("s3://runs/x", env).sizes()


@pytest.mark.parametrize("how", [["--checkpoint-async"], []])
def test_run_saves_prunes_and_resumes_checkpoints_in_bucket(
    launch, server: Server, how: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(server.env, "TMPDIR", str(tmp_path))
    whole = launch(*SHORT, *how, "--checkpoint-resume", "never", ranks=2, env=server.env)
    assert whole.codes == [0, 0], whole.stderr
    assert server.steps() == ["step-00000003", "step-00000004"]
    assert whole.of("checkpoint")[-1]["path"] == "s3://runs/a/b c/step-00000004"
    # Cut at its end: the one before counts.
    shard = max((server.buckets / "runs/a/b c/step-00000004/shards").glob("*.distcp"))
    os.truncate(shard, shard.stat().st_size - 1)
    rest = launch(*SHORT, *how, ranks=2, env=server.env)
    assert rest.codes == [0, 0], rest.stderr
    torn = f"step-00000004 is torn, and passed over: shards/{shard.name} is missing or cut"
    assert torn in rest.stdout[0]
    assert rest.losses() == {4: whole.losses()[4]}
    assert server.steps() == ["step-00000003", "step-00000004"]
    assert list(tmp_path.glob("checkpoints-*")) == []


def test_wrong_bucket_key_fails_every_rank(launch, server: Server) -> None:
    env = {**server.env, "AWS_SECRET_ACCESS_KEY": "no"}
    result = launch(*SHORT, ranks=2, env=env)
    assert result.codes == [1, 1]
    assert "s3://runs/a/b c: AWS_SECRET_ACCESS_KEY is wrong" in result.stderr[0]
