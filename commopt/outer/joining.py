"""A rank that joins: it has the anchor, the outer state and the counters of a member, and its parameters are the
anchor. Functions of an outer optimizer and its members.

The first member gives them, right after its outer step, to one after another: if one of these fails, the others do not.
"""

from __future__ import annotations

import contextlib
import io
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from commopt.comm import Backend, CollectiveError, gather_rows, wait
from commopt.comm.store import StoreLost, until
from commopt.outer import groups
from commopt.outer.members import TOO_LONG, Members
from commopt.outer.view import CutOff, LeftOut
from commopt.state import binding, following
from commopt.state.own import digest_of

if TYPE_CHECKING:
    from commopt.outer.base import OuterOptimizer

logger = logging.getLogger("commopt")

ATTEMPTS = 5
WHERE = "state for a rank that joins"
_TENSOR = "\0tensor"


@contextlib.contextmanager
def beginning(optimizer: OuterOptimizer) -> Iterator[None]:
    """Context in which an optimizer is made: with the others that begin the run, or alone, and then it joins them."""
    members = optimizer.members
    try:
        yield
    except Exception:
        if members is not None:
            members.give_up()
        raise
    if members is None:
        return
    if members.roster.view is None:
        join(optimizer, members, members.fetch_base)
    elif _verdict(members) == "failed":
        members.give_up()
        raise CollectiveError("another rank could not begin the run; its own error says why")


def _verdict(members: Members) -> str:
    """Says that this rank has begun the run; what is so of all."""
    try:
        return members.answered(lambda: members.verdict("kept"))
    except Exception:
        members.give_up()
        raise


def join_anew(optimizer: OuterOptimizer, members: Members, left: LeftOut) -> None:
    """Joins those again that have gone on without this rank, which keeps the state of its base.

    Raises:
        LeftOut: ``left``, if it shall not; and as of :func:`join`.
    """
    if not members.rejoin:
        raise left
    if isinstance(left, CutOff):
        members.pause(left)
    else:
        logger.warning("members: %s; its own round is lost, and it joins anew", left)
    join(optimizer, members, fetch_base=False, again=True)


def join(optimizer: OuterOptimizer, members: Members, fetch_base: bool, again: bool = False) -> None:
    """Waits until a member gives this rank the state; it is a member then. ``fetch_base``: also that of its base, which
    is kept otherwise; ``again``: it was one before.

    Raises:
        LeftOut: none has.
        commopt.comm.StoreLost: the store is lost, and does not come back.
        ValueError: this rank's model or settings are not the members', or the member cannot give its state.
    """
    failed = 0
    while failed < ATTEMPTS:
        try:
            if again:
                members.forsake()
            again = True
            take(optimizer, members.wait_to_join(), fetch_base)
        except LeftOut:
            raise
        except StoreLost as lost:
            members.find_store(lost)
        except CollectiveError as error:
            failed += 1
            logger.warning("members: %s; this rank asks again", error)
        except Exception:
            members.give_up()
            raise
        else:
            members.round_ended()
            if members.on_join is not None:
                try:
                    members.on_join(optimizer)
                except Exception:
                    members.give_up()
                    raise
            return
    raise LeftOut(
        f"{ATTEMPTS} times, a member has begun to give this rank the state, and has failed; if that takes longer than "
        f"{members.timeout:g} s, give all members a longer timeout"
    )


def serve(optimizer: OuterOptimizer, members: Members) -> None:
    """Gives those that join the state, each within ``timeout`` seconds: for longer the others do not wait."""
    begin = time.monotonic()
    left = until(members.timeout)
    for ticket in members.ready():
        try:
            give(optimizer, members.call(ticket, left), left)
        except StoreLost:
            raise
        except Exception as error:  # it is the joiner's alone
            logger.warning("members: a rank that would join has not: %s", error)
            members.roster.leave_for(ticket)
        left = until(members.timeout)
    members.has_joined(time.monotonic() - begin)


def give(optimizer: OuterOptimizer, backend: Backend, left: Callable[[], float]) -> None:
    """Sends the state to rank 1, in the seconds that are ``left()``.

    Raises:
        commopt.comm.CollectiveError: it has not got it in time.
    """
    binding.check_alike(backend, optimizer.param_groups, groups.fixed_settings(optimizer))
    wanted = gather_rows(backend, torch.zeros(1, device="cpu"), WHERE)
    failed: Exception | None = None
    try:
        message = message_of(_given(optimizer, with_base=bool(wanted[1])))
    except Exception as error:  # such as what somebody has put into a parameter group
        failed, message = error, message_of({"error": f"{type(error).__name__}: {error}"})
    send(backend, message, left)
    gather_rows(backend, torch.zeros(1, device="cpu"), WHERE)  # it has all
    if failed is not None:
        raise failed


