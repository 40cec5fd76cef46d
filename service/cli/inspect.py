"""placeholder"""


def inspect() -> None:
    """Print what is understood of a model's files: family, layers, parameters, memory."""
