"""Compiles launches for sm_90 without a device: what the package starts is noted on meta tensors, then compiled."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fourfold_kernels_triton.lone_parser import parse_one_at_a_time

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl")


@dataclass(frozen=True)
class Launch:
    """One start of a kernel, as Triton's own launcher would specialise it."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]

    def compile(self) -> Any:
        """The compiled kernel; raises what Triton or ptxas raises."""
        source = ASTSource(
            self.kernel,
            dict(self.signature),
            constexprs=dict(self.constants),
            attrs={(index,): [["tt.divisibility", 16]] for index in self.aligned},
        )
        return triton.compile(source, target=HOPPER, options=dict(self.options))


@dataclass
class Launches:
    """Takes the place of ``launch``."""

    noted: list[Launch] = field(default_factory=list)

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        assert all(size > 0 for size in grid)
        assert all(size < 65536 for size in grid[1:])
        options.setdefault("enable_fp_fusion", True)
        chosen = {name: options.pop(name) for name in OPTIONS if name in options}
        names = kernel.arg_names
        values = dict(zip(names, args), **options)
        assert list(values) == names or set(values) == set(names)
        signature, constants, aligned = {}, {}, []
        for index, param in enumerate(kernel.params):
            value = values[param.name]
            if param.is_constexpr or (type(value) is int and value == 1 and not param.do_not_specialize):
                signature[param.name], constants[param.name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[param.name] = POINTERS[value.dtype]
                if not param.do_not_specialize_on_alignment:
                    aligned.append(index)
            elif isinstance(value, float):
                signature[param.name] = "fp32"
            else:
                signature[param.name] = "i32"
                if value % 16 == 0 and not param.do_not_specialize:
                    aligned.append(index)
        launch = Launch(
            kernel,
            tuple(signature.items()),
            tuple(constants.items()),
            tuple(aligned),
            tuple(chosen.items()),
        )
        if launch not in self.noted:
            self.noted.append(launch)

    def compile(self) -> list[tuple[Launch, Any]]:
        """All that was noted, in parallel."""
        parse_one_at_a_time()
        with ThreadPoolExecutor(2) as pool:
            return list(zip(self.noted, pool.map(Launch.compile, self.noted)))
