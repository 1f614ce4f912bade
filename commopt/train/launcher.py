"""torchrun without a second report of a mistake that the trainer has already named.

    python -m commopt.train.launcher --standalone --nproc-per-node=2 -m commopt train CONFIG.yaml

takes torchrun's arguments and does what torchrun does. But where the processes end with exit code 2, which is one clear
line from the trainer, torchrun's traceback and table of failures would bury that line.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

MISTAKE = 2
"""Exit code of a process that has told the user what is wrong."""


def launch(argv: Sequence[str]) -> int:
    """Run torchrun with these arguments; return 0, 2 for a user's mistake, or 128 + the signal that ended it.

    Raises torchrun's ChildFailedError for every other failure of a process.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        main(list(argv))
    except ChildFailedError as error:
        if any(failure.exitcode == MISTAKE for failure in error.failures.values()):
            return MISTAKE
        raise
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
