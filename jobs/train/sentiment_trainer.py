"""Classify reviews with the Hugging Face Trainer: DDP, or DeepSpeed ZeRO if the job has a config.

    clusterkit submit jobs/sentiment-trainer.yaml      # DDP
    clusterkit submit jobs/sentiment-zero2.yaml        # the same with ZeRO-2; -zero3 with ZeRO-3
    torchrun --nproc-per-node 2 jobs/train/sentiment_trainer.py

Data, model and tokenizer are those of sentiment.py; the loop is the Trainer's. What it must be told
is here: batch sizes and clipping that agree with the DeepSpeed config, and, on CPUs, to use them.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import warnings
from types import ModuleType
from typing import Any

import torch
from classifier import choose_model, encode
from flags import Flags
from hub import import_transformers, read_deepspeed_config
from reviews import add_flags, learning_rate, read_reviews, split

from clusterkit.errors import Unavailable
from clusterkit.runtime.distributed import (
    EXIT_STOPPED,
    World,
    choose_device,
    distributed,
    read_ranks,
    run,
    stop_requested,
)
from clusterkit.runtime.metrics import Reporter


def main() -> int:
    args = parse_args()
    ranks = read_ranks()
    reporter = Reporter(speaks=ranks.is_first)
    device = choose_device(ranks)
    reviews = read_reviews(args.data, separator=args.separator, encoding=args.encoding)
    parts = split(len(reviews.texts), args.validation, args.seed)
    config = read_deepspeed_config(args.deepspeed_config) if args.deepspeed_config else None
    texts = [reviews.texts[row] for row in parts[0]]
    tokenizer, make_model = choose_model(args.model, texts, reviews.classes, args.max_length)
    hf = import_trainer(device, config)
    if ranks.is_first:
        print(reviews.describe(*map(len, parts)), flush=True)
    sets = [encode(tokenizer, reviews, rows, args.max_length) for rows in parts]
    reporter.phase("rendezvous")
    with distributed(ranks, device) as world, tempfile.TemporaryDirectory() as folder:
        reporter.phase("build")
        torch.manual_seed(args.seed)
        options = trainer_options(args, world, config)
        trainer = hf.Trainer(
            model=make_model(),
            args=hf.TrainingArguments(output_dir=folder, **options),
            train_dataset=sets[0],
            eval_dataset=sets[1],
            data_collator=hf.DataCollatorWithPadding(tokenizer),
            compute_metrics=count_right,
            callbacks=[make_callback(hf, reporter, world, len(sets[1]))],
        )
        trainer.remove_callback(hf.PrinterCallback)
        # The classifier takes any keyword, so transformers 5.23 believes that its loss is a sum
        # over all ranks' rows, and multiplies it by the ranks and the accumulation. It is a mean.
        trainer.model_accepts_loss_kwargs = False
        reporter.phase("training")
        trainer.train()
        if trainer.state.global_step < trainer.state.max_steps:
            return EXIT_STOPPED
        print(describe(trainer, config, world), flush=True)
        if args.output:
            trainer.save_model(args.output)  # with ZeRO-3 the ranks gather it: all must call
            tokenizer.save_pretrained(args.output)
    reporter.event("end", steps=trainer.state.global_step)
    reporter.phase(None)
    return 0


def trainer_options(
    args: argparse.Namespace, world: World, config: dict[str, Any] | None
) -> dict[str, Any]:
    """TrainingArguments; what stands in the DeepSpeed config as well must be the same there."""
    on_cpu = world.device.type == "cpu"
    return {
        "per_device_train_batch_size": args.batch,
        "per_device_eval_batch_size": args.batch,
        "gradient_accumulation_steps": args.accumulation,
        "max_grad_norm": 1.0 if config is None else config["gradient_clipping"],
        "deepspeed": config,
        "num_train_epochs": args.epochs,
        "learning_rate": learning_rate(args),
        "seed": args.seed,
        # Without it the Trainer takes a batch per GPU for one per rank, and DeepSpeed refuses.
        "use_cpu": on_cpu,
        "dataloader_pin_memory": not on_cpu,
        "ddp_find_unused_parameters": False,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "report_to": "none",
    }


def count_right(prediction: Any) -> dict[str, float]:
    """For the Trainer, which has gathered the rows of all ranks: each of them once."""
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"accuracy": float(right.mean()), "rows": len(right)}


def make_callback(hf: ModuleType, reporter: Reporter, world: World, rows: int) -> Any:
    """What passes the Trainer's own logs on to clusterkit, and a request to stop to the Trainer."""

    class Reports(hf.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            reporter.event("start", steps=state.max_steps, first_step=state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            (stop,) = world.mean(stop_requested())  # all ranks must leave at the same step
            control.should_training_stop |= stop > 0

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
            if "loss" in logs:
                values = {"loss": logs["loss"], "gradient_norm": logs.get("grad_norm")}
                values["learning_rate"] = logs.get("learning_rate")
                reporter.event("metrics", step=state.global_step, **values)
            elif "eval_loss" in logs:
                if logs["eval_rows"] != rows:
                    raise RuntimeError(f"{logs['eval_rows']} of {rows} rows were evaluated")
                values = {name: logs[f"eval_{name}"] for name in ("loss", "accuracy")}
                if state.is_world_process_zero:
                    print(f"epoch {logs['epoch']:g}  validation loss {values['loss']:.4f}  "
                          f"accuracy {values['accuracy']:.4f}", flush=True)  # fmt: skip
                reporter.event("evaluation", step=state.global_step, **values)

    return Reports()


def describe(trainer: Any, config: dict[str, Any] | None, world: World) -> str:
    """One line of this rank. ZeRO-3 leaves it a part of each parameter, in ``ds_tensor``."""
    parameters = list(trainer.model.parameters())
    held = sum(getattr(p, "ds_tensor", p).numel() for p in parameters)
    whole = sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
    engine = type(trainer.model_wrapped).__name__
    stage = "" if config is None else f" ZeRO-{trainer.model_wrapped.zero_optimization_stage()}"
    return f"rank {world.rank} | {engine}{stage} | keeps {held} of {whole} parameters"


def import_trainer(device: torch.device, config: dict[str, Any] | None) -> ModuleType:
    """transformers, with what the Trainer needs beside it.

    Raises:
        Unavailable: accelerate or DeepSpeed is not installed.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # accelerate looks at DeepSpeed anyway
    try:
        import accelerate  # noqa: F401 (the Trainer imports it, and explains less)

        if config is not None:
            import deepspeed.ops
    except ImportError as error:
        raise Unavailable(
            f"the Hugging Face Trainer needs {error.name}, which is not installed",
            hint="pip install accelerate deepspeed",
        ) from None
    if config is not None:
        # DeepSpeed calls collectives by names that torch 2.13 has renamed.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        if device.type == "cpu":
            # It would compile a collective at start, which takes a minute; gloo does without.
            deepspeed.ops.__compatible_ops__ = {}
        if "offload_optimizer" in config["zero_optimization"]:
            config.setdefault("zero_force_ds_cpu_optimizer", False)  # the Trainer brings its own
    return import_transformers()


def parse_args() -> argparse.Namespace:
    flags = Flags(__doc__)
    flags.add_batch(16, accumulates=True)
    add_flags(flags)
    config = os.environ.get("CLUSTERKIT_DEEPSPEED_CONFIG")
    flags.add_argument("--deepspeed-config", default=config, metavar="FILE",
                       help="JSON (default: the job's deepspeed section)")  # fmt: skip
    return flags.parse_args()


if __name__ == "__main__":
    run(main)
