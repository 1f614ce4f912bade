"""Sorting a model's parameters into hidden matrices and the rest: real models, tied and frozen ones, and bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from worlds import Toy

import commopt


def names(pairs: list[tuple[str, nn.Parameter]]) -> set[str]:
    return {name for name, _ in pairs}


def suffixes(pairs: list[tuple[str, nn.Parameter]]) -> set[str]:
    """The names without what comes before the number of the layer."""
    return {name.split(".0.", 1)[-1] for name, _ in pairs if ".1." not in name}


def check_complete(model: nn.Module, hidden: Any, rest: Any) -> None:
    """Each trainable parameter is once in one of the two, in the order of the model, with a name that it has."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert sorted(map(id, trainable)) == sorted(id(p) for _, p in (*hidden, *rest))
    order = {id(p): i for i, p in enumerate(trainable)}
    known = dict(model.named_parameters(remove_duplicate=False))
    for pairs in (hidden, rest):
        assert [order[id(p)] for _, p in pairs] == sorted(order[id(p)] for _, p in pairs)
        assert all(known[name] is p for name, p in pairs)


def gpt2(**settings: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=40, n_positions=12, **settings))


def llama(**settings: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=40, num_key_value_heads=2, **sizes, **settings))


def test_gpt2_with_its_tied_head() -> None:
    model = gpt2()
    hidden, rest = commopt.sort_parameters(model)
    check_complete(model, hidden, rest)
    assert suffixes(hidden) == {"attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"}
    assert len(hidden) == 8
    assert {"transformer.wte.weight", "transformer.wpe.weight"} <= names(rest)


def test_llama_with_a_head_of_its_own_or_a_tied_one() -> None:
    for tied in (False, True):
        model = llama(tie_word_embeddings=tied)
        hidden, rest = commopt.sort_parameters(model)
        check_complete(model, hidden, rest)
        assert len(hidden) == 14  # q, k, v, o, gate, up, down
        matrices = {name for name, p in rest if p.dim() > 1}
        assert matrices == {"model.embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})


def test_classifiers_and_encoders_of_transformers() -> None:
    from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertModel

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=40, max_position_embeddings=12, **sizes)
    layer = {f"attention.self.{name}.weight" for name in ("query", "key", "value")}
    layer |= {"attention.output.dense.weight", "intermediate.dense.weight", "output.dense.weight"}
    for cls, also in ((BertForSequenceClassification, {"bert.pooler.dense.weight"}), (BertForMaskedLM, set())):
        hidden, rest = commopt.sort_parameters(cls(config))
        assert layer | also <= suffixes(hidden), cls
        assert suffixes(hidden) - layer - also <= {"cls.predictions.transform.dense.weight"}
        assert not {name for name in names(rest) if "encoder" in name and name.endswith(("dense.weight", "key.weight"))}
    with pytest.raises(ValueError, match=r"no output head is found in BertModel.*head=\(\)"):
        commopt.sort_parameters(BertModel(config))
    hidden, rest = commopt.sort_parameters(BertModel(config), head=())
    assert layer <= suffixes(hidden)
    assert {name for name in names(rest) if "embeddings" in name}


class Vision(nn.Module):
    """Filters, a class token, a table of positions without a module, torch's attention, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4)
        self.pos_embed = nn.Parameter(torch.zeros(9, 8))
        self.table = nn.Parameter(torch.zeros(9, 8))
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16)])
        self.scale = nn.Parameter(torch.ones(8, 1))
        self.slow = nn.Parameter(torch.ones(8, 4))
        self.slow._no_weight_decay = True
        self.head = nn.Linear(8, 5)

    def no_weight_decay(self) -> set[str]:
        return {"table"}


def test_torchs_modules() -> None:
    model = nn.Sequential(Vision())
    hidden, rest = commopt.sort_parameters(model, head=["0.head.*"])
    check_complete(model, hidden, rest)
    blocks = {"self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"}
    assert names(hidden) == {f"0.blocks.0.{name}" for name in blocks}
    alone = commopt.sort_parameters(model[0])
    assert {f"0.{name}" for name in names(alone.hidden)} == names(hidden)  # its own head is found


def test_a_head_is_found_by_its_rows_where_its_name_says_nothing() -> None:
    model = nn.ModuleDict({"tokens": nn.Embedding(40, 8), "inner": nn.Linear(8, 8), "last": nn.Linear(8, 40)})
    hidden, rest = commopt.sort_parameters(model)
    assert names(hidden) == {"inner.weight"}
    assert {"tokens.weight", "last.weight"} <= names(rest)
    numbered = nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 8), nn.Linear(8, 40))  # says nothing at all
    assert names(commopt.sort_parameters(numbered, head=["2.*"]).hidden) == {"1.weight"}


def test_frozen_parameters_are_in_neither() -> None:
    model = gpt2()
    for name, p in model.named_parameters():
        p.requires_grad_("h.1" in name)
    hidden, rest = commopt.sort_parameters(model)
    check_complete(model, hidden, rest)
    assert len(hidden) == 4
    assert all("h.1" in name for name, _ in (*hidden, *rest))


def test_patterns_say_what_looks_cannot() -> None:
    model = Toy()
    with pytest.raises(ValueError, match="no output head is found in Toy"):
        commopt.sort_parameters(model)
    hidden, rest = commopt.sort_parameters(model, head=["embedding"], rest=["pos*", "unused"])
    check_complete(model, hidden, rest)
    assert names(hidden) == {"weight", "dead"}  # an empty one is no matrix
    tied = gpt2()
    assert "lm_head.weight" not in names(commopt.sort_parameters(tied).rest)  # its other name comes first
    assert "transformer.wte.weight" in names(commopt.sort_parameters(tied, hidden=["lm_head.weight"]).hidden)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rest": ["nothing.*"]}, "rest: no parameter is called 'nothing.*'; the first ones are transformer.wte"),
        ({"hidden": ["*.ln_1.weight"]}, r"hidden= asks for transformer.h.0.ln_1.weight of shape \(16,\)"),
        ({"hidden": ["*c_fc.weight"], "rest": ["*mlp*weight"]}, "h.0.mlp.c_fc.weight is asked for by hidden=, and by"),
        ({"head": "lm_head"}, r"head must be a list of patterns of names such as \['lm_head'\]"),
        ({"rest": ["*"]}, "GPT2LMHeadModel has no trainable hidden matrix among its 28 trainable"),
    ],
)
def test_bad_input(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        commopt.sort_parameters(gpt2(), **settings)


def test_parameters_without_a_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"parameter 0.weight has no shape yet"):
        commopt.sort_parameters(nn.Sequential(nn.LazyLinear(4)), head=())
