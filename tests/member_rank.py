"""A member in a process of its own, over Gloo and a TCPStore.

    member_rank.py NAME HOST PORT RANKS PATIENCE RECONNECT THROUGH

It trains, and leaves word in the store of its number and of each round that has ended. Where the store says so, it
kills itself: "in NAME" in an exchange, "view" while it publishes a view; or it leaves after a round: "leave NAME".
The members reach the store through the port THROUGH.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import zlib

import torch
import torch.distributed as dist
from worlds import Toy, backward

import commopt
from commopt.comm.given_up import GivenUp
from commopt.comm.store import StoreClient

NAME, HOST, PORT, RANKS = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
PATIENCE, RECONNECT, THROUGH = float(sys.argv[5]), float(sys.argv[6]), int(sys.argv[7])
store = dist.TCPStore(HOST, PORT, is_master=False, wait_for_workers=False)

TIMEOUT = 4 * PATIENCE
"""Of a collective; and, if that is less than 20 s, of an answer of the store."""


def die_if_told(where: str) -> None:
    """ "in NAME" is for one rank; "view" for whoever comes there first."""
    if store.check([f"{where} {NAME}"]) or (store.check([where]) and store.add(f"{where} died", 1) == 1):
        os.kill(os.getpid(), signal.SIGKILL)


def fatal() -> None:
    """Puts the places where it may die into the code."""
    all_reduce, compare_set = GivenUp.all_reduce, StoreClient.compare_set

    def reduce(self, x):
        work = all_reduce(self, x)
        die_if_told("in")
        return work

    def change(self, key, expected, desired):
        if " open " in desired:
            die_if_told("view")
        return compare_set(self, key, expected, desired)

    GivenUp.all_reduce, StoreClient.compare_set = reduce, change


def main() -> None:
    torch.set_num_threads(1)
    commopt.comm.set_first_notice(PATIENCE)
    store.set(f"pid {NAME}", str(os.getpid()))
    through = dist.TCPStore(HOST, THROUGH, is_master=False, wait_for_workers=False)
    members = commopt.Members(
        through, NAME, ranks=RANKS or None, patience=PATIENCE, timeout=TIMEOUT, join_timeout=60.0, reconnect=RECONNECT
    )
    fatal()
    model = Toy()
    optimizer = commopt.DiLoCo(model.parameters(), lr=1e-2, period=2, members=members)
    group = optimizer.param_groups[0]
    store.set(f"began {NAME}", str(group["rounds"]))
    while True:
        group = optimizer.param_groups[0]
        backward(model, 2 * group["rounds"] + group["round_step"], NAME, 12)
        time.sleep(0.01)
        optimizer.step()
        group = optimizer.param_groups[0]
        if not group["round_step"]:
            digest = zlib.crc32(torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes())
            store.set(f"after {NAME} {group['rounds']}", f"{digest} {len(members.names)}")
            store.set(f"rounds {NAME}", f"{group['rounds']}")
            if store.check([f"leave {NAME}"]):
                return members.leave()


try:
    main()
except Exception as error:
    print(type(error).__name__, error, flush=True)
    os._exit(1)
