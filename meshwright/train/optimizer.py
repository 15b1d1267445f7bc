"""AdamW over this rank's local shards: plain tensors, whatever mesh or placement the weights have.

On a GPU one kernel of Triton updates all of them (`parallel.triton_kernels.adamw`), else torch's own kernels do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from meshwright.json_types import JsonObject
from meshwright.parallel.dcp_shards import StateTensor
from meshwright.parallel.triton_kernels import load_kernels
from meshwright.parallel.weights import Weight, refresh_compute
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
        self._host_gradients = [_host_like(weight.local) for weight in self._local_weights] if on_host else []
        self._parameter_by_name = {
            weight.name: parameter for weight, parameter in zip(self._local_weights, self._parameters)
        }
        decays = [config.decay == "all" or len(weight.shape) >= 2 for weight in self._local_weights]
        self._decays = decays
        groups: list[dict[str, object]] = []
        # torch's AdamW has one weight decay for each parameter group.
        for decays_group, decay in ((True, config.weight_decay), (False, 0.0)):
            members = [parameter for parameter, decayed in zip(self._parameters, decays) if decayed is decays_group]
            if members:
                groups.append({"params": members, "weight_decay": decay})
        # A rank without an element still counts the updates, since a checkpoint may take its number.
        self._idle = [] if groups else [nn.Parameter(torch.zeros(1), requires_grad=False)]
        self._optimizer = torch.optim.AdamW(
            groups or self._idle,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=config.implementation == "fused",
            foreach=config.implementation == "foreach",
        )
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

    def _make_parameter(self, weight: Weight) -> nn.Parameter:
        shard = weight.local
        if self._on_host:
            shard = _host_like(shard).copy_(shard)
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
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if self._on_host:
            factor = self._fetch_gradients(factor)
        else:
            for parameter, weight in zip(self._parameters, self._local_weights):
                weight.widen_gradient()
                parameter.grad = weight.gradient
        for parameter in self._idle:
            parameter.grad = torch.zeros_like(parameter)
        self._run_kernel(factor)
        for parameter in self._parameters:
            parameter.grad = None
        if self._on_host:
            for weight, parameter in zip(self._local_weights, self._parameters):
                # Back to the device on the current stream, ahead of the next forward.
                weight.local.copy_(parameter, non_blocking=True)
        refresh_compute(self._local_weights)

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
                decays=decays,
            )
            for weight, state, decays in zip(self._local_weights, states, self._decays)
        ]
        betas, decay = (self.config.beta1, self.config.beta2), self.config.weight_decay
        return self._kernels.Update(tensors, states[0]["step"], betas, self.config.eps, decay)

    def _fetch_gradients(self, factor: torch.Tensor) -> torch.Tensor:
        """Copies the local gradients to pinned host buffers and waits; returns the factor, () float64 on the CPU."""
        for parameter, weight, host_gradient in zip(self._parameters, self._local_weights, self._host_gradients):
            assert weight.gradient is not None
            host_gradient.copy_(weight.gradient, non_blocking=True)
            parameter.grad = host_gradient
        if factor.is_cuda:
            # The CPU kernel reads the pinned buffers as soon as this returns.
            torch.cuda.current_stream(factor.device).synchronize()
        return factor.to("cpu")

    def _run_kernel(self, factor: torch.Tensor) -> None:
        """Runs the update kernel; ``factor``: () float64, where the parameters are."""
        # The fused kernel divides gradients by grad_scale and skips on found_inf, like torch.amp: no pass of its own,
        # and no device synchronisation to test the factor.
        optimizer: Any = self._optimizer
        fused = self.config.implementation == "fused"
        if fused and all(parameter.dtype == torch.float32 for parameter in self._parameters):
            optimizer.grad_scale = (1.0 / factor).to(torch.float32)
            optimizer.found_inf = (~torch.isfinite(factor)).to(torch.float32)
            optimizer.step()
        elif bool(torch.isfinite(factor)):
            if float(factor) != 1.0:
                foreach_mul_([parameter.grad for parameter in (*self._parameters, *self._idle)], float(factor))
            optimizer.step()

    @property
    def steps(self) -> int:
        """Updates done; steps that were skipped don't count."""
        for state in self._optimizer.state.values():
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
        states = [self._optimizer.state.get(parameter) for parameter in self._parameters]
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
        state: dict[str, torch.Tensor] = self._optimizer.state[parameter]
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


def _host_like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an empty host tensor of the same shape and dtype, pinned if the original is on a GPU."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
