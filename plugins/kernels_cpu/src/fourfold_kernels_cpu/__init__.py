"""AVX-512 bf16 kernels in C++ behind a plain C ABI, compiled at first use. Importing this loads nothing."""

from __future__ import annotations
