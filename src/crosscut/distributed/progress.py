"""How far a run has come, told by rank 0 and shown by whoever started the ranks.

The function that runs in the ranks calls ``ctx.progress(fraction, text)`` as often as it likes; most calls cost one
look at the clock. Where a report goes is decided where the ranks are started: over a pipe to the parent, straight to
its callback, or nowhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable

OnProgress = Callable[[float, str], None]
"""Called with the fraction done, 0 to 1, and a few words on what is being done."""


class Progress:
    """Passes reports on to ``send``, ten a second at most; does nothing when ``send`` is None (ranks other than 0)."""

    INTERVAL = 0.1
    """Seconds between two reports that are passed on."""

    def __init__(self, send: OnProgress | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._clock = clock
        self._next = float("-inf")

    def __call__(self, fraction: float, text: str) -> None:
        """Report that ``fraction`` (0 to 1) of the work is done. The last one, 1, is passed on whenever it comes."""
        if self._send is None:
            return
        now = self._clock()
        if now < self._next and fraction < 1:
            return
        self._next = now + self.INTERVAL
        self._send(min(max(fraction, 0.0), 1.0), text)
