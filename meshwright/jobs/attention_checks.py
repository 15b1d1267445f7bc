"""Checks attention by documents with a kernel of variable lengths, and attention in a ring, where a run asks for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

from torch import nn

from meshwright.data.config import DataConfig
from meshwright.data.tokens import TokenSet
from meshwright.errors import ConfigError
from meshwright.jobs.model_reading import ReadModel
from meshwright.jobs.progress import Say
from meshwright.launch.devices import Devices, found_devices, least_compute_capability
from meshwright.models.analysis.document_masks import varlen_refusal
from meshwright.models.attention import VARLEN
from meshwright.models.build import BuiltModel
from meshwright.models.config import ModelConfig
from meshwright.models.sizes import WINDOWS
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.train.model_analysis import ModelAnalysis

_GATHER, _RING = "gather", "ring"
"""Context parallelism that gathers keys and values, or passes them round."""
_KERNEL_PRECISIONS = ("bf16", "fp16")
_LEAST_CAPABILITY = 8.0
"""Ampere. Source: FlashAttention-2, README, "CUDA support"."""
_LARGEST_HEAD = 256
"""Elements of a head that the kernel takes at most. Source: the same."""
_HEAD_SIZES = ("head_dim", "global_head_dim", "swa_head_dim", "v_head_dim")
"""Fields of transformers' configs."""


def check_attention(built: BuiltModel, precision: str, analysis: ModelAnalysis, devices: Devices) -> None:
    """Refuses attention by documents, or in a ring, where a run asks for it and it can't be.

    Args:
        built: the model, on meta.
        precision: of the layout.
        analysis: of the model for the layout.
        devices: of this node.

    Raises:
        ConfigError: with what works instead.
    """
    refusal = _kernel_refusal(built, precision) if devices.kind == "cuda" else ""
    # Whether its masks allow a ring was found by the rehearsal of `cp`.
    if analysis.attention == _RING and refusal:
        raise ConfigError(f"attention=ring: {refusal}; the nearest is attention=gather")
    if built.config.attention != VARLEN or analysis.attention == _RING:
        return
    if analysis.attention == _GATHER:
        refusal = "attention=gather cuts the mask for each rank's tokens"
    refusal = refusal or varlen_refusal(built)
    if refusal:
        raise ConfigError(f"model.attention = varlen: {refusal}; set model.attention = auto")


def choose_attention(
    model: ReadModel,
    plan: Plan,
    analysis: ModelAnalysis,
    data: DataConfig,
    token_set: TokenSet,
    devices: Devices,
    say: Say | None,
) -> ReadModel:
    """Returns a checked model whose ``model.attention = auto`` is ``varlen`` where that replaces a mask on GPUs.

    A mask (B, 1, S, S) makes attention several times as long there. Layouts with ``attention=gather`` cut one all the
    same (`make_model_source`).

    Args:
        model: on meta.
        plan: the run's.
        analysis: of the model for the plan's layout.
        data: whether documents of a row see themselves alone, and its length.
        token_set: the prepared text.
        devices: of this node.
        say: takes the line that says why a mask remains; None for none.

    Raises:
        ConfigError: as `check_attention`.
    """
    built, precision = model.built, plan.layout.compute_precision
    check_attention(built, precision, analysis, devices)
    has_documents = data.separates_documents and len(token_set.train.ends) > 1
    if devices.kind != "cuda" or not needs_mask(built, data.sequence, has_documents):
        return model
    if refusal := _kernel_refusal(built, precision) or _varlen_refusal(built):
        if say is not None:
            say(f"attention reads a mask (B, 1, S, S), since {refusal}")
        return model
    config = dataclasses.replace(built.config, attention=VARLEN)
    return dataclasses.replace(model, built=dataclasses.replace(built, config=config))


def as_run_on(built: BuiltModel, precision: str, tokens: int, devices: Devices) -> BuiltModel:
    """Returns a model as it is to be measured for its plan: on GPUs it has no mask of a window (`choose_attention`).

    Rows with documents are measured as whole ones, and these have no mask either way.

    Args:
        built: the model, on meta.
        precision: of the layout.
        tokens: of a row.
        devices: of this node.
    """
    if devices.kind != "cuda" or not needs_mask(built, tokens, has_documents=False):
        return built
    if _kernel_refusal(built, Layout(precision=precision).compute_precision) or _varlen_refusal(built):
        return built
    return dataclasses.replace(built, config=dataclasses.replace(built.config, attention=VARLEN))


