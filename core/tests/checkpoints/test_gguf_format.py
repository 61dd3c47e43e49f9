"""GGUF files of every architecture give the logits of the model that they were made from, and are converted once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from fourfold.checkpoints.gguf_format import GgufFormat, convert
from fourfold.checkpoints.progress import NoProgress
from fourfold.checkpoints.resolve import describe_checkpoint, resolve_checkpoint
from fourfold.config.model_config import ModelConfig
from fourfold.entries import CheckpointContext
from fourfold.errors import CheckpointError, ConfigError
from fourfold.plugins import PluginRegistry

Write = Callable[..., Path]


def read_folder(format_: GgufFormat, folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    with format_.open(folder) as reader:
        return {name: reader.tensor(name)[:].numpy().copy() for name in reader.names()}


def test_conversion_of_a_whole_file(
    write_gguf: Write, tiny_tensors: dict[str, Any], context: CheckpointContext, cache: Path
) -> None:
    kind = gguf.GGMLQuantizationType.Q4_1
    tensors = {name: (v, kind) if v.ndim == 2 and "attn_v" in name else v for name, v in tiny_tensors.items()}
    path = write_gguf(tensors)
    format_ = GgufFormat(context)
    assert format_.recognizes(path)
    folder = format_.prepare(path, progress=NoProgress())
    assert folder.parent == cache
    assert sorted(one.name for one in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "llama"  # transformers and others cannot read the folder without it
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [2], "bos_token_id": 1}
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == "{{ messages }}"
    assert settings["bos_token"] == "<|start|>"
    have = read_folder(format_, folder)
    np.testing.assert_array_equal(have["model.embed_tokens.weight"], tiny_tensors["token_embd.weight"])
    quantised = gguf.quants.quantize(tiny_tensors["blk.0.attn_v.weight"], kind)
    np.testing.assert_array_equal(
        have["model.layers.0.self_attn.v_proj.weight"], gguf.quants.dequantize(quantised, kind)
    )
    # Interleaved pairs (0, 1), (2, 3).. become halves: row 1 of each head of 8 moves to row 4.
    queries = tiny_tensors["blk.0.attn_q.weight"].reshape(4, 8, 32)
    np.testing.assert_array_equal(
        have["model.layers.0.self_attn.q_proj.weight"], queries[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(32, 32)
    )


def test_an_unchanged_file_is_converted_once(
    write_gguf: Write, tiny_tensors: dict[str, Any], context: CheckpointContext
) -> None:
    path = write_gguf(tiny_tensors)
    folder = GgufFormat(context).prepare(path, progress=NoProgress())
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert GgufFormat(context).prepare(path, progress=NoProgress()) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    os.utime(path, ns=(1, 1))
    assert GgufFormat(context).prepare(path, progress=NoProgress()) != folder


def test_processes_at_once_convert_once(write_gguf: Write, tiny_tensors: dict[str, Any], cache: Path) -> None:
    path = write_gguf(tiny_tensors)
    code = textwrap.dedent(f"""
        import pathlib, sys
        from fourfold.checkpoints import gguf_format
        from fourfold.checkpoints.progress import NoProgress
        from fourfold.entries import CheckpointContext
        calls = []
        whole = gguf_format.convert
        def counted(*arguments):
            calls.append(1)
            whole(*arguments)
        gguf_format.convert = counted
        context = CheckpointContext(cache_folder={str(cache)!r}, describe=None)
        sys.stdin.readline()
        gguf_format.GgufFormat(context).prepare(pathlib.Path({str(path)!r}), progress=NoProgress())
        print(len(calls))
    """)
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    assert sum(int(process.communicate(timeout=60)[0]) for process in processes) == 1


def test_a_killed_conversion_leaves_nothing_that_is_trusted(
    write_gguf: Write, tiny_tensors: dict[str, Any], context: CheckpointContext, cache: Path
) -> None:
    path = write_gguf(tiny_tensors)
    code = textwrap.dedent(f"""
        import pathlib, sys, threading
        from fourfold.checkpoints import gguf_format
        from fourfold.checkpoints.progress import NoProgress
        from fourfold.entries import CheckpointContext
        def stuck(source, folder, progress):
            (folder / "config.json").write_text("half")
            print("ready", flush=True)
            threading.Event().wait(60)
        gguf_format.convert = stuck
        context = CheckpointContext(cache_folder={str(cache)!r}, describe=None)
        gguf_format.GgufFormat(context).prepare(pathlib.Path({str(path)!r}), progress=NoProgress())
    """)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=10)
    folder = GgufFormat(context).prepare(path, progress=NoProgress())
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 19
    assert [one for one in cache.iterdir() if one.suffix == ".part"] == []


def test_a_failed_conversion_leaves_nothing(
    write_gguf: Write, tiny_tensors: dict[str, Any], context: CheckpointContext, cache: Path
) -> None:
    path = write_gguf({**tiny_tensors, "blk.0.strange.weight": np.zeros((4, 4))})
    with pytest.raises(CheckpointError, match=r"has tensor blk\.0\.strange\.weight, which llama models do not use"):
        GgufFormat(context).prepare(path, progress=NoProgress())
    assert [one for one in cache.iterdir() if one.is_dir()] == []


def test_description_reads_the_header_only(
    write_gguf: Write, tiny_tensors: dict[str, Any], registry: PluginRegistry, cache: Path
) -> None:
    path = write_gguf(tiny_tensors)
    description = describe_checkpoint(ModelConfig(model=str(path)), registry, NoProgress())
    assert (description.hidden_size, description.max_model_len, description.tied_embeddings) == (32, 128, True)
    assert not cache.exists()


def test_the_embedded_model_is_described_and_converted_in_time(registry: PluginRegistry) -> None:
    # CPU seconds, which other work on the machine does not lengthen.
    start = time.process_time()
    describe_checkpoint(ModelConfig(model="smollm2"), registry, NoProgress())
    assert time.process_time() - start < 0.5
    start = time.process_time()
    resolve_checkpoint(ModelConfig(model="smollm2"), registry, NoProgress())
    assert time.process_time() - start < 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "falcon"}, "has architecture 'falcon'; supported in GGUF files: gemma, gemma2"),
        ({"keys": lambda w: w.add_uint16("split.count", 3)}, "is one of 3 parts"),
        ({"keys": lambda w: w.add_key_length(8) or w.add_value_length(4)}, "values of another size than keys"),
        ({"keys": lambda w: w.add_sliding_window(8), "architecture": "qwen2"}, "a sliding window, which is not"),
    ],
)
def test_what_cannot_be_expressed(
    write_gguf: Write, tiny_tensors: dict[str, Any], context: CheckpointContext, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        GgufFormat(context).read_config(write_gguf(tiny_tensors, **change))


def test_mixtures_of_experts_are_refused(
    write_gguf: Write, tiny_tensors: dict[str, Any], registry: PluginRegistry
) -> None:
    path = write_gguf(tiny_tensors, keys=lambda writer: writer.add_expert_count(8))
    with pytest.raises(ConfigError, match="num_local_experts: 8, but LlamaForCausalLM has no mixture of experts"):
        describe_checkpoint(ModelConfig(model=str(path)), registry, NoProgress())


def test_llama3_frequencies_become_settings(
    write_gguf: Write, tiny_tensors: dict[str, Any], context: CheckpointContext
) -> None:
    from fourfold.layers.rotary import inverse_frequencies
    from fourfold.models.description import RotaryDescription

    rotary = RotaryDescription(kind="llama3", theta=1e4, dim=64, factor=8.0, original_max_position=8192)
    plain = inverse_frequencies(RotaryDescription(theta=1e4, dim=64), 1)
    divisors = (plain / inverse_frequencies(rotary, 1)).numpy()
    tensors = {**tiny_tensors, "rope_freqs.weight": divisors}
    config = GgufFormat(context).read_config(write_gguf(tensors))
    assert config["rope_scaling"]["rope_type"] == "llama3"
    assert config["rope_scaling"]["factor"] == pytest.approx(8.0)
    folder = GgufFormat(context).prepare(write_gguf(tensors), progress=NoProgress())
    assert "rope_freqs.weight" not in read_folder(GgufFormat(context), folder)
    tensors["rope_freqs.weight"] = divisors * np.linspace(1, 2, len(divisors))
    with pytest.raises(CheckpointError, match="scales its rotary frequencies in a way that is not supported"):
        GgufFormat(context).read_config(write_gguf(tensors, name="other.gguf"))


def test_a_folder_with_one_file(
    write_gguf: Write, tiny_tensors: dict[str, Any], registry: PluginRegistry, tmp_path: Path
) -> None:
    (tmp_path / "sub").mkdir()
    write_gguf(tiny_tensors, name="sub/one.gguf")
    config = ModelConfig(model=str(tmp_path / "sub"))
    assert resolve_checkpoint(config, registry, NoProgress()).description.vocab_size == 19
    write_gguf(tiny_tensors, name="sub/two.gguf")
    with pytest.raises(CheckpointError, match=r"holds several \.gguf files; name one of them"):
        resolve_checkpoint(config, registry, NoProgress())


def test_progress_counts_tensors(write_gguf: Write, tiny_tensors: dict[str, Any], tmp_path: Path) -> None:
    class Counting(NoProgress):
        total = done = 0

        def task(self, name: str, total: int) -> None:
            self.total = total

        def advance(self, steps: int) -> None:
            self.done += steps

    progress = Counting()
    (tmp_path / "out").mkdir()
    convert(write_gguf(tiny_tensors), tmp_path / "out", progress)
    assert progress.total == progress.done == len(tiny_tensors)


def test_weights_load_in_torch(write_gguf: Write, tiny_tensors: dict[str, Any], registry: PluginRegistry) -> None:
    from fourfold.config.engine_config import EngineConfig
    from fourfold.entries import WorkerContext
    from fourfold.layout import ParallelLayout
    from fourfold.models.loading import load_model

    config = EngineConfig(model=ModelConfig(model=str(write_gguf(tiny_tensors))))
    decoder = load_model(
        WorkerContext(config=config, layout=ParallelLayout(), rank=0),
        registry,
        resolve_checkpoint(config.model, registry, NoProgress()),
        device=torch.device("cpu"),
        dtype=torch.float32,
        progress=NoProgress(),
    )
    assert decoder.logits(torch.ones(1, 32)).shape == (1, 19)
