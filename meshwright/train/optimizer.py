"""AdamW over this rank's local shards: plain tensors, whatever mesh or placement the weights have.

On a GPU one kernel of Triton updates all of them (`parallel.triton_kernels.adamw`), else torch's own kernels do. In
host memory they go through some weights after the others: meanwhile gradients of the next are copied from the device,
and new values of those before to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from meshwright.json_types import JsonObject
from meshwright.parallel.dcp_shards import StateTensor
from meshwright.parallel.side_stream import SideStream, host_like
from meshwright.parallel.triton_kernels import load_kernels
from meshwright.parallel.weights import Weight, refresh_compute
from meshwright.spec.layout import HOST_CHUNK
from meshwright.torch_compat.tensors import foreach_mul_
from meshwright.train.config import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's state per weight, as they stand in checkpoints."""


class OuterState(Protocol):
    """The state that islands share beside this optimizer's (`train.outer.OuterOptimizer`)."""

    island: int
    """Index of this rank's island."""
    islands: int
    """Number of islands."""

    def state(self) -> Iterator[tuple[str, StateTensor]]:
        """Yields (name in a checkpoint, tensor)."""

    def addresses(self) -> list[int]:
        """Returns the memory addresses of `state`'s tensors."""

    def read_counters(self) -> JsonObject:
        """Returns the island's plain values, after `state`'s tensors were filled from a checkpoint."""

    def restart(self) -> None:
        """Begins a round from the present weights."""


_Pairs = Sequence[tuple[Weight, nn.Parameter]]
"""Weights, each with the parameter that torch's optimizer sees of it."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Weights that one call of torch's optimizer updates."""

    optimizer: torch.optim.AdamW
    pairs: _Pairs


