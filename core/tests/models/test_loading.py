from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fourfold.errors import CheckpointError, ConfigError
from fourfold.plugins import PluginRegistry

SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
Edit = Callable[[dict[str, torch.Tensor]], Any]
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture
def edited(save_random: Callable[..., tuple[Path, Any]]) -> Callable[..., Path]:
    def run(edit: Edit, **settings: Any) -> Path:
        folder, _ = save_random("Llama", **{**SMALL, **settings})
        file = folder / "model.safetensors"
        tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
        edit(tensors)
        save_file(tensors, file)
        return folder

    return run


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(NORM), f"the checkpoint lacks {NORM}$"),
        (lambda t: t.update({NORM + "s": t.pop(NORM)}), f"lacks {NORM}; it holds {NORM}s, which nothing takes"),
        (
            lambda t: [t.pop(name) for name in list(t) if ".1." in name],
            r"the checkpoint lacks model\.layers\.1\..* and 4 more",
        ),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(1)}),
            r"holds model\.layers\.2\.mlp\.up_proj\.weight, which LlamaForCausalLM with this config\.json does not use",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(16)}),
            r"holds model\.layers\.0\.self_attn\.q_proj\.bias, which",
        ),
        (
            lambda t: t.update({NORM: torch.ones(8)}),
            rf"tensor {NORM} has shape \[8\], but config\.json makes it \[16\]",
        ),
    ],
)
def test_every_parameter_is_filled_and_nothing_is_left(
    edited: Callable[..., Path], load_decoder: Callable[..., Any], edit: Edit, message: str
) -> None:
    folder = edited(edit)
    with pytest.raises(CheckpointError, match=message):
        load_decoder(folder)


def test_harmless_leftovers(edited: Callable[..., Path], load_decoder: Callable[..., Any]) -> None:
    buffers = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
        "model.rotary_emb.inv_freq": torch.zeros(4),
    }
    load_decoder(edited(lambda tensors: tensors.update(buffers)))


def test_tied_head_that_is_stored_as_well(edited: Callable[..., Path], load_decoder: Callable[..., Any]) -> None:
    name = "model.embed_tokens.weight"
    load_decoder(edited(lambda t: t.update({"lm_head.weight": t[name].clone()}), tie_word_embeddings=True))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight, but .*false"):
        load_decoder(edited(lambda t: t.update({"lm_head.weight": t[name] + 1}), tie_word_embeddings=True))


def test_untied_head_must_be_there(edited: Callable[..., Path], load_decoder: Callable[..., Any]) -> None:
    with pytest.raises(CheckpointError, match=r"the checkpoint lacks lm_head\.weight"):
        load_decoder(edited(lambda tensors: tensors.pop("lm_head.weight")))


def test_cache_specs(save_random: Callable[..., tuple[Path, Any]], load_decoder: Callable[..., Any]) -> None:
    folder, _ = save_random(
        "Gemma2", **{**SMALL, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 8, "num_attention_heads": 4}
    )
    decoder = load_decoder(folder)
    specs = decoder.kv_cache_specs()
    assert [specs[layer].sliding_window for layer in range(2)] == [8, 0]
    assert specs[0].block_size == 16
    assert specs[0].bytes_per_block == 2 * 16 * 1 * 8 * 4
    assert torch.empty(decoder.kv_cache_shape(1, 5)).numel() * 4 == 5 * specs[1].bytes_per_block
    assert decoder.backends == {
        "attention": "torch",
        "linear_method": "torch",
        "operators": "torch",
        "parallel_layer": "tp",
    }


