"""Backends (who talks to whom), topology and channels, collectives (what is said), and the pipeline (who waits)."""

from commopt.comm.backend import (
    Backend,
    ExchangingBackend,
    LocalBackend,
    Work,
    check_exchanges,
    message_device,
    open_channels,
    open_control,
    sends_from,
)
from commopt.comm.collectives import (
    InFlightChunk,
    compressed_all_reduce,
    compressed_mean,
    compressed_reduce_scatter,
    mean_over_all,
    reduce_scatter,
    to_node,
)
from commopt.comm.counting import CountingBackend, Traffic, all_reduce_bytes
from commopt.comm.holding import Holding, ShardedBackend
from commopt.comm.mesh import MeshBackend
from commopt.comm.mpi import MPIBackend
from commopt.comm.nodes import NodesBackend
from commopt.comm.pipeline import STARTED, CollectiveError, Pipeline, Task, gather_rows, run, wait
from commopt.comm.psync import BlockSync, PayloadSync, PSync, psync
from commopt.comm.receipt import (
    CONFIRMATION_BYTES,
    MessageDamaged,
    NoReceipt,
    Receipt,
    confirm,
    confirmation,
    refuse_damaged,
)
from commopt.comm.resolve import refuse_if_left_out, resolve_backend
from commopt.comm.threads import ThreadBackend, ThreadWorld
from commopt.comm.topology import CHANNELS, Channel, Replicas, Topology, gather_number
from commopt.comm.torch import TorchBackend, numbers_in_world
from commopt.comm.watch import first_notice, set_first_notice

__all__ = [
    "CHANNELS",
    "CONFIRMATION_BYTES",
    "STARTED",
    "Backend",
    "BlockSync",
    "Channel",
    "CollectiveError",
    "CountingBackend",
    "ExchangingBackend",
    "Holding",
    "InFlightChunk",
    "LocalBackend",
    "MPIBackend",
    "MeshBackend",
    "MessageDamaged",
    "NoReceipt",
    "NodesBackend",
    "PSync",
    "PayloadSync",
    "Pipeline",
    "Receipt",
    "Replicas",
    "ShardedBackend",
    "Task",
    "ThreadBackend",
    "ThreadWorld",
    "Topology",
    "TorchBackend",
    "Traffic",
    "Work",
    "all_reduce_bytes",
    "check_exchanges",
    "compressed_all_reduce",
    "compressed_mean",
    "compressed_reduce_scatter",
    "confirm",
    "confirmation",
    "first_notice",
    "gather_number",
    "gather_rows",
    "mean_over_all",
    "message_device",
    "numbers_in_world",
    "open_channels",
    "open_control",
    "psync",
    "reduce_scatter",
    "refuse_damaged",
    "refuse_if_left_out",
    "resolve_backend",
    "run",
    "sends_from",
    "set_first_notice",
    "to_node",
    "wait",
]
