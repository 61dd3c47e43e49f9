"""A decoder with LoRA adapters against the same model with them merged, in Hugging Face's arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fourfold.checkpoints.progress import NoProgress
from fourfold.checkpoints.resolve import resolve_checkpoint
from fourfold.config.backend_config import BackendConfig
from fourfold.config.engine_config import EngineConfig
from fourfold.config.lora_config import LoraConfig
from fourfold.config.model_config import ModelConfig
from fourfold.entries import WorkerContext
from fourfold.errors import CheckpointError
from fourfold.layout import ParallelLayout
from fourfold.models.adapter_file import read_adapter
from fourfold.models.loading import build_model, fill_model
from fourfold.plugins import PluginRegistry
from fourfold.testing.lora_adapter import ALL_MODULES, write_adapter

SMALL = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
PROMPTS = ([3, 17, 150, 9, 42], [5, 5, 8], [100, 7, 66, 31])


LATENTS = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Gemma2": {"head_dim": 8},
    "DeepseekV2": {**LATENTS, "q_lora_rank": None},
    "DeepseekV3": LATENTS,
}
MODULES = {
    "DeepseekV2": ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    "DeepseekV3": ("q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_equal_merged_weights_alone_and_mixed(
    family: str,
    save_random: Callable[..., tuple[Path, Any]],
    registry: PluginRegistry,
    torch_backends: BackendConfig,
    reference_logits: Callable[[Any, list[int]], torch.Tensor],
    paged: Any,
    tmp_path: Path,
) -> None:
    folder, model = save_random(family, **{**SMALL, **FAMILIES[family]})
    lora = LoraConfig(enable_lora=True)
    config = EngineConfig(model=ModelConfig(model=str(folder)), backends=torch_backends, lora=lora)
    checkpoint = resolve_checkpoint(config.model, registry, NoProgress())
    context = WorkerContext(config=config, layout=ParallelLayout(), rank=0)
    cpu = torch.device("cpu")
    built = build_model(context, registry, checkpoint.description, device=cpu, dtype=torch.float32)
    fill_model(built, checkpoint, NoProgress())
    assert built.adapters is not None
    models = [model]
    some, all_modules = MODULES.get(family, ("q_proj", "v_proj"))[:2], MODULES.get(family, ALL_MODULES)
    for slot, options in ((1, {"modules": some, "rslora": True}), (2, {"rank": 2, "modules": all_modules})):
        merged = tmp_path / f"merged{slot}"
        written = write_adapter(checkpoint, tmp_path / f"adapter{slot}", seed=slot, merged=merged, **options)
        built.adapters.load(slot, read_adapter(written, checkpoint.description, max_rank=4))
        models.append(type(model).from_pretrained(merged, dtype=torch.float32).eval())
    expected = [reference_logits(models[slot], prompt) for slot, prompt in enumerate(PROMPTS)]
    counts = np.array([len(prompt) for prompt in PROMPTS])

    def near(logits: torch.Tensor, slot: int) -> None:
        torch.testing.assert_close(logits, expected[slot], rtol=0, atol=1e-3)

    assert built.adapters.activate(np.array([0, 1, 2]), counts, torch.from_numpy)
    together = paged(built.decoder, num_sequences=3).step(dict(enumerate(PROMPTS))).split(counts.tolist())
    for slot, prompt in enumerate(PROMPTS):
        assert built.adapters.activate(np.array([slot]), counts[slot : slot + 1], torch.from_numpy) == bool(slot)
        near(paged(built.decoder).step({0: prompt}), slot)
        near(together[slot], slot)
    assert (together[1] - reference_logits(model, PROMPTS[1])).abs().max() > 0.1  # an adapter does something

    # The model's weights can be read again beneath adapters; one of these that is not whole leaves none.
    fill_model(built, checkpoint, NoProgress())
    near(paged(built.decoder).step({0: PROMPTS[2]}), 2)
    strange = read_adapter(tmp_path / "adapter1", checkpoint.description, max_rank=4)
    name = "model.layers.0.input_layernorm"  # stands for a layer of a kind that knows no adapters
    with pytest.raises(CheckpointError, match=f"adapts {name}, a layer of a kind that cannot be adapted"):
        built.adapters.load(1, replace(strange, modules={name: next(iter(strange.modules.values()))}))
    broken = read_adapter(tmp_path / "adapter2", checkpoint.description, max_rank=4)
    broken.file.write_bytes(broken.file.read_bytes()[:-4])
    with pytest.raises(CheckpointError):
        built.adapters.load(2, broken)
    plain = paged(built.decoder).step({0: PROMPTS[2]})
    torch.testing.assert_close(plain, reference_logits(model, PROMPTS[2]), rtol=0, atol=1e-3)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_an_adapter_in_bfloat16_equals_merged_weights_up_to_rounding(
    stored: torch.dtype,
    save_random: Callable[..., tuple[Path, Any]],
    registry: PluginRegistry,
    torch_backends: BackendConfig,
    reference_logits: Callable[[Any, list[int]], torch.Tensor],
    paged: Any,
    tmp_path: Path,
) -> None:
    """The measure is how far the merged model itself is from exact arithmetic when it is run in bfloat16."""
    folder, model = save_random("Llama", **SMALL)

    def build(path: Path) -> tuple[Any, Any]:
        config = EngineConfig(
            model=ModelConfig(model=str(path)), backends=torch_backends, lora=LoraConfig(enable_lora=True)
        )
        checkpoint = resolve_checkpoint(config.model, registry, NoProgress())
        context = WorkerContext(config=config, layout=ParallelLayout(), rank=0)
        cpu = torch.device("cpu")
        built = build_model(context, registry, checkpoint.description, device=cpu, dtype=torch.bfloat16)
        fill_model(built, checkpoint, NoProgress())
        return built, checkpoint

    built, checkpoint = build(folder)
    written = write_adapter(checkpoint, tmp_path / "adapter", merged=tmp_path / "merged", alpha=2.0)
    file = written / "adapter_model.safetensors"
    save_file({name: tensor.to(stored) for name, tensor in load_file(file).items()}, file)
    built.adapters.load(1, read_adapter(written, checkpoint.description, max_rank=4))
    merged, _ = build(tmp_path / "merged")
    exact_model = type(model).from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    for prompt in PROMPTS:
        exact = reference_logits(exact_model, prompt)
        rounded = paged(merged.decoder).step({0: prompt}).float()
        built.adapters.activate(np.array([1]), np.array([len(prompt)]), torch.from_numpy)
        adapted = paged(built.decoder).step({0: prompt}).float()
        noise = (rounded - exact).abs()
        assert (adapted - exact).abs().max() <= 3 * noise.max()
        assert (adapted - exact).abs().mean() <= 2 * noise.mean()
        clear = exact.sort(dim=-1).values.diff(dim=-1)[:, -1] > 6 * noise.max()
        assert torch.equal(adapted.argmax(-1)[clear], exact.argmax(-1)[clear])
        assert (reference_logits(model, prompt) - exact).abs().max() > 10 * noise.max()  # an adapter does something
