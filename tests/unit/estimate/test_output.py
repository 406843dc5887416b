"""What `clusterkit estimate` prints, as wide as the terminal is."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
WORDS = ("--gpus", "8", "--gpu-memory", "80GB")


def parts(text: str) -> tuple[list[str], list[str]]:
    """The words around the table, and its lines."""
    blocks = text.split("\n\n")
    (table,) = [block for block in blocks if block.startswith("STRATEGY")]
    blocks.remove(table)
    return " ".join(blocks).split(), table.splitlines()


def test_number_of_tokens_in_vocabulary_does_not_read_as_context(cli: Callable[..., Any]) -> None:
    out = cli("estimate", str(ROOT / "jobs" / "ddp.yaml"), *WORDS).out
    assert "2 layers x 128, vocabulary 256\n" in out
    assert "micro batch 6 x 64 tokens" in out


@pytest.mark.parametrize("width", [40, 80, 100])
@pytest.mark.parametrize("model", ["llama-2-70b", "qwen2-1.5b", "7B", "1.5b"])
def test_output_fits_terminal_without_broken_number_or_name(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, model: str, width: int
) -> None:
    wide = cli("estimate", model, *WORDS)
    monkeypatch.setenv("COLUMNS", str(width))
    done = cli("estimate", model, *WORDS)
    assert max(map(len, (done.out + done.err).splitlines())) <= width
    assert done.err.split() == wide.err.split()
    (words, table), (all_words, whole_table) = parts(done.out), parts(wide.out)
    assert words == all_words
    assert set(table[0].split()) >= {"STRATEGY", "TOTAL", "FITS"}
    # Columns go first: no line more, and each begins with the whole name.
    for line, whole in zip(table, whole_table, strict=True):
        assert line.startswith(re.split("  +", whole)[0])
        assert set(line.split()) <= set(whole.split())
