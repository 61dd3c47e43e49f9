"""The text side of a model: tokenizer, chat template, stop tokens. Imports no torch; weights are the engine's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fourfold.blame import blame
from fourfold.checkpoints.progress import make_progress
from fourfold.checkpoints.resolve import resolve_checkpoint
from fourfold.entries import TokenizerContext
from fourfold.selection import select
from fourfold.text.chat_template import ChatTemplate, load_chat_template
from fourfold.text.eos_tokens import load_eos_token_ids

if TYPE_CHECKING:
    from fourfold.config.engine_config import EngineConfig
    from fourfold.contracts.tokenizer import Tokenizer
    from fourfold.plugins import PluginRegistry


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """What turns text into token ids for the engines, and back."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_ids: tuple[int, ...]
    vocabulary_size: int
    """Token ids that the engines take: 0 to this, exclusive."""


def load_served_model(config: EngineConfig, registry: PluginRegistry) -> ServedModel:
    """Prepare the checkpoint, converting it if need be, and read what stands beside its weights.

    An engine that starts at the same time waits for the same conversion. Raises ConfigError and PluginError.
    """
    progress = make_progress()
    try:
        checkpoint = resolve_checkpoint(config.model, registry, progress)
    finally:
        progress.close()
    selection = select("tokenizer", registry.tokenizers(), config.model.tokenizer, config)
    with blame(f"tokenizer {selection.entry.name!r}"):
        tokenizer = selection.entry.build(TokenizerContext(folder=str(checkpoint.folder)))
    return ServedModel(
        tokenizer=tokenizer,
        chat_template=load_chat_template(checkpoint.folder, tokenizer, override=config.model.chat_template),
        eos_token_ids=load_eos_token_ids(checkpoint.folder),
        vocabulary_size=checkpoint.description.vocab_size,
    )
