"""The fields of a layout: the degree of every axis and the choices that go with them, as a user writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.spec.axis import Mechanics
from meshwright.spec.compression import Compression
from meshwright.spec.groups import axis_with, state_axes, state_copies, state_shards
from meshwright.spec.layout_choices import BatchShares, LossChunk, Recompute, StageSplit

FLOAT8_RECIPES = {"fp8": "tensorwise", "fp8_rowwise": "rowwise"}
"""Precisions whose products of matrices are in float8 and the rest in bf16, each with torchao's name of its scales."""
PRECISIONS = ("float32", "float64", "tf32", "bf16", "fp16", *FLOAT8_RECIPES)
OFFLOADS = ("none", "optimizer", "parameters")
ATTENTIONS = ("heads", "gather", "ring")
"""Ways in which ``cp`` computes attention."""
BALANCED_ATTENTIONS = ("gather", "ring")
"""Those under which a rank has an early and a late run of each row, for balance (`spec.key_ring`)."""
DEFAULT_SCHEDULE = "1f1b"
"""Where there is a pipeline and the layout names no schedule."""
MECHANICS_OF_CHOICE: Mapping[str, Mechanics] = {
    "schedule": Mechanics.STAGES,
    "stages": Mechanics.STAGES,
    "split": Mechanics.STAGES,
    "sequence": Mechanics.MATRICES,
    "tp_overlap": Mechanics.MATRICES,
    "attention": Mechanics.TOKENS,
    "ep_node": Mechanics.EXPERTS,
    "ep_overlap": Mechanics.EXPERTS,
    "ep_halves": Mechanics.EXPERTS,
    "ep_keep": Mechanics.EXPERTS,
    "compress_tokens": Mechanics.EXPERTS,
}
"""Choices that say something about an axis of some mechanics, and have no effect without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutFields:
    """What a layout states, and the degrees that its rules read; a `Layout` is one whose fields go together."""

    degrees: Mapping[str, int] = field(default_factory=dict)
    """Axis name to degree; axes of degree 1 are left out."""
    zero: int = 0
    """ZeRO level over ``shard``: 0 copies everything, 1 shards optimizer state, 2 gradients too, 3 parameters too."""
    microbatches: int = 1
    """Micro-batches that every rank runs before one optimizer step."""
    recompute: Recompute = Recompute()  # noqa: RUF009 - frozen
    """``none``; ``full``: keep a layer's input alone; ``selective``: keep products of matrices, recompute the rest.
    ``full:3`` and ``selective:3`` do so in 3 of the layers, evenly spaced; with ``full:3+selective`` all others keep
    products of matrices."""
    precision: str = "float32"
    """``float32``, ``float64``; ``tf32``: float32 with products of matrices that GPUs round to TF32; ``bf16`` or
    ``fp16``: compute in it over float32 master weights and reductions; ``fp8`` or ``fp8_rowwise``: as ``bf16``, with
    the layers' products of matrices in float8, scaled by tensor or by row."""
    offload: str = "none"
    """``optimizer``: optimizer state and update in host memory; ``parameters``: parameters and gradients as well."""
    compile: bool = False
    """Run each layer through torch.compile."""
    schedule: str = ""
    """Order of work along ``pp``: a name of ``python -m meshwright.schedules``, or ``file:PATH``; empty is ``1f1b``."""
    stages: int = 0
    """Stages that each rank of ``pp`` runs; 0 is what the schedule asks for."""
    split: StageSplit = StageSplit()  # noqa: RUF009 - frozen
    """Layers of each stage in order, as ``5-7-6-6``; empty balances by cost."""
    sequence: bool = False
    """Between the parts that ``tp`` shards, split the tokens over its ranks (sequence parallel)."""
    tp_overlap: int = 0
    """Chunks of tokens in which linear layers next to ``tp``'s collectives compute, so that one chunk travels while the
    next is computed; with 1 backward's sums alone hide, under the products of weight gradients; 0 waits for each."""
    attention: str = ""
    """How ``cp`` computes attention: ``heads`` exchanges tokens for heads, ``gather`` collects keys and values; empty
    takes heads where they divide, else gather."""
    ep_node: int = 0
    """Neighbouring ranks of ``ep``, those of a node, to which a token travels once, however many of its experts they
    hold; inside it goes once to each rank that has some. With 1 it goes once to each rank; 0 sends it once for each of
    its experts."""
    ep_overlap: int = 0
    """Chunks of tokens, of which one travels to its experts and back while the experts compute another; 0 computes the
    tokens of a micro-batch as one."""
    ep_halves: bool = False
    """Run a micro-batch's rows as two halves that go through the layers in turns: what one has sent to its experts, or
    back, travels while the other computes."""
    ep_keep: bool = False
    """Under ``recompute`` keep what came from the ranks of ``ep``, and compute again without another exchange."""
    rows: BatchShares = BatchShares()  # noqa: RUF009 - frozen
    """Share of each reader in every micro-batch's rows, as ``5-3`` for two readers of unequal speed; empty shares them
    evenly. Losses and gradients are weighted by tokens, so the training is the same."""
    compress: Compression = Compression()  # noqa: RUF009 - frozen
    """Numbers or matrices in which gradients are summed over copies (`Compression`); ``none`` sums exactly."""
    compress_weights: str = "none"
    """Numbers in which ZeRO gathers weights: ``none`` for those of compute, ``int8``, ``fp8``."""
    compress_tokens: str = "none"
    """Numbers in which tokens go to the ranks of their experts, and in backward the gradients of what these return:
    ``none`` for those of compute, ``fp8``. What comes back is exact."""
    secondary: int = 0
    """Neighbouring ranks that share each layer's gathered weights from forward to backward under ZeRO-3, so that
    backward gathers among them alone; 0 for all ranks that share the state."""
    loss_chunk: LossChunk = LossChunk()  # noqa: RUF009 - frozen
    """Tokens whose logits exist at once, where the model's are a linear function of its last hidden state: ``auto``
    lets the device decide, ``off`` makes the logits of the whole micro-batch, ``1024`` those of 1024 tokens."""

    def degree(self, axis: str | Mechanics) -> int:
        """Returns the size of an axis, or of the one that has some mechanics; 1 when it isn't used."""
        return self.degrees.get(axis if isinstance(axis, str) else self.axis(axis), 1)

    def axis(self, mechanics: Mechanics) -> str:
        """Returns the axis of some mechanics that is used, or the first that is known where none is."""
        return axis_with(mechanics, self.degrees)

    def format_degree(self, mechanics: Mechanics) -> str:
        """Returns the axis of some mechanics with its degree, as ``cp=2``."""
        return f"{self.axis(mechanics)}={self.degree(mechanics)}"

    @property
    def state_axes(self) -> tuple[str, ...]:
        """Axes over whose product the state of a weight is sharded; none at ``zero=0``."""
        return state_axes(self.zero)

    @property
    def state_shards(self) -> int:
        """Number of ranks that share the state of a weight."""
        return int(state_shards(self.degrees, self.zero))

    @property
    def copies(self) -> int:
        """Number of ranks that hold the same part of a weight's state, over which its gradient is summed."""
        return state_copies(self.degrees, self.zero)

    @property
    def can_halve(self) -> bool:
        """Whether `ep_halves` is possible: the weights of a layer stay gathered until both halves have left it."""
        return self.degree(Mechanics.EXPERTS) > 1 and (self.zero < 3 or self.degree(Mechanics.STAGES) > 1)
