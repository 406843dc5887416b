"""Ranks started by hand, as a launcher would: quicker than torchrun, and without its patience."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from clusterkit.run.logs import parse_mark
from tests.unit.runtime.warm import Rank, Warm

ROOT = Path(__file__).parents[3]
GPT = ROOT / "jobs" / "train" / "gpt" / "train.py"
Process = Rank | subprocess.Popen[bytes]


@dataclass
class Result:
    """What the ranks left: exit codes, marked lines and standard error, in rank order."""

    codes: list[int]
    events: list[dict[str, Any]]
    stdout: list[str]
    stderr: list[str]

    def of(self, event: str) -> list[dict[str, Any]]:
        return [record for record in self.events if record["event"] == event]

    def losses(self) -> dict[int, float]:
        return {record["step"]: record["loss"] for record in self.of("metrics")}


@dataclass
class Launcher:
    folder: Path
    warm: Callable[[str], Warm]
    count: int = 0
    processes: list[Process] = field(default_factory=list)

    def __call__(
        self,
        *args: str | Path,
        ranks: int = 1,
        program: Path = GPT,
        env: dict[str, str] | None = None,
        on_event: Callable[[dict[str, Any], list[Process]], None] | None = None,
        warm: str | None = "programs",
        patience: float = 90,
    ) -> Result:
        """Run ``program`` on ``ranks`` ranks; ``on_event`` sees rank 0's events as they come.

        ``warm``: what the process has imported whose forks they are, one of `FAMILIES`.
        None: each imports all by itself. ``patience``: seconds for all of it.
        """
        self.count += 1
        outputs = [self.folder / f"{self.count}-{rank}.out" for rank in range(ranks)]
        errors = [self.folder / f"{self.count}-{rank}.err" for rank in range(ranks)]
        listening = on_event is not None
        if listening:
            os.mkfifo(outputs[0])
        port = _free_port()
        started: list[Process] = []
        for rank in range(ranks):
            here = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            argv = [str(program), *map(str, args)]
            variables = environment() | (here if ranks > 1 else {}) | (env or {})
            if warm is not None:
                end = self.folder / f"{self.count}-{rank}.end"
                process: Process = self.warm(warm).start(
                    argv, variables, outputs[rank], errors[rank], end
                )
            else:
                with outputs[rank].open("wb") as out, errors[rank].open("wb") as err:
                    process = subprocess.Popen(
                        [sys.executable, *argv],
                        env=variables,
                        stdout=out,
                        stderr=err,
                        start_new_session=True,
                    )
            started.append(process)
            self.processes.append(process)
        heard = ""
        if on_event is not None:
            with outputs[0].open() as lines:
                for line in lines:
                    heard += line
                    event = parse_mark(line)
                    if event is not None:
                        on_event(event, started)
        codes = [process.wait(timeout=patience) for process in started]
        texts = [output.read_text() for output in outputs[listening:]]
        texts = [heard, *texts] if listening else texts
        events = [e for text in texts for line in text.splitlines() if (e := parse_mark(line))]
        return Result(codes, events, texts, [error.read_text() for error in errors])


@pytest.fixture(scope="session")
def warm() -> Iterator[Callable[[str], Warm]]:
    """Processes that become ranks, by what they have imported; each started when first needed."""
    made: dict[str, Warm] = {}

    def of(family: str) -> Warm:
        if family not in made:
            made[family] = Warm(family, environment())
        return made[family]

    yield of
    for each in made.values():
        each.close()


@contextlib.contextmanager
def launching(folder: Path, warm: Callable[[str], Warm]) -> Iterator[Launcher]:
    """A launcher that keeps its files in ``folder``; no rank of it is left afterwards."""
    launcher = Launcher(folder, warm)
    try:
        yield launcher
    finally:
        for process in launcher.processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
def launch(tmp_path: Path, warm: Callable[[str], Warm]) -> Iterator[Launcher]:
    folder = tmp_path / "launches"
    folder.mkdir()
    with launching(folder, warm) as launcher:
        yield launcher


@pytest.fixture
def zero(tmp_path: Path) -> Callable[..., list[str]]:
    """Arguments that choose a ZeRO stage, with the config file they name."""
    return lambda stage, **section: zero_arguments(tmp_path, stage, **section)


def zero_arguments(folder: Path, stage: int, **section: object) -> list[str]:
    """Arguments that choose a ZeRO stage; their config file is in ``folder``."""
    path = folder / f"zero{stage}.json"
    config = {"zero_optimization": {"stage": stage, **section}, "gradient_clipping": 1.0}
    path.write_text(json.dumps(config))
    return ["--strategy", "deepspeed", "--deepspeed-config", str(path)]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder with the config of a small Hugging Face model."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def environment() -> dict[str, str]:
    dropped = ("CLUSTERKIT_", "LOCAL_", "MASTER_", "OMPI_", "PYTHONWARNINGS", "RANK", "SLURM_",
               "WORLD_SIZE")  # fmt: skip
    kept = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    return kept | {"OMP_NUM_THREADS": "1", "CLUSTERKIT_DEVICE": "cpu", "PYTHONPATH": path}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
