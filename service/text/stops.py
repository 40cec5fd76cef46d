"""Stop strings over a stream of text: found as soon as complete, whatever the text's pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopSet:
    """Immutable, made once a request and shared by its n answers."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError for an empty string. No strings at all is fine."""
        raise NotImplementedError
