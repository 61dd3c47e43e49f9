"""Compiling before the first use: what would be started, once each, and no failure of it stops anything."""

from __future__ import annotations

from contextlib import nullcontext
from threading import Event

import pytest
import torch

from fourfold_kernels_triton.compile_ahead import Compilation

DEVICE = torch.device("cuda")


class Kernel:
    __name__ = "kernel"

    def __init__(self, error=None):
        self.error = error
        self.compiled = []
        self.may_end = Event()

    def warmup(self, *args, **options):
        self.may_end.wait(10)
        self.compiled.append((args, options))
        if self.error:
            raise self.error


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())


def test_equal_starts_are_compiled_once_as_they_would_be_launched():
    kernel, x = Kernel(), torch.empty(3, device="meta")
    kernel.may_end.set()
    for _ in range(2):
        compilation = Compilation(DEVICE)
        compilation(kernel, (1, 2), x, 16, EARLY=True, WIDTH=4)
        compilation.wait()
    options = {"grid": (1, 2), "EARLY": True, "WIDTH": 4, "enable_fp_fusion": True, "launch_pdl": True}
    assert kernel.compiled == [((torch.float32, 16), options)]


def test_it_goes_on_meanwhile_and_waits_when_told():
    kernel = Kernel()
    compilation = Compilation(DEVICE)
    compilation(kernel, (1,))
    assert kernel.compiled == []
    kernel.may_end.set()
    compilation.wait()
    assert len(kernel.compiled) == 1


def test_a_failure_is_left_to_the_first_use():
    kernel = Kernel(ValueError("no"))
    kernel.may_end.set()
    compilation = Compilation(DEVICE)
    compilation(kernel, (1,))
    compilation.wait()
    assert len(kernel.compiled) == 1
