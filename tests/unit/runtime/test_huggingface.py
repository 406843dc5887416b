"""Hugging Face models by folder, as they are given."""

from __future__ import annotations

from pathlib import Path

import gpt_hugging_face
import pytest


@pytest.mark.parametrize("kind", ["GPT2Config", "GemmaConfig", "LlamaConfig"])
def test_model_without_tokenizer_uses_bytes_as_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip(
        "transformers", reason="transformers: not installed (pip install 'clusterkit[train]')"
    )
    getattr(transformers, kind)(vocab_size=300).save_pretrained(tmp_path)
    facts, _, tokenize = gpt_hugging_face.choose_hugging_face(str(tmp_path), False)
    assert facts["vocabulary"] == 300
    assert tokenize(b"abc").tolist() == [97, 98, 99]
