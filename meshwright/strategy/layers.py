"""Tensor-parallel layers for models written by hand: a linear layer and multi-head attention."""

from __future__ import annotations

from typing import Literal, Self, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from meshwright.errors import ConfigError
from meshwright.parallel.axis_group import AxisGroup, TrafficLog
from meshwright.parallel.collectives import (
    all_gather_dim,
    all_gather_tokens,
    copy_to_group,
    reduce_from_group,
    reduce_scatter_tokens,
)

Ranks: TypeAlias = AxisGroup | DeviceMesh | dist.ProcessGroup | None
"""Ranks that share a layer: a mesh of one dim (``device_mesh(...)["tp"]``), a process group, or all ranks."""
Mode: TypeAlias = Literal["columns", "rows"]


def axis_group_over(ranks: Ranks) -> AxisGroup:
    """Returns the collectives of a group of ranks.

    Raises:
        ConfigError: for a mesh of several dims, and where there is no process group.
    """
    if isinstance(ranks, AxisGroup):
        return ranks
    if not dist.is_initialized():
        raise ConfigError("there is no process group; call torch.distributed.init_process_group() under torchrun")
    if ranks is not None and not isinstance(ranks, (DeviceMesh, dist.ProcessGroup)):
        raise ConfigError(
            f"ranks is a {type(ranks).__name__}: give a mesh of one dim, such as device_mesh('tp=2')['tp'], a process "
            "group, or None for all ranks"
        )
    # a mesh of several dims doesn't say which of them splits the layer
    if isinstance(ranks, DeviceMesh):
        if ranks.ndim != 1:
            raise ConfigError(f"the mesh has dims {ranks.mesh_dim_names}; name the one to split over, as mesh['tp']")
        ranks = ranks.get_group()
    return AxisGroup("tp", ranks or dist.group.WORLD, TrafficLog())


