"""The outer form of model files: mapped bytes, JSON objects, GGUF heads, names of parts.

Bounded readers that trust nothing in a file. They know no tensor, no architecture and no tokenizer, and
import neither engine nor kernels: every process may use them.
"""
