"""Fixtures for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.make_tiny_checkpoint import make_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers with tokenizer and chat template. Read-only: it is shared."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")
