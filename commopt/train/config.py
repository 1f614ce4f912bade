"""The config of a run: plain dataclasses, one per concern. Importing them needs no config library.

Every field's docstring gives its unit and allowed range; the command line shows them as help. Values are checked when
an object is made, so a wrong one never reaches a rank. Reading files and command lines is ``parse.py``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from commopt.train.errors import ConfigError


def _check(name: str, value: Any, ok: bool, allowed: str) -> None:
    if not ok:
        raise ConfigError(f"{name}={value!r} is not allowed: it must be {allowed}")


def _is_name(path: str) -> bool:
    """True if files can have it, and logs name it."""
    try:
        return b"\0" not in path.encode()
    except UnicodeEncodeError:  # of bytes that are not UTF-8
        return False


@dataclass
class ModelConfig:
    """The network, built from these numbers alone: nothing is downloaded."""

    kind: Literal["gpt", "bert", "llama"] = "gpt"
    """gpt: predicts the next token (GPT-2 classes). bert: predicts masked tokens (BERT classes). llama: predicts the
    next token (Llama classes: RMSNorm, rotary positions of base 10,000, SwiGLU, grouped queries, no biases)."""
    layers: int = 4
    """Transformer layers, >= 1."""
    heads: int = 4
    """Attention heads, >= 1; must divide width, and width / heads be even with llama."""
    kv_heads: int | None = None
    """Heads of the keys and values, >= 1; must divide heads. null for heads, and always with gpt and bert."""
    width: int = 256
    """Hidden size, >= 1."""
    mlp_width: int | None = None
    """Size within the MLPs, >= 1; null for 4 * width, and with llama for 8/3 * width, up to a multiple of 256."""
    tied: bool = True
    """True if the head is the matrix of the tokens' embedding; false with llama only."""
    dropout: float = 0.0
    """Dropout probability everywhere, in [0, 1); 0 with llama, which has none."""
    positions: int | None = None
    """Positions that have an embedding, >= data.seq_len; null for data.seq_len, and always with llama, which turns
    queries and keys instead. More for a model that goes on with longer samples later, see init."""

    def __post_init__(self) -> None:
        _check("model.kind", self.kind, self.kind in ("gpt", "bert", "llama"), "gpt, bert or llama")
        _check("model.layers", self.layers, self.layers >= 1, ">= 1")
        _check("model.heads", self.heads, self.heads >= 1, ">= 1")
        divides = self.width >= 1 and self.width % self.heads == 0
        _check("model.width", self.width, divides, f">= 1 and a multiple of model.heads={self.heads}")
        _check("model.mlp_width", self.mlp_width, self.mlp_width is None or self.mlp_width >= 1, ">= 1 or null")
        _check("model.dropout", self.dropout, 0.0 <= self.dropout < 1.0, "in [0, 1)")
        if self.kind == "llama":
            self._check_llama()
            return
        _check("model.kv_heads", self.kv_heads, self.kv_heads is None, f"null with model.kind={self.kind}")
        _check("model.tied", self.tied, self.tied, f"true with model.kind={self.kind}")

    def _check_llama(self) -> None:
        kv, pairs = self.kv_heads, self.width // self.heads % 2 == 0
        divides = kv is None or (kv >= 1 and self.heads % kv == 0)
        _check("model.kv_heads", kv, divides, f"null or a divisor of model.heads={self.heads}")
        of_pairs = f"an even multiple of model.heads={self.heads} with model.kind=llama, which turns pairs"
        _check("model.width", self.width, pairs, of_pairs)
        _check("model.dropout", self.dropout, self.dropout == 0, "0 with model.kind=llama, which has none")
        no_table = "null with model.kind=llama, whose rotary positions have no table"
        _check("model.positions", self.positions, self.positions is None, no_table)

    @property
    def kv_heads_made(self) -> int:
        """Heads of the keys and values."""
        return self.kv_heads or self.heads

    @property
    def mlp_width_made(self) -> int:
        """Size within the MLPs."""
        if self.mlp_width is not None:
            return self.mlp_width
        return 4 * self.width if self.kind != "llama" else -(-8 * self.width // (3 * 256)) * 256


@dataclass
class DataConfig:
    """The text, its tokenizer and its held-out split."""

    corpus: str | list[str] = "stdlib"
    """stdlib: source text of the running Python's standard library. A path or a list of paths: files or folders of
    text. hf:NAME: a data set of the Hugging Face `datasets` library, or a local folder that it can load."""
    hf_config: str | None = None
    """Configuration name of an hf: data set; null for its default."""
    hf_split: str = "train"
    """Split of an hf: data set to read; the held-out part is taken from it by document."""
    hf_text_field: str = "text"
    """Column of an hf: data set that holds the text."""
    vocab_size: int = 4096
    """Tokens of the byte-level BPE tokenizer trained on the corpus, in [261, 16777216]: 256 bytes and 5 special
    tokens at least."""
    seq_len: int = 128
    """Tokens the model reads per sample, >= 8."""
    heldout: float = 0.05
    """Share of the documents kept for evaluation, in (0, 0.5]."""
    cache_dir: str | None = None
    """Folder of prepared corpora; null for $XDG_CACHE_HOME/commopt or ~/.cache/commopt. On several machines it must be
    shared."""

    def __post_init__(self) -> None:
        listed = [self.corpus] if isinstance(self.corpus, str) else self.corpus
        empty = not listed or "" in listed or self.corpus == "hf:"
        _check("data.corpus", self.corpus, not empty, "stdlib, a path, a list of paths or hf:NAME")
        _check("data.vocab_size", self.vocab_size, 261 <= self.vocab_size <= 2**24, "in [261, 16777216]")
        _check("data.seq_len", self.seq_len, self.seq_len >= 8, ">= 8")
        _check("data.heldout", self.heldout, 0.0 < self.heldout <= 0.5, "in (0, 0.5]")
        _check("data.cache_dir", self.cache_dir, self.cache_dir is None or bool(self.cache_dir), "null or a folder")


@dataclass
class CompressorConfig:
    """Compressor of the messages of an optimizer that compresses."""

    name: str = "Sign"
    """Attribute of commopt.compress, or a dotted path for a class of your own."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of that class, checked against its signature."""


@dataclass
class GradientsConfig(CompressorConfig):
    """Compressor of the mean gradients of a torch optimizer, what becomes of what it loses, and what else is
    compressed."""

    feedback: bool | str | dict[str, Any] = True
    """true: what compression loses is kept, and sent with the next gradients (error feedback). false: it is lost. Or
    what keeps it otherwise, an attribute of commopt.gradients: LoCo, or name and args of it."""
    inside: str | dict[str, Any] | None = None
    """Compressor inside a machine, a name, or name and args, such as Int8; null for full precision. With
    parallel.shard: of what FSDP2 reduces inside a replica, or inside a node where it cuts the model over all ranks;
    without, of what the ranks of a node send each other (comm.ranks_per_node). Nothing where a node is one rank."""
    weights: str | dict[str, Any] | None = None
    """With parallel.shard: compressor of the weights that FSDP2 gathers, such as Int8, or Differences (with args:
    {compressor: ...}); null for full precision."""
    warmup_steps: int = 0
    """Steps whose gradients are averaged in full precision, before the first compressed ones, >= 0."""

    def __post_init__(self) -> None:
        _check("comm.compress.warmup_steps", self.warmup_steps, self.warmup_steps >= 0, "an integer >= 0")
        named = isinstance(self.feedback, bool | dict) or bool(self.feedback)
        _check("comm.compress.feedback", self.feedback, named, "true, false or LoCo, or name and args of it")


@dataclass
class OptimConfig:
    """The optimizer and the learning-rate schedule: warm-up to lr, then down towards min_lr_ratio * lr."""

    name: str = "OneBitAdam"
    """Attribute of commopt.optim, commopt.outer or torch.optim, or a dotted path. A torch optimizer is trained under
    DDP, with fp32 all-reduce."""
    lr: float = 1e-3
    """Peak learning rate, > 0."""
    weight_decay: float = 0.0
    """Weight decay of parameters with two or more dimensions, >= 0; biases and norms are never decayed."""
    max_grad_norm: float | None = 1.0
    """Gradients are clipped to this global L2 norm, > 0; null for no clipping."""
    max_skipped: int | None = 25
    """The run ends with an error after this many steps in a row that were skipped for inf or NaN in the gradients,
    >= 1; null: never."""
    check_every: int | None = 100
    """Steps between two comparisons of the replicas of a commopt optimizer, by digests of parameters and common state,
    >= 1; null: never. With a torch optimizer only comm.compress compares, the parameters of a model that is not on a
    mesh; else 100 or null there."""
    on_difference: Literal["raise", "repair"] = "raise"
    """Reaction to replicas of a commopt optimizer that differ. raise: an error that names the rank. repair: a rank that
    differs gets what the majority has, if there is one."""
    warmup_steps: int = 0
    """Steps of learning-rate warm-up, >= 0; more than train.steps are warned of. Not the warm-up phase of 1-bit Adam:
    that is args.freeze_step."""
    warmup_power: float = 1.0
    """The warm-up is lr * (step / warmup_steps) ** warmup_power, > 0: 1 is a straight line, 2 starts more slowly."""
    decay: Literal["cosine", "linear", "exponential"] = "cosine"
    """Decay of what is above min_lr_ratio after the warm-up. cosine, linear: to 0 after the last step. exponential:
    times decay_rate every decay_every steps."""
    decay_rate: float | None = None
    """Factor of the exponential decay, in (0, 1]; null for the others."""
    decay_every: int | None = None
    """Steps between two of its factors, >= 1; null for the others."""
    min_lr_ratio: float = 0.1
    """Share of the peak learning rate that stays, in [0, 1]; 1 keeps it constant."""
    args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer's class (betas, eps, freeze_step, ...), checked against its signature. One of
    commopt.outer has base, the name of the optimizer that it wraps (AdamW), and base_args, arguments of that; lr and
    weight_decay are those of the base. Muon, by itself or as a base, is for hidden matrices, with AdamW for the rest:
    adamw has arguments of that."""
    compressor: CompressorConfig | None = None
    """Compressor of a commopt optimizer, a name, or name and args; null for the optimizer's own default."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that differ with another optimizer: by its name, keys of this section, or others by their whole names
    (train.batch_size), and their values. They come after those of the file and before those of the command line.
    Resolved when a config is read, and then empty."""

    def __post_init__(self) -> None:
        if isinstance(self.compressor, str):
            self.compressor = CompressorConfig(self.compressor)
        _check("optim.lr", self.lr, 0 < self.lr < 1e30, "> 0, and less than 1e30")
        _check("optim.weight_decay", self.weight_decay, self.weight_decay >= 0, ">= 0")
        clip = self.max_grad_norm
        _check("optim.max_grad_norm", clip, clip is None or clip > 0, "> 0 or null")
        most = self.max_skipped
        _check("optim.max_skipped", most, most is None or most >= 1, ">= 1 or null")
        every = self.check_every
        _check("optim.check_every", every, every is None or every >= 1, ">= 1 or null")
        _check("optim.warmup_steps", self.warmup_steps, self.warmup_steps >= 0, ">= 0")
        _check("optim.warmup_power", self.warmup_power, self.warmup_power > 0, "> 0")
        _check("optim.min_lr_ratio", self.min_lr_ratio, 0 <= self.min_lr_ratio <= 1, "in [0, 1]")
        kinds = ("cosine", "linear", "exponential")
        _check("optim.decay", self.decay, self.decay in kinds, "cosine, linear or exponential")
        rate, every = self.decay_rate, self.decay_every
        if self.decay == "exponential":
            _check("optim.decay_rate", rate, rate is not None and 0 < rate <= 1, "in (0, 1] with exponential decay")
            _check("optim.decay_every", every, every is not None and every >= 1, ">= 1 with exponential decay")
        else:
            _check("optim.decay_rate", rate, rate is None, f"null with optim.decay={self.decay}")
            _check("optim.decay_every", every, every is None, f"null with optim.decay={self.decay}")


BACKENDS = ("auto", "gloo", "nccl", "mpi")


@dataclass
class CommConfig:
    """Connection of the ranks."""

    backend: str = "auto"
    """auto: NCCL where there is a GPU, else Gloo. gloo or nccl: that one. mpi: for processes started by mpirun; needs
    commopt[mpi]. Or the dotted path of a class of your own, made on every rank after torch.distributed has joined them.
    mpi and classes of your own are for commopt optimizers."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the class behind mpi (cuda_aware) or of your own, checked against its signature."""
    compress: GradientsConfig | None = None
    """Compressor of the mean gradients of a torch optimizer, a name, or name, args and more; null for full precision. A
    commopt optimizer has optim.compressor."""
    timeout: float = 600.0
    """Seconds for which a rank waits for the others, in (0, 604800]: to start, in a step, and in the messages between
    the ranks, over MPI too; then it ends with an error. A class of your own has its own way in steps."""
    ranks_per_node: int = 1
    """1: all ranks are alike. More: that many ranks that follow each other are a node, and only what goes from node to
    node is compressed. 0: as many as every machine runs. For commopt optimizers, over auto, gloo, nccl or mpi; and for
    comm.compress, without parallel or where parallel.shard are all ranks."""

    def __post_init__(self) -> None:
        if isinstance(self.compress, str):
            self.compress = GradientsConfig(self.compress)
        _check("comm.ranks_per_node", self.ranks_per_node, self.ranks_per_node >= 0, ">= 0")
        _check("comm.timeout", self.timeout, 0 < self.timeout <= 604800, "in (0, 604800]")
        _check("comm.backend", self.backend, bool(self.backend), f"{', '.join(BACKENDS)} or a dotted path")


@dataclass
class ParallelConfig:
    """The ranks that hold one model together, by torch's FSDP2 and tensor parallelism: a device mesh of replicate *
    shard * tensor ranks. What an optimizer compresses goes between the replicas. All as it is: every rank holds the
    whole model."""

    shard: int = 1
    """Ranks over which FSDP2 cuts the model, >= 1; each trains on samples of its own. They follow each other, in steps
    of tensor: make shard * tensor the ranks of a machine."""
    tensor: int = 1
    """Ranks that compute each layer together, on the same samples, >= 1; must divide model.heads, model.kv_heads and
    model.mlp_width. They follow each other."""
    replicate: int | None = None
    """Replicas of the model, >= 1; null for as many as there are ranks for. Given, it must fit, and the run is one on a
    mesh even where nothing is cut: so it can take up what runs on other meshes have saved."""

    def __post_init__(self) -> None:
        _check("parallel.shard", self.shard, self.shard >= 1, ">= 1")
        _check("parallel.tensor", self.tensor, self.tensor >= 1, ">= 1")
        replicas = self.replicate
        _check("parallel.replicate", replicas, replicas is None or replicas >= 1, ">= 1 or null")

    @property
    def on_mesh(self) -> bool:
        """True if the run has a device mesh at all."""
        return self.shard > 1 or self.tensor > 1 or self.replicate is not None


@dataclass
class TrainConfig:
    """The loop: how long, how much per step, and what is written when."""

    run_dir: str = "runs/default"
    """Folder of the run: config.yaml, metrics.jsonl, TensorBoard events, checkpoints, curves.png. On several machines
    it must be shared."""
    steps: int = 1000
    """Optimizer steps, >= 1."""
    batch_size: int = 32
    """Samples per optimizer step over all ranks, >= 1; must be a multiple of ranks * accumulate. The same config is
    the same run at any world size."""
    accumulate: int = 1
    """Backward passes per optimizer step, >= 1: each rank's share of the batch is split into this many parts."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: forward and backward under autocast; parameters and optimizer state stay fp32."""
    seed: int = 0
    """Seed of initial weights, data order, masks and dropout, in [0, 2**32)."""
    log_every: int = 10
    """Steps between two training records, >= 1."""
    eval_every: int = 100
    """Steps between two evaluations, >= 1; there is always one at the end."""
    eval_samples: int = 512
    """Held-out samples per evaluation over all ranks, >= 1; the whole split if it has fewer."""
    checkpoint_every: int = 500
    """Steps between two checkpoints, >= 1; there is always one at the end and when stopped."""
    keep: int = 2
    """Checkpoints kept, >= 1."""

    def __post_init__(self) -> None:
        _check("train.run_dir", self.run_dir, bool(self.run_dir) and _is_name(self.run_dir), "a folder, in UTF-8")
        self.run_dir = os.path.expanduser(self.run_dir)
        counts = ("steps", "batch_size", "accumulate", "log_every", "eval_every", "eval_samples", "checkpoint_every")
        for name in (*counts, "keep"):
            value = getattr(self, name)
            _check(f"train.{name}", value, value >= 1, ">= 1")
        _check("train.precision", self.precision, self.precision in ("fp32", "bf16"), "fp32 or bf16")
        _check("train.seed", self.seed, 0 <= self.seed < 2**32, "in [0, 2**32)")


@dataclass
class Config:
    """A whole run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    init: str | None = None
    """Folder of a checkpoint of another run, for the weights that a new run starts from: of a model of the same shape,
    on the same corpus. Optimizer, learning rate and data start anew. null: random weights. A run that is resumed has
    weights already."""
    resume: str = "none"
    """none: a new run. auto: continue from the newest good checkpoint of train.run_dir, or start where there is none.
    Else the folder of a checkpoint."""

    def __post_init__(self) -> None:
        _check("init", self.init, self.init is None or bool(self.init), "null or the folder of a checkpoint")
        chosen = self.resume in ("none", "auto") or self.resume.lower() not in ("", "none", "auto")
        _check("resume", self.resume, chosen, "none, auto or the folder of a checkpoint")
        self.resume = os.path.expanduser(self.resume)
        self.init = None if self.init is None else os.path.expanduser(self.init)
        positions, length = self.model.positions, self.data.seq_len
        enough = positions is None or positions >= length
        _check("model.positions", positions, enough, f"null or >= data.seq_len={length}")
        tensor, model = self.parallel.tensor, self.model
        shared = {"heads": model.heads, "kv_heads": model.kv_heads_made, "mlp_width": model.mlp_width_made}
        for name, size in shared.items():
            _check("parallel.tensor", tensor, size % tensor == 0, f"a divisor of model.{name}={size}")
        if self.parallel.on_mesh:
            places, backend = self.comm.ranks_per_node, self.comm.backend
            on_nodes = self.comm.compress is not None and self.parallel.shard > 1
            allowed = "1 with parallel.*, whose replicas are the nodes, but with comm.compress and parallel.shard"
            _check("comm.ranks_per_node", places, places == 1 or on_nodes, allowed)
            known = backend in BACKENDS and backend != "mpi"
            _check("comm.backend", backend, known, "auto, gloo or nccl with parallel.*: the mesh is torch's")


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the sections of a config as a tree, by their whole names, to be compared: what means the same is
    the same."""
    tree = {"parallel": asdict(ParallelConfig()), **tree}  # checkpoints from before there was one have none
    return {
        f"{section}.{name}": _plain(value)
        for section in ("model", "data", "optim", "comm", "parallel", "train")
        for name, value in tree.get(section, {}).items()  # nor comm
    }


def _plain(value: Any) -> Any:
    """``value`` with lists for tuples, and Int8 for {name: Int8, args: {}}."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if "name" in value and value.keys() <= {"name", "args"} and not value.get("args"):
        return value["name"]
    return {key: _plain(item) for key, item in value.items()}
