"""Protocol definitions and the stubs generated from them by scripts/generate_protos.py."""