_REFUSALS: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""What a trial of a clone found, which takes a second, by the model on meta."""


def _varlen_refusal(built: BuiltModel) -> str:
    if built.module not in _REFUSALS:
        _REFUSALS[built.module] = varlen_refusal(built)
    return _REFUSALS[built.module]


def needs_mask(built: BuiltModel, tokens: int, has_documents: bool) -> bool:
    """Returns whether a model whose ``model.attention`` is ``auto`` would read a mask in rows of some tokens.

    Args:
        built: the model.
        tokens: of a row.
        has_documents: whether rows have several documents, which see themselves alone.
    """
    if built.config.attention != "auto" or built.hf_config is None:
        return False
    fields = built.hf_config.get_text_config(decoder=True).to_dict()
    windows = (fields.get(name) for name in WINDOWS)
    # transformers makes a mask of a window as long as the row, which hides nothing.
    return has_documents or any(isinstance(window, int) and 0 < window <= tokens for window in windows)


def attention_to_prove(
    build: Callable[[], BuiltModel],
    clone: ModelConfig,
    precisions: Iterable[str],
    tokens: int,
    has_documents: bool,
    float64_for: str = "float64",
) -> ModelConfig:
    """Returns a proof's model with the attention that a run of the user's model would take on this machine's devices.

    Args:
        build: builds the user's model, on meta; not called without GPUs.
        clone: what is proven of it.
        precisions: of the layouts, as they were named.
        tokens: of a row.
        has_documents: whether rows have several documents.
        float64_for: precision of the runs for which float64 stands: a run's own layout that names it trains in it, and
            a layout that a proof takes in it by default is of runs in bf16, as those on GPUs are.
    """
    if found_devices(None).kind != "cuda":
        return clone
    built = build()
    if not needs_mask(built, tokens, has_documents):
        return clone
    run_precisions = {float64_for if precision == "float64" else precision for precision in precisions}
    computed = {Layout(precision=precision).compute_precision for precision in run_precisions}
    if any(_kernel_refusal(built, precision) for precision in computed) or varlen_refusal(built):
        return clone
    return dataclasses.replace(clone, attention=VARLEN)


def attention_text(named: str, proven: str) -> str:
    """Returns what a proof says of an attention that it chose itself; "" where it proves the one that was named."""
    return ", attending by documents as a run on these GPUs does" if proven == VARLEN != named else ""


def attention_header_row(built: BuiltModel, analysis: ModelAnalysis, kind: str) -> dict[str, str]:
    """Returns the header's row of a run that attends by documents, under the layout that it has now.

    Args:
        built: the model.
        analysis: of it for the layout.
        kind: of the devices, ``cpu`` or ``cuda``.
    """
    if analysis.attention == _RING:
        kernel = "FlashAttention" if kind == "cuda" else "the CPU's fused kernel"
        return {"attention": f"keys and values go round the ranks of cp, {kernel} a block"}
    if built.config.attention != VARLEN:
        return {}
    # A layout for fewer ranks may gather keys though the run's own didn't.
    if analysis.attention == _GATHER:
        return {"attention": "with a mask (B, 1, S, S): attention=gather cuts it for each rank's tokens"}
    kernel = "torch's kernel for variable lengths" if kind == "cuda" else "the kernel's reference, which is slow"
    return {"attention": f"by documents and windows, without a mask: {kernel}"}


def _kernel_refusal(built: BuiltModel, precision: str) -> str:
    """Returns why torch's kernel can't serve a model; "" where it can."""
    if precision not in _KERNEL_PRECISIONS:
        return f"the kernel computes in {' and '.join(_KERNEL_PRECISIONS)}, not in {precision}"
    capability = least_compute_capability()
    if capability is not None and capability < _LEAST_CAPABILITY:
        return f"the kernel needs GPUs of compute capability {_LEAST_CAPABILITY} (Ampere), here is one of {capability}"
    size = _largest_head(built)
    return f"the kernel takes heads of up to {_LARGEST_HEAD} elements, and here are {size}" * (size > _LARGEST_HEAD)


def _largest_head(built: BuiltModel) -> int:
    """Returns the elements of the largest head that a transformers config names; 0 where it names none."""
    if built.hf_config is None:
        return 0
    fields = built.hf_config.get_text_config(decoder=True).to_dict()
    numbers = {name: value for name, value in fields.items() if isinstance(value, int) and not isinstance(value, bool)}
    sizes = [numbers[name] for name in _HEAD_SIZES if name in numbers]
    if "hidden_size" in numbers and numbers.get("num_attention_heads") and "head_dim" not in numbers:
        sizes.append(numbers["hidden_size"] // numbers["num_attention_heads"])
    sizes.append(numbers.get("qk_nope_head_dim", 0) + numbers.get("qk_rope_head_dim", 0))
    return max(sizes)
