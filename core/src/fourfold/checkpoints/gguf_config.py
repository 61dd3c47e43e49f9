"""Turns GGUF metadata into the config.json that the same model has on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fourfold.errors import CheckpointError

if TYPE_CHECKING:
    from fourfold.checkpoints.gguf_file import GgufFile

ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
"""``general.architecture`` -> the architecture that config.json names. Mistral's files say llama."""

# Models whose attention scale is not 1 / sqrt(head_dim); the metadata has no key for it. Layers tell them apart.
_SCALED_BY_HIDDEN_SIZE = {("gemma2", 46), ("gemma3", 62)}


def hugging_face_config(file: GgufFile) -> dict[str, Any]:
    """A config.json as a dict. Raises CheckpointError for architectures and settings that it cannot express."""
    name = file.get("general.architecture")
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path} has architecture {name!r}; supported in GGUF files: {', '.join(sorted(ARCHITECTURES))}"
        )
    if file.get("split.count", 1) > 1:
        raise CheckpointError(
            f"{file.path} is one of {file.get('split.count')} parts; merge them with llama-gguf-split"
        )
    read = _Keys(file, name)
    heads = read.required("attention.head_count")
    hidden_size = read.required("embedding_length")
    head_dim = read.optional("attention.key_length") or hidden_size // heads
    if read.optional("attention.value_length") not in (None, head_dim):
        raise CheckpointError(f"{file.path} has values of another size than keys, which is not supported")
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path} has no tensor token_embd.weight; it holds no whole model")
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[name]],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": read.required("feed_forward_length"),
        "num_hidden_layers": read.required("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read.optional("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "max_position_embeddings": read.required("context_length"),
        "rms_norm_eps": shortest_float(read.required("attention.layer_norm_rms_epsilon")),
        "rope_theta": shortest_float(read.optional("rope.freq_base") or 1e4),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "num_local_experts": read.optional("expert_count"),
        "hidden_act": "gelu_pytorch_tanh" if name.startswith("gemma") else "silu",
        "attention_bias": name != "qwen2" and "blk.0.attn_q.bias" in file.tensors,
        "dtype": "float32",
    }
    rotated = read.optional("rope.dimension_count") or head_dim
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    config["rope_scaling"] = _rope_scaling(read, config)
    _add_windows(read, config, name)
    if name in ("gemma2", "gemma3"):
        scaled = (name, config["num_hidden_layers"]) in _SCALED_BY_HIDDEN_SIZE
        config["query_pre_attn_scalar"] = hidden_size // heads if scaled else head_dim
        config["attn_logit_softcapping"] = read.optional("attn_logit_softcapping")
        config["final_logit_softcapping"] = read.optional("final_logit_softcapping")
    if name == "gemma3":
        config["rope_local_base_freq"] = shortest_float(read.optional("rope.freq_base_swa") or 1e4)
    config["model_type"] = _model_type(config["architectures"][0])
    return {key: value for key, value in config.items() if value is not None or key.endswith("softcapping")}


def _model_type(architecture: str) -> str:
    """What transformers and others that read the folder go by."""
    kind = architecture.removesuffix("ForCausalLM").lower()
    return "gemma3_text" if kind == "gemma3" else kind


def shortest_float(value: float) -> float:
    """The shortest decimal that means the same fp32: 9.99999974e-06 was 1e-05 before it was stored."""
    return float(f"{value:.7g}")


class _Keys:
    """The keys of one architecture."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self._prefix = architecture

    def optional(self, key: str) -> Any:
        """A number or string, or None if absent."""
        value = self.file.get(f"{self._prefix}.{key}")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise CheckpointError(f"{self.file.path} has {self._prefix}.{key} that differs from layer to layer")
            return value[0]
        return value

    def required(self, key: str) -> Any:
        """A value that must be there."""
        value = self.optional(key)
        if value is None:
            raise CheckpointError(f"{self.file.path} has no key {self._prefix}.{key}")
        return value


def _rope_scaling(read: _Keys, config: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = read.optional("rope.scaling.type")
    factor = read.optional("rope.scaling.factor")
    original = read.optional("rope.scaling.original_context_length")
    if "rope_freqs.weight" in read.file.tensors:
        return _llama3_scaling(read.file, config)
    if kind in (None, "none") or not factor or factor == 1:
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": shortest_float(factor)}
    if original:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings behind a tensor of frequency divisors; only those that reproduce it are accepted."""
    from fourfold.checkpoints.gguf_dequantize import dequantize_rows

    tensor = file.tensors["rope_freqs.weight"]
    divisors = dequantize_rows(file, tensor, range(tensor.shape[0]))
    scaling = {
        "rope_type": "llama3",
        "factor": shortest_float(float(divisors.max())),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = _llama3_divisors(scaling, float(config["rope_theta"]), 2 * len(divisors))
    if any(abs(have - want) > 1e-3 * want for have, want in zip(divisors.tolist(), expected, strict=True)):
        raise CheckpointError(f"{file.path} scales its rotary frequencies in a way that is not supported")
    return scaling


def _llama3_divisors(scaling: Mapping[str, Any], theta: float, dim: int) -> list[float]:
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    divisors = []
    for i in range(0, dim, 2):
        turns = scaling["original_max_position_embeddings"] * theta ** (-i / dim) / 6.283185307179586
        blend = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - blend) / factor + blend))
    return divisors


def _add_windows(read: _Keys, config: dict[str, Any], name: str) -> None:
    window = read.optional("attention.sliding_window")
    if name in ("gemma2", "gemma3"):
        config["sliding_window"] = window
    elif window and name == "llama":
        # llama.cpp's name for Mistral is llama; only Mistral slides in every layer.
        config["architectures"] = ["MistralForCausalLM"]
        config["sliding_window"] = window
    elif window:
        raise CheckpointError(f"{read.file.path} has a sliding window, which is not supported for {name} GGUF files")
