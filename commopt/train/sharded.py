"""The part of a checkpoint that ranks have in pieces: a folder of torch.distributed.checkpoint, of tensors alone.

    sharded/  __0_0.distcp …   every rank: its pieces of the weights, of the optimizer's state, and of what is its own
              .metadata        where in these files each piece of each tensor is

Any mesh reads what any other has written. All public functions but :func:`files_of` are collectives; what fails on one
rank is raised on all. Reading runs no code: the metadata is a pickle, of which only known classes are made.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from commopt.comm import CollectiveError
from commopt.train.errors import unloadable
from commopt.train.files import Watched
from commopt.train.manifest import PIECES
from commopt.train.world import World, is_loss_of_contact

Tensors = dict[str, Tensor]
_METADATA = "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"
KNOWN = {
    *((dcp.metadata.__name__, name) for name in (*_METADATA, "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
    (dcp.filesystem.__name__, "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13 has it there
}
"""Globals that metadata consists of, besides dtypes."""


def weights(model: nn.Module) -> Tensors:
    """The weights by their names in a checkpoint; the memory is the model's."""
    return {f"model.{name}": value for name, value in model.state_dict().items()}


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Tensors, dict[str, Any]]:
    """The tensors of the optimizer's state, by their names in a checkpoint; and the state with these names in their
    places, which is the same on all ranks."""
    state: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer))
    tensors: Tensors = {}
    entries: dict[str, dict[str, Any]] = {}
    for parameter, entry in state["state"].items():
        entries[parameter] = {}
        for name, value in entry.items():
            key = f"optimizer.{parameter}.{name}"
            entries[parameter][name] = key if isinstance(value, Tensor) else value
            if isinstance(value, Tensor):
                tensors[key] = value
    return tensors, {"state": entries, "param_groups": state["param_groups"]}


def wanted(model: nn.Module, optimizer: torch.optim.Optimizer, rest: Mapping[str, Any]) -> Tensors:
    """Tensors to read the optimizer's state into, of those that were saved with ``rest``: a torch optimizer has none of
    a parameter before it has moved it."""
    saved = {name for entry in rest["state"].values() for name in entry.values() if isinstance(name, str)}
    return {name: value for name, value in optimizer_state(model, optimizer)[0].items() if name in saved}


def load_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Tensors, rest: Mapping[str, Any]
) -> None:
    """Loads what :func:`optimizer_state` gave, into a model that has its weights."""
    named = {
        parameter: {name: tensors.get(value, value) if isinstance(value, str) else value for name, value in e.items()}
        for parameter, e in rest["state"].items()
    }
    state: dict[str, Any] = {"state": named, "param_groups": rest["param_groups"]}
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(strict=False))


def write(folder: Path, tensors: Tensors, world: World) -> None:
    """Writes ``tensors`` below the checkpoint ``folder``, to the disk itself. Raises OSError."""
    writer = FileSystemWriter(folder / PIECES)
    writer.fs = _Files()
    try:
        _together(lambda group: dcp.save(dict(tensors), storage_writer=writer, process_group=group), world)
    except CheckpointException as error:
        raise _cause(error) from error


def read(folder: Path, tensors: Tensors, world: World) -> None:
    """Reads ``tensors`` of the checkpoint ``folder``, into the memory that they have.

    Raises DamagedError, or CheckpointError where the machine is to blame.
    """
    try:
        reader = _Reader(folder / PIECES)
        _together(lambda group: dcp.load(dict(tensors), storage_reader=reader, process_group=group), world)
    except CheckpointException as error:
        raise unloadable(folder, " does not fit", _cause(error)) from error


def files_of(folder: Path, world: World) -> list[Path]:
    """Files that this rank has written below the checkpoint ``folder``."""
    mine = sorted((folder / PIECES).glob(f"__{world.rank}_*.distcp"))
    return [*mine, folder / PIECES / ".metadata"] if world.is_main else mine


def _together(work: Callable[[dist.ProcessGroup | None], Any], world: World) -> None:
    try:
        work(getattr(world.control, "group", None))
    except RuntimeError as error:
        if is_loss_of_contact(error):
            raise CollectiveError(str(error)) from error
        raise


def _cause(error: CheckpointException) -> Exception:
    """The failure of the first rank on which something has failed."""
    rank = min(error.failures)
    cause = error.failures[rank][0]
    return cause if isinstance(cause, Exception) else RuntimeError(f"{type(cause).__name__}: {cause}")


class _Stream(Watched):
    """A file for writing that remembers the first error, and can do what any other can."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


class _Files(FileSystem):
    """Files on whose disk the error is said that writing has met, and not what torch makes of it."""

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as file:
            stream = _Stream(cast(IO[bytes], file))
            try:
                yield stream if "w" in mode else file
            except Exception as error:
                if stream.error is not None:
                    raise stream.error from error
                raise


class _Reader(FileSystemReader):
    """Reads tensors, and makes no other objects than metadata has."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if kwargs.get("rank") is not None:
            raise FileNotFoundError("metadata is of all ranks")
        with Path(self.path, ".metadata").open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata) or not all(
            isinstance(entry, TensorStorageMetadata) for entry in metadata.state_dict_metadata.values()
        ):
            raise pickle.UnpicklingError(".metadata is not of tensors alone")
        return metadata


class _Unpickler(pickle.Unpickler):
    """Makes what metadata consists of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not dtype and (module, name) not in KNOWN:
            raise pickle.UnpicklingError(f".metadata wants {module}.{name}, which metadata never has")
        return super().find_class(module, name)
