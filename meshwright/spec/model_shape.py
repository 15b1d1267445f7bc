"""The model as sizes: what a plan, a utilisation and a memory estimate are computed from."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from meshwright.json_types import JsonObject
from meshwright.units import Flops


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """One product of tokens with a weight: (T, inner) x (inner, outer)."""

    name: str
    """What it is: ``qkv``, ``out``, ``up``, ``down``, ``router``, ``head`` ..."""
    inner: int
    """Width that is summed over."""
    outer: int
    """Width of the result."""
    split: str = ""
    """``columns``: tp divides the result, ``rows``: the sum; empty: every rank of tp computes all of it."""
    experts: bool = False
    """Whether it is one routed expert's, run on the tokens that visit it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """Sizes of one block: what its time, its saved activations and its traffic are computed from."""

    products: tuple[Product, ...]
    """Matrix products of a forward, in order; an expert's are listed once, not once an expert."""
    width: int
    """D."""
    parameters: int
    """All parameters, those of the experts included."""
    expert_parameters: int = 0
    """Those of routed experts, which ``ep`` spreads."""
    heads: int = 0
    """H; 0 for a block without attention over all tokens."""
    kv_heads: int = 0
    """K."""
    head_size: int = 0
    """E of queries and keys."""
    value_size: int = 0
    """E of values."""
    normed_width: int = 0
    """Widths of queries and keys that a norm takes over all heads at once (OLMo 2): ranks of tp gather them for it."""
    window: int = 0
    """Tokens that a query looks back at most; 0 is all of them."""
    sinks: bool = False
    """Whether the softmax has a learned sink beside the keys (GPT-OSS)."""
    latent: int = 0
    """Widths of low-rank queries, keys and values together, which tp doesn't divide; 0 without them."""
    ffn: int = 0
    """F of the branch that every token visits: dense, or the shared experts."""
    gated: bool = False
    """Whether the feed-forward part multiplies two branches (SwiGLU)."""
    norm: str = "rms"
    """``rms`` or ``layer``."""
    norm_behind: bool = False
    """Whether a norm, known by its name, reads what the last product returned (OLMo 2, Gemma 3, GLM-4): recompute
    computes and sends that again."""
    dropout: bool = False
    """Whether its code has dropout, so that masks are saved."""
    drops: int = 0
    """Dropouts of D elements a token, those of attention's weights left out."""
    drops_scores: bool = False
    """Whether the weights of attention are dropped."""
    experts: int = 0
    """X; 0 for a dense block."""
    active_experts: int = 0
    """Routed experts that a token visits."""
    expert_groups: int = 0
    """Equal runs of experts, of which the router first chooses some; 0 where it chooses among all experts."""
    chosen_groups: int = 0
    """Runs that hold all experts of a token."""
    expert_ffn: int = 0
    """F of a routed expert."""

    @property
    def query_width(self) -> int:
        """H times E."""
        return self.heads * self.head_size

    @property
    def key_width(self) -> int:
        """Keys of all heads: K times E."""
        return self.kv_heads * self.head_size

    @property
    def value_width(self) -> int:
        """Values of all kv heads."""
        return self.kv_heads * self.value_size

    @property
    def mixed_width(self) -> int:
        """Weighted values of all query heads: what the output product reads."""
        return self.heads * self.value_size

    def attended(self, sequence: int) -> float:
        """Returns the keys that a query sees on average under the causal mask."""
        if not self.window or self.window >= sequence:
            # Query i sees i keys.
            return sequence / 2
        # Query i sees min(i, W) keys: W - W^2 / (2 S) on average over S.
        return self.window - self.window * self.window / (2 * sequence)

    def forward_flops_per_token(self) -> Flops:
        """Returns two operations a weight that a token multiplies, attention scores left out."""
        total = sum(
            2.0 * product.inner * product.outer * (self.active_experts if product.experts else 1)
            for product in self.products
        )
        return Flops(total)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes of one model; parameters are counted once however many names they have."""

    name: str
    """What was asked for."""
    parameters: int
    """All parameters."""
    layer_parameters: tuple[int, ...]
    """Parameters of each block, in order."""
    embedding_parameters: int
    """Token and learned position embeddings."""
    head_parameters: int
    """Projection to logits; 0 when it is tied to the embedding."""
    other_parameters: int
    """What is in no block and is neither embedding nor head: final norm ..."""
    matmul_parameters: int
    """Weights that each token multiplies, the head included though tied, the embedding tables not, of a mixture only
    the experts that a token visits."""
    layers: int
    """Number of blocks."""
    width: int
    """D."""
    heads: int
    """H; 0 for a model without attention heads."""
    head_size: int
    """E."""
    vocab: int
    """V."""
    experts: int = 0
    """X; 0 for a dense model."""
    active_experts: int = 0
    """Experts that one token visits."""
    tied: bool = False
    """Whether the head is the embedding."""
    positions: int = 0
    """Learned positions; 0 without them."""
    whole_logits: bool = False
    """Whether the loss needs the logits of a whole micro-batch at once: there is no linear head."""
    blocks: tuple[LayerShape, ...] = ()
    """Every block, in order; equal ones may be one object. Empty where only the totals are known."""

    def forward_flops_per_token(self, sequence: int) -> Flops:
        """Returns 2 N + 4 L S H E: two operations a matmul weight, scores and weighted values over S tokens.

        Args:
            sequence: tokens in a row, S; attention is counted over all of them, not over the causal half.

        Source: Chowdhery et al., PaLM (2022), appendix B, whose 6 N + 12 L H Q T counts forward and backward.
        """
        return Flops(2.0 * self.matmul_parameters + 4.0 * self.layers * sequence * self.heads * self.head_size)

    def train_flops_per_token(self, sequence: int) -> Flops:
        """Returns three times the forward: backward costs two. Recomputed activations don't count.

        Source: Chowdhery et al., PaLM (2022), appendix B (model FLOPs utilisation).
        """
        return Flops(3.0 * self.forward_flops_per_token(sequence))

    def to_json(self) -> dict[str, object]:
        """Returns plain values that `from_json` takes back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: JsonObject) -> ModelShape:
        """Builds the shape from what `to_json` gave."""
        blocks = tuple(
            LayerShape(**{**block, "products": tuple(Product(**product) for product in block["products"])})
            for block in values.get("blocks", ())
        )
        return cls(**{**values, "layer_parameters": tuple(values["layer_parameters"]), "blocks": blocks})


