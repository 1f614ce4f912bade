"""An optimizer, its threads and its connections end with the last reference to it, not with a garbage collection."""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
import traceback
from contextlib import suppress


def import_what_torch_imports_late() -> None:
    """Imports what torch would import while it makes its first optimizer.

    The frames under that import are kept until a garbage collection, with all that calls it: here a thread's, which
    hold nothing.
    """
    if "torch._dynamo" not in sys.modules:

        def load() -> None:
            with suppress(Exception):  # torch will say so
                importlib.import_module("torch._dynamo")

        thread = threading.Thread(target=load)
        thread.start()
        thread.join()


def forget_frames(error: Exception) -> None:
    """Lets go of what the functions that ``error`` has passed hold, and those that had called them and have returned
    since: it may be ``error``, which holds them."""
    traceback.clear_frames(error.__traceback__)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        back = frame.f_back
        with suppress(RuntimeError):  # it is running, and so are all that have called it
            while back is not None:
                if not back.f_code.co_flags & inspect.CO_GENERATOR:  # one that waits would end
                    back.clear()
                back = back.f_back
