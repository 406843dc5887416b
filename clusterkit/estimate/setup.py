"""The input of a prediction: the sizes of a model, and how it is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from clusterkit.estimate.mesh import Mesh

Precision = Literal["fp32", "bf16", "fp16"]
ZERO = ("zero0", "zero1", "zero2", "zero3")

OPTIMIZERS: dict[str, float] = {"adamw": 8, "adam": 8, "momentum": 4, "sgd": 0, "adafactor": 0}
"""Optimizer to bytes of float32 state a parameter; Adafactor's follows from the shapes."""

FP32 = 4
HALF = 2


@dataclass(frozen=True)
class Model:
    """The sizes of a model that decide its memory; counts are of elements."""

    name: str
    parameters: int  # all; shared ones once
    layers: int
    hidden: int  # width of the residual stream
    heads: int
    context: int  # tokens in a sample
    vocabulary: int  # tokens in the output layer; 0 for a model that predicts no tokens
    layer_parameters: int  # of one layer
    matrix_parameters: int  # of one layer's matrices, without biases and norms
    largest: int  # of the largest matrix in a layer
    feed_forward: int  # width of the perceptron
    first: int  # parameters before the layers, the embeddings
    last: int  # parameters after them, without those that are shared with the embeddings
    tied: bool  # whether the output layer is the token embedding
    # Elements that a layer saves of a token:
    residual: float = 0  # of the residual stream; under autocast they are float32
    kept: float = 0  # in the precision of the computation, not divided by tensor parallel
    divided: float = 0  # the same, divided by it
    wide: float = 0  # float32 (statistics of norms and softmax), whatever the precision
    gated: bool = False  # whether the perceptron has a gate
    buffers: int = 0  # bytes
    divisible: bool = False  # whether our tensor and pipeline parallel can cut it
    # Instead of those four, counted on the meta device: precision to bytes that a layer saves of
    # one sample and that all else saves of it.
    measured: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    origin: str = ""  # where the numbers come from, for people


@dataclass(frozen=True)
class Zero:
    """Sizes of DeepSpeed's buffers, in elements, with the defaults of its version 0.19."""

    reduce_bucket: float = 5e8
    prefetch: float = 5e7
    max_live: float = 1e9
    overlap: bool = False  # two reduce buckets instead of one, in stages 1 and 2


@dataclass(frozen=True)
class Setup:
    """How a model is trained.

    ZeRO keeps 16-bit weights and a float32 copy of them; the other strategies keep float32 weights
    and cast (FSDP when it gathers, DDP as it computes).
    """

    strategy: str  # ddp, zero0 to zero3, fsdp, tp, pp or 3d
    mesh: Mesh  # for DDP and ZeRO its dp counts
    precision: Precision = "bf16"  # of the computation
    micro: int = 1  # samples in one forward pass
    accumulation: int = 1  # forward passes a step
    optimizer: str = "adamw"  # a key of OPTIMIZERS
    fused: bool = False  # Adam in one kernel, which needs no temporaries
    recompute: bool = False  # activation checkpointing: keep a layer's input alone
    attention: str = "fused"  # keeps no scores (flash, memory-efficient kernels); "eager" does
    offload_optimizer: bool = False  # optimizer and float32 weights in the memory of the host
    offload_parameters: bool = False  # the 16-bit (or only) weights as well
    reshard: bool = True  # FSDP: free gathered parameters after the forward pass of a layer
    sequence: bool = False  # tensor parallel: divide the other activations along the sequence
    schedule: str = "1f1b"  # or gpipe
    zero: Zero = field(default_factory=Zero)
    local_ranks: int = 1  # ranks of a node, which share its memory
    device: str = "cuda"  # cpu has no memory of its own: what is offloaded stays
    overhead: int = 0  # bytes that are no tensor: context, libraries, NCCL, fragmentation

    @property
    def gathers(self) -> bool:
        """Whether FSDP2 gathers parameters, layer by layer."""
        return self.strategy == "fsdp" or (self.strategy in ("tp", "pp", "3d") and self.mesh.dp > 1)

    @property
    def vocabulary_slices(self) -> int:
        """Ranks that share embedding and output layer; DeepSpeed's AutoTP leaves them whole."""
        return 1 if self.strategy in ZERO else self.mesh.tp

    @property
    def autocast(self) -> bool:
        """Whether float32 weights are cast to 16 bits when they are used."""
        return self.precision != "fp32" and self.strategy not in ZERO and not self.gathers

    @property
    def compute(self) -> int:
        """Bytes of an element of the computation."""
        return FP32 if self.precision == "fp32" else HALF

    @property
    def stored(self) -> int:
        """Bytes of an element of the weights in use and of the residual stream."""
        return FP32 if self.autocast else self.compute

    @property
    def optimizer_on_host(self) -> bool:
        """Whether the optimizer's state is in another memory than the device's."""
        return self.offload_optimizer and self.device != "cpu"
