"""A GPT, and how it is cut: every layer into slices, or its layers into stages.

Nothing here knows ranks. `GPT.tensor_plan` says which weight is sliced which way, `GPT.stage` which
layers go together; `sharded` and `pipeline` do the cutting.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clusterkit.runtime.gpt_shape import PRESETS, Shape

__all__ = ["GPT", "PRESETS", "Shape", "Stage", "cross_entropy"]

_STD = 0.02


class Linear(nn.Linear):
    """Weights drawn with ``std``, biases zero.

    Drawn here and not later: under DeepSpeed's ``zero.Init`` a weight is whole only until the
    module that holds it is complete.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, std: float = _STD) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """Weights drawn as those of ``Linear``."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=_STD)


def _output_std(shape: Shape) -> float:
    """Of the weights that add to the residual stream, so that its variance stays near one."""
    return _STD / math.sqrt(2 * shape.layers)


class Attention(nn.Module):
    """Causal self-attention with several heads: (batch, length, width) to the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        # The rows of one head lie together, so that a slice of the rows is a number of heads.
        self.heads_in = Linear(shape.width, 3 * shape.width)
        self.output = Linear(shape.width, shape.width, std=_output_std(shape))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.heads_in(x)
        batch, length, _ = rows.shape
        heads = rows.view(batch, length, -1, 3, self.head_width)
        # Each of the three: (batch, heads of this rank, length, width of a head).
        query, key, value = heads.permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.output(y.transpose(1, 2).reshape(batch, length, -1))
        return mixed


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each normalised before and added after."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.perceptron_norm = nn.LayerNorm(shape.width)
        self.expand = Linear(shape.width, 4 * shape.width)
        self.output = Linear(4 * shape.width, shape.width, std=_output_std(shape))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        inner = F.gelu(self.expand(self.perceptron_norm(x)), approximate="tanh")
        added: Tensor = x + self.output(inner)
        return added


