"""Ways to stream that every outer optimizer has: fragments, delay, merge and alpha for the oracle; and ours."""

from __future__ import annotations

from commopt import Streaming

STREAMS = {
    "waits": (2, 0, "mix", 0.0, Streaming(2, 0)),
    "one": (1, 2, "corrected", 0.0, Streaming(1, 2)),
    "mix": (2, 1, "mix", 0.5, Streaming(2, merge="mix")),
    "mix all": (3, 3, "mix", 0.25, Streaming(3, 3, "mix", 0.25)),  # two in flight at once
    "corrected": (3, 2, "corrected", 0.0, Streaming(3, 2)),
}
