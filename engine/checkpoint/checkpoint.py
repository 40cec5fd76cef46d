"""A model on disk, opened: its configuration and its weights by canonical name.

The engine sees only this. Which file holds a weight, under what name, whole, in slices or with its rows
in another order, is settled when the checkpoint is opened, before a single weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

from engine.checkpoint.tensor import Tensor
from engine.config import ModelConfig


class Checkpoint:
    """Lazy, memory-mapped weights. Made by open_checkpoint(); every tensor the config needs is there
    and has the right shape. Usable from any thread.
    """

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        tensors: Mapping[str, Callable[[], Tensor]],
        unused: tuple[str, ...],
    ) -> None:
        self.path = path
        self.config = config
        self.unused = unused
        """Tensors of the file, by its own names, that are known and not needed (vision towers, …)."""
        self._tensors = dict(tensors)

    def names(self) -> Iterator[str]:
        """Canonical names in the order a forward pass meets them. A tied head is not among them."""
        return iter(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> Tensor:
        """A weight by canonical name; "head.weight" of a tied model is the embedding.

        Raises KeyError for a name that is not in expected_tensors(config). Nothing is read before the
        tensor's data is; the files must not be truncated while they are mapped.
        """
        if name == "head.weight" and self.config.tied_embeddings:
            name = "embedding.weight"
        return self._tensors[name]()

    def close(self) -> None:
        """Lets go of the files; each is unmapped once no tensor refers to it. Idempotent."""
        self._tensors.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
