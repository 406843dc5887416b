"""Formulas for the memory of a training step on one GPU.

docs/estimate.md derives them and lists the measurements that they were checked against. Sources:

- ZeRO: Rajbhandari et al. 2019, https://arxiv.org/abs/1910.02054, section 3 and figure 1: 16 bytes
  a parameter with Adam in mixed precision, and which of them a stage divides.
- Activations: Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198, section 4: what a layer
  saves for its backward pass, with tensor and sequence parallel, and what recomputing saves.
- Pipelines: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2: micro batches
  in flight.

All sizes are bytes unless a name says otherwise.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass, replace

from msgspec import Struct

from clusterkit.estimate.setup import FP32, HALF, OPTIMIZERS, ZERO, Model, Setup

_STAGE_0_BUCKET = 5e8
"""Elements that DeepSpeed flattens at a time without ZeRO, whatever its config says."""


class Memory(Struct, frozen=True, kw_only=True):
    """Bytes that one rank needs; in a pipeline, the rank of the stage that needs most."""

    parameters: int  # weights that are there all the time, with a float32 copy if there is one
    gradients: int  # once all of them are there
    optimizer: int  # states
    activations: int  # saved for the backward pass, without the loss
    loss: int  # logits and what the cross entropy makes of them, at its peak
    buffers: int  # the model's buffers, the batch
    communication: int  # buckets and gathered parameters
    temporary: int  # of the optimizer step
    overhead: int  # what is no tensor
    total: int  # the largest moment with the overhead; not the sum, for not all is there at once
    moment: str  # the largest
    moments: Mapping[str, int]  # what is allocated at each of them, without the overhead
    host_per_node: int  # memory of the node that its ranks need for what is offloaded

    @property
    def peak(self) -> int:
        """The largest moment."""
        return self.total - self.overhead


def predict(model: Model, setup: Setup) -> Memory:
    """Predict the memory of one rank at every moment of a training step."""
    stages = setup.mesh.pp
    if stages == 1:
        return _predict(model, setup, _Share(model.layers, True, True, 1))
    layers = math.ceil(model.layers / stages)
    flight = setup.accumulation if setup.schedule == "gpipe" else None
    ends = [
        _Share(layers, True, False, min(flight or stages, setup.accumulation)),
        _Share(model.layers // stages, False, True, min(flight or 1, setup.accumulation)),
    ]
    if stages > 2:
        ends.append(_Share(layers, False, False, min(flight or stages - 1, setup.accumulation)))
    return max((_predict(model, setup, share) for share in ends), key=lambda memory: memory.peak)


def largest_micro(model: Model, setup: Setup, limit: float, *, most: int = 4096) -> int:
    """Return the largest micro batch that fits into ``limit`` bytes; 0 if none does."""
    sizes = range(1, most + 1)
    return bisect(sizes, limit, key=lambda size: predict(model, replace(setup, micro=size)).total)


# ---------------------------------------------------------------- one stage


@dataclass(frozen=True)
class _Share:
    """The part of the model in a pipeline stage, and its micro batches in flight."""

    layers: int
    first: bool
    last: bool
    in_flight: int


@dataclass(frozen=True)
class _Static:
    """Bytes allocated between two forward passes, and the changes during a step."""

    weights: float  # and their float32 copy
    gradients: float  # all of them
    early: float  # gradients that are there already when a backward pass begins
    optimizer: float  # states
    step: float  # on top of weights and optimizer during its step, gradients included
    temporary: float  # of that, what the optimizer itself makes
    communication: float = 0.0  # buckets and gathered parameters, during forward and backward pass
    prefetched: float = 0.0  # what of it is gone when the loss is computed
    reduce: float = 0.0  # on top when gradients are reduced after the backward pass
    host: float = 0.0  # of one rank in the memory of its node
    later: float = 0.0  # what the backward pass allocates when it has gone a part of its way
    after: float = 0.0  # which part, 0 to 1


def _predict(model: Model, setup: Setup, share: _Share) -> Memory:
    own = _own_parameters(model, setup, share)
    static = _static(model, setup, share, own)
    tokens = setup.micro * model.context
    # What a stage receives: activations and gradients of every micro batch.
    received = tokens * model.hidden * FP32 * setup.accumulation * (2 - share.first - share.last)
    buffers: float = model.buffers + 2 * 8 * tokens * setup.accumulation + received
    if setup.device == "cpu" and setup.mesh.pp > 1:
        # Every rank builds the whole model in host memory, and keeps the other stages' layers.
        uncut = replace(setup, mesh=replace(setup.mesh, tp=1))
        buffers += FP32 * (model.parameters - _own_parameters(model, uncut, share))
    layer = layer_activations(model, setup)
    kept = _layer_input(model, setup) if setup.recompute else layer
    # Of a layer whose insides are computed again, they are there during its backward pass.
    again = setup.micro * layer if setup.recompute else 0.0
    saved = setup.micro * share.layers * kept * share.in_flight
    saved += _casts(model, setup, share) + _around(model, setup, share, tokens)
    # Three times the logits in float32: log-softmax, its gradient, and the logits' gradient.
    loss = 3 * FP32 * tokens * model.vocabulary if share.last else 0.0
    head, tied = _head_gradients(model, setup, share, tokens)
    between = static.weights + static.optimizer + buffers
    forward = between + static.communication + static.early
    backward = forward - static.prefetched
    all_gradients = backward - static.early + max(static.gradients, static.early)
    layer_gradients = tied + _layer_backward(model, setup, tokens)
    moments = {
        "end of forward": forward + saved + again,
        "loss": backward + saved + loss,
        "start of backward": backward + saved + max(head, again + layer_gradients),
        "middle of backward": backward
        + static.later
        + saved * (1 - static.after)
        + again
        + layer_gradients,
        "end of backward": all_gradients
        + (_embedding_gradients(model, setup) if share.first else 0.0),
        "gradient reduction": all_gradients + static.reduce,
        "optimizer step": between + static.step,
    }
    whole = {name: round(size) for name, size in moments.items()}
    moment = max(whole, key=lambda name: whole[name])
    return Memory(
        parameters=round(static.weights),
        gradients=round(static.gradients),
        optimizer=round(static.optimizer),
        activations=round(saved + again),
        loss=round(loss),
        buffers=round(buffers),
        communication=round(static.communication),
        temporary=round(static.temporary),
        overhead=setup.overhead,
        total=whole[moment] + setup.overhead,
        moment=moment,
        moments=whole,
        host_per_node=round(static.host * setup.local_ranks),
    )


def _own_parameters(model: Model, setup: Setup, share: _Share) -> float:
    """Parameters that this rank computes with: its stage's, its slice of them."""
    tp = setup.mesh.tp
    ends = 0.0
    tokens = model.vocabulary * model.hidden
    if share.first:
        ends += model.first - tokens + tokens / setup.vocabulary_slices
    if share.last:
        ends += model.last
        if model.tied and not share.first:
            ends += tokens / setup.vocabulary_slices
    small = model.layer_parameters - model.matrix_parameters
    # Biases of the matrices that are cut by rows are cut as well; the few others are too small.
    layer = model.matrix_parameters / tp + small
    return share.layers * layer + ends


