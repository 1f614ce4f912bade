"""Sorting a model's parameters: hidden matrices, for optimizers such as Muon that are made for them, and the rest.

    hidden   parameters of two dimensions, neither of them 1, that are no embedding and no output head
    rest     embeddings, heads, norms, biases, scalars; filters of convolutions, and stacks of matrices such as those
             of fused experts: torch.optim.Muon takes two dimensions

What an embedding or a head is, is known from the module (nn.Embedding), from the model (``get_output_embeddings()``,
``no_weight_decay()``), or from a name; and a matrix outside of the layers with as many rows as an embedding has is a
head. A tied parameter has several names, and one of them is enough.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parameter import UninitializedParameter

Named = list[tuple[str, nn.Parameter]]
_TABLES = nn.Embedding, nn.EmbeddingBag

HEADS = frozenset(
    (
        "lm_head", "head", "heads", "classifier", "classification_head", "score", "output", "output_layer",
        "output_projection", "proj_out", "fc", "logits", "qa_outputs", "embed_out", "unembed", "unembedding",
    )
)  # fmt: skip
"""Names of modules that are an output head, unless they are inside a numbered one: layers have parts of these names."""


class SortedParameters(NamedTuple):
    """The trainable parameters of a model, as (name, parameter) pairs in the order of the model.

    Attributes:
        hidden: matrices for Muon.
        rest: all others, for AdamW.
    """

    hidden: Named
    rest: Named


def sort_parameters(
    model: nn.Module, *, head: Iterable[str] | None = None, hidden: Iterable[str] = (), rest: Iterable[str] = ()
) -> SortedParameters:
    """Sorts the trainable parameters of ``model`` into hidden matrices and the rest; frozen ones are in neither.

    ::

        hidden, rest = commopt.sort_parameters(model)
        optimizers = commopt.Muon(hidden, lr=0.02), torch.optim.AdamW(rest, lr=3e-4)

    Names are those of ``model.named_parameters()``, patterns those of the shell: ``"*.lora_*"``. A parameter that is
    tied has several names, and a pattern may match any of them.

    Args:
        model: to train: whole, wrapped by DDP, or cut into DTensors (FSDP2, tensor parallelism), which have the shapes
            of the whole.
        head: patterns of the output head's parameters; () says that there is none. None looks for it, by what the model
            says of itself and by names such as ``lm_head``.
        hidden: patterns of parameters that are hidden matrices whatever they look like.
        rest: patterns of parameters that are not.

    Raises:
        ValueError: if no head is found and ``head`` is None; for a pattern that matches no parameter, for a parameter
            that both ``hidden`` and ``rest`` ask for, or one of ``hidden`` that is not of two dimensions; if there is
            no hidden matrix, as in a model that FSDP1 has flattened; and for parameters that have no shape yet.
    """
    names = _names_of(model)
    asked_hidden = _matching(names, hidden, "hidden")
    asked_rest = _matching(names, rest, "rest") | _matching(names, head or (), "head")
    for p in asked_hidden:
        name = names[p][0]
        if p in asked_rest:
            raise ValueError(f"parameter {name} is asked for by hidden=, and by rest= or head=; allowed is one of them")
        if p.dim() != 2:
            raise ValueError(f"hidden= asks for {name} of shape {tuple(p.shape)}; allowed are those of 2 dimensions")
    embeddings, heads = _embeddings(model, names), _heads(model, names) if head is None else set()
    if head is None and not heads:
        raise ValueError(
            f"no output head is found in {type(model).__name__}, and it should not be trained like a hidden matrix: "
            "name its parameters, as in head=['decoder.weight'], or say head=() if the model has none, or if it is "
            "the embedding itself"
        )
    out = SortedParameters([], [])
    for p in (p for p in names if p.requires_grad):
        matrix = p.dim() == 2 and min(p.shape) > 1 and p not in embeddings | heads
        where = out.hidden if (matrix and p not in asked_rest) or p in asked_hidden else out.rest
        where.append((names[p][0], p))
    if not out.hidden:
        raise ValueError(
            f"{type(model).__name__} has no trainable hidden matrix among its {len(out.rest)} trainable parameters: "
            "those that FSDP1 has flattened are not known any more (sort before, or use FSDP2); others are chosen by "
            "hidden=['*.pattern']"
        )
    return out


def _names_of(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """All names of each parameter, in the order of the model."""
    out: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if isinstance(p, UninitializedParameter):
            raise ValueError(
                f"parameter {name} has no shape yet: give the model a batch before its parameters are sorted"
            )
        out.setdefault(p, []).append(name)
    return out


def _matching(names: dict[nn.Parameter, list[str]], patterns: Iterable[str], what: str) -> set[nn.Parameter]:
    """The parameters that have a name of one of ``patterns``."""
    if isinstance(patterns, str):
        raise ValueError(f"{what} must be a list of patterns of names such as [{patterns!r}], got {patterns!r}")
    found: set[nn.Parameter] = set()
    for pattern in patterns:
        matching = {p for p, of_it in names.items() if any(fnmatchcase(name, pattern) for name in of_it)}
        if not matching:
            some = ", ".join(of_it[0] for of_it in list(names.values())[:5])
            raise ValueError(f"{what}: no parameter is called {pattern!r}; the first ones are {some}")
        found |= matching
    return found


def _embeddings(model: nn.Module, names: dict[nn.Parameter, list[str]]) -> set[nn.Parameter]:
    """Tables that are looked up in, and what the model itself does not want to decay, which are of this kind."""
    found: set[nn.Parameter] = set()
    undecayed: set[str] = set()
    for prefix, module in model.named_modules():
        if isinstance(module, _TABLES):
            found |= set(module.parameters(recurse=False))
        start = f"{prefix}." if prefix else ""
        undecayed |= {start + name for name in _said_by(module, "no_weight_decay") or ()}
    for p, of_it in names.items():
        if any(_is_of_embedding(name) or name in undecayed for name in of_it) or getattr(p, "_no_weight_decay", False):
            found.add(p)
    return found


def _is_of_embedding(name: str) -> bool:
    """True if the parameter, or the module that has it, or the module of that, is called an embedding."""
    for part in name.lower().split(".")[-3:]:
        if "embed" in part or part in ("wte", "wpe") or {"emb", "pos"} & set(part.split("_")):
            return True
    return False


def _heads(model: nn.Module, names: dict[nn.Parameter, list[str]]) -> set[nn.Parameter]:
    """Parameters of output heads."""
    rows = {module.num_embeddings for module in model.modules() if isinstance(module, _TABLES)}
    found: set[nn.Parameter] = set()
    for p, of_it in names.items():
        outside = [name for name in of_it if not any(part.isdigit() for part in name.split("."))]
        table = bool(outside) and p.dim() == 2 and p.shape[0] in rows and not any(map(_is_of_embedding, of_it))
        if table or any(_is_of_head(name) for name in of_it):
            found.add(p)
    for module in model.modules():
        head = _said_by(module, "get_output_embeddings")
        if isinstance(head, nn.Module):
            found |= set(head.parameters())
    return found


def _is_of_head(name: str) -> bool:
    """True if a module that the parameter is in is called a head, and is not inside a numbered one."""
    modules = name.split(".")[:-1]
    return any(part in HEADS for part in itertools.takewhile(lambda part: not part.isdigit(), modules))


def _said_by(module: nn.Module, method: str) -> Any:
    """Result of ``method`` of ``module``, None if it has none."""
    says = getattr(module, method, None)
    return says() if callable(says) else None
