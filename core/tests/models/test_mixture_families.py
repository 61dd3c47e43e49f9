"""Every family with a mixture of experts against transformers, whatever its checkpoint calls and stacks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fourfold.errors import CheckpointError, ConfigError
from fourfold.models.deepseek_family import describe_deepseek
from fourfold.models.layer_costs import stage_costs, stage_memory
from fourfold.models.mixture_families import describe_qwen_moe

SaveRandom = Callable[..., tuple[Path, Any]]
Reference = Callable[[Any, list[int]], torch.Tensor]

SMALL: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2}
V2: dict[str, Any] = {**LATENT, "routed_scaling_factor": 1.7}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.3,
    "mscale_all_dim": 0.7,
}
FAMILIES: list[tuple[str, str, dict[str, Any]]] = [
    ("plain", "Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    ("sliding", "Mixtral", {"num_local_experts": 5, "sliding_window": 9}),
    ("shared", "Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 40}),
    (
        "some-dense",
        "Qwen2Moe",
        {**EXPERTS, "shared_expert_intermediate_size": 40, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    (
        "sliding",
        "Qwen2Moe",
        {**EXPERTS, "shared_expert_intermediate_size": 40, "use_sliding_window": True, "sliding_window": 7},
    ),
    ("plain", "Olmoe", {"num_experts": 7, "num_experts_per_tok": 3}),
    ("clipped", "Olmoe", {"num_experts": 7, "num_experts_per_tok": 3, "clip_qkv": 0.7, "num_key_value_heads": 6}),
    ("plain", "DeepseekV2", V2),
    ("no-query-latent", "DeepseekV2", {**V2, "q_lora_rank": None}),
    ("groups", "DeepseekV2", {**V2, **GROUPS, "topk_method": "group_limited_greedy"}),
    ("yarn", "DeepseekV2", {**V2, "rope_parameters": YARN}),
    ("wide-values", "DeepseekV2", {**V2, "v_head_dim": 24, "attention_bias": True}),
    ("plain", "DeepseekV3", {**LATENT, **GROUPS}),
    ("not-normalized", "DeepseekV3", {**LATENT, **GROUPS, "norm_topk_prob": False, "q_lora_rank": None}),
    ("not-interleaved", "DeepseekV3", {**LATENT, "n_group": 1, "topk_group": 1, "rope_interleave": False}),
    ("yarn-biased", "DeepseekV3", {**LATENT, **GROUPS, "rope_parameters": YARN, "attention_bias": True}),
    ("sliding", "Qwen3Moe", {**EXPERTS, "head_dim": 16, "use_sliding_window": True, "sliding_window": 7}),
    ("plain", "Qwen3Moe", {**EXPERTS, "head_dim": 16}),
    ("normalized", "Qwen3Moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    ("some-dense", "Qwen3Moe", {**EXPERTS, "head_dim": 16, "decoder_sparse_step": 2, "mlp_only_layers": [2]}),
]


def prompt(length: int) -> list[int]:
    return torch.randint(3, 131, (length,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize(
    ("family", "settings"), [one[1:] for one in FAMILIES], ids=[f"{b}-{a}" for a, b, _ in FAMILIES]
)
def test_logits_equal_transformers(
    family: str,
    settings: dict[str, Any],
    save_random: SaveRandom,
    reference_logits: Reference,
    load_decoder: Callable[..., Any],
    paged: Any,
) -> None:
    folder, model = save_random(family, **{**SMALL, **settings})
    ids = prompt(45)
    expected = reference_logits(model, ids)
    assert expected.std() > 0.05, "a model whose logits are all alike tests nothing"
    steps = paged(load_decoder(folder))
    pieces = [steps.step({0: ids[:33]})]
    pieces += [steps.step({0: [token]}) for token in ids[33:]]
    assert (torch.cat(pieces) - expected).abs().max() < 1e-3


@pytest.mark.parametrize("fp8", [False, True])
def test_latents_are_cached_once_in_place_of_all_heads(
    fp8: bool, save_random: SaveRandom, reference_logits: Reference, load_decoder: Callable[..., Any], paged: Any
) -> None:
    folder, model = save_random("DeepseekV3", **{**SMALL, **LATENT, **GROUPS})
    ids = prompt(45)
    expected = reference_logits(model, ids)
    nbytes = []
    for lora in (False, True):  # with adapters it is heads
        decoder = load_decoder(folder, fp8_cache=fp8, lora=lora)
        steps = paged(decoder)
        pieces = [steps.step({0: ids[:33]}), *(steps.step({0: [token]}) for token in ids[33:])]
        assert (torch.cat(pieces) - expected).abs().max() < (expected.abs().max() / 4 if fp8 else 1e-3)
        spec = decoder.kv_cache_specs()[0]
        nbytes.append(spec.bytes_per_block // spec.block_size)
    assert nbytes == ([20 + 8 + 4, 2 * 6 * (20 + 4)] if fp8 else [4 * (20 + 8), 4 * 2 * 6 * 20])


def test_a_checkpoint_in_fp8_blocks_is_the_model_of_its_rounded_weights(
    save_random: SaveRandom, reference_logits: Reference, load_decoder: Callable[..., Any], paged: Any
) -> None:
    folder, model = save_random("DeepseekV3", **{**SMALL, **LATENT, **GROUPS})
    (file,) = folder.glob("*.safetensors")
    stored, rounded, block = {}, model.state_dict(), 16
    for name, weight in load_file(file).items():
        if not name.endswith("_proj.weight"):
            stored[name] = weight
            continue
        tiles = [-(-size // block) for size in weight.shape]
        padded = torch.zeros(tiles[0] * block, tiles[1] * block)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        scales = padded.view(tiles[0], block, tiles[1], block).abs().amax((1, 3)) / 448
        factors = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[: weight.shape[0], : weight.shape[1]]
        stored[name] = (weight / factors).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
        if name in rounded:
            rounded[name].copy_(stored[name].float() * factors)
    save_file(stored, file)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [block, block], "fmt": "e4m3"}
    (folder / "config.json").write_text(json.dumps(config))
    for layer, expert, part in itertools.product(range(3), range(8), ("gate", "up", "down")):
        name = f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
        if name in stored and name not in rounded:  # the reference stacks experts
            stacked = rounded[f"model.layers.{layer}.mlp.experts.{'down' if part == 'down' else 'gate_up'}_proj"][
                expert
            ]
            factors = stored[f"{name}_scale_inv"].repeat_interleave(block, 0).repeat_interleave(block, 1)
            values = stored[name].float() * factors[: stored[name].shape[0], : stored[name].shape[1]]
            half = len(stacked) // 2
            target = stacked if part == "down" else stacked[:half] if part == "gate" else stacked[half:]
            target.copy_(values)
    ids = prompt(30)
    expected = reference_logits(model, ids)
    assert (paged(load_decoder(folder)).step({0: ids}) - expected).abs().max() < 1e-3


@pytest.mark.parametrize("name", ["Mixtral-plain", "Qwen2Moe-shared"])
def test_stacked_experts_are_read_too(
    name: str, save_random: SaveRandom, load_decoder: Callable[..., Any], paged: Any
) -> None:
    family, settings = next(one[1:] for one in FAMILIES if f"{one[1]}-{one[0]}" == name)
    folder, model = save_random(family, **{**SMALL, **settings})
    ids = prompt(20)
    expected = paged(load_decoder(folder)).step({0: ids})
    (file,) = folder.glob("*.safetensors")
    assert any(".experts.0." in name for name in load_file(file)), "saved expert by expert"
    stacked = {key: value.contiguous() for key, value in model.state_dict().items()}
    assert any(key.endswith(".experts.gate_up_proj") for key in stacked)
    save_file(stacked, file)
    assert torch.equal(paged(load_decoder(folder)).step({0: ids}), expected)


def test_a_missing_expert_is_named(save_random: SaveRandom, load_decoder: Callable[..., Any]) -> None:
    folder, _ = save_random("Qwen3Moe", **SMALL, **EXPERTS)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.experts.6.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.mlp\.experts\.6\.up_proj\.weight"):
        load_decoder(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: 9 and num_experts: 8; a token cannot go to more experts"),
        ({"num_experts": None}, "config.json has no num_experts; add it"),
        ({"moe_intermediate_size": None}, "config.json has no moe_intermediate_size; add it"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step: 0; a whole number above 0"),
        ({"mlp_only_layers": ["1"]}, r"mlp_only_layers: \['1'\]; the numbers of layers"),
        ({"mlp_only_layers": [[1]]}, r"mlp_only_layers: \[\[1\]\]; the numbers of layers"),
    ],
)
def test_what_cannot_be_honoured_is_refused(change: dict[str, Any], message: str) -> None:
    values = {**SMALL, **EXPERTS, "num_experts": 8, "architectures": ["Qwen3MoeForCausalLM"]}
    with pytest.raises(ConfigError, match=message):
        describe_qwen_moe({**values, **change})


DEEPSEEK: dict[str, Any] = {**SMALL, **LATENT, **GROUPS}


@pytest.mark.parametrize(
    ("version", "change", "message"),
    [
        (3, {"scoring_func": "softmax"}, "scoring_func: 'softmax', which DeepseekV3ForCausalLM has not"),
        (2, {"topk_method": "noaux_tc"}, "topk_method: 'noaux_tc', which DeepSeek V2 has not"),
        (2, {"norm_topk_prob": True}, "norm_topk_prob: true; no DeepSeek V2 was trained so"),
        (2, {"mlp_bias": True}, "mlp_bias: true; DeepSeek's feed-forward has no biases here"),
        (3, {"moe_layer_freq": 2}, "moe_layer_freq: 2; 1 is supported"),
        (3, {"n_group": 3}, "8 experts, n_group 3, topk_group 2 and num_experts_per_tok 3; equal groups of 2 or more"),
        (3, {"topk_group": 5}, "n_group 4, topk_group 5"),
        (3, {"topk_group": 1}, "topk_group 1 and num_experts_per_tok 3; .* enough of them for a token's experts"),
        (3, {"kv_lora_rank": None}, "config.json has no kv_lora_rank; add it"),
        (2, {"first_k_dense_replace": -1}, "first_k_dense_replace: -1; 0, or a whole number above it"),
        (3, {"num_nextn_predict_layers": 10**12}, "num_nextn_predict_layers: 1000000000000; 4096 at most"),
    ],
)
def test_deepseek_refuses_what_it_cannot_honour(version: int, change: dict[str, Any], message: str) -> None:
    architecture = {"architectures": [f"DeepseekV{version}ForCausalLM"]}
    with pytest.raises(ConfigError, match=message):
        describe_deepseek({**DEEPSEEK, **architecture, **change})


def test_no_shared_experts_may_be_said_as_0() -> None:
    values = {**DEEPSEEK, "architectures": ["DeepseekV2ForCausalLM"]}
    assert describe_deepseek({**values, "n_shared_experts": 0}) == describe_deepseek(
        {**values, "n_shared_experts": None}
    )


def test_layers_that_draft_tokens_are_passed_over(
    save_random: SaveRandom, load_decoder: Callable[..., Any], paged: Any
) -> None:
    folder, _ = save_random("DeepseekV3", **DEEPSEEK, num_nextn_predict_layers=1)
    expected = paged(load_decoder(folder)).step({0: prompt(9)})
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    save_file({**tensors, "model.layers.3.eh_proj.weight": torch.zeros(2)}, file)
    assert torch.equal(paged(load_decoder(folder)).step({0: prompt(9)}), expected)
    save_file({**tensors, "model.layers.4.eh_proj.weight": torch.zeros(2)}, file)
    with pytest.raises(CheckpointError, match=r"holds model\.layers\.4\.eh_proj\.weight"):
        load_decoder(folder)


def test_costs_count_a_tokens_experts_and_memory_counts_all() -> None:
    values = {**SMALL, **EXPERTS, "architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [0]}
    few, many = (describe_qwen_moe({**values, "num_experts": count}) for count in (4, 40))
    router = 36 * SMALL["hidden_size"]
    assert stage_costs(many).layers[1] == stage_costs(few).layers[1] + router
    assert stage_costs(many).layers[0] == stage_costs(few).layers[0]
    memory = [stage_memory(one, available=(1,), max_model_len=64, item_bytes=2, tp=1).layers for one in (few, many)]
    expert = 3 * EXPERTS["moe_intermediate_size"] * SMALL["hidden_size"]
    assert memory[1][1] - memory[0][1] == 2 * (router + 36 * expert)