def _given(optimizer: OuterOptimizer, with_base: bool) -> dict[str, Any]:
    """What a joiner is given: also which parameters are in buckets, which are trained, and those of which a state says
    too little."""
    given, packed = optimizer.state_dict(), optimizer.packed()
    entries = {i: entry for i, entry in given["state"].items() if isinstance(entry, dict)}
    return {
        "state": {i: {k: v for k, v in entry.items() if isinstance(v, Tensor)} for i, entry in entries.items()},
        "param_groups": given["param_groups"],
        "base": given["residuals"]["base"] if with_base else {},
        "frozen": {i: p.detach() for i, p in enumerate(optimizer.params) if not p.requires_grad or id(p) not in packed},
        "packed": [id(p) in packed for p in optimizer.params],
        "trained": [p.requires_grad for p in optimizer.params],
    }


def take(optimizer: OuterOptimizer, backend: Backend, fetch_base: bool) -> None:
    """Receives the state from rank 0, and goes on with it."""
    binding.check_alike(backend, optimizer.param_groups, groups.fixed_settings(optimizer))
    gather_rows(backend, torch.full((1,), float(fetch_base), device="cpu"), WHERE)
    tree = receive_tree(backend)
    gather_rows(backend, torch.zeros(1, device="cpu"), WHERE)
    if "error" in tree:
        raise ValueError(f"a member cannot give its state: {tree['error']}")
    packed = {id(p) for p, there in zip(optimizer.params, tree["packed"]) if there}
    if packed != optimizer.packed():
        pack_anew(optimizer, packed)
    own = {**optimizer.own_part(), "state": {}}
    if fetch_base:
        own["base"] = tree["base"]
    own["digest"] = digest_of(own)
    optimizer.load_state_dict({"state": tree["state"], "param_groups": tree["param_groups"], "residuals": own})
    with torch.no_grad():
        for i, value in tree["frozen"].items():
            optimizer.params[i].copy_(value)
    for p, trained in zip(optimizer.params, tree["trained"]):
        p.requires_grad_(trained)
    optimizer._moved = False


def pack_anew(optimizer: OuterOptimizer, packed: Collection[int], runs: Sequence[Sequence[Tensor]] = ()) -> None:
    """Makes the buckets anew, of the parameters with the ids ``packed``, frozen or not, and of no others; as they were,
    if these are the ``runs``."""
    others = [p for p in optimizer.params if p.requires_grad != (id(p) in packed)]
    try:
        for p in others:
            p.requires_grad_(not p.requires_grad)
        optimizer.buckets = []
        following.rebuild(optimizer, optimizer.state, None, runs)
    finally:
        for p in others:
            p.requires_grad_(not p.requires_grad)


def message_of(tree: Any) -> list[Tensor]:
    """Nested dicts and lists of tensors, numbers and strings as tensors that are sent one after another.

    Raises:
        Exception: there is something else in them, which the receiver would not read.
    """
    tensors: list[Tensor] = []

    def without(node: Any) -> Any:
        if isinstance(node, Tensor):
            tensors.append(node)
            return {_TENSOR: len(tensors) - 1}
        if isinstance(node, np.generic):  # a learning rate that numpy has made
            return node.item()
        if isinstance(node, dict):
            return {key: without(value) for key, value in node.items()}
        return type(node)(map(without, node)) if type(node) in (list, tuple) else node

    file = io.BytesIO()
    skeleton = without(tree)
    torch.save((skeleton, [(tuple(t.shape), t.dtype) for t in tensors]), file)
    file.seek(0)
    if unknown := torch.serialization.get_unsafe_globals_in_checkpoint(file):
        raise ValueError(f"it has {', '.join(unknown)}; allowed are tensors, numbers and strings")
    header = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    return [torch.tensor([header.numel()], device="cpu"), header, *tensors]


def send(backend: Backend, message: Sequence[Tensor], left: Callable[[], float]) -> None:
    """Sends what :func:`message_of` has made, from the CPU, as long as there are seconds ``left()``."""
    for t in message:
        if not left():
            raise CollectiveError(f"{WHERE}: {TOO_LONG}")
        if t.numel():
            data = t.detach().cpu().contiguous()
            wait(backend.broadcast(data.view(-1).view(torch.uint8)), WHERE)


def receive_tree(backend: Backend) -> Any:
    """The tree that rank 0 sends by :func:`send`."""
    size = torch.zeros(1, dtype=torch.int64, device="cpu")
    wait(backend.broadcast(size.view(torch.uint8)), WHERE)
    header = torch.zeros(int(size), dtype=torch.uint8, device="cpu")
    wait(backend.broadcast(header), WHERE)
    skeleton, kinds = torch.load(io.BytesIO(header.numpy().tobytes()), weights_only=True)
    tensors = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in kinds]
    for t in tensors:
        if t.numel():
            wait(backend.broadcast(t.view(-1).view(torch.uint8)), WHERE)

    def whole(node: Any) -> Any:
        if isinstance(node, dict):
            if _TENSOR in node:
                return tensors[node[_TENSOR]]
            return {key: whole(value) for key, value in node.items()}
        return type(node)(map(whole, node)) if type(node) in (list, tuple) else node

    return whole(skeleton)
