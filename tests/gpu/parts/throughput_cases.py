"""Who takes part in `parts.throughput`: shapes, contenders by hand and of meshwright, and what these leave out."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import LlamaConfig

from meshwright.spec.layout import Layout
from meshwright.train.optimizer import LocalAdamW
from tests.gpu.hand_loops import HandLoop

PEAK = 989e12
"""Dense bf16 FLOP/s of an H100 SXM by its data sheet."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A llama and its rows."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    sequence: int
    rows: int

    def config(self) -> LlamaConfig:
        """Returns it in transformers' terms."""
        return LlamaConfig(
            hidden_size=self.width, intermediate_size=self.ffn, num_hidden_layers=self.layers, vocab_size=self.vocab,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, max_position_embeddings=self.sequence,
            tie_word_embeddings=False, bos_token_id=None, eos_token_id=0, pad_token_id=None,
        )  # fmt: skip

    def layer_weights(self) -> int:
        """Returns the weights of a layer's matrices."""
        head = self.width // self.heads
        return self.width * (2 * self.width + 2 * self.kv_heads * head + 3 * self.ffn)

    def flops_per_token(self, layers: int | None = None) -> float:
        """Returns model FLOPs of a token: 6 (N - N_embedding) + 12 L D S."""
        layers = self.layers if layers is None else layers
        weights = layers * self.layer_weights() + self.vocab * self.width
        return 6.0 * weights + 12.0 * layers * self.width * self.sequence


SHAPES = {
    "1.2b": Shape(layers=18, width=2048, heads=32, kv_heads=8, ffn=8192, vocab=32768, sequence=4096, rows=4),
    "8b": Shape(layers=4, width=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, sequence=8192, rows=2),
}
TINY = {
    "1.2b": Shape(layers=4, width=64, heads=4, kv_heads=2, ffn=128, vocab=512, sequence=128, rows=4),
    "8b": Shape(layers=4, width=64, heads=4, kv_heads=2, ffn=128, vocab=1024, sequence=128, rows=2),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A contender, or a run that something is read from."""

    setting: str
    """Those of one setting are compared; empty for none."""
    hand: HandLoop | None = None
    layout: str = ""
    words: tuple[str, ...] = ()
    shape: str = "1.2b"
    layers: int = 0
    """Where it is another number than the shape's."""
    documents: bool = False
    traced: bool = False
    cudnn: bool = False
    """Whether torch's attention takes cuDNN's kernel before its own."""
    without: tuple[str, ...] = ()
    """What is left out of meshwright, by its names in `PARTS`: as it was before."""


HALF = "precision=bf16"
VARLEN = ("--model.attention", "varlen")
LAYERS_8 = f"{HALF},compile=true,recompute=selective"
FP8_8 = "precision=fp8,compile=true,recompute=selective"
CASES = {
    "ours-compiled": Case(setting="compiled", layout=f"{HALF},compile=true", traced=True),
    "ours-documents-varlen": Case(setting="documents", layout=f"{HALF},compile=true", documents=True, words=VARLEN),
    "ours-fp8": Case(setting="fp8", layout="precision=fp8,compile=true"),
    "fsdp2-compiled": Case(setting="compiled", hand=HandLoop(style="fsdp2", compile=True)),
    "ours-eager": Case(setting="eager", layout=HALF),
    "8b-4-bf16": Case(setting="", layout=LAYERS_8, shape="8b"),
    "8b-1-bf16": Case(setting="", layout=LAYERS_8, shape="8b", layers=1),
    "8b-4-fp8": Case(setting="", layout=FP8_8, shape="8b"),
    "8b-1-fp8": Case(setting="", layout=FP8_8, shape="8b", layers=1),
    "plain-compiled": Case(setting="compiled", hand=HandLoop(style="autocast", compile=True)),
    "ours-cudnn": Case(setting="cudnn", layout=f"{HALF},compile=true", cudnn=True),
    "fsdp2-eager": Case(setting="eager", hand=HandLoop(style="fsdp2", compile=False)),
    "fsdp2-fp8": Case(setting="fp8", hand=HandLoop(style="fsdp2", compile=True, float8=True)),
    "ours-documents-mask": Case(setting="documents", layout=f"{HALF},compile=true", documents=True),
    "fsdp2-documents-flex": Case(
        setting="documents",
        documents=True,
        hand=HandLoop(style="fsdp2", compile=True, attention="flex_attention", documents=True),
    ),
    "fsdp2-cudnn": Case(setting="cudnn", hand=HandLoop(style="fsdp2", compile=True), cudnn=True),
    "plain-eager": Case(setting="eager", hand=HandLoop(style="autocast", compile=False)),
    "plain-bf16-compiled": Case(setting="", hand=HandLoop(style="bf16", compile=True)),
    "ours-selective": Case(setting="", layout=f"{HALF},compile=true,recompute=selective"),
    "before-compiled": Case(setting="compiled", layout=f"{HALF},compile=true", without=("copies", "update")),
    "copies-compiled": Case(setting="compiled", layout=f"{HALF},compile=true", without=("update",)),
    "ours-compiled-again": Case(setting="compiled", layout=f"{HALF},compile=true"),
    "before-compiled-again": Case(setting="compiled", layout=f"{HALF},compile=true", without=("copies", "update")),
    "ours-parts": Case(setting="parts", layout=f"{HALF},compile=true,microbatches=4"),
    "before-parts": Case(setting="parts", layout=f"{HALF},compile=true,microbatches=4", without=("copies", "update")),
    "before-fp8": Case(setting="fp8", layout="precision=fp8,compile=true", without=("copies", "update")),
    "before-eager": Case(setting="eager", layout=HALF, without=("copies", "update")),
    "ours-fp8-again": Case(setting="fp8", layout="precision=fp8,compile=true"),
    "fsdp2-fp8-again": Case(setting="fp8", hand=HandLoop(style="fsdp2", compile=True, float8=True)),
    "fsdp2-compiled-again": Case(setting="compiled", hand=HandLoop(style="fsdp2", compile=True)),
    "ours-eager-again": Case(setting="eager", layout=HALF),
    "fsdp2-eager-again": Case(setting="eager", hand=HandLoop(style="fsdp2", compile=False)),
    "plain-eager-again": Case(setting="eager", hand=HandLoop(style="autocast", compile=False)),
}
"""By name, in the order in which they run; ``before-...`` is ``ours-...`` without what `PARTS` says."""


def without_copies() -> None:
    """Has FSDP2 cast and copy the weights of one rank."""
    Layout.has_compute_copies = property(lambda _layout: False)  # type: ignore[method-assign, assignment]


def without_update() -> None:
    """Has torch's kernel run AdamW."""
    LocalAdamW._fits_kernels = lambda _optimizer: False  # type: ignore[method-assign]


PARTS = {"copies": without_copies, "update": without_update}
"""What takes a part out of this process and those that it forks, by the part's name."""
