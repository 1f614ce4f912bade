"""Base of Lamb and Lans: the state of Adam, in float32 whatever the parameters are, and the conventions of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from commopt.agreement import checks
from commopt.bucket import buffer_dtype
from commopt.optim.rules import scaled_gradient
from commopt.sharding import is_sharded
from commopt.state import foreign
from commopt.state.saving import check_shape, check_tensor
from commopt.step.closure import loss_of
from commopt.step.torch_options import OF_LAMB, check_group_options, check_torch_options, leave_out_of_loaded

MOMENTS = ("exp_avg", "exp_avg_sq")


def moments(states: list[dict[str, Any]]) -> tuple[list[Tensor], list[Tensor]]:
    """exp_avg and exp_avg_sq of each."""
    return [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]


class PlainOptimizer(torch.optim.Optimizer):
    """An optimizer that sends nothing and takes the norms of whole tensors.

    State per parameter: exp_avg and exp_avg_sq, of its shape, in float32 whatever its dtype (float64 for float64), and
    how many steps it took.
    """

    known_options = OF_LAMB
    """Keywords of torch's optimizer that are taken where they ask for nothing."""

    def __init__(self, params: Any, defaults: dict[str, Any], torch_options: Mapping[str, Any]) -> None:
        super().__init__(params, {**defaults, foreign.WHOSE: foreign.name_of_ours(type(self))})
        check_torch_options(type(self), torch_options, self.known_options, self.param_groups)

    def check_group(self, group: dict[str, Any]) -> None:
        """Raises ValueError if a hyper-parameter of ``group`` is out of range."""
        raise NotImplementedError

    def update(
        self, params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]], group: dict[str, Any]
    ) -> None:
        """One step of the parameters of ``group`` that have a gradient.

        Args:
            params: x, of any floating dtype.
            grads: g, of the dtype of the state. They may be the gradients themselves, and must not be changed.
            states: exp_avg, exp_avg_sq and step (this one included) of each.
            group: its hyper-parameters.
        """
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            self._refuse_sharded(self.param_groups[-1]["params"])
            checks.check_params(self.param_groups[-1]["params"])
            where = f"parameter group {len(self.param_groups) - 1}"
            check_group_options(type(self), self.param_groups[-1], self.known_options, where)
            self.check_group(self.param_groups[-1])
        except ValueError:
            del self.param_groups[-1]
            raise
        self._make_state()

    def _refuse_sharded(self, params: Sequence[Tensor]) -> None:
        for i, p in enumerate(params):
            if is_sharded(p):
                name, placements = type(self).__name__, getattr(p, "placements", ())
                raise ValueError(
                    f"parameter {i} is a DTensor, placed as {placements}: {name} takes the norms of whole tensors; "
                    "commopt.OneBitLamb(params, process_group=mesh) takes those of sharded ones too, and is LAMB up to "
                    "its freeze_step"
                )

    def _make_state(self) -> None:
        """Makes the state of parameters that have none, and moves it after those that were moved or cast."""
        params = [p for group in self.param_groups for p in group["params"]]
        for p in (p for p in params if p.requires_grad or p.grad is not None):
            like = {"dtype": buffer_dtype(p.dtype), "device": p.device}
            state = self.state[p]
            state.setdefault("step", torch.zeros((), dtype=torch.float32, device="cpu"))
            for name in MOMENTS:
                if name in state:
                    state[name] = state[name].to(**like)
                else:
                    state[name] = torch.zeros_like(p, **like, memory_format=torch.preserve_format)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step on the gradients there are; a parameter without one does not move.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            what the closure returned, or None.
        """
        loss = loss_of(closure)
        checks.check_gradients([p.grad for group in self.param_groups for p in group["params"] if p.grad is not None])
        self._make_state()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            states = [self.state[p] for p in params]
            for state in states:
                state["step"] += 1
            sign = -1.0 if group["maximize"] else 1.0
            grads = [scaled_gradient(p, p.grad, s["exp_avg"].dtype, sign) for p, s in zip(params, states)]
            self.update(params, grads, states, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict()`` gave, or the state of a ``torch.optim.Adam``; copies it, and keeps its dtype.

        Raises:
            ValueError: if it is the state of another optimizer, of other shapes, or has a hyper-parameter out of range;
                nothing is changed then.
        """

        def keep(_: Any, given: dict[str, Any]) -> None:  # torch would cast state to the dtype of the parameters
            foreign.check_form(given)
            self._check_loaded(given)
            self._incoming = given

        hook = self.register_load_state_dict_pre_hook(keep)
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
            self.__dict__.pop("_incoming", None)

    def loads_of(self) -> tuple[str, ...]:
        """The optimizers of commopt whose state it loads."""
        return (foreign.name_of_ours(type(self)),)

    def _check_loaded(self, given: Mapping[str, Any]) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        name = type(self).__name__
        foreign.check_saver(name, given, self.loads_of())
        foreign.check_family(name, given, self.param_groups, [self.state.get(p, {}) for p in params])
        for group in given["param_groups"]:
            self.check_group({**self.defaults, **group})
        for i, p in zip(foreign.ids_of(given), params):
            for key in MOMENTS:
                value = given["state"].get(i, {}).get(key)
                check_tensor(i, key, value)
                if isinstance(value, Tensor):
                    check_shape(i, key, value, p.shape, p)

    def __setstate__(self, state: dict[str, Any]) -> None:
        before: list[dict[str, Any]] = self.__dict__.get("param_groups") or [{} for _ in state["param_groups"]]
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it, and it would get into the groups
        for group, old in zip(self.param_groups, before):
            for key, default in self.defaults.items():
                group.setdefault(key, old.get(key, default))
        incoming: Mapping[str, Any] | None = self.__dict__.get("_incoming")
        if incoming is None:
            return
        leave_out_of_loaded(type(self), self.param_groups, self.known_options)
        ids = foreign.ids_of(incoming)
        params = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(ids, params):
            for name, value in incoming["state"].get(i, {}).items():
                if value is None and name in ("step", *MOMENTS):  # as if it were not there
                    self.state[p].pop(name, None)
                    continue
                device = "cpu" if name == "step" else p.device
                self.state[p][name] = value.detach().to(device, copy=True) if isinstance(value, Tensor) else value
        self._make_state()