def _static(model: Model, setup: Setup, share: _Share, own: float) -> _Static:
    # Gradients of earlier micro batches are there when activations are at their most, unless all
    # forward passes come before: in GPipe, and in short pipelines.
    accumulates = setup.accumulation > share.in_flight
    if setup.strategy in ZERO:
        return _zero(model, setup, own)
    if setup.gathers:
        return _fsdp(model, setup, share, own, accumulates)
    # DDP's buckets are the gradients (gradient_as_bucket_view), but those of micro batches before
    # the last are accumulated beside them (no_sync).
    early = FP32 * own if accumulates else 0.0
    if setup.strategy == "ddp" and setup.mesh.size > 1:  # one rank has no buckets
        early += FP32 * own
    temporary = _optimizer_temporary(setup, own, _largest(model, setup) * FP32)
    return _Static(
        weights=FP32 * own,
        gradients=FP32 * own,
        early=early,
        optimizer=_state_bytes(model, setup) * own,
        step=FP32 * own + temporary,
        temporary=temporary,
    )


def _zero(model: Model, setup: Setup, own: float) -> _Static:
    """DeepSpeed 0.19: what each stage divides (ZeRO paper, figure 1), and its buffers."""
    stage = ZERO.index(setup.strategy)
    width, ranks = setup.compute, setup.mesh.dp
    shard = own / ranks
    flat = FP32 * shard
    per_state = _state_bytes(model, setup)
    largest = _largest(model, setup)
    on_host = setup.optimizer_on_host
    if stage == 0:
        fp32 = 0.0 if width == FP32 else FP32 * own
        temporary = _optimizer_temporary(setup, own, largest * FP32)
        return _Static(
            weights=width * own + fp32,
            gradients=width * own,
            early=width * own if setup.accumulation > 1 else 0.0,
            optimizer=per_state * own,
            reduce=width * min(own, _STAGE_0_BUCKET) if ranks > 1 else 0.0,
            step=width * own + fp32 + temporary,
            temporary=temporary,
        )
    temporary = 0.0 if on_host else _optimizer_temporary(setup, shard, flat, flat=True)
    bucket = width * setup.zero.reduce_bucket
    if stage < 3:
        whole = width * own
        partition = width * shard
        copied, offloaded, step = 0.0, 0.0, flat + partition
        if setup.offload_optimizer:
            # A buffer for the updated weights, float32 gradients, and one for copying gradients.
            copied = width * largest
            offloaded = width * shard + flat + copied
            partition = 0.0
            step = 0.0 if on_host else offloaded + copied
        early = whole if stage == 1 else partition
        buckets = bucket * (2 if setup.zero.overlap else 1)
        return _Static(
            weights=whole + (0.0 if on_host else flat),
            gradients=partition if stage == 2 else whole,
            early=early if setup.accumulation > 1 else 0.0,
            optimizer=0.0 if on_host else per_state * shard,
            communication=buckets + copied + (0.0 if on_host else offloaded),
            step=step + temporary,
            temporary=temporary,
            host=flat + per_state * shard + offloaded if on_host else 0.0,
            later=partition if stage == 2 else 0.0,
            after=min(1.0, setup.zero.reduce_bucket / own),
        )
    weights_on_host = setup.device != "cpu" and setup.offload_parameters
    gathered = width * min(own, setup.zero.max_live)
    prefetch = width * min(own, setup.zero.prefetch, setup.zero.max_live) if ranks > 1 else 0.0
    gradients = 0.0 if on_host else width * shard
    extra = flat if setup.offload_optimizer and not on_host else 0.0
    host = (FP32 + FP32 + per_state + width) * shard if on_host else 0.0
    return _Static(
        weights=(0.0 if weights_on_host else width * shard) + (0.0 if on_host else flat),
        gradients=gradients,
        early=gradients,
        optimizer=0.0 if on_host else per_state * shard,
        communication=bucket + gathered + prefetch + extra,
        prefetched=prefetch,
        step=bucket + gradients + extra + (0.0 if on_host else flat) + temporary,
        temporary=temporary,
        host=host + (width * shard if weights_on_host else 0.0),
    )