class TensorParallelLinear(nn.Module):
    """`nn.Linear` whose weight is split over ranks; output and gradients are those of the whole layer.

    ``columns`` splits the outputs: each rank has (out / n, in) and its shard of the bias. ``rows`` splits the inputs:
    each rank has (out, in / n) and the bias whole, added after the sum. A ``columns`` layer without ``gather_output``
    and a ``rows`` layer with ``input_is_split`` make a pair that communicates once.
    Source: Shoeybi et al., Megatron-LM (2019), section 3.

    Args:
        in_features: of the whole layer.
        out_features: of the whole layer.
        mode: which of them is split; or the ranks, for a layer split by outputs.
        ranks: group that shares the layer; ``mesh`` is the same.
        mesh: another name of ``ranks``.
        bias: whether it has one.
        gather_output: of ``columns``: whether every rank gets all outputs, or its shard.
        input_is_split: of ``rows``: whether a rank is called with its shard of the inputs, or with all.
        seed: of the whole weight, which is drawn as `nn.Linear` does and cut: no degree changes it. Layers of one model
            need different seeds.

    Raises:
        ConfigError: when the ranks don't divide the split dim, or an option belongs to the other mode.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mode: Mode | Ranks = "columns",
        ranks: Ranks = None,
        *,
        mesh: Ranks = None,
        bias: bool = True,
        gather_output: bool = True,
        input_is_split: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        # mode's position may carry the ranks, as in the usual order of arguments
        if not isinstance(mode, str):
            mode, mesh = "columns", mesh if mode is None else mode
        full_linear, axis_group = (
            seeded_linear(in_features, out_features, bias, seed),
            axis_group_over(mesh if ranks is None else ranks),
        )
        self._assign_shard(full_linear, cast(Mode, mode), axis_group, gather_output, input_is_split)

    @classmethod
    def from_linear(
        cls,
        full_linear: nn.Linear,
        mode: Mode = "columns",
        ranks: Ranks = None,
        *,
        gather_output: bool = True,
        input_is_split: bool = False,
    ) -> Self:
        """Returns the split form of a layer, whose weights are the same on all ranks; the layer stays unchanged."""
        split_linear = cls.__new__(cls)
        nn.Module.__init__(split_linear)
        split_linear._assign_shard(full_linear, mode, axis_group_over(ranks), gather_output, input_is_split)
        return split_linear

    def _assign_shard(
        self, full_linear: nn.Linear, mode: Mode, axis_group: AxisGroup, gather_output: bool, input_is_split: bool
    ) -> None:
        """Checks the options and copies this rank's shard of weight and bias."""
        if mode not in ("columns", "rows"):
            raise ConfigError(f"mode='{mode}': a layer is split by 'columns' (its outputs) or 'rows' (its inputs)")
        if mode == "columns" and input_is_split:
            raise ConfigError("input_is_split=True has no effect on columns, which need all inputs; use mode='rows'")
        if mode == "rows" and not gather_output:
            raise ConfigError("gather_output=False has no effect on rows, whose output is whole; use mode='columns'")
        dim = 0 if mode == "columns" else 1
        check_share("out_features" if dim == 0 else "in_features", full_linear.weight.shape[dim], axis_group.size)
        self.in_features, self.out_features, self.mode = full_linear.in_features, full_linear.out_features, mode
        self.gather_output, self.input_is_split = gather_output, input_is_split
        self._axis_group, self._dim = axis_group, dim
        with torch.no_grad():
            weight = full_linear.weight.chunk(axis_group.size, dim)[axis_group.index].clone()
            # A frozen layer stays frozen.
            self.weight = nn.Parameter(weight, requires_grad=full_linear.weight.requires_grad)
            # rows: the bias is added after the sum, so every rank has all of it
            bias = (
                full_linear.bias
                if full_linear.bias is None or dim
                else full_linear.bias.chunk(axis_group.size)[axis_group.index]
            )
            self.bias = None if bias is None else nn.Parameter(bias.clone(), requires_grad=bias.requires_grad)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns (..., out), or (..., out / n) ungathered.

        Args:
            x: (..., in), replicated; or (..., in / n) where the input is split.
        """
        if self.mode == "columns":
            # Megatron's f: identity forward, all-reduce backward
            y = self.product(copy_to_group(x, self._axis_group))
            return all_gather_tokens(y, self._axis_group, -1, False) if self.gather_output else y
        local_input = x if self.input_is_split else reduce_scatter_tokens(x, self._axis_group, -1, False)
        # Megatron's g: all-reduce forward, identity backward; the bias is added once, after it
        y = reduce_from_group(functional.linear(local_input, self.weight), self._axis_group)
        return y if self.bias is None else y + self.bias

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies without communication, for code that communicates itself.

        Args:
            x: (..., in), replicated.

        Returns:
            (..., out / n), split over the ranks.
        """
        return functional.linear(x, self.weight, self.bias)

    @torch.no_grad()
    def to_linear(self) -> nn.Linear:
        """Returns the full layer; all ranks call it together."""
        settings = {"dtype": self.weight.dtype, "device": self.weight.device}
        # without drawing values, which would move torch's random state
        full_linear = nn.utils.skip_init(
            nn.Linear, self.in_features, self.out_features, self.bias is not None, **settings
        )
        # the shards in order of rank along the split dim
        full_linear.weight.copy_(all_gather_dim(self.weight, self._axis_group, self._dim))
        full_linear.weight.requires_grad_(self.weight.requires_grad)
        if self.bias is not None:
            full_linear.bias.copy_(self.bias if self._dim else all_gather_dim(self.bias, self._axis_group, 0))
            full_linear.bias.requires_grad_(self.bias.requires_grad)
        full_linear.train(self.training)
        return full_linear

    def extra_repr(self) -> str:
        """Called by torch for ``repr``."""
        return f"{self.in_features}, {self.out_features}, mode={self.mode}, ranks={self._axis_group.size}"


