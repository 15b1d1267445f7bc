"""How torch's own tensor parallelism splits a layer of transformers' llama."""

from __future__ import annotations

from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.distributed.tensor.placement_types import Placement


def layer_rules(between: Placement) -> dict[str, ParallelStyle]:
    """Returns the styles of a layer's matrices.

    Args:
        between: how the sums lie between the two halves of a layer: whole, or each rank's run of the tokens.
    """
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rules: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    return rules | {name: RowwiseParallel(output_layouts=between) for name in ("self_attn.o_proj", "mlp.down_proj")}
