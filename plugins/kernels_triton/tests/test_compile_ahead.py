"""Compiling before the first use: what would be started, once each, and no failure of it stops anything."""

from __future__ import annotations

import ast
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Event, Timer
from time import sleep

import pytest
import torch

from fourfold_kernels_triton.compile_ahead import compile_instead
from fourfold_kernels_triton.kernels.routing import choose_rows
from fourfold_kernels_triton.launch import launch, settle

DEVICE = torch.device("cuda")


class Kernel:
    __name__ = "kernel"

    def __init__(self, error=None):
        self.error = error
        self.compiled = []
        self.launched = []
        self.may_end = Event()

    def warmup(self, *args, **options):
        self.may_end.wait(10)
        self.compiled.append((args, options))
        if self.error:
            raise self.error

    def __getitem__(self, grid):
        return lambda *args, **options: self.launched.append(args)


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())


def test_threads_parse_kernels_one_at_a_time(monkeypatch):
    compile_instead(DEVICE)
    inside, most = [], []

    def parse(source, *args):
        inside.append(source)
        most.append(len(inside))
        sleep(0.01)  # lets others in, as building a large tree does
        inside.pop()
        return tree

    tree = ast.parse(choose_rows.src)
    with monkeypatch.context() as patched, ThreadPoolExecutor(4) as pool:
        patched.setattr(ast, "parse", parse)
        trees = list(pool.map(lambda _: choose_rows.parse(), range(8)))
    assert (trees, max(most)) == ([tree] * 8, 1)


def test_equal_starts_are_compiled_once_as_they_would_be_launched():
    kernel, x = Kernel(), torch.empty(3, device="meta")
    kernel.may_end.set()
    for _ in range(2):
        compile_instead(DEVICE)(kernel, (1, 2), x, 16, EARLY=True, WIDTH=4)
        settle(kernel)
    options = {"grid": (1, 2), "EARLY": True, "WIDTH": 4, "enable_fp_fusion": True, "launch_pdl": True}
    assert kernel.compiled == [((torch.float32, 16), options)]


def test_a_launch_waits_for_what_is_compiled_of_its_kernel_alone():
    kernel, other = Kernel(), Kernel()
    for one in (kernel, other):
        compile_instead(DEVICE)(one, (1,))
    assert kernel.compiled == []
    Timer(0.2, kernel.may_end.set).start()
    launch(kernel, (1,), 7)
    assert len(kernel.compiled) == 1
    assert kernel.launched == [(7,)]
    assert other.compiled == []
    other.may_end.set()


def test_a_failure_is_left_to_the_first_use():
    kernel = Kernel(ValueError("no"))
    kernel.may_end.set()
    compile_instead(DEVICE)(kernel, (1,))
    launch(kernel, (1,))
    assert len(kernel.compiled) == len(kernel.launched) == 1
