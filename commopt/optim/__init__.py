"""The optimizers."""

from commopt.optim.base import CommOptimizer
from commopt.optim.onebit_adam import OneBitAdam
from commopt.optim.state import join_state_dict, split_state_dict

__all__ = ["CommOptimizer", "OneBitAdam", "join_state_dict", "split_state_dict"]
