"""The optimizers."""

from commopt.optim.cser import CSER
from commopt.optim.lamb import Lamb
from commopt.optim.lans import Lans
from commopt.optim.muon import Muon
from commopt.optim.onebit_adam import OneBitAdam
from commopt.optim.onebit_lamb import OneBitLamb
from commopt.optim.onebit_lion import OneBitLion
from commopt.optim.policies import SyncPolicy, VariancePolicy
from commopt.optim.qsparse import QSparseLocalSGD
from commopt.optim.sorting import SortedParameters, sort_parameters
from commopt.optim.zero_one_adam import ZeroOneAdam
from commopt.state.guard import Guard, NotFinite, ReplicasDiffer
from commopt.state.own_tensor import OwnTensor
from commopt.state.split import join_state_dict, split_state_dict
from commopt.step.base import CommOptimizer

__all__ = [
    "CSER",
    "CommOptimizer",
    "Guard",
    "Lamb",
    "Lans",
    "Muon",
    "NotFinite",
    "OneBitAdam",
    "OneBitLamb",
    "OneBitLion",
    "OwnTensor",
    "QSparseLocalSGD",
    "ReplicasDiffer",
    "SortedParameters",
    "SyncPolicy",
    "VariancePolicy",
    "ZeroOneAdam",
    "join_state_dict",
    "sort_parameters",
    "split_state_dict",
]