def _fsdp(model: Model, setup: Setup, share: _Share, own: float, accumulates: bool) -> _Static:
    """FSDP2: float32 shards; layers are gathered in the precision of the computation."""
    shard = own / setup.mesh.shard
    width = setup.compute
    layer = model.layer_parameters / setup.mesh.tp
    ends = own - share.layers * layer
    unit = max(layer, ends)
    gathered = width * (min(own, ends + 2 * layer) if setup.reshard else own)
    # While a unit is gathered or reduced, it is there twice: in one piece, and cut up.
    # Without resharding that is over before the last activations are there.
    copied = width * unit if setup.reshard else 0.0
    on_host = setup.optimizer_on_host
    state = _state_bytes(model, setup) * shard
    largest = FP32 * _largest(model, setup) / setup.mesh.shard
    temporary = 0.0 if on_host else _optimizer_temporary(setup, shard, largest)
    on_device = 0.0 if on_host else FP32 * shard
    return _Static(
        weights=on_device,
        gradients=on_device,
        early=FP32 * own if accumulates else 0.0,
        optimizer=0.0 if on_host else state,
        communication=gathered + copied,
        prefetched=copied,
        # Of one unit, whole gradients and what is sent of them.
        reduce=2 * FP32 * unit,
        step=on_device + temporary,
        temporary=temporary,
        host=(2 * FP32 * shard + state) if on_host else 0.0,
    )


def _state_bytes(model: Model, setup: Setup) -> float:
    """Bytes of optimizer state a parameter."""
    if setup.optimizer == "adafactor":
        # A row and a column of float32 for each matrix, of hidden x 4 hidden on the whole.
        return FP32 * (1 / model.hidden + 1 / model.feed_forward)
    return OPTIMIZERS[setup.optimizer]


