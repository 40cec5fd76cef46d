"""Makes tests/parity/golden/smollm2.json: what transformers generates from the demo model's weights.

    python scripts/make_smollm2_golden.py MODEL.gguf [--out FILE]

Needs torch, transformers and gguf, which neither the service nor its tests need. The weights are the
GGUF file's, dequantised to float32 and put into transformers' own Llama: the file stores the rows of q
and k in the order of interleaved rotation, which is undone here. Greedy, 64 tokens, on one thread pool of
the CPU. The smallest gap between the two largest logits is recorded beside each output: it tells how far
another engine's rounding is from a different token.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

N_TOKENS = 64
DEFAULT_OUT = Path(__file__).resolve().parent.parent / "tests" / "parity" / "golden" / "smollm2.json"
QUESTIONS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about a lighthouse in winter.",
    "List five fruits and say what colour each of them is.",
    "Give me a Python function that reverses a string.",
    "Name the planets of the solar system in order.",
    "What is the boiling point of water in Fahrenheit?",
    "A train leaves at 9:40 and arrives at 12:05. How long does the journey take? Think step by step.",
)
TEXTS = (
    "def fibonacci(n):\n    if n",
    "Water is made of hydrogen and oxygen. Table salt is made of",
)
"""Prompts without a chat template, to see plain continuation too."""
SECTIONS = (
    ("blk.{}.attn_norm", "input_layernorm"),
    ("blk.{}.attn_q", "self_attn.q_proj"),
    ("blk.{}.attn_k", "self_attn.k_proj"),
    ("blk.{}.attn_v", "self_attn.v_proj"),
    ("blk.{}.attn_output", "self_attn.o_proj"),
    ("blk.{}.ffn_norm", "post_attention_layernorm"),
    ("blk.{}.ffn_gate", "mlp.gate_proj"),
    ("blk.{}.ffn_up", "mlp.up_proj"),
    ("blk.{}.ffn_down", "mlp.down_proj"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    arguments = parser.parse_args()
    reader = gguf.GGUFReader(arguments.model)
    model = load_model(reader)
    tokenizer = AutoTokenizer.from_pretrained(str(arguments.model.parent), gguf_file=arguments.model.name)
    cases = []
    for prompt in make_prompts(tokenizer):
        tokens, margin = generate(model, prompt)
        cases.append({"prompt": prompt, "tokens": tokens, "smallest_margin": round(margin, 5)})
        print(f"{margin:8.5f}  {tokenizer.decode(tokens)!r}")
    golden = {
        "model": arguments.model.name,
        "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0],
        "cases": cases,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(to_json(golden))
    return 0


def load_model(reader: gguf.GGUFReader) -> LlamaForCausalLM:
    """transformers' Llama with the file's weights in float32."""
    fields = {name: field.contents() for name, field in reader.fields.items()}
    heads, kv_heads = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = LlamaConfig(
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rope_theta=fields["llama.rope.freq_base"],
        max_position_embeddings=fields["llama.context_length"],
        tie_word_embeddings="output.weight" not in tensors,
        attn_implementation="eager",
    )
    state = {
        "model.embed_tokens.weight": values(tensors["token_embd.weight"]),
        "model.norm.weight": values(tensors["output_norm.weight"]),
    }
    for layer in range(config.num_hidden_layers):
        for theirs, ours in SECTIONS:
            weight = values(tensors[f"{theirs.format(layer)}.weight"])
            if ours.endswith(("q_proj", "k_proj")):
                weight = halves(weight, heads if ours.endswith("q_proj") else kv_heads)
            state[f"model.layers.{layer}.{ours}.weight"] = weight
    state["lm_head.weight"] = (
        state["model.embed_tokens.weight"] if config.tie_word_embeddings else values(tensors["output.weight"])
    )
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    model.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})
    return model


def values(tensor: Any) -> np.ndarray:
    """The tensor's values, float32 in the shape transformers expects."""
    shape = tuple(int(size) for size in reversed(tensor.shape))
    return gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape).astype(np.float32)


def halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from pairs (0, 1), (2, 3), … to two halves, which transformers rotates."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape).copy()


def make_prompts(tokenizer: Any) -> list[list[int]]:
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        for question in QUESTIONS
    ]
    return [*chats, *(tokenizer(text)["input_ids"] for text in TEXTS)]


def generate(model: LlamaForCausalLM, prompt: list[int]) -> tuple[list[int], float]:
    """64 tokens, each the most likely, end of text or not; and the smallest gap to the second."""
    tokens: list[int] = []
    margin = float("inf")
    cache, feed = None, torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(N_TOKENS):
            output = model(feed, cache=cache, use_cache=True)
            cache = output.cache
            top = torch.topk(output.logits[0, -1], 2)
            margin = min(margin, float(top.values[0] - top.values[1]))
            tokens.append(int(top.indices[0]))
            feed = top.indices[:1][None]
    return tokens, margin


def to_json(golden: dict[str, Any]) -> str:
    """One line per list of tokens: readable, and small differences show as small ones."""
    cases = ",\n".join("  " + json.dumps(case) for case in golden["cases"])
    head = "".join(f' "{key}": {json.dumps(value)},\n' for key, value in golden.items() if key != "cases")
    return "{\n" + head + ' "cases": [\n' + cases + "\n ]\n}\n"


if __name__ == "__main__":
    sys.exit(main())
