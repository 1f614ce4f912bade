"""Optimizers with local steps: a base optimizer on each rank, and an outer step now and then."""

from commopt.outer.averaging import LocalSGD
from commopt.outer.base import OuterOptimizer
from commopt.outer.diloco import DiLoCo
from commopt.outer.gossip import Gossip
from commopt.outer.members import Members
from commopt.outer.mixed import Mixed
from commopt.outer.noloco import NoLoCo
from commopt.outer.rounds import Round
from commopt.outer.sign_momentum import SignMomentum
from commopt.outer.signs import ExactSign, RandomSign, RandomSignOrZero, SignRule
from commopt.outer.slowmo import SlowMo
from commopt.outer.sparse_loco import SparseLoCo
from commopt.outer.streaming import Streaming
from commopt.outer.view import CutOff, LeftOut, NotEnoughMembers

__all__ = [
    "CutOff",
    "DiLoCo",
    "ExactSign",
    "Gossip",
    "LeftOut",
    "LocalSGD",
    "Members",
    "Mixed",
    "NoLoCo",
    "NotEnoughMembers",
    "OuterOptimizer",
    "RandomSign",
    "RandomSignOrZero",
    "Round",
    "SignMomentum",
    "SignRule",
    "SlowMo",
    "SparseLoCo",
    "Streaming",
]
