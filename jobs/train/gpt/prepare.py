"""Write text as token files, which train.py maps into memory instead of reading them whole.

    python jobs/train/gpt/prepare.py my-texts/ tokens/                      # a token per byte
    python jobs/train/gpt/prepare.py my-texts/ tokens/ --tokenizer gpt2     # or a folder with one
    torchrun --nproc-per-node 8 jobs/train/gpt/train.py --model 124m --data tokens/

nanoGPT's layout: ``train.bin`` and ``val.bin`` (the last tenth), each token two bytes, lowest
first, and nothing else. ``meta.json`` says how many tokens each holds: a torn copy is noticed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from gpt_data import as_tokens, read_text
from gpt_ranks import BadInput, run
from torch import Tensor

LARGEST = 1 << 16
"""Tokens that two bytes can tell apart."""


def prepare(text: bytes, folder: Path, tokenizer: str | None) -> dict[str, object]:
    """Write the files; returns what meta.json says of them."""
    tokens, vocabulary = as_tokens(text), 256
    if tokenizer is not None:
        from gpt_hugging_face import load_tokenizer

        known = load_tokenizer(tokenizer)
        if known is None:
            raise BadInput(f"--tokenizer {tokenizer}: there is none")
        vocabulary = len(known)
        if vocabulary > LARGEST:
            raise BadInput(
                f"--tokenizer {tokenizer} has {vocabulary} tokens, and a token file of two bytes a "
                f"token can hold {LARGEST}",
                hint="train.py --model NAME --data TEXT tokenizes in memory",
            )
        tokens = torch.tensor(known(text.decode(errors="replace"), verbose=False)["input_ids"])
    held_out = len(tokens) // 10
    if held_out == 0:
        raise BadInput(f"{len(tokens)} tokens are too few to divide")
    parts = {"train.bin": tokens[:-held_out], "val.bin": tokens[-held_out:]}
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        (folder / name).write_bytes(_two_bytes_each(part))
    about = {"vocabulary": vocabulary} | {name: len(part) for name, part in parts.items()}
    (folder / "meta.json").write_text(json.dumps(about) + "\n")
    return about


def _two_bytes_each(tokens: Tensor) -> bytes:
    numbers = tokens.to(torch.uint16).numpy()
    return bytes((numbers.byteswap() if sys.byteorder == "big" else numbers).tobytes())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", help="file or folder")
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("--tokenizer", metavar="NAME", help="Hugging Face name or folder")
    args = parser.parse_args()
    print(json.dumps(prepare(read_text(args.text), args.folder, args.tokenizer)))
    return 0


if __name__ == "__main__":
    run(main)
