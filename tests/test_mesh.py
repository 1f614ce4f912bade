"""Sharded parameters: FSDP2 and its like inside, and one bit between replicas. Real processes over Gloo."""

from __future__ import annotations

import mesh_scenes
from worlds import on_processes


def test_a_sharded_run_with_the_identity_is_the_unsharded_one():
    """Every optimizer, with clipping and without; scalar, tied, frozen and unused parameters, uneven, empty pieces."""
    for furthest in on_processes(4, mesh_scenes.as_unsharded):
        assert len(furthest) == 2 * 9
        for name, distance in furthest.items():
            assert distance < 1e-12, name