@dataclass(frozen=True, slots=True)
class Operator:
    """One call of an operator."""

    kind: str
    """``product``, ``attention`` or ``element``."""
    name: str
    """As torch names it: ``mm``, ``add``."""
    sizes: tuple[int, ...]
    """Of a product (batch, M, N, K); of attention (B, H, S queries, S keys, E); else empty."""
    flops: float
    """Of products and attention, two for each multiplication and addition; counted as executed over all pairs."""
    bytes: int
    """Read and written: all its tensor arguments and results."""
    kept_bytes: int = 0
    """Results of a product or of attention: what selective recompute keeps of it."""
    summed: bool = False
    """Of a product, whether it sums over tokens: the left factor is a transposed view."""


ByRecompute = tuple[int, int, int]
"""Bytes without recompute, with ``selective`` and with ``full``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptBytes:
    """Bytes of a module's tensors that live from its forward to its backward, and while backward runs."""

    saved: ByRecompute = (0, 0, 0)
    """Kept between forward and backward: distinct memory that is no parameter. Of ``selective`` the module's input and
    the results of products and attention, of ``full`` the input."""
    working: ByRecompute = (0, 0, 0)
    """Most bytes that exist at once while backward runs, without gradients of weights, beyond what was kept."""


@dataclass(kw_only=True, slots=True)
class ModuleWork:
    """What one call of a module computes, sends and keeps."""

    forward: list[Operator] = field(default_factory=list)
    """In order."""
    backward: list[Operator] = field(default_factory=list)
    """In order."""
    fused_forward: list[Operator] = field(default_factory=list)
    """Forward with the element-wise operators between two products as one, `models.fused`."""
    fused_backward: list[Operator] = field(default_factory=list)
    """Backward with the element-wise operators between two products as one, `models.fused`."""
    kept: KeptBytes = field(default_factory=KeptBytes)
    """As its own code keeps them."""
    compiled: KeptBytes | None = None
    """As a compiler's partition keeps them, where that was asked for."""
    sent: list[tuple[str, int, int]] = field(default_factory=list)
    """Collectives of the axes that split the module: (operation, bytes of the full tensor, degree)."""

    def flops(self, kind: str, backward: bool = False) -> float:
        """Returns the FLOPs of one kind of operator."""
        return sum(item.flops for item in (self.backward if backward else self.forward) if item.kind == kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWork:
    """What a model computes and keeps on one micro-batch, as its own modules do it."""

    rows: int
    """Of the micro-batch."""
    layers: tuple[ModuleWork, ...]
    """Of each kind of layer."""
    counts: tuple[int, ...]
    """Layers of each kind."""
    rest: ModuleWork
    """What lies outside of the layers: embedding, masks, final norm, head."""
    gradients: tuple[int, ...] = ()
    """Elements of each trained weight on a rank, in the order of definition; empty where they aren't known."""

    def operators(self, backward: bool = False) -> list[tuple[int, Operator]]:
        """Returns every operator with how often it runs."""
        counted_operators: list[tuple[int, Operator]] = []
        for count, work in (*zip(self.counts, self.layers), (1, self.rest)):
            counted_operators += [(count, item) for item in (work.backward if backward else work.forward)]
        return counted_operators

    def compiled(self) -> ModelWork:
        """Returns the same with layers whose element-wise operators are fused, as torch.compile runs them.

        They keep what the partition keeps, where it was made, else what eager code keeps.
        """
        layers = tuple(
            dataclasses.replace(
                work, forward=work.fused_forward, backward=work.fused_backward, kept=work.compiled or work.kept
            )
            for work in self.layers
        )
        return dataclasses.replace(self, layers=layers)

    @property
    def saved_bytes(self) -> int:
        """Kept between forward and backward by all layers and what lies around them."""
        layers = sum(count * work.kept.saved[0] for count, work in zip(self.counts, self.layers))
        return layers + self.rest.kept.saved[0]
