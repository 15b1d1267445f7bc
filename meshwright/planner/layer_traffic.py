"""Lists the collectives of one rank inside forward and backward: activations over ``tp``, ``cp``, ``ep``, ``pp``."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.planner.collectives import Bytes, Collectives
from meshwright.planner.cost.expert_dispatch import visit_share
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.layer_collective import LayerCollective, sum_of_products
from meshwright.planner.model_parts import ModelParts, stage_bounds
from meshwright.planner.rank_groups import CollectiveGroup, RankGroups
from meshwright.spec.axis import Mechanics
from meshwright.spec.compression import row_bytes
from meshwright.spec.experts import LayerExperts
from meshwright.spec.groups import coordinates
from meshwright.spec.key_ring import KeyRing
from meshwright.spec.layout import EXPERT_NODE, Layout
from meshwright.spec.sharding_table import CuttingKind, LayerSharding, ParameterSplit, ShardingGroup, local_group

INDEX = 8
"""Bytes of an expert's index and of a token count: int64."""


class LayerTraffic:
    """Collectives of a rank on activations.

    Args:
        job: model and batch.
        layout: of the run.
        model: as names and sizes.
        rank: which rank.
    """

    def __init__(self, job: PricedJob, layout: Layout, model: ModelParts, rank: int) -> None:
        self._job, self._layout, self._model = job, layout, model
        self._axis_indices, self._bytes = coordinates(rank, layout.degrees), Bytes.of(layout)
        self._table = model.split_table(layout)
        groups = RankGroups(layout, rank)
        self._tp, self._cp, self._pp = (
            groups.across((layout.axis(mechanics),))
            for mechanics in (Mechanics.MATRICES, Mechanics.TOKENS, Mechanics.STAGES)
        )
        self._ep = groups.carved(layout.axis(Mechanics.EXPERTS))
        self._ep_index = self._ep.ranks.index(rank)
        share = layout.reader_shares()[layout.reader(rank)[0]]
        self._rows = job.rows * share / (sum(layout.reader_shares()) * layout.microbatches)
        self._tokens = self._rows * job.sequence / layout.degree(Mechanics.TOKENS)
        self._width = job.shape.width

    def _index(self, mechanics: Mechanics) -> int:
        """This rank's index along the axis of some mechanics."""
        return self._axis_indices[self._layout.axis(mechanics)]

    def add_to(self, collectives: Collectives) -> None:
        """Adds the collectives of all micro-batches of a step."""
        for start, stop, stage, stages in self._rank_stages():
            for sent in self._stage_collectives(start, stop, stage, stages):
                collectives.add(sent.group, sent.kind, sent.size * self._layout.microbatches)

    def _rank_stages(self) -> Iterator[tuple[int, int, int, int]]:
        """Yields (start layer, stop layer, stage, number of stages) of each stage of this rank."""
        if self._layout.degree(Mechanics.STAGES) == 1:
            yield 0, len(self._model.layers), 0, 1
            return
        bounds, schedule = stage_bounds(self._model, self._layout), self._layout.pipeline()
        for number in schedule.rank_stages(self._index(Mechanics.STAGES)):
            yield bounds[number], bounds[number + 1], number, schedule.stages

    def _stage_collectives(self, start: int, stop: int, stage: int, stages: int) -> Iterator[LayerCollective]:
        """Yields the collectives of one stage on a micro-batch: ends, layers with recompute, sends."""
        yield from self._end_collectives(stage == 0, stage == stages - 1)
        modes = self._layout.recompute.modes(len(self._model.layers))
        for layer in range(start, stop):
            layer_collectives = list(self._layer_collectives(layer))
            yield from layer_collectives
            if modes[layer] != "none":
                yield from (sent for sent in layer_collectives if self._is_repeated(sent, modes[layer]))
        if stages > 1:
            yield from self._stage_sends(start, stop, stage, stages)

    def _is_repeated(self, sent: LayerCollective, mode: str) -> bool:
        """Whether recompute runs a collective of forward again, in a layer that recomputes by a mode."""
        if mode == "selective" and sent.kept_by_selective:
            return False
        is_kept = sent.kept_by_ep_keep and self._layout.ep_keep
        return not (is_kept or sent.is_backward or sent.skipped_by_recompute)

    def _stage_sends(self, start: int, stop: int, stage: int, stages: int) -> Iterator[LayerCollective]:
        """Yields the sends of activations to the next stage and gradients to the previous, on other ranks."""
        layer_graph, schedule, stage_ranks = self._model.layer_graph, self._layout.pipeline(), self._pp.ranks
        assert layer_graph is not None
        split = self._layout.degree(Mechanics.MATRICES) if self._layout.sequence else 1
        size = self._tokens / split * self._width * self._bytes.compute
        own_index = self._index(Mechanics.STAGES)
        for peer_stage, boundary, is_backward in ((stage + 1, stop, False), (stage - 1, start, True)):
            if 0 <= peer_stage < stages and schedule.stage_rank(peer_stage) != own_index:
                pair = tuple(sorted((stage_ranks[own_index], stage_ranks[schedule.stage_rank(peer_stage)])))
                group = CollectiveGroup(self._layout.axis(Mechanics.STAGES), pair)
                count = len(layer_graph.boundary_tensors[boundary])
                yield LayerCollective(group, "send", size * count, is_backward)

    # -------------------------------------------------------- the ends

    def _end_collectives(self, is_first: bool, is_last: bool) -> Iterator[LayerCollective]:
        """Yields the collectives of a vocabulary that ``tp`` splits: embedding output, head input, loss."""
        table, loss_bytes = self._table, 8 if self._layout.precision == "float64" else 4
        if self._layout.degree(Mechanics.MATRICES) == 1 or table is None:
            return
        size = self._tokens * self._width * self._bytes.compute
        if table.vocabulary and is_first:  # before cp splits the sequence: of all tokens of the rows
            yield LayerCollective(self._tp, "all_reduce", size * self._layout.degree(Mechanics.TOKENS))
        if table.vocabulary and is_last and not table.headless:
            yield LayerCollective(self._tp, "all_reduce", size, is_backward=True)
            yield LayerCollective(self._tp, "all_reduce", self._tokens * loss_bytes * 3)
        local_size = size / self._layout.degree(Mechanics.MATRICES)
        if self._layout.sequence and is_first:
            yield LayerCollective(self._tp, "all_gather", local_size, is_backward=True)
        if self._layout.sequence and is_last:
            yield LayerCollective(self._tp, "all_gather", local_size)

    # -------------------------------------------------------- layers

    def _layer_collectives(self, layer: int) -> Iterator[LayerCollective]:
        """Yields a layer's collectives on a micro-batch, in the order of its forward."""
        name, table, has_ep = self._model.layers[layer], self._table, self._layout.degree(Mechanics.EXPERTS) > 1
        rows = table.layers.get(name, LayerSharding(groups=())) if table is not None else LayerSharding(groups=())
        degree = self._layout.degree(Mechanics.MATRICES)
        dispatched_experts = [item for item in self._model.experts if has_ep and item.module.startswith(f"{name}.")]
        splits = [group for group in rows.groups if group.shares(degree)]
        for group in rows.groups:
            if self._layout.degree(Mechanics.TOKENS) > 1 and group.heads and self._attention == "heads":
                local = local_group(group, self._index(Mechanics.MATRICES), degree)
                yield from self._head_exchange(name, local)
            if degree > 1 and group in splits:
                # Routed experts follow attention, so attention's all-reduce isn't the layer's last collective.
                is_last = group is splits[-1] and not (dispatched_experts and group.heads)
                # Several graphs are repeated whole, the last sum too; so is a layer up to a norm behind that.
                is_skipped = is_last and not ((self._layout.compile and has_ep) or rows.saves_after_sums)
                yield from self._tensor_parallel(name, group, layer, is_skipped)
        if self._layout.degree(Mechanics.TOKENS) > 1 and self._attention == "gather":
            yield from self._key_value_gather(layer)
        if self._layout.degree(Mechanics.TOKENS) > 1 and self._attention == "ring":
            yield from self._key_value_ring(layer)
        for experts in dispatched_experts:
            yield from self._expert_dispatch(experts, layer, all(group.heads for group in splits))

    @property
    def _attention(self) -> str:
        return self._layout.attention or self._model.attention

    def _tensor_parallel(
        self, layer: str, group: ShardingGroup, layer_index: int, is_last: bool
    ) -> Iterator[LayerCollective]:
        """Yields the ``tp`` collectives of a sharding group, at its input and output. Source: Shoeybi et al. (2019)."""
        size, split, tp = self._tokens * self._bytes.compute, self._layout.degree(Mechanics.MATRICES), self._tp
        for cutting in group.cuttings:
            if cutting.kind is CuttingKind.GLOBAL_NORM:
                # It runs on the features of all units, gathered; backward returns to each rank the sum of its own.
                local_features = sum(block.size * block.count for block in cutting.blocks) / split
                yield LayerCollective(tp, "all_gather", size * local_features)
                yield LayerCollective(tp, "reduce_scatter", size * local_features, is_backward=True)
        input_features = list(self._input_features(layer, group, layer_index))
        output_features = self._row_features(layer, group, group.row_linear)
        if not self._layout.sequence:
            # Megatron's f and g: all-reduce of the inputs' gradients in backward, of the output in forward.
            for features in input_features:
                yield LayerCollective(tp, "all_reduce", size * features, is_backward=True)
            yield sum_of_products(tp, "all_reduce", size * output_features, is_last)
            for name in group.side_row_linears:
                yield sum_of_products(tp, "all_reduce", size * self._row_features(layer, group, name))
            for name in group.inner_row_linears:
                inner_features = self._row_features(layer, group, name)
                yield sum_of_products(tp, "all_reduce", size * inner_features)
                yield LayerCollective(tp, "all_reduce", size * inner_features, is_backward=True)
            return
        if group.column_inputs == (group.row_linear,):  # experts: the indices of chosen experts travel too
            yield LayerCollective(tp, "all_gather", self._tokens / split * INDEX * self._active_experts(layer_index))
        # Sequence parallelism: each all-reduce becomes an all-gather and a reduce-scatter of tokens.
        for features in input_features:
            yield LayerCollective(tp, "all_gather", size / split * features)
            yield LayerCollective(tp, "reduce_scatter", size / split * features, is_backward=True)
        yield sum_of_products(tp, "reduce_scatter", size / split * output_features, is_last)
        yield LayerCollective(tp, "all_gather", size / split * output_features, is_backward=True)
        for name in group.side_row_linears:
            side_features = self._row_features(layer, group, name)
            yield sum_of_products(tp, "reduce_scatter", size / split * side_features)
            yield LayerCollective(tp, "all_gather", size / split * side_features, is_backward=True)

    def _input_features(self, layer: str, group: ShardingGroup, layer_index: int) -> Iterator[int]:
        """Yields the features of each tensor that enters a sharding group."""
        if self._layout.sequence and group.heads:
            yield self._width
            return
        if group.column_inputs == (group.row_linear,):
            yield self._width
            yield self._routing_elements(layer_index)
            return
        # Column linears that read the hidden state share one tensor; one that reads a latent has its own.
        inputs = [self._column_inputs(layer, group, name) for name in group.column_inputs]
        if self._width in inputs:
            yield self._width
        yield from (features for features in inputs if features != self._width)
        if not self._layout.sequence:
            yield from (self._replicated_outputs(layer, name) for name in group.replicated_inputs)

    def _head_exchange(self, layer: str, group: ShardingGroup) -> Iterator[LayerCollective]:
        """Yields the all-to-alls of tokens for heads and back. Source: Jacobs et al., DeepSpeed Ulysses (2023), 3."""
        shares = group.shares(len(self._cp.ranks))
        if shares is None:
            return
        size, index = self._tokens * self._bytes.compute, self._index(Mechanics.TOKENS)
        by_name = {split.name: split for split in group.splits}

        def widths(split: ParameterSplit) -> list[int]:
            return [sum(stop - start for start, stop in split.spans(*units, group.units)) for units in shares]

        for name in group.column_inputs:
            width_by_rank = widths(by_name[f"{name}.weight"])
            sent, received = sum(width_by_rank) - width_by_rank[index], width_by_rank[index] * (len(width_by_rank) - 1)
            yield LayerCollective(self._cp, "all_to_all", size * sent, kept_by_selective=True)
            yield LayerCollective(self._cp, "all_to_all", size * received, is_backward=True)
        for name in group.replicated_inputs:
            features = self._replicated_outputs(layer, name)
            yield LayerCollective(self._cp, "all_gather", size * features)
            yield LayerCollective(self._cp, "reduce_scatter", size * features, is_backward=True)
        width_by_rank = widths(by_name[f"{group.row_linear}.weight"])
        sent, received = sum(width_by_rank) - width_by_rank[index], width_by_rank[index] * (len(width_by_rank) - 1)
        for _ in group.row_linears:
            yield LayerCollective(self._cp, "all_to_all", size * received)
            yield LayerCollective(self._cp, "all_to_all", size * sent, is_backward=True)

    def _key_value_gather(self, layer: int) -> Iterator[LayerCollective]:
        """Yields the all-gather of keys and values; a window repeats key heads to as many as query heads."""
        block = self._job.shape.blocks[layer]
        if not block.heads:
            return
        heads = block.heads if block.window else block.kv_heads
        # With fewer key heads than ranks of tp, each rank has a full head.
        features = -(-heads // self._layout.degree(Mechanics.MATRICES)) * (block.head_size + block.value_size)
        size = self._tokens * features * self._bytes.compute
        yield LayerCollective(self._cp, "all_gather", size)
        yield LayerCollective(self._cp, "reduce_scatter", size, is_backward=True)

    def _key_value_ring(self, layer: int) -> Iterator[LayerCollective]:
        """Yields the sends of keys and values, and of their gradients, to and from each other rank of cp.

        Source: Liu et al., Ring Attention (2023), section 3; which tokens a rank needs is `spec.key_ring`'s rule.
        """
        block, ranks, index = self._job.shape.blocks[layer], self._cp.ranks, self._index(Mechanics.TOKENS)
        if not block.heads:
            return
        ring = KeyRing(len(ranks), self._job.sequence // (2 * len(ranks)), block.window)
        features = -(-block.kv_heads // self._layout.degree(Mechanics.MATRICES)) * (block.head_size + block.value_size)
        size = self._rows * features * self._bytes.compute
        for step in range(1, len(ranks)):
            for peer, is_gradient in (((index + step) % len(ranks), False), ((index - step) % len(ranks), True)):
                owner, reader = (peer, index) if is_gradient else (index, peer)
                pair = CollectiveGroup(self._cp.axis, tuple(sorted((ranks[index], ranks[peer]))))
                sent_bytes = size * ring.tokens_sent(owner, reader)
                # Backward sends keys and values once more.
                if not is_gradient:
                    yield LayerCollective(pair, "send", sent_bytes, kept_by_selective=True)
                yield LayerCollective(pair, "send", sent_bytes, is_backward=True)

    def _expert_dispatch(self, rows: LayerExperts, layer: int, is_last: bool) -> Iterator[LayerCollective]:
        """Yields the dispatch of tokens to experts and back, for balanced routing. Source: GShard (2021), 3.2."""
        degree, tp_degree = self._layout.degree(Mechanics.EXPERTS), self._layout.degree(Mechanics.MATRICES)
        active, routing = self._active_experts(layer), self._routing_elements(layer)
        tokens, compute = self._tokens, self._bytes.compute
        if rows.children:
            # A list's rows travel as its caller sends them, weighed there; of equal tokens fewer do, since each rank of
            # tp sends those of a run of experts.
            tokens, active, routing = tokens * active, 1, 0
        if tp_degree > 1:
            tokens = -(-tokens // tp_degree)
            if not self._layout.sequence:  # each rank of tp sends its share of equal tokens
                yield LayerCollective(
                    self._tp, "all_gather", tokens * self._width * compute, skipped_by_recompute=is_last
                )
                for features in (self._width, routing):
                    yield LayerCollective(self._tp, "all_gather", tokens * features * compute, is_backward=True)
        experts_by_rank = [stop - start for start, stop in (rows.span(index, degree) for index in range(degree))]
        if self._layout.ep_node:
            yield from self._node_dispatch(rows, layer, tokens)
            return
        remote_share = (rows.experts - experts_by_rank[self._ep_index]) / rows.experts
        counts_bytes = INDEX * self._chunks * (rows.experts - experts_by_rank[self._ep_index])
        yield LayerCollective(self._ep, "all_to_all", counts_bytes, kept_by_ep_keep=True)
        routed_bytes = tokens * active * self._width * compute
        dispatch_bytes, combine_bytes = (
            routed_bytes * remote_share,
            routed_bytes * (degree - 1) * experts_by_rank[self._ep_index] / rows.experts,
        )
        # What goes to experts, tokens or gradients, may be rounded; what comes from them isn't.
        dispatch_bytes *= self._routed_row_bytes / (self._width * compute)
        for size, backward in (
            (dispatch_bytes, False),
            (combine_bytes, False),
            (dispatch_bytes, True),
            (combine_bytes, True),
        ):
            yield LayerCollective(self._ep, "all_to_all", size, is_backward=backward, kept_by_ep_keep=True)

    def _node_dispatch(self, rows: LayerExperts, layer: int, tokens: float) -> Iterator[LayerCollective]:
        """Yields the dispatch that sends a token once to each node and rank of its experts, for balanced routing.

        Args:
            rows: the layer's experts.
            layer: its index.
            tokens: that this rank sends.
        """
        ranks, run, own, active = self._ep.ranks, self._layout.ep_node, self._ep_index, self._active_experts(layer)
        nodes, node, place = len(ranks) // run, own // run, own % run
        inside = CollectiveGroup(EXPERT_NODE, ranks[node * run : (node + 1) * run])
        across = CollectiveGroup(self._ep.axis, ranks[place::run])
        shape = self._job.shape.blocks[layer]
        held = [stop - start for start, stop in (rows.span(index, len(ranks)) for index in range(len(ranks)))]
        by_rank = [float(visit_share(shape, count)) for count in held]
        by_node = [float(visit_share(shape, sum(held[first : first + run]))) for first in range(0, len(ranks), run)]
        counted = INDEX * self._chunks
        # What leaves this rank, and what it returns of others' tokens.
        legs = [(across, tokens * (sum(by_node) - by_node[node]), tokens * by_node[node] * (nodes - 1))]
        if run > 1:
            tokens_of_places = tokens * nodes
            sent = tokens_of_places * (sum(by_rank[node * run : (node + 1) * run]) - by_rank[own])
            legs.append((inside, sent, tokens_of_places * by_rank[own] * (run - 1)))
        yield LayerCollective(across, "all_to_all", counted * (1 + 2 * run) * (nodes - 1), kept_by_ep_keep=True)
        yield LayerCollective(inside, "all_to_all", counted * 2 * (run - 1), kept_by_ep_keep=True)
        exact_bytes = self._width * self._bytes.compute
        weight_bytes = self._routing_elements(layer) * self._bytes.compute
        # Experts travel in integers as wide as their weights, and of 4 bytes at least.
        choice_bytes = 2 * active * max(4, weight_bytes // active)
        for group, sent, returned in legs:
            routed_bytes = sent * self._routed_row_bytes
            yield LayerCollective(group, "all_to_all", routed_bytes + sent * choice_bytes, kept_by_ep_keep=True)
            yield LayerCollective(group, "all_to_all", returned * exact_bytes, kept_by_ep_keep=True)
            yield LayerCollective(group, "all_to_all", routed_bytes, is_backward=True)
            yield LayerCollective(group, "all_to_all", returned * (exact_bytes + weight_bytes), is_backward=True)

    # -------------------------------------------------------- sizes

    @property
    def _chunks(self) -> int:
        """Chunks of a micro-batch's tokens whose counts are exchanged."""
        return max(1, self._layout.ep_overlap) * (2 if self._layout.ep_halves else 1)

    @property
    def _routed_row_bytes(self) -> float:
        """Bytes of a token's values on its way to experts, and of their gradients."""
        is_rounded = self._layout.compress_tokens != "none"
        return row_bytes(self._width) if is_rounded else self._width * self._bytes.compute

    def _active_experts(self, layer: int) -> int:
        """Returns the experts that a token visits in a layer."""
        return self._job.shape.blocks[layer].active_experts

    def _routing_elements(self, layer: int) -> int:
        """Returns the size of a token's routing weights in a layer, in elements of the compute type."""
        routing_bytes = 4 if self._model.wide_routing else 0
        return self._active_experts(layer) * max(routing_bytes, self._bytes.compute) // self._bytes.compute

    def _split_dim(self, group: ShardingGroup, name: str) -> int:
        return next((split.dim for split in group.splits if split.name == f"{name}.weight"), 0)

    def _row_features(self, layer: str, group: ShardingGroup, name: str) -> int:
        """Returns the output features of a row-parallel linear."""
        if group.column_inputs == (group.row_linear,) and name == group.row_linear:
            return self._width
        shape = self._model.shapes[f"{layer}.{name}.weight"]
        return shape[1 - self._split_dim(group, name)]

    def _column_inputs(self, layer: str, group: ShardingGroup, name: str) -> int:
        """Returns the input features of a column-parallel linear."""
        shape = self._model.shapes[f"{layer}.{name}.weight"]
        return shape[1 - self._split_dim(group, name)] if len(shape) > 1 else self._width

    def _replicated_outputs(self, layer: str, name: str) -> int:
        """Returns the output features of a replicated linear."""
        return self._model.shapes[f"{layer}.{name}.weight"][0]
