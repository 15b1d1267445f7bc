"""What the room uses of transformers, imported once torchao has been.

transformers imports torchao where that is installed, which would touch the GPUs before ranks are forked
(`torch_compat.torchao_import`). So would its masks, in each forward, by asking whether a CUDA graph is being captured.

It also reads the text of its 1,700 files of models twice, half a second of a core each; the second time is spared.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from meshwright.torch_compat.torchao_import import import_before_transformers

import_before_transformers()

import transformers.utils.import_utils as transformers_imports  # noqa: E402


@contextmanager
def _reading_models_once(imports: Any) -> Iterator[None]:
    """Has the package of models take its list of names from the list of the whole package, which is known already."""
    plain: Callable[..., dict[frozenset[str], dict[str, set[str]]]] = imports.define_import_structure
    folder = Path(imports.__file__).parent.parent / "models"

    def define_import_structure(path: str | Path, prefix: str | None = None) -> Any:
        if prefix is not None or Path(path) != folder / "__init__.py":
            return plain(path, prefix)
        # Kept by the function's own cache since `transformers` called it so; anew where another version doesn't.
        names = plain(folder, prefix="models")
        return {
            requirements: {
                name.removeprefix("models."): objects for name, objects in modules.items() if name.startswith("models.")
            }
            for requirements, modules in names.items()
        }

    imports.define_import_structure = define_import_structure
    try:
        yield
    finally:
        imports.define_import_structure = plain


with _reading_models_once(transformers_imports):
    import transformers.models  # noqa: F401

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig  # noqa: E402
from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: E402
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto.modeling_auto import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

__all__ = [
    "CONFIG_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoConfig",
    "AutoModelForCausalLM",
    "PreTrainedConfig",
    "WeightConverter",
    "WeightRenaming",
    "get_model_conversion_mapping",
    "rename_source_key",
]


def _keep_driver_closed(imports: Any) -> None:
    """Has transformers ask torch whether a CUDA graph is captured only where CUDA is in use: else none can be."""
    is_capturing: Callable[[], bool] = imports.is_cuda_stream_capturing

    def is_cuda_stream_capturing() -> bool:
        return torch.cuda.is_initialized() and is_capturing()

    imports.is_cuda_stream_capturing = is_cuda_stream_capturing


_keep_driver_closed(transformers_imports)
