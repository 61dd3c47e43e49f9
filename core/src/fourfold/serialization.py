"""Values to bytes and back: msgpack with extensions for tensors, arrays, tuples and registered types. No pickle.

Only types that both sides have registered are built from bytes, so a message cannot name a class of its own choice.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from fourfold import messages
from fourfold.contracts.deferred_reply import DeferredReply
from fourfold.contracts.kv_cache_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec
from fourfold.errors import Unsupported
from fourfold.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import torch

_TENSOR: Final = 1
_ARRAY: Final = 2
_TUPLE: Final = 3
_REGISTERED: Final = 4
_PLAIN: Final = (bool, int, float, str, bytes, bytearray, type(None))
_ARRAY_KINDS: Final = "biufc"  # numpy's kinds of numbers: no objects, no records, no text


def _message_types() -> tuple[type, ...]:
    return tuple(one for one in vars(messages).values() if isinstance(one, type) and issubclass(one, msgspec.Struct))


CORE_TYPES: Final[tuple[type, ...]] = (*_message_types(), KVCacheConfig, KVCacheGroup, KVCacheSpec, SamplingParams)
"""What travels without being registered: the messages and what they hold."""


class Codec:
    """Encodes values for calls between processes. ``types`` adds dataclasses and msgspec Structs that may travel."""

    def __init__(self, types: Iterable[type] = ()) -> None:
        self._types = {f"{one.__module__}:{one.__qualname__}": one for one in (*CORE_TYPES, *types)}
        self._names = {one: name for name, one in self._types.items()}

    def encode(self, value: object) -> bytes:
        """``value`` as bytes; raises Unsupported naming the type of what cannot travel.

        A DeferredReply is waited for, so that executors which know nothing of it work too.
        """
        if isinstance(value, DeferredReply):
            value = value.take()
        try:
            return msgspec.msgpack.encode(self._pack(value))
        except (OverflowError, ValueError) as error:
            raise Unsupported(f"a value cannot travel between processes: {error}") from error

    def decode(self, data: bytes | bytearray | memoryview) -> Any:
        """The value that ``data`` holds; tensors are on the CPU and own their memory.

        Raises Unsupported for data that this side has no type for, or that is no message at all.
        """
        try:
            return msgspec.msgpack.decode(data, ext_hook=self._unpack)
        except (msgspec.DecodeError, ValueError, TypeError) as error:
            raise Unsupported(f"{len(data)} bytes are no message that can be read here: {error}") from error

    def _pack(self, value: object) -> object:
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, list):
            return [self._pack(item) for item in value]
        if isinstance(value, dict):
            return {self._pack(key): self._pack(item) for key, item in value.items()}
        if isinstance(value, tuple):
            return msgspec.msgpack.Ext(_TUPLE, self.encode(list(value)))
        if type(value) in self._names:
            payload = (self._names[type(value)], msgspec.Raw(msgspec.msgpack.encode(value, enc_hook=self._pack)))
            return msgspec.msgpack.Ext(_REGISTERED, msgspec.msgpack.encode(payload))
        # modules are looked up, not imported: who holds a tensor has imported torch
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and isinstance(value, torch.Tensor):
            return msgspec.msgpack.Ext(_TENSOR, _pack_tensor(value))
        if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
            return msgspec.msgpack.Ext(_ARRAY, _pack_array(numpy.asarray(value)))
        raise Unsupported(
            f"a {type(value).__module__}.{type(value).__qualname__} cannot travel between processes; "
            "send numbers, text, bytes, lists, tuples, dicts, tensors, arrays, or register its dataclass"
        )

    def _unpack(self, code: int, data: memoryview) -> Any:
        if code == _TUPLE:
            return tuple(self.decode(data))
        if code == _TENSOR:
            return _unpack_tensor(data)
        if code == _ARRAY:
            return _unpack_array(data)
        if code == _REGISTERED:
            name, payload = msgspec.msgpack.decode(data, type=tuple[str, msgspec.Raw])
            if name not in self._types:
                raise Unsupported(f"type {name!r} is not registered in this process; install the plugin that sends it")
            return msgspec.msgpack.decode(payload, type=self._types[name], ext_hook=self._unpack)
        raise Unsupported(f"extension {code} of a message is unknown; both sides need the same fourfold-core")


_CORE_CODEC: Final = Codec()


def encode(value: object) -> bytes:
    """``value`` as bytes, with core's types; raises Unsupported naming the type of what cannot travel."""
    return _CORE_CODEC.encode(value)


def decode(data: bytes | bytearray | memoryview) -> Any:
    """The value that ``data`` holds, with core's types; raises Unsupported."""
    return _CORE_CODEC.decode(data)


def _pack_tensor(tensor: torch.Tensor) -> bytes:
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise Unsupported(f"a tensor of layout {tensor.layout} cannot travel; make it dense")
    dense = tensor.detach().cpu().contiguous()
    raw = memoryview(dense.reshape(-1).view(torch.uint8).numpy().data) if dense.numel() else b""
    return msgspec.msgpack.encode((str(dense.dtype).removeprefix("torch."), tuple(dense.shape), raw))


def _unpack_tensor(data: memoryview) -> torch.Tensor:
    import torch

    dtype_name, shape, raw = msgspec.msgpack.decode(data, type=tuple[str, tuple[int, ...], bytes])
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise Unsupported(f"a tensor of dtype {dtype_name!r} cannot be read by torch {torch.__version__}")
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(shape)


def _pack_array(array: np.ndarray[Any, Any]) -> bytes:
    import numpy as np

    if array.dtype.kind not in _ARRAY_KINDS:
        raise Unsupported(f"an array of dtype {array.dtype} cannot travel; send numbers")
    dense = np.ascontiguousarray(array)
    return msgspec.msgpack.encode((dense.dtype.str, array.shape, dense.tobytes()))


def _unpack_array(data: memoryview) -> np.ndarray[Any, Any]:
    import numpy as np

    dtype_name, shape, raw = msgspec.msgpack.decode(data, type=tuple[str, tuple[int, ...], bytes])
    dtype = np.dtype(dtype_name)
    if dtype.kind not in _ARRAY_KINDS:
        raise Unsupported(f"an array of dtype {dtype_name!r} cannot be read; send numbers")
    return np.frombuffer(raw, dtype=dtype).reshape(shape).copy()