def _optimizer_temporary(
    setup: Setup, elements: float, largest: float, *, flat: bool = False
) -> float:
    """Return the bytes that torch's Adam allocates during a step: none if it is fused.

    Otherwise it takes all parameters at once on GPUs (foreach) and holds one copy: the square roots
    of the second moments. On CPUs it takes one parameter after the other and holds three of its
    size; two of a flat one, for there is no previous one.
    """
    if setup.optimizer in ("sgd", "momentum") or (setup.fused and "adam" in setup.optimizer):
        return 0.0
    if setup.device == "cpu":
        return (2 if flat else 3) * largest
    return FP32 * elements


def _largest(model: Model, setup: Setup) -> float:
    """Elements of the largest parameter that this rank has."""
    vocabulary = model.vocabulary * model.hidden / setup.vocabulary_slices
    return max(model.largest / setup.mesh.tp, vocabulary)


# ---------------------------------------------------------------- activations


def layer_activations(model: Model, setup: Setup) -> float:
    """Return the bytes that one layer saves of one sample for its backward pass.

    Equations 1 to 4 of Korthikanti et al., for the layer that the model has.
    """
    measured = _measured(model, setup)
    if measured is not None:
        return measured[0] + _scores(model, setup)
    width, tp = setup.compute, setup.mesh.tp
    residual = model.residual * setup.stored / (tp if setup.sequence else 1)
    # What a norm hands to a sliced layer is gathered before, and saved whole, also with sequence
    # parallel: DTensor does not gather it again for the backward pass as Megatron does.
    kept = model.kept * width
    divided = model.divided * width / tp
    wide = model.wide * FP32
    return model.context * (residual + kept + divided + wide) + _scores(model, setup)


def _measured(model: Model, setup: Setup) -> tuple[float, float] | None:
    return model.measured.get("fp32" if setup.precision == "fp32" else "bf16")


def _scores(model: Model, setup: Setup) -> float:
    """Attention scores of one layer and sample, where they are kept: the softmax's result."""
    if setup.attention != "eager":
        return 0.0
    heads = model.heads / setup.mesh.tp
    # With 16 bits the softmax is still computed in float32, and both are kept.
    width = FP32 if setup.precision == "fp32" else FP32 + HALF
    return heads * model.context**2 * width


def _layer_input(model: Model, setup: Setup) -> float:
    """Bytes of one layer's input, of one sample: all that recomputing needs."""
    between = setup.mesh.tp if setup.sequence else 1
    return model.context * model.hidden * setup.stored / between


def _around(model: Model, setup: Setup, share: _Share, tokens: float) -> float:
    """Return the bytes saved outside the layers, without the loss."""
    measured = _measured(model, setup)
    if measured is not None:
        return setup.micro * measured[1]
    if not share.last:
        return 0.0
    return tokens * model.hidden * (setup.stored + setup.compute) + 2 * FP32 * tokens


def _casts(model: Model, setup: Setup, share: _Share) -> float:
    """16-bit copies of float32 weights, which autocast keeps until the backward pass is over."""
    if not setup.autocast:
        return 0.0
    matrices = share.layers * model.matrix_parameters
    if share.last:
        matrices += model.vocabulary * model.hidden
    return HALF * matrices / setup.mesh.tp


def _head_gradients(
    model: Model, setup: Setup, share: _Share, tokens: float
) -> tuple[float, float]:
    """While the output layer's gradient is computed, and what of it stays until the embedding's.

    A shared weight's gradient is complete only when the embedding's is there.
    """
    if not share.last:
        return 0.0, 0.0
    weight = model.vocabulary * model.hidden * setup.stored / setup.vocabulary_slices
    logits = tokens * model.vocabulary * (FP32 if setup.compute == FP32 else FP32 + HALF)
    now = logits + weight + tokens * model.hidden * setup.compute
    return now, weight if model.tied else 0.0


def _layer_backward(model: Model, setup: Setup, tokens: float) -> float:
    """Gradients on their way through one layer, at the perceptron's second matrix."""
    tp = setup.mesh.tp
    inner = (2 if model.gated else 1) * model.feed_forward / tp
    matrix = model.largest / tp * (setup.compute + (FP32 if setup.autocast else 0))
    return tokens * (model.hidden * setup.stored + inner * setup.compute) + matrix


def _embedding_gradients(model: Model, setup: Setup) -> float:
    """The embedding's gradient is dense; a shared weight has two, and their sum."""
    weight = model.vocabulary * model.hidden * setup.stored / setup.vocabulary_slices
    return weight * (3 if model.tied and setup.mesh.pp == 1 else 1)
