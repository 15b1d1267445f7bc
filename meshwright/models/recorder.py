"""Records a module's initialisation on the meta device, so that any box of any weight can be computed later.

Three interceptors are active while a module is built: a function mode that sends every tensor factory to the meta
device, a dispatch mode that records every operation which creates or changes a meta tensor, and stand-ins for the
functions of `torch.nn.init` that do nothing on the meta device (`trunc_normal_`, `orthogonal_`, ...). What a file
computes as it is imported meanwhile is real and no part of the recording.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.torch_compat.tensors import TorchDispatchMode, tensor_factories, tree_map_only

SILENT_ON_META = ("trunc_normal_", "orthogonal_", "sparse_", "dirac_", "eye_")
"""Functions of `torch.nn.init` that depend on data and therefore return at once for a meta tensor (torch 2.13)."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor's storage in the recording, and its view of it."""

    storage: int
    """Ordinal of the storage."""
    shape: tuple[int, ...]
    """Sizes."""
    stride: tuple[int, ...]
    """Strides in elements."""
    offset: int
    """First element in the storage."""
    dtype: torch.dtype
    """Element type."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def is_flat(self) -> bool:
        """True when the view is a run of neighbouring elements in row-major order."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True, slots=True)
class Op:
    """One recorded operation; tensors among its arguments are `TensorRef` (meta) or clones (real)."""

    order: int
    """Position in the recording."""
    func: Callable[..., Any]
    """The operator, or a function of `torch.nn.init`."""
    args: tuple[Any, ...]
    """Positional arguments."""
    kwargs: dict[str, Any]
    """Keyword arguments; a device is always that of the replay."""
    writes: tuple[TensorRef, ...]
    """Arguments that it changes in place."""
    fresh: tuple[TensorRef | None, ...]
    """Its outputs, None where an output is no new storage."""

    @property
    def name(self) -> str:
        """Bare name of the operator: ``normal_``, ``mul``."""
        packet = getattr(self.func, "overloadpacket", None)
        return packet.__name__ if packet is not None else self.func.__name__


