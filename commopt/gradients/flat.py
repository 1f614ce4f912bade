"""Base of ways to take means that keep a rank's residuals in flat buffers, as compressed optimizers do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from commopt.compress import Feedback
from commopt.gradients.loss_scale import rescale_
from commopt.state import saving
from commopt.state.own import Origin
from commopt.state.places import Saved, places_of
from commopt.state.saving import Entries
from commopt.state.state_bucket import StateBucket


class Flat:
    """Residuals of buckets: of what a rank compresses, and of the means that it takes for others.

    Args:
        feedback: whether what is lost is kept, and sent later.
    """

    of_whole = False

    def __init__(self, feedback: bool) -> None:
        self.feedback = feedback
        self._scratches: dict[Any, Tensor] = {}

    def prepare(self, bucket: StateBucket, capacity: int) -> None:
        """See :class:`commopt.gradients.method.Method`, here and below."""
        if self.feedback:
            bucket.add_residuals(double_buffered=True)

    def residuals(self, bucket: StateBucket) -> Feedback:
        """The residuals of ``bucket`` before a mean, double-buffered."""
        return bucket.feedback or _forgotten(bucket)

    def scratch(self, bucket: StateBucket) -> Tensor:
        """A flat buffer that all buckets have in turn: new memory costs a CPU more than what is written to it."""
        key = (bucket.dtype, bucket.device)
        known = self._scratches.get(key)
        if known is None or known.numel() < bucket.padded:
            known = self._scratches[key] = bucket.zeros()
        return known[: bucket.padded]

    def rescale(self, buckets: Sequence[StateBucket], factor: float) -> None:
        for bucket in buckets:
            if bucket.feedback is not None:
                rescale_(bucket.feedback.worker, factor)
                rescale_(bucket.feedback.server, factor)

    def own(self, buckets: Sequence[StateBucket], params: Sequence[Tensor]) -> dict[Any, dict[str, Any]]:
        return dict(saving.own_states([(bucket, ()) for bucket in buckets], params, lambda p: p))

    def places(self, buckets: Sequence[StateBucket], params: Sequence[Tensor]) -> Saved:
        return places_of(buckets, params)

    def common(self, buckets: Sequence[StateBucket], params: Sequence[Tensor]) -> dict[int, dict[str, Any]]:
        return {}

    def load(
        self,
        buckets: Sequence[StateBucket],
        entries: Entries,
        origin: Origin | None,
        here: Origin,
        fold: Callable[[Tensor, Tensor], None],
    ) -> bool:
        for bucket in buckets:
            for p, shape, mine in zip(bucket.params, bucket.shapes, bucket.residuals()):
                theirs = entries.get(p, {}).get("worker_error")
                if origin == here and theirs is not None and theirs.numel() != mine["worker_error"].numel():
                    raise ValueError(
                        f"the loaded residual of a parameter of shape {tuple(shape)} has {theirs.numel()} elements, "
                        f"and {mine['worker_error'].numel()} are here: it is of another model"
                    )
        return saving.fill_residuals(buckets, entries, origin, here, lambda _: False, fold)


def _forgotten(bucket: StateBucket) -> Feedback:
    """Residuals of a mean that keeps none."""
    numel = bucket.padded // bucket.local_world_size
    return Feedback.zeros(numel, bucket.replicas.nodes, bucket.dtype, bucket.device, double_buffered=True)
