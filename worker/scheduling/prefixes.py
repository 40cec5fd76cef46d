"""Sharing of prefixes: cached ones, and ones that another sequence is computing right now."""

from __future__ import annotations

from collections.abc import Callable

from engine.interface import PAGE_SIZE
from worker.pages import PageManager
from worker.sequence import Sequence


class PrefixSharing:
    """Finds pages that a sequence can share, registers those it computes.

    While a sequence (the *leader*) is prefilling a page that nobody has yet, the page is *promised*: a
    sequence that needs the same one does better to wait than to compute it a second time. A promise ends
    when the page is registered, by whomever, or its leader stops; then `on_settled` is told the page's
    digest.
    """

    def __init__(self, pages: PageManager, *, enabled: bool, on_settled: Callable[[bytes], None]) -> None:
        self._pages = pages
        self._enabled = enabled
        self._on_settled = on_settled
        self._promised: dict[bytes, Sequence] = {}

    def may_share(self, sequence: Sequence) -> bool:
        """Log-probabilities of the prompt need all of it to be run."""
        return self._enabled and sequence.prompt_logprobs is None

    def find(self, sequence: Sequence) -> list[int]:
        """Cached pages that the sequence could begin with, never all of its tokens.

        At least one token must be run for there to be logits.
        """
        return self._pages.find(self._wanted_digests(sequence))

    def promise_worth_waiting_for(self, sequence: Sequence, n_found: int) -> bytes | None:
        """The last page, of those right behind the `n_found` cached ones, that a leader has promised.

        Leaders of lower priority do not count: prefill goes by priority, so they might take for ever.
        """
        awaited: bytes | None = None
        if self._promised:
            for digest in self._wanted_digests(sequence)[n_found:]:
                leader = self._promised.get(digest)
                if leader is None or leader.request.priority < sequence.request.priority:
                    break
                awaited = digest
        return awaited

    def promise(self, sequence: Sequence) -> None:
        """A sequence that has just taken its slot is going to compute the rest of its full pages."""
        if self._enabled:
            for digest in self._unpublished(sequence, len(sequence.tokens)):
                self._promised.setdefault(digest, sequence)

    def publish(self, sequence: Sequence, n_tokens: int) -> None:
        """KV of the first `n_tokens` positions is in steps already planned: later steps may share it."""
        if not self._enabled or n_tokens < (sequence.n_published + 1) * PAGE_SIZE:
            return
        digests = self._unpublished(sequence, n_tokens)
        first = sequence.n_published
        sequence.n_published += len(digests)
        for page, digest in zip(sequence.pages[first:], digests, strict=False):
            self._pages.register(page, digest)
            self._settle(digest)

    def break_promises(self, sequence: Sequence) -> None:
        """The sequence stops before it has computed all of its known tokens."""
        if self._enabled:
            for digest in self._unpublished(sequence, len(sequence.tokens)):
                if self._promised.get(digest) is sequence:
                    self._settle(digest)

    def disown(self, sequence: Sequence) -> None:
        """What the sequence computed is in doubt: nobody else shall share it."""
        if self._enabled:
            for digest in sequence.digests(sequence.n_published)[sequence.n_shared_pages :]:
                self._pages.forget(digest)

    def _wanted_digests(self, sequence: Sequence) -> list[bytes]:
        if not self.may_share(sequence):
            return []
        return sequence.digests((sequence.n_known - 1) // PAGE_SIZE)

    def _unpublished(self, sequence: Sequence, n_tokens: int) -> list[bytes]:
        return sequence.digests(n_tokens // PAGE_SIZE)[sequence.n_published :]

    def _settle(self, digest: bytes) -> None:
        if self._promised.pop(digest, None) is not None:
            self._on_settled(digest)
