"""The anonymous host memory of this process while something runs."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType


def anonymous_bytes() -> int:
    """Resident memory that is not a mapped file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/self/status has no RssAnon")


class PeakMemory:
    """`with PeakMemory() as peak: …`, then `peak.grown`: bytes above what there was, sampled every millisecond."""

    def __enter__(self) -> PeakMemory:
        self.before = self.most = anonymous_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._done.wait(0.001):
            self.most = max(self.most, anonymous_bytes())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self.most = max(self.most, anonymous_bytes())

    @property
    def grown(self) -> int:
        return self.most - self.before
