"""CUDA C++ sources by subject, their compile cache, and a typed wrapper per family. Knows no model."""