class LocalAdamW:
    """Runs torch's AdamW on local shards.

    The optimizer sees plain tensors that share storage with the weights' local shards, so fused kernels run on any mix
    of meshes; the step's factor on gradients (normalisation, unscaling, clipping) is folded into the kernel. It keeps
    up the copies of weights that compute in another type (`Weight.compute`).

    Args:
        weights: all weights of this rank.
        config: hyper-parameters.
        on_host: keep moments and run the update in host memory; gradients are copied there, new weights back.
    """

    def __init__(self, weights: Sequence[Weight], config: OptimizerConfig, on_host: bool = False) -> None:
        self.config, self._on_host = config, on_host
        self.outer: OuterState | None = None
        """What joins the islands; None where there is one."""
        self._pending_copies: list[torch.cuda.Event] = []
        # Weights without an element on this rank have no state here.
        self._local_weights = [weight for weight in weights if weight.local.numel()]
        self._all = list(weights)
        self._parameters = [self._make_parameter(weight) for weight in self._local_weights]
        self._parameter_by_name = {
            weight.name: parameter for weight, parameter in zip(self._local_weights, self._parameters)
        }
        self._on_device = not on_host and all(weight.local.is_cuda for weight in self._local_weights)
        # Gradients come down on one stream while new values go up on another.
        self._down, self._up = [SideStream(self._compute_device()) for _ in range(2)]
        self._host_gradients = {
            parameter: host_like(weight.local, weight.local.device)
            for weight, parameter in zip(self._local_weights, self._parameters)
            if on_host
        }
        # A rank without an element still counts the updates, since a checkpoint may take its number.
        self._idle = [] if self._parameters else [nn.Parameter(torch.zeros(1), requires_grad=False)]
        pairs = list(zip(self._local_weights, self._parameters))
        self._chunks = [self._make_chunk(part) for part in ([pairs] if self._on_device else _split(pairs) or [[]])]
        self._state: dict[nn.Parameter, dict[str, torch.Tensor]] = self._chunks[0].optimizer.state
        for chunk in self._chunks:
            chunk.optimizer.state = self._state  # type: ignore[assignment]
        self._kernels: Any = load_kernels("adamw") if self._fits_kernels() else None
        self._update: Any = None
        """The kernel's table of tensors, made by the first update."""

    @property
    def lacks_kernels(self) -> bool:
        """Whether the kernel of Triton could run the updates, but not in this process."""
        return self._kernels is None and self._fits_kernels()

    def leave_kernels(self) -> None:
        """Has torch's kernels run the updates from now on, before the first one."""
        self._kernels = None

    def _fits_kernels(self) -> bool:
        """Returns whether the kernel of Triton can run the updates: on a GPU, of float32 shards."""
        is_wide = all(weight.local.is_cuda and weight.local.dtype == torch.float32 for weight in self._local_weights)
        return self.config.implementation == "fused" and not self._on_host and bool(self._local_weights) and is_wide

    def _make_chunk(self, pairs: _Pairs) -> _Chunk:
        """Makes torch's optimizer of some weights."""
        config = self.config
        groups: list[dict[str, object]] = []
        # torch's AdamW has one weight decay for each parameter group.
        for decays_group, decay in ((True, config.weight_decay), (False, 0.0)):
            members = [parameter for weight, parameter in pairs if self._decays(weight) is decays_group]
            if members:
                groups.append({"params": members, "weight_decay": decay})
        optimizer = torch.optim.AdamW(
            groups or self._idle,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=config.implementation == "fused",
            foreach=config.implementation == "foreach",
        )
        return _Chunk(optimizer, pairs)

    def _compute_device(self) -> torch.device:
        """Returns where weights compute that are updated in host memory; the CPU for no such weights."""
        tensors = [weight.local if weight.compute is None else weight.compute for weight in self._local_weights]
        return tensors[0].device if tensors and not self._on_device else torch.device("cpu")

    def _decays(self, weight: Weight) -> bool:
        return self.config.decay == "all" or len(weight.shape) >= 2

    def _make_parameter(self, weight: Weight) -> nn.Parameter:
        shard = weight.local
        if self._on_host:
            shard = host_like(shard, shard.device).copy_(shard)
        return nn.Parameter(shard, requires_grad=False)

    def wait_for(self, event: torch.cuda.Event | None) -> None:
        """Makes the next update wait on the device for a CUDA event, because a snapshot is copying the state."""
        if event is not None:
            self._pending_copies.append(event)

    def step(self, lr: float, factor: torch.Tensor) -> None:
        """Updates the weights with ``factor`` x their gradients; a factor that isn't finite leaves them unchanged.

        Args:
            lr: learning rate of this step.
            factor: () float64 on the weights' device, equal on all ranks.
        """
        while self._pending_copies:
            self._pending_copies.pop().wait()  # on the current device's stream: the weights may lie in host memory
        if self._kernels is not None:
            self._run_own_kernel(lr, factor)
            return
        for parameter in self._idle:
            parameter.grad = torch.zeros_like(parameter)
        if self._on_device:
            for chunk in self._chunks:
                self._take_gradients(chunk.pairs)
                self._run_kernel(chunk, lr, factor)
            refresh_compute(self._local_weights)
        else:
            self._update_on_host(lr, factor)
        for parameter in self._parameters:
            parameter.grad = None

    def _update_on_host(self, lr: float, factor: torch.Tensor) -> None:
        """Updates chunk by chunk; meanwhile gradients of the next arrive and new values of those before leave."""
        arrivals = [self._fetch_gradients(chunk.pairs, factor) for chunk in self._chunks]
        # Waits for the norm, and for copies of a snapshot.
        factor = factor.to("cpu")
        for chunk, arrival in zip(self._chunks, arrivals):
            if arrival is not None:
                arrival.synchronize()
            self._run_kernel(chunk, lr, factor)
            self._send_weights(chunk.pairs)
        # Ahead of the next forward.
        self._down.join()
        self._up.join()

    def _take_gradients(self, pairs: _Pairs) -> None:
        """Shows torch's optimizer the weights' gradients where they are."""
        for weight, parameter in pairs:
            weight.widen_gradient()
            parameter.grad = weight.gradient

    def _fetch_gradients(self, pairs: _Pairs, factor: torch.Tensor) -> torch.cuda.Event | None:
        """Has ``factor`` x gradients copied to host memory; returns when they are there, None for now."""
        if not self._on_host:
            self._take_gradients(pairs)
            return None
        with self._down.behind():
            for weight, parameter in pairs:
                assert weight.gradient is not None
                # The processor would write what it scales back to memory.
                scaled = weight.gradient.to(parameter.dtype).mul_(factor)
                parameter.grad = self._host_gradients[parameter].copy_(scaled, non_blocking=True)
        return self._down.mark()

    def _send_weights(self, pairs: _Pairs) -> None:
        """Has new values copied to the device, beside what the processor does."""
        with self._up.behind():
            for weight, parameter in pairs:
                if self._on_host:
                    weight.local.copy_(parameter, non_blocking=True)
                if weight.compute is not None:
                    weight.compute.detach().copy_(weight.local, non_blocking=True)

    def _run_own_kernel(self, lr: float, factor: torch.Tensor) -> None:
        """Runs the update by one kernel, which reads gradients in either type and writes the copies that compute."""
        self._update = self._update or self._make_update()
        gradients = [weight.gradient for weight in self._local_weights]
        # Every weight has one: `step.fill_missing`.
        self._update.run([grad.contiguous() for grad in gradients if grad is not None], lr, factor)

    def _make_update(self) -> Any:
        """Returns the kernel's table of all tensors (`parallel.triton_kernels.adamw.Update`)."""
        states = [self._begun_state(parameter) for parameter in self._parameters]
        tensors = [
            self._kernels.Tensors(
                weight=weight.local,
                exp_avg=state["exp_avg"],
                exp_avg_sq=state["exp_avg_sq"],
                copy=weight.compute.detach() if weight.compute is not None else None,
                decays=self._decays(weight),
            )
            for weight, state in zip(self._local_weights, states)
        ]
        betas, decay = (self.config.beta1, self.config.beta2), self.config.weight_decay
        return self._kernels.Update(tensors, states[0]["step"], betas, self.config.eps, decay)

    def _run_kernel(self, chunk: _Chunk, lr: float, factor: torch.Tensor) -> None:
        """Runs torch's kernel; ``factor``: () float64, where the parameters are."""
        optimizer: Any = chunk.optimizer
        for group in optimizer.param_groups:
            group["lr"] = lr
        # The fused kernel divides gradients by grad_scale and skips on found_inf, like torch.amp: no pass of its own,
        # and no device synchronisation to test the factor.
        fused = self.config.implementation == "fused"
        if self._on_host:
            # Gradients were scaled as they came down.
            if bool(torch.isfinite(factor)):
                optimizer.step()
        elif fused and all(parameter.dtype == torch.float32 for _, parameter in chunk.pairs):
            optimizer.grad_scale = (1.0 / factor).to(torch.float32)
            optimizer.found_inf = (~torch.isfinite(factor)).to(torch.float32)
            optimizer.step()
        elif bool(torch.isfinite(factor)):
            if chunk.pairs and float(factor) != 1.0:
                foreach_mul_([parameter.grad for _, parameter in chunk.pairs], float(factor))
            optimizer.step()

    @property
    def steps(self) -> int:
        """Updates done; steps that were skipped don't count."""
        for state in self._state.values():
            return int(state["step"])
        return 0

    def state(self) -> Iterator[tuple[str, StateTensor]]:
        """Yields (``exp_avg/<weight>``, tensor sharded like the weight) for each moment of each weight."""
        for weight in self._all:
            parameter = self._parameter_by_name.get(weight.name)
            for moment in MOMENTS:
                yield f"{moment}/{weight.name}", weight.checkpoint_boxes(self._moment(weight, parameter, moment))

    def moments(self) -> list[torch.Tensor]:
        """Returns exp_avg and exp_avg_sq of each weight in turn, shaped like its local shard; none before an update."""
        # By `get`: looking a parameter up in torch's dict would leave an empty state in it.
        states = [self._state.get(parameter) for parameter in self._parameters]
        return [state[moment] for state in states if state for moment in MOMENTS]

    def moment_addresses(self) -> list[int]:
        """Returns the memory addresses of all moments."""
        return [moment.data_ptr() for moment in self.moments()]

    def _moment(self, weight: Weight, parameter: nn.Parameter | None, moment: str) -> torch.Tensor:
        if parameter is None:
            # An empty shard has no state, but appears in checkpoints like every other.
            return torch.empty_like(weight.local)
        return self._begun_state(parameter)[moment]

    def _begun_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Returns torch's state of a parameter, zeros before the first update."""
        state: dict[str, torch.Tensor] = self._state[parameter]
        if not state:
            # Where torch's own AdamW keeps the step counter: fused kernels read it on the device.
            step_device = parameter.device if self.config.implementation == "fused" else torch.device("cpu")
            # Our own kernel counts the updates of all in the first one's.
            is_shared = self._kernels is not None and parameter is not self._parameters[0]
            state["step"] = (
                self._begun_state(self._parameters[0])["step"]
                if is_shared
                else torch.zeros((), dtype=torch.float32, device=step_device)
            )
            for name in MOMENTS:
                state[name] = torch.zeros_like(parameter)
        return state

    def weights_changed(self) -> None:
        """Reads weights again that something else than an update has changed: host copies are the master weights."""
        for weight, parameter in zip(self._local_weights, self._parameters):
            if self._on_host:
                parameter.data.copy_(weight.local)

    def restored(self, steps: int) -> None:
        """Sets the number of updates after `state`'s tensors were filled from a checkpoint."""
        for parameter in (*self._parameters, *self._idle):
            self._begun_state(parameter)["step"].fill_(steps)
        self.weights_changed()

    def bytes(self) -> int:
        """Returns the bytes of optimizer state that this rank holds."""
        return sum(moment.nbytes for moment in self.moments())


def _split(pairs: _Pairs) -> list[_Pairs]:
    """Returns pairs in chunks, the smallest at both ends: nothing is updated beside the first and last copies."""
    chunks: list[list[tuple[Weight, nn.Parameter]]] = []
    for pair in sorted(pairs, key=lambda pair: pair[1].numel()):
        if not chunks or sum(parameter.numel() for _, parameter in chunks[-1]) >= HOST_CHUNK:
            chunks.append([])
        chunks[-1].append(pair)
    return [*chunks[::2], *chunks[1::2][::-1]]
