"""Private attributes of torch's objects that any file may use: a function for each would only rename it."""

from __future__ import annotations

from meshwright.torch_compat import PrivateName

PRIVATE_NAMES = (
    *(
        PrivateName(
            f"torch.nn:Module.{name}",
            "a module's own tensors, submodules and hooks by name, None among them, as a dict that can be written",
            of_instances=True,
        )
        for name in (
            *("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"),
            *("_forward_hooks", "_forward_pre_hooks"),
        )
    ),
    *(
        PrivateName(f"torch:Tensor.{name}", "whether a gradient hook would see a gradient that isn't summed yet")
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
    ),
    PrivateName("torch:Tensor._version", "whether a layer has written into a tensor in place"),
    PrivateName(
        "torch:UntypedStorage._cdata", "which tensors share memory: on meta and fake tensors data_ptr() is the same"
    ),
    PrivateName(
        "torch._ops:OpOverload._schema", "which arguments an operator writes, and their names", of_instances=True
    ),
)
