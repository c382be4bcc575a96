"""A progress bar for runs that take long enough to need one."""

import sys
import time
from types import TracebackType
from typing import Any, Self

DELAY_SECONDS = 2.0


class Progress:
    """Counts steps; shows a bar on stderr once a run has taken over two seconds, and removes it at the end."""

    def __init__(self, *, enabled: bool, delay: float = DELAY_SECONDS) -> None:
        self._enabled, self._delay = enabled, delay
        self._start = time.perf_counter()
        self._bar: Any = None

    def update(self, done: int, total: int) -> None:
        """`done` of `total` steps are finished."""
        if not self._enabled or (self._bar is None and time.perf_counter() - self._start < self._delay):
            return
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=done - 1, file=sys.stderr, leave=False, unit="step")
        self._bar.update(done - self._bar.n)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
