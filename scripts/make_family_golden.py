"""Computes the golden logits of tests/parity with transformers. Needs torch and transformers.

    python -m scripts.make_family_golden [family …]

Every case's folder is written by the same code as in the tests, and loaded by transformers, which must
find each of its own text weights in it and no other: so names and layouts are checked as well.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.parity.families import (
    CASES,
    GOLDEN,
    PROMPT_LENGTHS,
    ROPES,
    Case,
    build_checkpoint,
    kept_positions,
    prompt,
)

_NOT_TEXT = re.compile(r"visual|vision|multi_modal_projector|audio")
MAX_GOLDEN_BYTES = 300_000


def load(case: Case, folder: Path) -> Any:
    """The case's model in transformers, float32."""
    name = case.config["architectures"][0]
    model, report = getattr(transformers, name).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    missing = [key for key in report["missing_keys"] if not _NOT_TEXT.search(key)]
    wrong = {
        "missing": missing,
        "unexpected": report["unexpected_keys"],
        "mismatched": report["mismatched_keys"],
    }
    if any(wrong.values()):
        raise SystemExit(f"{case.id}: transformers does not accept the checkpoint: {wrong}")
    for module in model.modules():
        if hasattr(module, "scalar_embed_scale"):
            module.embed_scale.copy_(module.embed_scale.to(torch.bfloat16))
    return model.eval()


def golden(case: Case) -> dict[str, np.ndarray]:
    """Logits float32 [kept positions, vocab] by "case/length"."""
    with tempfile.TemporaryDirectory() as folder:
        build_checkpoint(case, Path(folder))
        model = load(case, Path(folder))
    result = {}
    for length in PROMPT_LENGTHS:
        with torch.inference_mode():
            logits = model(
                input_ids=torch.from_numpy(prompt(length).astype(np.int64))[None], use_cache=False
            ).logits[0]
        kept = logits.float().numpy()[kept_positions(length)]
        if not np.isfinite(kept).all():
            raise SystemExit(f"{case.id}: logits of length {length} are not finite")
        result[f"{case.name}/{length}"] = kept
    print(case.id, json.dumps({"std": round(float(kept.std()), 3)}), flush=True)
    return result


def rope_golden() -> dict[str, np.ndarray]:
    """Frequencies float32 [rotary_dim / 2] by name, and the factor on cos and sin under "name/factor"."""
    result = {}
    for name, rope in ROPES.items():
        config = transformers.LlamaConfig(
            head_dim=rope.head_dim,
            hidden_size=2 * rope.head_dim,
            num_attention_heads=2,
            max_position_embeddings=131072,
            rope_parameters=dict(rope.parameters),
        )
        compute = ROPE_INIT_FUNCTIONS[rope.parameters["rope_type"]]
        frequencies, factor = compute(config, torch.device("cpu"))
        result[name] = frequencies.numpy()
        result[f"{name}/factor"] = np.float32(factor)
    return result


def main() -> None:
    families = ["rope", *dict.fromkeys(case.family for case in CASES)]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=families, metavar="family", help=", ".join(families))
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for family in parser.parse_args().families:
        arrays = rope_golden() if family == "rope" else {}
        for case in CASES:
            if case.family == family:
                arrays |= golden(case)
        path = GOLDEN / f"{family}.npz"
        np.savez_compressed(path, **arrays)
        size = path.stat().st_size
        if size > MAX_GOLDEN_BYTES:
            raise SystemExit(f"{path} has {size} bytes, more than {MAX_GOLDEN_BYTES}")
        print(path.name, size, "bytes", flush=True)


if __name__ == "__main__":
    main()
