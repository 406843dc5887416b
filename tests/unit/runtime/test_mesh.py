from __future__ import annotations

import weakref
from functools import partial
from itertools import product
from typing import Any

import gpt_parallelize
import gpt_settings as meshes
import pytest
import torch
import torch.distributed as dist
import train
from gpt_model import GPT as Model
from gpt_model import Shape
from gpt_parallelize import local
from gpt_pipeline import Pipeline
from gpt_ranks import BadInput, World
from gpt_settings import Chosen, Mesh, Parser, check_model, make_mesh, solve
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.runtime.conftest import GPT as GPT_PROGRAM


class Memory(TorchDispatchMode):
    """Counts the bytes of the tensors in host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        for tensor in pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self._count(local(tensor).untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        if (key := storage._cdata) in self._seen:
            return
        size = storage.nbytes()
        self._seen.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


GPT = {"name": "tiny", "layers": 2, "heads": 4, "context": 64}


@pytest.mark.parametrize(
    ("strategy", "text", "ranks", "expected"),
    [
        ("ddp", None, 8, Mesh(shard=8)),
        ("fsdp", None, 8, Mesh(shard=8)),
        ("fsdp", "dp=8", 8, Mesh(shard=8)),
        ("fsdp", "replicate=2", 8, Mesh(replicate=2, shard=4)),
        ("fsdp", "shard=2, replicate=4", 8, Mesh(replicate=4, shard=2)),
        ("fsdp", None, 1, Mesh()),
        ("tp", None, 8, Mesh(shard=2, tp=4)),
        ("tp", "tp=2", 8, Mesh(shard=4, tp=2)),
        ("pp", None, 8, Mesh(pp=8)),
        ("pp", "pp=2", 8, Mesh(pp=2, shard=4)),
        ("3d", "pp=2,dp=2,tp=2", 8, Mesh(pp=2, shard=2, tp=2)),
        ("3d", "tp=2,pp=2", 8, Mesh(pp=2, shard=2, tp=2)),
    ],
)
def test_mesh_fills_in_missing_dimensions(
    strategy: str, text: str | None, ranks: int, expected: Mesh
) -> None:
    assert make_mesh(strategy, text, ranks=ranks, local_ranks=min(ranks, 4)) == expected
    assert expected.size == ranks


@pytest.mark.parametrize(
    ("strategy", "text", "ranks", "message"),
    [
        ("tp", "tp=3", 8, r"--mesh tp=3: tp 3 is 3 ranks, and there are 8 ranks"),
        ("3d", "pp=2,dp=2,tp=2", 4, r"pp 2 x dp 2 x tp 2 is 8 ranks, and there are 4 ranks"),
        ("pp", "pp=4", 1, r"pp 4 is 4 ranks, and there is 1 rank"),
        ("fsdp", "replicate=2,shard=2", 8, r"replicate 2 x shard 2 is 4 ranks"),
        ("tp", "pp=2", 8, r"--strategy tp has no dimension 'pp'"),
        ("ddp", "tp=2", 8, r"--strategy ddp has no dimension 'tp'"),
        ("3d", "pp=2,ep=2", 8, r"no dimension 'ep'"),
        ("3d", None, 8, r"--strategy 3d needs a mesh"),
        ("3d", "2x2x2", 8, r"no dimension '2x2x2'"),
        ("tp", "tp", 8, r"tp is ''; it must be a whole number above 0"),
        ("tp", "tp=0", 8, r"tp is '0'"),
        ("tp", "tp=-2", 8, r"tp is '-2'"),
        ("tp", "tp=two", 8, r"tp is 'two'"),
        ("tp", "tp=2.0", 8, r"tp is '2\.0'"),
        ("tp", "tp=\u00b2", 8, "tp is '\u00b2'"),
        ("tp", "tp=2,tp=4", 8, r"tp is there twice"),
        ("fsdp", "dp=4,shard=2", 8, r"dp is replicate x shard"),
        ("tp", "tp=1", 8, r"--strategy tp with tp=1 divides nothing"),
        ("pp", "pp=1", 8, r"--strategy pp with pp=1 divides nothing"),
        ("tp", None, 1, r"--strategy tp with tp=1 divides nothing"),
        ("3d", "pp=1,dp=8,tp=1", 8, r"--strategy 3d with pp=1,tp=1 divides nothing"),
    ],
)
def test_invalid_mesh_is_refused(strategy: str, text: str | None, ranks: int, message: str) -> None:
    with pytest.raises(BadInput, match=message) as error:
        make_mesh(strategy, text, ranks=ranks, local_ranks=ranks)
    assert error.value.hint or "twice" in error.value.message


@pytest.mark.parametrize(
    ("strategy", "mesh", "sequence", "message"),
    [
        ("pp", Mesh(pp=4), False, r"--mesh pp=4: tiny has 2 layers, and a stage needs one"),
        ("tp", Mesh(tp=3), False, r"--mesh tp=3: the 4 attention heads of tiny do not divide"),
        ("tp", Mesh(tp=8), False, r"--mesh tp=8: the 4 attention heads"),
        ("3d", Mesh(pp=2, tp=8), False, r"--mesh tp=8"),
    ],
)
def test_model_that_mesh_cannot_divide_is_refused(
    strategy: str, mesh: Mesh, sequence: bool, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        check_model(strategy, mesh, GPT, sequence=sequence)


def test_sequence_parallel_refuses_context_indivisible_by_tp() -> None:
    with pytest.raises(BadInput, match=r"--sequence-parallel: 63 tokens do not divide by tp=2"):
        check_model("tp", Mesh(tp=2), GPT | {"context": 63}, sequence=True)
    check_model("tp", Mesh(tp=2), GPT | {"context": 63}, sequence=False)


def test_model_of_unknown_layers_accepts_fsdp_and_refuses_pp() -> None:
    stranger = {"name": "owner/model"}
    check_model("fsdp", Mesh(shard=4), stranger, sequence=False)
    with pytest.raises(BadInput, match=r"--strategy pp cannot cut owner/model"):
        check_model("pp", Mesh(pp=2), stranger, sequence=False)


@pytest.mark.parametrize(
    ("strategy", "mesh", "local_ranks", "said"),
    [
        ("tp", Mesh(tp=4), 2, ["tp=4 reaches over nodes of 2 ranks"]),
        ("tp", Mesh(tp=2, shard=3), 3, ["tp=2 reaches over nodes of 3 ranks"]),
        ("tp", Mesh(tp=2, shard=2), 2, []),
        ("3d", Mesh(pp=2, tp=2), 4, ["dp=1 in a 3d mesh divides nothing"]),
        ("3d", Mesh(pp=2, shard=2), 4, ["tp=1 in a 3d mesh divides nothing; --strategy pp says"]),
        ("3d", Mesh(pp=2, shard=2, tp=2), 8, []),
        ("fsdp", Mesh(replicate=2), 2, ["fsdp with shard=1 on 2 ranks shards nothing"]),
        ("fsdp", Mesh(shard=2), 1, []),
    ],
)
def test_mesh_warns_of_probable_mistakes(
    strategy: str, mesh: Mesh, local_ranks: int, said: list[str]
) -> None:
    warnings = meshes.mesh_warnings(strategy, mesh, local_ranks=local_ranks)
    assert len(warnings) == len(said)
    for warning, start in zip(warnings, said, strict=True):
        assert warning.startswith(start)


@pytest.mark.parametrize(
    "mesh", [Mesh(pp=2, replicate=3, shard=2, tp=2), Mesh(tp=4), Mesh(pp=3, tp=2), Mesh(shard=5)]
)
def test_mesh_maps_ranks_to_stage_then_replica_then_tp(mesh: Mesh) -> None:
    places = [(mesh.stage(rank), mesh.replica(rank)) for rank in range(mesh.size)]
    expected = product(range(mesh.pp), range(mesh.dp), range(mesh.tp))
    assert places == [(stage, replica) for stage, replica, _ in expected]


def test_mesh_text_names_divided_dimensions() -> None:
    assert str(Mesh(pp=2, shard=2, tp=2)) == "pp=2,dp=2,tp=2"
    assert str(Mesh(replicate=2, shard=4)) == "replicate=2,shard=4"
    assert str(Mesh()) == "dp=1"


SHAPE = Shape(layers=4, heads=4, width=60, context=6)  # which 8 ranks cannot share equally


def keeps_its_part(rank: int, strategy: str, mesh: Mesh) -> None:
    """One of 8 ranks. In a process of its own: torch keeps meshes beyond their process groups."""
    parser, cpu, chosen = Parser(None), torch.device("cpu"), Chosen(strategy, "fp32", 1.0)
    parser.set_defaults(seed=0, weight_decay=0.1, learning_rate=1e-3)
    args = parser.parse_args(["--strategy", strategy])
    world = World(rank, rank, 0, 8, 8, device=cpu, backend="fake")
    batch = solve(data_parallel=mesh.dp, micro=1, accumulation=4)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    whole = train.build(lambda: Model(SHAPE), args, chosen, batch, mesh, world).parameters
    generator = torch.get_rng_state()
    with Memory() as memory:
        parts = train.build(partial(Model, SHAPE), args, chosen, batch, mesh, world).parameters
    assert parts.keys() == whole.keys()
    for name, part in parts.items():
        assert torch.equal(local(part), local(whole[name])), name
    assert torch.equal(torch.get_rng_state(), generator)
    kept = sum(local(part).nbytes for part in parts.values())
    kept *= 2 if strategy == "ddp" else 1  # its buckets
    assert memory.most <= kept + 2 * max(p.nbytes for p in Model(SHAPE).parameters())


PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
from tests.unit.runtime.test_mesh import Mesh, keeps_its_part
keeps_its_part({rank}, {strategy!r}, {mesh!r})
print("the same")
"""


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.thorough), 7])
@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [
        ("ddp", Mesh(shard=8)),
        ("fsdp", Mesh(shard=8)),
        ("fsdp", Mesh(replicate=2, shard=4)),
        ("tp", Mesh(shard=2, tp=4)),
        ("pp", Mesh(pp=4, shard=2)),
        ("3d", Mesh(pp=2, shard=2, tp=2)),
        ("3d", Mesh(pp=4, tp=2)),
    ],
    ids=str,
)
def test_rank_builds_only_its_part_of_whole_model(
    launch, tmp_path, strategy: str, mesh: Mesh, rank: int
) -> None:
    program = tmp_path / "program.py"
    folder = str(GPT_PROGRAM.parent)
    program.write_text(PROGRAM.format(folder=folder, rank=rank, strategy=strategy, mesh=mesh))
    done = launch(program=program)
    assert (done.codes, done.stdout) == ([0], ["the same\n"]), done.stderr


@pytest.mark.parametrize("rank", [0, 20, 63])
def test_pipeline_of_64_ranks_makes_no_extra_process_groups(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """All ranks take part in making each, one after the other: tens of seconds."""
    cpu, made, mesh = torch.device("cpu"), [], Mesh(pp=4, shard=4, tp=4)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=64)
    try:
        grid = gpt_parallelize.device_mesh(mesh, cpu)
        monkeypatch.setattr(dist, "new_group", made.append)
        stage = Model(Shape(8, 4, 16, 8)).stage(mesh.stage(rank), 4)
        Pipeline(stage, "1f1b", 4, mesh, grid, World(rank, 0, 0, 64, 8, device=cpu, backend="fake"))
    finally:
        dist.destroy_process_group()
    assert made == []
