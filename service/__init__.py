"""The RPC layer: servers, text, health, metrics, command line. Knows no CUDA and no numpy kernels."""
