"""Private names of torch.distributed.checkpoint."""

from __future__ import annotations

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from meshwright.torch_compat import PrivateName

PRIVATE_NAMES = (
    PrivateName(
        "torch.distributed.checkpoint.filesystem:_StorageInfo",
        "part of the pickled metadata of a checkpoint, in which file which bytes are a tensor's",
    ),
    PrivateName("torch.distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING", "part of the pickled metadata too"),
)
StorageInfo = _StorageInfo
MemoryFormatCode = _MEM_FORMAT_ENCODING