class TensorParallelMultiheadAttention(nn.Module):
    """Self-attention whose heads are split over ranks: one all-reduce forward and one backward.

    Args:
        width: D of the input and output; ``embed_dim`` is the same.
        heads: H query heads of D / H elements each; ``num_heads`` is the same.
        kv_heads: K key and value heads, each shared by H / K query heads; H when None; or the ranks.
        ranks: group that shares the layer; ``mesh`` is the same.
        embed_dim: another name of ``width``.
        num_heads: another name of ``heads``.
        mesh: another name of ``ranks``.
        causal: whether a token attends only to itself and those before it.
        bias: of the four projections.
        seed: of the full weights; no degree changes them. The four projections have the seeds 4 s to 4 s + 3, which a
            `TensorParallelLinear` beside them must not have.

    Raises:
        ConfigError: when the heads don't divide, or a size is missing or given twice.
    """

    def __init__(
        self,
        width: int | None = None,
        heads: int | None = None,
        kv_heads: int | Ranks = None,
        ranks: Ranks = None,
        *,
        embed_dim: int | None = None,
        num_heads: int | None = None,
        mesh: Ranks = None,
        causal: bool = True,
        bias: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        width = _size_of_two_names("width", width, "embed_dim", embed_dim)
        heads = _size_of_two_names("heads", heads, "num_heads", num_heads)
        # kv_heads' position may carry the ranks
        if not isinstance(kv_heads, int):
            kv_heads, mesh = None, mesh if kv_heads is None else kv_heads
        axis_group, key_heads = axis_group_over(mesh if ranks is None else ranks), kv_heads or heads
        if heads < 1 or width % heads or heads % key_heads:
            raise ConfigError(
                f"width={width}, heads={heads}, kv_heads={key_heads}: heads divide the width, and kv_heads the heads"
            )
        check_share("heads", heads, axis_group.size)
        check_share("kv_heads", key_heads, axis_group.size)
        self.width, self.head_size, self.causal = width, width // heads, causal
        self._axis_group = axis_group

        def product(seed_offset: int, inputs: int, outputs: int, mode: Mode) -> TensorParallelLinear:
            full_linear = seeded_linear(inputs, outputs, bias, 4 * seed + seed_offset)
            is_columns = mode == "columns"
            return TensorParallelLinear.from_linear(
                full_linear, mode, axis_group, gather_output=not is_columns, input_is_split=not is_columns
            )

        # a seed for each projection, so that no two start equal
        self.query = product(0, width, width, "columns")
        self.key = product(1, width, key_heads * self.head_size, "columns")
        self.value = product(2, width, key_heads * self.head_size, "columns")
        self.out = product(3, width, width, "rows")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attends over S.

        Args:
            x: (B, S, D), replicated.

        Returns:
            (B, S, D), replicated.
        """
        # one all-reduce in backward for the three projections together
        replicated_input = copy_to_group(x, self._axis_group)
        query, key, value = (
            self._heads(projection.product(replicated_input)) for projection in (self.query, self.key, self.value)
        )
        is_grouped = query.shape[1] != key.shape[1]
        attention_output = functional.scaled_dot_product_attention(
            query, key, value, is_causal=self.causal, enable_gqa=is_grouped
        )
        merged: torch.Tensor = self.out(attention_output.transpose(1, 2).flatten(2))
        return merged

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """Reshapes (B, S, h E) to (B, h, S, E)."""
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


def _size_of_two_names(name: str, value: int | None, other_name: str, other_value: int | None) -> int:
    """Returns a size that may be given by two names."""
    if (value is None) == (other_value is None):
        raise ConfigError(f"{name} and {other_name} are one size: give one of them")
    size = value if value is not None else other_value
    if not isinstance(size, int):
        raise ConfigError(f"{name} is a {type(size).__name__}: give a whole number")
    return size


def seeded_linear(inputs: int, outputs: int, bias: bool, seed: int) -> nn.Linear:
    """Returns an `nn.Linear` whose weights are a function of its seed; torch's random state stays unchanged."""
    with torch.random.fork_rng(devices=[]):
        # the full weight is drawn and cut, so that the degree doesn't change it
        # Of the CPU alone: `torch.manual_seed` would seed every GPU too, whose states aren't restored.
        torch.default_generator.manual_seed(seed)
        return nn.Linear(inputs, outputs, bias=bias)


def check_share(name: str, size: int, ranks: int) -> None:
    """Refuses a size that the ranks don't divide.

    Raises:
        ConfigError: with the nearest that works.
    """
    if size % ranks:
        lower_multiple = size // ranks * ranks
        nearest = " or ".join(str(multiple) for multiple in (lower_multiple, lower_multiple + ranks) if multiple)
        raise ConfigError(f"{name}={size} doesn't divide over {ranks} ranks; nearest that works: {nearest}")