class Recording(TorchDispatchMode):
    """Records the operations on meta tensors while it is entered, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.replayed: Callable[[TensorRef], torch.Tensor] | None = None
        """Computes the present values of a recorded tensor, for code that writes them into a real one."""
        self.drawn_unnamed: set[int] = set()
        """Storages whose draws were computed before they had a name, which a later one mustn't change."""
        self.is_paused = False
        """Whether tensors are made and changed as if nothing were recorded."""
        self.sizes: dict[int, tuple[int, torch.dtype]] = {}
        self._ordinals: dict[int, int] = {}
        self._alive: list[Any] = []

    def ref(self, tensor: torch.Tensor) -> TensorRef:
        """Returns the reference of a meta tensor of any shape; a new storage gets the next ordinal."""
        storage = tensor.untyped_storage()
        ordinal = self._ordinals.get(storage._cdata)
        if ordinal is None:
            ordinal = self._ordinals[storage._cdata] = len(self._ordinals)
            # an address must not be used twice while the recording lives
            self._alive.append(storage)
            self.sizes[ordinal] = (storage.nbytes() // tensor.element_size(), tensor.dtype)
        size, dtype = self.sizes[ordinal]
        if storage.nbytes() > size * dtype.itemsize:  # `out=` has resized an empty tensor
            self.sizes[ordinal] = (storage.nbytes() // dtype.itemsize, dtype)
        return TensorRef(ordinal, tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.dtype)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Returns whether the storage of a tensor of any shape was created under this recording."""
        return tensor.is_meta and tensor.untyped_storage()._cdata in self._ordinals

    def add(self, func: Callable[..., Any], args: Any, kwargs: Any, writes: Any, fresh: Any) -> None:
        """Appends one operation."""
        stored = tree_map_only(torch.Tensor, self._argument, (tuple(args), dict(kwargs)))
        self.ops.append(Op(len(self.ops), func, stored[0], stored[1], tuple(writes), tuple(fresh)))

    def _argument(self, tensor: torch.Tensor) -> TensorRef | torch.Tensor:
        """Returns a meta tensor's reference, or a copy of a real tensor, which may change later."""
        return self.ref(tensor) if tensor.is_meta else tensor.detach().clone()

    def _computed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the values of a meta tensor of any shape, on the CPU; a real tensor itself."""
        if not self.knows(tensor) or self.replayed is None:
            return tensor
        return self.replayed(self.ref(tensor)).clone()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation and records it when it created or changed a meta tensor."""
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        written = list(_written_tensors(func, args, kwargs))
        if self.replayed is not None and written and not any(tensor.is_meta for tensor in written):
            # torch would write nothing into the real tensor, or refuse to.
            args, kwargs = tree_map_only(torch.Tensor, self._computed, (args, kwargs))
        written = [tensor for tensor in written if tensor.is_meta]
        out = args[0] if _draws_normal_numbers(func, args, kwargs) else func(*args, **kwargs)
        outputs = list(out) if isinstance(out, (tuple, list)) else [out]
        # an output with a known storage is a view, which needs no operation in the replay
        new = [isinstance(tensor, torch.Tensor) and tensor.is_meta and not self.knows(tensor) for tensor in outputs]
        if written or any(new):
            writes = [self.ref(item) for item in written]
            fresh = [self.ref(item) if is_new else None for item, is_new in zip(outputs, new)]
            self.add(func, args, kwargs, writes, fresh)
        return out


def _draws_normal_numbers(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether an operation fills a meta tensor with normal numbers, which changes nothing there.

    torch works its result's shape out in Python, a fifth of the time of reading a model. What it refuses isn't such a
    draw.
    """
    if func is not torch.ops.aten.normal_.default or not args[0].is_meta:
        return False
    return bool((args[2] if len(args) > 2 else kwargs.get("std", 1.0)) >= 0.0)


def _written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yields the arguments that an operator writes: ``self`` of `mul_`, each of `_foreach_mul_`'s, ``out=``."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor):
                yield item


class MetaFactories(TorchFunctionMode):
    """Sends tensor factories without a device to meta; `torch.tensor` gets its values on the CPU first.

    Args:
        recording: which tells when not to.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Redirects one call."""
        kwargs = dict(kwargs or {})
        if self._recording.is_paused:
            return func(*args, **kwargs)
        if func in (torch.tensor, torch.as_tensor, torch.asarray):
            device = kwargs.get("device")
            if device is None or torch.device(device).type == "meta":
                real = func(*args, **(kwargs | {"device": None if device is None else "cpu"}))
                # transformers asks the device of an empty tensor whether to skip its own initialisation: it must not,
                # but where it has put the device to meta itself, and initialises once a directory's weights are there.
                is_probe = real.numel() == 0 and device is None
                return real if is_probe or real.is_meta else real.to("meta")
        elif func in tensor_factories() and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


@contextlib.contextmanager
def record(seed: int) -> Iterator[Recording]:
    """Builds modules on the meta device while it is entered, and yields the growing `Recording`.

    Args:
        seed: seeds the CPU generator for values that initialisation computes on real CPU tensors, so that every rank
            sees the same ones; the generator's state is restored afterwards.
    """
    recording = Recording()
    state = torch.random.get_rng_state()
    with (
        warnings.catch_warnings(),
        _stand_ins(recording),
        _plain_imports(recording),
        MetaFactories(recording),
        recording,
    ):
        # load_state_dict into a meta tensor: torch takes it for an oversight, and it is recorded.
        warnings.filterwarnings("ignore", ".*copying from a non-meta parameter", UserWarning)
        torch.default_generator.manual_seed(seed)
        try:
            yield recording
        finally:
            torch.random.set_rng_state(state)


class _PlainImports(MetaPathFinder):
    """Finds a file's module as the other finders do, and has it executed while the recording pauses."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Returns what the first other finder finds."""
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in finders)), None)
        # Such a loader is of one module; those of other kinds may be shared, or execute no code of tensors.
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader.exec_module = partial(self._execute, spec.loader)  # type: ignore[method-assign]
        return spec

    def _execute(self, loader: SourceFileLoader, module: ModuleType) -> None:
        del loader.exec_module  # the class has its own again
        state, was_paused = torch.random.get_rng_state(), self._recording.is_paused
        self._recording.is_paused = True
        try:
            loader.exec_module(module)
        finally:
            self._recording.is_paused = was_paused
            torch.random.set_rng_state(state)


@contextlib.contextmanager
def _plain_imports(recording: Recording) -> Iterator[None]:
    """Keeps what files compute as they are imported out of a recording: the next model of the process imports none."""
    finder = _PlainImports(recording)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@contextlib.contextmanager
def _stand_ins(recording: Recording) -> Iterator[None]:
    """Has the `SILENT_ON_META` functions record while it is entered.

    Their code is exchanged, and no reference to them: whoever imported one, under any name, calls the function itself.
    """
    functions: list[FunctionType] = [getattr(nn.init, name) for name in SILENT_ON_META]
    originals = [(function.__code__, function.__defaults__, function.__kwdefaults__) for function in functions]
    try:
        for function in functions:
            handler = _stand_in(recording, function)
            function.__defaults__, function.__kwdefaults__ = None, {"handler": handler}
            function.__code__ = _handed_on.__code__
        yield
    finally:
        for function, (code, defaults, named_defaults) in zip(functions, originals):
            function.__code__, function.__defaults__, function.__kwdefaults__ = code, defaults, named_defaults


def _handed_on(*args: Any, handler: Callable[..., Any], **kwargs: Any) -> Any:
    """Calls what is the default of ``handler``; the code of a function that is replaced, which has no closure."""
    return handler(*args, **kwargs)


def _stand_in(recording: Recording, function: FunctionType) -> Callable[..., Any]:
    """Returns a function that records an initialisation on meta and runs the original code on a real tensor."""
    original = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__

    def initialise(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not tensor.is_meta:
            return original(tensor, *args, **kwargs)
        # an empty tensor has nothing to initialise
        if tensor.numel():
            recording.add(function, (tensor, *args), kwargs, [recording.ref(tensor)], [])
        return tensor

    return initialise
