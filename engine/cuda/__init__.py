"""The engine for NVIDIA GPUs. Importing this package creates no CUDA context."""
