"""Ranks in a grid: groups of one size, and the ranks that have one place in each."""

from __future__ import annotations

import torch

from commopt.comm.backend import Backend, check_backend
from commopt.comm.pipeline import gather_rows, wait

NODES = ("NodesBackend", "nodes", "intra_node", "inter_node")
"""Words for errors: who asks, what the rows are, and the names of the groups along a row and a column."""


def check_grid(
    world: Backend, row: Backend, column: Backend, device: torch.device, words: tuple[str, str, str, str] = NODES
) -> list[tuple[int, int]]:
    """Returns the number of its row, and its place in that, of every rank.

    Args:
        world: all ranks.
        row, column: those of this rank's row, and those that have its place in the rows.
        device: one that all can send from.
        words: for errors.

    Raises:
        ValueError: on every rank, unless these are the rows and columns of a grid of all ranks, each row in one order
            of places, and each column in one order of rows; before that, if one of them lacks a collective.
    """
    backend, rows_are, along_row, along_column = words
    for name, group in (("world", world), (along_row, row), (along_column, column)):
        check_backend(group, name)
    mine = torch.tensor([column.rank, row.rank, column.world_size, row.world_size], device=device)
    where = f"construction of {backend}"
    everyone: list[list[int]] = gather_rows(world, mine, where).tolist()
    _, _, rows, places = everyone[0]
    for rank, line in enumerate(everyone):
        if line[2:] != [rows, places]:
            raise ValueError(
                f"the ranks do not form {rows_are} of one size: rank {rank} sees {line[2]} {rows_are} of {line[3]} "
                f"ranks, rank 0 sees {rows} of {places}"
            )
    grid = [(line[0], line[1]) for line in everyone]
    if rows * places != world.world_size or len(set(grid)) != world.world_size:
        raise ValueError(
            f"{rows} {rows_are} of {places} ranks are not the {world.world_size} ranks of world, each in a place of "
            "its own"
        )
    wrong = ""
    for name, group, axis in ((along_row, row, 0), (along_column, column, 1)):
        same = [(line[1 - axis], r) for r, line in enumerate(everyone) if line[axis] == mine[axis]]
        expected = [r for _, r in sorted(same)]
        number = torch.tensor([world.rank], device=device)
        found = gather_rows(group, number, f"{where}, the ranks {name}").flatten().tolist()
        if found != expected:
            wrong = wrong or f"{name} has ranks {found} where it should have {expected}"
    failed = torch.tensor([float(bool(wrong))], device=device)
    wait(world.all_reduce(failed), where)
    if wrong:
        raise ValueError(wrong)
    if failed.item() > 0:
        raise ValueError(
            f"{along_row} and {along_column} do not fit together on another rank; its own error says where"
        )
    return grid
