"""QSparse-local-SGD (Basu et al., arXiv 1906.02367) and EF-SGD (Karimireddy et al., arXiv 1901.09847), as CSER whose
error is kept apart.

Read first: tests/oracle_cser.py, the same on plain lists of floats.

    every step:               x_i = x_i - p_i                              (p_i as in CSER)
    at each H-th step, then:  e_i = e_i + x_i - a;   q_i = C(e_i);   e_i = e_i - q_i
                              a = a + mean_i q_i;    x_i = a

Where this differs from the papers: every rank has the exact mean of q_i, as in CSER; momentum is each rank's own and
continues through the rounds; all ranks synchronise at the same steps. One rank alone is plain SGD.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from commopt.compress import RandomBlocks
from commopt.optim.cser import CSER, AnyCompressor
from commopt.optim.cser_error import KeptError
from commopt.state.host import square_norm
from commopt.state.saving import PARAMETER
from commopt.state.state_bucket import StateBucket


class QSparseLocalSGD(CSER):
    """Local SGD whose models are averaged through a compressor with error feedback (Basu et al., arXiv 1906.02367).

    CSER that sends nothing between resets, but keeps what a reset has not sent for the next one, instead of in the
    model. All ranks have the same model after every H-th step. EF-SGD (Karimireddy et al., arXiv 1901.09847) is
    ``period=1``.

    State per parameter and rank: momentum_buffer 1 with ``momentum``, anchor 1, error_buffer 1. With one rank plain
    SGD.

    Args:
        compressor: C, a RandomBlocks or any Compressor.
        all others: as for :class:`CSER`.
    """

    name_of_reset = "compressor"
    rank_local_buffers = ("momentum_buffer", "error_buffer")
    ever_rank_local = (PARAMETER, *rank_local_buffers)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        *,
        compressor: AnyCompressor = RandomBlocks(8),  # noqa: B008
        **others: Any,
    ) -> None:
        if "reset_compressor" in others:
            raise ValueError(
                f"QSparseLocalSGD has no reset_compressor, got {others['reset_compressor']!r}: what a reset sends is "
                "compressor= here, and nothing is sent between two"
            )
        super().__init__(params, lr, momentum, compressor=None, reset_compressor=compressor, **others)

    @property
    def anchored(self) -> bool:
        return self.topology.copies > 1 or self.topology.is_sharded

    def init_bucket(self, bucket: StateBucket) -> None:
        super().init_bucket(bucket)
        if self.anchored:
            bucket.buffers["error_buffer"] = bucket.zeros()

    def resets_all(self) -> bool:
        return True

    def error_of(self, bucket: StateBucket) -> KeptError:
        return KeptError(bucket)

    def _norms(self) -> tuple[float, float]:
        """2-norms of e_i, which the next reset adds, and of the momentum. How far x_i is from the anchor is no
        error: it has not been compressed yet."""
        flats = [bucket.buffers for bucket in self.buckets]
        errors, momenta = ([b[name] for b in flats if name in b] for name in ("error_buffer", "momentum_buffer"))
        return square_norm(errors) ** 0.5, square_norm(momenta) ** 0.5