def test_an_fp8_cache_is_small_and_nearly_right(
    save_random: Callable[..., tuple[Path, Any]], load_decoder: Callable[..., Any], paged: Any
) -> None:
    folder, _ = save_random("Llama", **{**SMALL, "num_key_value_heads": 1, "head_dim": 8, "num_attention_heads": 4})
    plain, small = load_decoder(folder), load_decoder(folder, fp8_cache=True)
    assert [one.kv_cache_specs()[0].bytes_per_block for one in (plain, small)] == [2 * 16 * 8 * 4, 2 * 16 * (8 + 4)]
    prompt = torch.randint(0, 40, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    wanted, found = (paged(one).step({0: prompt}) for one in (plain, small))
    error = (found - wanted).norm() / wanted.norm()
    assert 1e-5 < error < 0.05


def test_a_backend_without_an_fp8_cache_is_refused(
    save_random: Callable[..., tuple[Path, Any]], load_decoder: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = save_random("Llama", **SMALL)
    offered = PluginRegistry.attention_backends
    monkeypatch.setattr(
        PluginRegistry,
        "attention_backends",
        lambda self: {name: replace(entry, capabilities=frozenset()) for name, entry in offered(self).items()},
    )
    with pytest.raises(
        ConfigError, match=r"'torch' cannot run this model: it keeps no fp8 cache; --kv-cache-dtype auto"
    ):
        load_decoder(folder, fp8_cache=True)


BIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 20_000,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MEASURE = """
    import sys, threading
    import torch
    from fourfold import builtin_plugin
    from fourfold.checkpoints.progress import NoProgress
    from fourfold.checkpoints.resolve import resolve_checkpoint
    from fourfold.config.backend_config import BackendConfig
    from fourfold.config.engine_config import EngineConfig
    from fourfold.config.model_config import ModelConfig
    from fourfold.entries import WorkerContext
    from fourfold.layout import ParallelLayout
    from fourfold.models.loading import load_model
    from fourfold.plugins import load_plugins

    def anonymous():
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))

    class Peak(NoProgress):
        most = 0
        def advance(self, steps):
            self.most = max(self.most, anonymous())

    torch.set_num_threads(1)
    backends = BackendConfig(attention="torch", linear_method="torch", operators="torch")
    config = EngineConfig(model=ModelConfig(model=sys.argv[1], load_format=sys.argv[2]), backends=backends)
    registry = load_plugins(entry_points=False, extra={"core": builtin_plugin})
    checkpoint = resolve_checkpoint(config.model, registry, NoProgress())
    # What the first operations of torch allocate once is not the weights'.
    torch.nn.functional.linear(torch.ones(8, 8), torch.ones(8, 8)).bfloat16()
    before = anonymous()
    stop = threading.Event()
    peak = Peak()
    watcher = threading.Thread(target=lambda: [peak.advance(0) for _ in iter(lambda: stop.wait(0.002), True)])
    watcher.start()
    context = WorkerContext(config=config, layout=ParallelLayout(), rank=0)
    decoder = load_model(context, registry, checkpoint, device=torch.device("cpu"), dtype=torch.bfloat16, progress=peak)
    stop.set()
    watcher.join()
    with open("/proc/self/maps") as file:
        mapped = sum(".safetensors" in line for line in file)
    print(peak.most - before, mapped)
"""


@pytest.mark.parametrize("load_format", ["dummy", "safetensors"])
def test_anonymous_memory_while_loading(tmp_path: Path, load_format: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BIG))
    hidden, inner, vocab = 512, 2048, 20_000
    shapes = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer in range(6):
        prefix = f"model.layers.{layer}."
        for name, shape in {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (256, hidden),
            "self_attn.v_proj": (256, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }.items():
            shapes[f"{prefix}{name}.weight"] = shape
    if load_format == "safetensors":
        save_file({name: torch.ones(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURE), str(tmp_path), load_format],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    peak, mapped = map(int, process.stdout.split())
    weights = sum(torch.Size(shape).numel() for shape in shapes.values()) * 2
    largest = vocab * hidden * 4
    assert peak > weights * 0.9, "the measurement sees the weights"
    assert peak < weights + 2 * largest
    assert mapped == 0, "nothing stays mapped"
