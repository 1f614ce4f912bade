"""GPT, BERT and Llama of any size, from transformers' classes and numbers alone: no download, no hub.

The loss is computed here and not by transformers: BERT's vocabulary projection, the widest layer of a small model, then
runs on the masked places only, and the sum and the number of predicted tokens are known, so that averages are exact.

What a device mesh needs to know of a model (see parallel.py) is here too: its ``blocks``, and in each of them the
projections that tensor parallel ranks share, ``cuts``.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from commopt.train.config import Config, ModelConfig
from commopt.train.data import CLS, EOT, PAD, SEP
from commopt.train.tasks import IGNORE

Cut = Literal["out", "in"]
"""Ways to share a projection by tensor parallelism: a rank has some of its outputs, or works on some of its inputs."""


class GPT(nn.Module):
    """GPT-2 with tied embeddings. ``forward(inputs, labels)``: the mean cross-entropy in nats per predicted token.

    Tensor parallel ranks share the work of the MLPs, two thirds of a block. The attention is every rank's: its fused
    projection has the queries, keys and values of all heads one after another, so that its columns cannot be cut into
    runs that are whole heads.
    """

    cuts: ClassVar[dict[str, Cut]] = {"mlp.c_fc": "out", "mlp.c_proj": "in"}

    def __init__(self, config: ModelConfig, vocab_size: int, seq_len: int) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.net: Any = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=vocab_size,
                n_positions=config.positions or seq_len,
                n_embd=config.width,
                n_layer=config.layers,
                n_head=config.heads,
                n_inner=config.mlp_width_made,
                resid_pdrop=config.dropout,
                embd_pdrop=config.dropout,
                attn_pdrop=config.dropout,
                bos_token_id=EOT,
                eos_token_id=EOT,
            )
        )

    @property
    def blocks(self) -> list[nn.Module]:
        """The transformer layers."""
        return list(self.net.transformer.h)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """inputs, labels: (samples, seq_len) int64."""
        hidden = self.net.transformer(input_ids=inputs, use_cache=False).last_hidden_state
        return F.cross_entropy(self.net.lm_head(hidden).flatten(0, 1).float(), labels.flatten())


class BERT(nn.Module):
    """BERT's encoder and masked-LM head with tied embeddings. ``forward`` as GPT's, over the masked tokens only.

    Tensor parallel ranks have some of the heads each, and a part of the MLPs.
    """

    cuts: ClassVar[dict[str, Cut]] = {
        **dict.fromkeys((f"attention.self.{name}" for name in ("query", "key", "value")), "out"),
        "attention.output.dense": "in", "intermediate.dense": "out", "output.dense": "in",
    }  # fmt: skip

    def __init__(self, config: ModelConfig, vocab_size: int, seq_len: int) -> None:
        super().__init__()
        from transformers import BertConfig, BertForMaskedLM

        self.net: Any = BertForMaskedLM(
            BertConfig(
                vocab_size=vocab_size,
                max_position_embeddings=config.positions or seq_len,
                hidden_size=config.width,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                intermediate_size=config.mlp_width_made,
                hidden_dropout_prob=config.dropout,
                attention_probs_dropout_prob=config.dropout,
                type_vocab_size=1,
                pad_token_id=PAD,
                bos_token_id=CLS,
                eos_token_id=SEP,
            )
        )

    @property
    def blocks(self) -> list[nn.Module]:
        """The transformer layers."""
        return list(self.net.bert.encoder.layer)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """inputs, labels: (samples, seq_len) int64; labels are IGNORE where nothing is predicted."""
        hidden = self.net.bert(input_ids=inputs).last_hidden_state
        chosen = labels != IGNORE
        total = F.cross_entropy(self.net.cls(hidden[chosen]).float(), labels[chosen], reduction="sum")
        return total / chosen.sum().clamp(min=1)


class Llama(nn.Module):
    """Llama, with the head tied to the embedding or not. ``forward`` as GPT's.

    Tensor parallel ranks have some of the heads each, with the keys and values of their groups, and a part of the MLPs.
    Rotary positions are computed from frequencies, constants that every rank makes for itself and no checkpoint has.
    """

    cuts: ClassVar[dict[str, Cut]] = {
        **dict.fromkeys((f"self_attn.{name}_proj" for name in "qkv"), "out"), "self_attn.o_proj": "in",
        "mlp.gate_proj": "out", "mlp.up_proj": "out", "mlp.down_proj": "in",
    }  # fmt: skip

    def __init__(self, config: ModelConfig, vocab_size: int, seq_len: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.net: Any = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocab_size,
                max_position_embeddings=seq_len,
                hidden_size=config.width,
                intermediate_size=config.mlp_width_made,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                num_key_value_heads=config.kv_heads_made,
                rms_norm_eps=1e-5,
                tie_word_embeddings=config.tied,
                bos_token_id=EOT,
                eos_token_id=EOT,
            )
        )

    @property
    def blocks(self) -> list[nn.Module]:
        """The transformer layers."""
        return list(self.net.model.layers)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """inputs, labels: (samples, seq_len) int64."""
        hidden = self.net.model(input_ids=inputs, use_cache=False).last_hidden_state
        return F.cross_entropy(self.net.lm_head(hidden).flatten(0, 1).float(), labels.flatten())


def make_model(config: Config, vocab_size: int) -> nn.Module:
    """The network of ``config.model``, its weights drawn from torch's current seed."""
    kinds = {"gpt": GPT, "bert": BERT, "llama": Llama}
    return kinds[config.model.kind](config.model, vocab_size, config.data.seq_len)


def count_parameters(model: nn.Module) -> int:
    """Trainable parameters, tied ones once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two named groups: weight decay for parameters with two or more dimensions, none for biases and norms."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decay = [(name, p) for name, p in named if p.ndim >= 2]
    rest = [(name, p) for name, p in named if p.ndim < 2]
    return [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


def fingerprint(model: nn.Module) -> list[list[Any]]:
    """[name, shape] of every parameter: what makes a checkpoint fit."""
    return [[name, list(p.shape)] for name, p in model.named_parameters()]
