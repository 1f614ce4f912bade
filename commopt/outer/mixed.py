"""Several optimizers over disjoint parameters as one: Muon for hidden matrices and AdamW for the rest, as in MuLoCo.

    hidden, rest = commopt.sort_parameters(model)
    base = commopt.Mixed(commopt.Muon(hidden, lr=0.02), torch.optim.AdamW(rest, lr=3e-4))

It has the groups of all of them, the very same objects, one after another, so schedules and whoever else changes a
group reach the optimizer that it is of. State stays where it is: each optimizer has that of its own parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from commopt.optim.plain import PlainOptimizer
from commopt.outer.wrap import check_base, step_base
from commopt.state.packed import PackedOptimizer
from commopt.step.closure import loss_of


class Mixed(torch.optim.Optimizer):
    """Several optimizers that step together. Sends nothing: it is a base of an outer optimizer
    (:class:`commopt.DiLoCo`, ...), or any model's optimizer under DDP.

    ``state_dict()`` is that of one optimizer which has all groups. Learning rates are each group's own.

    Args:
        optimizers: of disjoint parameters, in the order of their groups.

    Raises:
        ValueError: if there are none, if two have a parameter in common, for optimizers that communicate, LBFGS, and
            those of commopt that keep their state in buckets: as OneBitAdam on a rank alone is AdamW, take that.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        for optimizer in optimizers:
            _check_part(optimizer)
        self.parts = list(optimizers)
        self._adding = True
        groups = [group for part in self.parts for group in part.param_groups]
        if not groups:
            raise ValueError("Mixed() has no optimizer; allowed are one or more, such as commopt.Muon(hidden)")
        super().__init__(groups, {})
        self._restart()

    def _restart(self) -> None:
        self._adding = False
        self.defaults = {}  # a default of one optimizer means nothing to the groups of another
        self.state = _StateOfParts(self)  # type: ignore[assignment]
        self.follow()

    @property
    def name(self) -> str:
        """The names of its optimizers, for what is saved: "Mixed(Muon, AdamW)"."""
        return f"Mixed({', '.join(type(part).__name__ for part in self.parts)})"

    def follow(self) -> None:
        """Takes over the groups of its optimizers, if somebody has loaded one of them."""
        groups = [group for part in self.parts for group in part.param_groups]
        if [*map(id, groups)] != [*map(id, self.param_groups)]:
            self.param_groups = groups

    def part_of(self, p: Any) -> torch.optim.Optimizer:
        """The optimizer of the parameter ``p``; of what is none, the first."""
        for part in self.parts:
            if p in part.state or any(q is p for group in part.param_groups for q in group["params"]):
                return part
        return self.parts[0]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ValueError: it cannot know whose a new group is. Only its constructor adds some."""
        if not self._adding:
            raise ValueError(
                f"{self.name} cannot tell which of its optimizers a new parameter group is for: give them all of their "
                "groups before they are mixed"
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of each optimizer, in their order.

        Args:
            closure: reevaluates the model and returns the loss; called once, first.

        Returns:
            what the closure returned, or None.
        """
        loss = loss_of(closure)
        self.follow()
        for part in self.parts:
            step_base(part)
        return loss

    def state_dict(self) -> dict[str, Any]:
        self.follow()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` gave: each optimizer loads what is of its groups, as it does by itself.

        Raises:
            ValueError: if groups or their sizes do not match, or one of its optimizers refuses what is of its groups;
                nothing is changed then.
        """
        given = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, given)
            given = given if changed is None else changed
        self.follow()
        sizes = [[len(group["params"]) for group in groups] for groups in (given["param_groups"], self.param_groups)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the loaded state has parameter groups of {sizes[0]} parameters, and {self.name} has groups of "
                f"{sizes[1]}: it is the state of another optimizer"
            )
        known = self._load_parts(given)
        for key in given["state"].keys() - known:  # somebody's own
            self.state[key] = given["state"][key]
        self.follow()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _load_parts(self, given: Mapping[str, Any]) -> set[Any]:
        """Has each optimizer load what is of its groups, or none of them; returns the keys of all their parameters."""
        groups, known = iter(given["param_groups"]), set[Any]()
        before = [(part.state, part.param_groups) for part in self.parts]
        try:
            for part in self.parts:
                of_it = [next(groups) for _ in part.param_groups]
                ids = {i for group in of_it for i in group["params"]}
                known |= ids
                part.load_state_dict({"state": _only(given["state"], ids), "param_groups": of_it})
        except BaseException:
            for part, (state, had) in zip(self.parts, before):
                part.state, part.param_groups = state, had
            raise
        return known

    def __getstate__(self) -> dict[str, Any]:
        """Its optimizers: all else is theirs."""
        return {"parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "param_groups": [], "defaults": {}})
        self._restart()


def parts_of(base: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that ``base`` consists of; itself, unless it is a mixture."""
    return base.parts if isinstance(base, Mixed) else [base]


def check_names(base: torch.optim.Optimizer, ours: dict[str, Any]) -> None:
    """Raises ValueError if ``base``, or one of the optimizers it consists of, has a hyper-parameter of ``ours``."""
    for part in parts_of(base):
        both = sorted(part.defaults.keys() & ours.keys())
        if both:
            raise ValueError(
                f"the base optimizer {type(part).__name__} has a hyper-parameter {both[0]!r} of its own; allowed are "
                f"optimizers without any of {', '.join(ours)}"
            )


def name_of(base: torch.optim.Optimizer) -> str:
    """The name of ``base``; of a mixture, with those of its optimizers."""
    return base.name if isinstance(base, Mixed) else type(base).__name__


def names_loaded(base: torch.optim.Optimizer) -> list[str]:
    """The optimizers of commopt whose state ``base`` loads, or one of the optimizers it consists of."""
    ours = [part for part in parts_of(base) if isinstance(part, (PackedOptimizer, PlainOptimizer))]
    return [name for part in ours for name in part.loads_of()]


class _StateOfParts(MutableMapping[Any, Any]):
    """The states of all optimizers of a :class:`Mixed`, by parameter; what is set goes to the one that it is of."""

    def __init__(self, mixed: Mixed) -> None:
        self._mixed = mixed

    def __getitem__(self, p: Any) -> Any:
        for part in self._mixed.parts:
            if p in part.state:
                return part.state[p]
        return self._mixed.part_of(p).state[p]  # empty until it is stepped, as torch has it

    def __contains__(self, p: object) -> bool:
        return any(p in part.state for part in self._mixed.parts)

    def get(self, p: Any, default: Any = None) -> Any:
        return next((part.state[p] for part in self._mixed.parts if p in part.state), default)

    def __setitem__(self, p: Any, entry: Any) -> None:
        self._mixed.part_of(p).state[p] = entry

    def __delitem__(self, p: Any) -> None:
        del self._mixed.part_of(p).state[p]

    def __iter__(self) -> Iterator[Any]:
        return (p for part in self._mixed.parts for p in part.state)

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._mixed.parts)


def _only(state: dict[Any, Any], ids: set[Any]) -> dict[Any, Any]:
    return {key: entry for key, entry in state.items() if key in ids}


def _check_part(optimizer: Any) -> None:
    """Raises ValueError if ``optimizer`` cannot be one of several."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"Mixed() takes optimizers such as torch.optim.AdamW(params), got {type(optimizer).__name__}")
    name = type(optimizer).__name__
    if isinstance(optimizer, Mixed):
        raise ValueError("Mixed() of a Mixed(): give it the optimizers of that one")
    if isinstance(optimizer, PackedOptimizer):
        raise ValueError(
            f"Mixed() cannot have {name}, which communicates itself; allowed are optimizers that do not, such as "
            "torch.optim.AdamW; an outer optimizer goes around the mixture, as in DiLoCo(Mixed(...))"
        )
    check_base(optimizer)