class _Blocks(nn.Module):
    """What a GPT and a stage of one have in common.

    Attributes:
        recompute: called as ``recompute(block, x)`` to run a block and forget what is inside it;
            None to keep everything for the backward pass.
    """

    recompute: Callable[..., Any] | None = None
    blocks: nn.ModuleDict
    # Modules; None in a stage that is not the first, or not the last.
    token: Any
    position: Any
    norm: Any
    head: Any

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens with their positions as vectors: (batch, length) to (batch, length, width)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        embedded: Tensor = self.token(tokens) + self.position(places)
        return embedded

    def through(self, x: Tensor) -> Tensor:
        """Activations after all blocks that are here."""
        for block in self.blocks.values():
            x = block(x) if self.recompute is None else self.recompute(block, x)
        return x

    def tensor_plan(self, *, sequence: bool) -> dict[str, Any]:
        """Which module is sliced which way, for torch's ``parallelize_module``.

        Megatron's cut (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 3): the
        first matrix of attention and of the perceptron is cut by rows of its output, the second by
        its input, so that only the sum after the second one travels. The vocabulary is cut in the
        embedding and in the output layer. With ``sequence`` (Korthikanti et al. 2022,
        https://arxiv.org/abs/2205.05198) the norms between them see a slice of the sequence.
        """
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            PrepareModuleInputOutput,
            PrepareModuleOutput,
            RowwiseParallel,
            SequenceParallel,
        )

        between = Shard(1) if sequence else Replicate()
        plan: dict[str, Any] = {}
        for name in self.blocks:
            block = f"blocks.{name}"
            plan |= {
                f"{block}.attention.heads_in": ColwiseParallel(input_layouts=between),
                f"{block}.attention.output": RowwiseParallel(output_layouts=between),
                f"{block}.expand": ColwiseParallel(input_layouts=between),
                f"{block}.output": RowwiseParallel(output_layouts=between),
            }
            if sequence:
                plan[f"{block}.attention_norm"] = SequenceParallel(use_local_output=True)
                plan[f"{block}.perceptron_norm"] = SequenceParallel(use_local_output=True)
        if sequence:
            names = list(self.blocks)
            whole, sliced = Replicate(), Shard(1)
            if len(names) == 1:
                plan[f"blocks.{names[0]}"] = PrepareModuleInputOutput(
                    input_layouts=whole, desired_input_layouts=sliced, use_local_input=True,
                    output_layouts=sliced, desired_output_layouts=whole,
                )  # fmt: skip
            else:
                plan[f"blocks.{names[0]}"] = PrepareModuleInput(
                    input_layouts=whole, desired_input_layouts=sliced, use_local_output=True
                )
                plan[f"blocks.{names[-1]}"] = PrepareModuleOutput(
                    output_layouts=sliced, desired_output_layouts=whole
                )
        if self.token is not None:
            plan["token"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        if self.head is not None:
            plan["head"] = ColwiseParallel(output_layouts=Replicate())
        return plan


class GPT(_Blocks):
    """GPT-2 without dropout; the output layer shares its weight with the token embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = Embedding(shape.vocabulary, shape.width)
        self.position = Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleDict({str(n): Block(shape) for n in range(shape.layers)})
        self.norm = nn.LayerNorm(shape.width)
        self.head = Linear(shape.width, shape.vocabulary, bias=False)
        self.tie()

    def tie(self) -> None:
        """Let the output layer use the token embedding's weight."""
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of ``targets``, a float32 scalar; both (batch, length), int64."""
        x = self.through(self.embed(tokens))
        return cross_entropy(self.head(self.norm(x)), targets)

    def stage(self, index: int, stages: int) -> Stage:
        """The ``index``-th of ``stages`` equal runs of the blocks, with what stands at the ends.

        When the blocks do not divide, earlier stages take one more. The modules are this model's
        own and keep their names.
        """
        blocks = list(self.blocks.items())
        fewest, more = divmod(len(blocks), stages)
        first = index * fewest + min(index, more)
        own = blocks[first : first + fewest + (index < more)]
        return Stage(self, dict(own), first=index == 0, last=index == stages - 1)

    def pipeline_layers(self) -> list[Any]:
        """The model as a sequence, for DeepSpeed's ``PipelineModule``.

        The token embedding stands in it twice: it also makes the logits.
        """
        from deepspeed.pipe import LayerSpec, TiedLayerSpec

        def logits(token: Given, x: Tensor) -> Tensor:
            return F.linear(x, token.module.weight)  # type: ignore[arg-type]

        token = {"tied_weight_attr": "module.weight"}
        return [
            TiedLayerSpec("token", Given, self.token, **token),
            LayerSpec(AddPosition, self.position),
            *(block for block in self.blocks.values()),
            self.norm,
            TiedLayerSpec("token", Given, self.token, forward_fn=logits, **token),
        ]

    def autotp_plan(self) -> dict[str, Any]:
        """Which weight is sliced which way, as DeepSpeed's ``tensor_parallel.partition_config``.

        The vocabulary stays whole: AutoTP slices no embedding.
        """
        by_rows = {"patterns": [r".*\.output\.weight$"], "partition_type": "row"}
        by_columns = {
            "patterns": [r".*\.heads_in\.weight$", r".*\.expand\.weight$"],
            "partition_type": "column",
        }
        return {"use_default_specs": False, "layer_specs": [by_rows, by_columns]}


class Stage(_Blocks):
    """Some blocks of a GPT: from tokens or activations to activations or logits."""

    def __init__(self, gpt: GPT, blocks: dict[str, nn.Module], *, first: bool, last: bool) -> None:
        super().__init__()
        self.recompute = gpt.recompute
        self.token = gpt.token if first else None
        self.position = gpt.position if first else None
        self.blocks = nn.ModuleDict(blocks)
        self.norm = gpt.norm if last else None
        self.head = gpt.head if last else None

    def forward(self, x: Tensor) -> Tensor:
        """``x``: tokens (batch, length) in the first stage, else (batch, length, width)."""
        if self.token is not None:
            x = self.embed(x)
        x = self.through(x)
        if self.head is not None:
            x = self.head(self.norm(x))
        return x


class Given(nn.Module):
    """A module that was made before, for those who want a class to make one of."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.module(x)
        return y


class AddPosition(Given):
    """Adds the vectors of the positions: (batch, length, width) to the same."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        added: Tensor = x + self.module(places)
        return added


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all tokens, in float32."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
