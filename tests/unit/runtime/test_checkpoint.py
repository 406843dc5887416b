from __future__ import annotations

import json
import random
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import gpt_checkpoint
import gpt_checkpoint as module
import pytest
import torch
from gpt_checkpoint import Checkpoint, Checkpoints
from gpt_ranks import BadInput, Explained, Ranks, World

MODEL = {"name": "tiny", "layers": 2}
ALONE = Ranks(rank=0, local_rank=0, node_rank=0, size=1, local_size=1)
WORLD = World(**vars(ALONE), device=torch.device("cpu"), backend="gloo")


class Fake:
    """Holds one word instead of a model."""

    def __init__(self, word: str = "") -> None:
        self.word = word

    def write(self, folder: Path) -> None:
        (folder / "part").mkdir()
        (folder / "part" / "word").write_text(self.word)

    def read(self, folder: Path) -> None:
        self.word = (folder / "part" / "word").read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later is later, however fast the machine."""
    times = iter(range(1000))
    monkeypatch.setattr(module.time, "time", lambda: float(next(times)))


def checkpoints(folder: Path | None, **settings: Any) -> Checkpoints:
    usual = {"model": MODEL, "strategy": "fake", "any_world_size": False}
    return Checkpoints(folder, **(usual | settings))


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_checkpoint_restores_saved_state(folder: Path) -> None:
    checkpoints(folder).save(5, Fake("hello").write, WORLD, {"loss": 0.1})
    found = checkpoints(folder).find(ALONE)
    assert found is not None
    assert (found.step, found.world_size, found.notes) == (5, 1, {"loss": 0.1})
    strategy = Fake()
    checkpoints(folder).load(found, strategy.read, WORLD)
    assert strategy.word == "hello"


def test_checkpoint_restores_random_state(folder: Path) -> None:
    path = checkpoints(folder).save(1, Fake().write, WORLD)
    expected = (random.random(), float(torch.rand(1)))
    found = Checkpoint.read(path)
    assert found is not None
    checkpoints(folder).load(found, Fake().read, WORLD)
    assert (random.random(), float(torch.rand(1))) == expected


def test_checkpoint_save_and_resume_print_events(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = checkpoints(folder).save(5, Fake().write, WORLD)
    found = Checkpoint.read(path)
    assert found is not None
    checkpoints(folder).load(found, Fake().read, WORLD)
    saved, resumed = (
        json.loads(line.split(" ", 1)[1]) for line in capfd.readouterr().out.split("\n")[:2]
    )
    assert saved.pop("seconds") >= 0
    assert saved == {"event": "checkpoint", "step": 5, "path": str(path)}
    assert resumed == {"event": "resumed", "step": 5, "path": str(path)}


def test_find_returns_none_without_checkpoints(folder: Path) -> None:
    assert checkpoints(folder).find(ALONE) is None
    assert checkpoints(None).find(ALONE) is None
    assert not checkpoints(None).due(1, last=True)


@pytest.mark.parametrize(("every", "due"), [(0, [6]), (2, [2, 4, 6]), (4, [4, 6])])
def test_checkpoint_is_due_every_n_steps_and_at_end(
    folder: Path, every: int, due: list[int]
) -> None:
    here = checkpoints(folder, every=every)
    assert [step for step in range(1, 7) if here.due(step, last=step == 6)] == due


@pytest.mark.parametrize(("keep", "left"), [(0, [1, 2, 3]), (1, [3]), (2, [2, 3])])
def test_checkpoint_keep_prunes_oldest(folder: Path, keep: int, left: list[int]) -> None:
    for step in (1, 2, 3):
        checkpoints(folder, keep=keep).save(step, Fake().write, WORLD)
    assert steps(folder) == [f"step-{step:08d}" for step in left]


def tear_manifest(path: Path) -> None:
    text = (path / "checkpoint.json").read_text()
    (path / "checkpoint.json").write_text(text[: len(text) // 2])


def lose_manifest(path: Path) -> None:
    (path / "checkpoint.json").unlink()


def cut_file(path: Path) -> None:
    (path / "part" / "word").write_text("h")


def lose_file(path: Path) -> None:
    (path / "part" / "word").unlink()


@pytest.mark.parametrize("damage", [tear_manifest, lose_manifest, cut_file, lose_file])
def test_torn_checkpoint_is_skipped_and_refused_by_path(folder: Path, damage: Any) -> None:
    here = checkpoints(folder)
    here.save(1, Fake("older").write, WORLD)
    torn = here.save(2, Fake("newer").write, WORLD)
    damage(torn)
    found = here.find(ALONE)
    assert found is not None
    assert found.step == 1
    with pytest.raises(BadInput, match="step-00000002 is not a complete checkpoint"):
        checkpoints(folder, resume=str(torn)).find(ALONE)


def test_failed_save_leaves_previous_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = checkpoints(folder)
    here.save(1, Fake("older").write, WORLD)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError("power cut")))
        with pytest.raises(Explained, match=r"cannot write checkpoint .*: power cut"):
            here.save(2, Fake("newer").write, WORLD)
    found = here.find(ALONE)
    assert found is not None
    assert found.step == 1
    here.save(2, Fake("newer").write, WORLD)  # and the draft is not in the way
    assert steps(folder) == ["step-00000001", "step-00000002"]


def test_checkpoint_files_are_synced_before_rename(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, rename = gpt_checkpoint.sync, Path.rename
    monkeypatch.setattr(gpt_checkpoint, "sync", lambda p: (done.append(f"sync {p.name}"), sync(p)))
    monkeypatch.setattr(
        Path, "rename", lambda p, to: (done.append(f"rename {to.name}"), rename(p, to))
    )
    checkpoints(folder).save(1, Fake().write, WORLD)
    named = done.index("rename step-00000001")
    assert {"sync word", "sync part", "sync random.pt", "sync checkpoint.json"} < set(done[:named])
    assert done[named + 1 :] == ["sync checkpoints"]


def test_resume_never_starts_over_and_its_checkpoint_is_newest(folder: Path) -> None:
    checkpoints(folder).save(200, Fake("old run").write, WORLD)
    anew = checkpoints(folder, resume="never")
    assert anew.find(ALONE) is None
    anew.save(100, Fake("new run").write, WORLD)
    found = checkpoints(folder).find(ALONE)
    assert found is not None
    assert found.step == 100


def test_checkpoint_of_same_step_is_replaced(folder: Path) -> None:
    for word in ("one", "two"):
        path = checkpoints(folder).save(1, Fake(word).write, WORLD)
    assert (path / "part" / "word").read_text() == "two"


def test_resume_path_selects_that_checkpoint(folder: Path) -> None:
    first = checkpoints(folder).save(1, Fake().write, WORLD)
    checkpoints(folder).save(2, Fake().write, WORLD)
    found = checkpoints(None, resume=str(first)).find(ALONE)
    assert found is not None
    assert found.step == 1


def test_checkpoint_of_other_model_is_refused(folder: Path) -> None:
    checkpoints(folder).save(1, Fake().write, WORLD)
    other = checkpoints(folder, model={"name": "small", "layers": 6})
    with pytest.raises(BadInput, match=r"holds the model name=tiny, layers=2, .* name=small"):
        other.find(ALONE)


def test_checkpoint_of_other_strategy_is_refused(folder: Path) -> None:
    checkpoints(folder).save(1, Fake().write, WORLD)
    with pytest.raises(BadInput, match="was saved by fake, this run uses ddp"):
        checkpoints(folder, strategy="ddp").find(ALONE)


def test_checkpoint_of_other_world_size_is_refused_unless_any_is_allowed(folder: Path) -> None:
    two = Ranks(rank=1, local_rank=1, node_rank=0, size=2, local_size=2)
    checkpoints(folder).save(1, Fake().write, WORLD)
    with pytest.raises(BadInput, match=r"saved by 1 ranks, now there are 2; fake divides") as error:
        checkpoints(folder).find(two)
    assert "run on 1 ranks" in str(error.value.hint)
    checkpoints(folder, any_world_size=True).save(1, Fake().write, WORLD)
    assert checkpoints(folder).find(two) is not None


def test_load_refuses_ranks_that_found_different_checkpoints(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoints(folder).save(1, Fake().write, WORLD)
    found = Checkpoint.read(path)
    assert found is not None
    monkeypatch.setattr(World, "gather", lambda self, value: [value, "/other"])
    with pytest.raises(BadInput, match="rank 1 from /other") as error:
        checkpoints(folder).load(found, Fake().read, WORLD)
    assert "a disk that all nodes share" in str(error.value.hint)


class Slow(Fake):
    """Writes in the background: its file is there when ``writing`` is done."""

    def __init__(self) -> None:
        super().__init__("slow")
        self.writing: Future[None] = Future()

    def write(self, folder: Path) -> Future[None]:
        self.folder = folder
        return self.writing

    def complete(self) -> None:
        super().write(self.folder)
        self.writing.set_result(None)


def test_background_checkpoint_counts_only_when_complete(folder: Path) -> None:
    here, strategy = checkpoints(folder), Slow()
    assert not here.written()
    here.save(1, strategy.write, WORLD)
    assert not here.written()
    assert checkpoints(folder).find(ALONE) is None
    strategy.complete()
    assert here.written()
    here.finish(WORLD)
    found = checkpoints(folder).find(ALONE)
    assert found is not None
    assert found.files.keys() == {"part/word", "random.pt"}
    assert not here.written()
    here.finish(WORLD)  # and there is nothing more to do


def test_next_save_finishes_previous_background_save(folder: Path) -> None:
    here, strategy = checkpoints(folder), Slow()
    here.save(1, strategy.write, WORLD)
    strategy.complete()
    here.save(2, Fake().write, WORLD)
    assert steps(folder) == ["step-00000001", "step-00000002"]


def test_failed_background_save_raises_and_leaves_previous_checkpoint(folder: Path) -> None:
    here, strategy = checkpoints(folder), Slow()
    here.save(1, Fake().write, WORLD)
    here.save(2, strategy.write, WORLD)
    strategy.writing.set_exception(OSError(28, "No space left on device"))
    with pytest.raises(Explained, match=r"cannot write .*step-00000002: No space left"):
        here.finish(WORLD)
    assert steps(folder) == ["step-00000001"]
    assert here.find(ALONE) is not None


@pytest.mark.parametrize(
    "error", [RuntimeError("size mismatch\nfor a"), KeyError("model"), EOFError(), OSError("gone")]
)
def test_unreadable_checkpoint_files_raise_one_line_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    path = checkpoints(folder).save(1, Fake().write, WORLD)
    found = Checkpoint.read(path)
    assert found is not None
    monkeypatch.setattr(Fake, "read", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(BadInput, match=r"checkpoint .*step-00000001 cannot be read: \S+") as told:
        checkpoints(folder).load(found, Fake().read, WORLD)
    assert "\n" not in told.value.message


def test_file_damaged_without_changing_size_is_refused(folder: Path) -> None:
    path = checkpoints(folder).save(1, Fake("abc").write, WORLD)
    (path / "part" / "word").write_text("abd")
    found = Checkpoint.read(path)
    assert found is not None
    with pytest.raises(BadInput, match=r"part/word is damaged: its SHA-256 is not the one in ch"):
        checkpoints(folder).load(found, Fake().read, WORLD)


def test_connection_error_during_load_is_raised_unchanged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoints(folder).save(1, Fake().write, WORLD)
    found = Checkpoint.read(path)
    assert found is not None
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer")
    monkeypatch.setattr(Fake, "read", lambda *_: (_ for _ in ()).throw(lost))
    with pytest.raises(RuntimeError, match="Connection closed"):
        checkpoints(folder).load(found, Fake().read, WORLD)


def test_convertible_checkpoint_of_other_world_size_is_found(folder: Path) -> None:
    two = Ranks(rank=1, local_rank=1, node_rank=0, size=2, local_size=2)
    checkpoints(folder).save(1, Fake().write, WORLD)
    found = checkpoints(folder, converts=True).find(two)
    assert found is not None
