"""Which model is served, and in what precision and length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fourfold.errors import ConfigError

Dtype = Literal["auto", "bfloat16", "float16", "float32"]
LoadFormat = str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The model and how it is loaded."""

    model: str = "smollm2"
    """A name that a checkpoint source knows, a folder, a .gguf file, or a hub id such as org/name."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    served_model_name: tuple[str, ...] = ()
    """Names that clients may use; the first is the one in replies. Default: the model's."""
    dtype: Dtype = "auto"
    """Precision of weights and activations; auto is bfloat16 where the device computes in it, else float32."""
    max_model_len: int | None = None
    """Prompt and output tokens of one request at most; default: what the model was made for."""
    load_format: LoadFormat = "auto"
    """How weights are read: auto, safetensors, sharded, gguf, or dummy (seeded random, for benchmarks)."""
    tokenizer: str = "auto"
    """Name of the tokenizer backend."""
    chat_template: str | None = None
    """A file with a jinja2 chat template in place of the model's."""
    seed: int | None = None
    """Seed of dummy weights and, with LLM, of requests that bring none (a server draws theirs anew); default: 0."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("the model is an empty string; name a model, a folder or a .gguf file")
        for option, texts in (
            ("--served-model-name", self.served_model_name),
            ("--revision", (self.revision,)),
            ("--chat-template", (self.chat_template,)),
        ):
            if any(text is not None and not text.strip() for text in texts):
                raise ConfigError(f"{option} is empty; give a value, or leave the option out")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"--max-model-len is {self.max_model_len}; 2 or more")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed is {self.seed}; from 0 to 2**63 - 1")

    @property
    def effective_seed(self) -> int:
        """The seed to draw with, given or not."""
        return self.seed or 0

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names that clients may use, never empty."""
        return self.served_model_name or (self.model,)
