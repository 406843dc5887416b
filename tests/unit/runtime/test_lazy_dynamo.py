"""Each case in a process of its own: what is being tested is what a process has imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

START = """
import sys
from clusterkit.agent.lazy_dynamo import defer_dynamo, deferred_compile
defer_dynamo()
import torch
def loaded(): return "torch._dynamo.eval_frame" in sys.modules
"""

TRAIN = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
ddp = torch.nn.parallel.DistributedDataParallel(model)
ddp(torch.ones(1, 2)).sum().backward()
optimizer.step(), optimizer.zero_grad(), optimizer.load_state_dict(optimizer.state_dict())
torch.compiler.disable(reason="never compiled")(lambda: None)()
assert not loaded()
"""

CASES = {
    "training does not load it; another submodule does, once": TRAIN
    + """
import torch._dynamo.config as config
assert loaded() and config is torch._dynamo.config is sys.modules["torch._dynamo.config"]
assert torch._dynamo.__file__
ddp(torch.ones(1, 2)).sum().backward()
optimizer.step(), optimizer.zero_grad()
""",
    "an attribute loads it": "assert torch._dynamo.config.__file__ and loaded()",
    "compiling works": """
marked = torch.compiler.disable(lambda x: x + 1)
assert marked(1) == 2
compiled = torch.compile(lambda x: marked(x) * 2, backend="eager")
assert compiled(torch.ones(1)).item() == 4 and loaded()
""",
    "loaded before, it stays": """
from torch._dynamo import config
real = sys.modules["torch._dynamo"]
defer_dynamo()
assert sys.modules["torch._dynamo"] is torch._dynamo is real and loaded()
""",
    "a deferred compile compiles when called": """
calls = []
real, torch.compile = torch.compile, lambda fn, **options: calls.append(options) or fn
with deferred_compile():
    @torch.compile(backend="eager")
    def double(x): return 2 * x
    again = torch.compile(lambda x: x)
assert calls == [] and double.__name__ == "double"
assert (double(2), double(3), again(4)) == (4, 6, 4)
assert calls == [{"backend": "eager"}, {}]
""",
}


@pytest.mark.parametrize("case", CASES)
def test_dynamo(launch: Any, tmp_path: Path, case: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(START + CASES[case] + "\nimport os; os._exit(0)")
    done = launch(program=program, warm="bare")
    assert (done.codes, done.stderr) == ([0], [""])
