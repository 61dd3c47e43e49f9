"""Loads the text side of a model: tokenizer, chat template, stop tokens. Imports no torch; weights are the engine's."""

from __future__ import annotations

from fourfold.checkpoints.progress import make_progress
from fourfold.checkpoints.resolve import resolve_checkpoint
from fourfold.config.engine_config import EngineConfig
from fourfold.entries import TokenizerContext
from fourfold.plugins import PluginRegistry
from fourfold.selection import select
from fourfold.text.chat_template import load_chat_template
from fourfold.text.eos_tokens import load_eos_token_ids
from fourfold_server.state import ServedModel


def load_served_model(config: EngineConfig, registry: PluginRegistry) -> ServedModel:
    """Prepare the checkpoint, converting it if need be, and read what API servers need of it.

    An engine that starts at the same time waits for the same conversion. Raises ConfigError and PluginError.
    """
    progress = make_progress()
    try:
        checkpoint = resolve_checkpoint(config.model, registry, progress)
    finally:
        progress.close()
    tokenizers = registry.tokenizers()
    selection = select("tokenizer", tokenizers, config.model.tokenizer, config)
    tokenizer = selection.entry.build(TokenizerContext(folder=str(checkpoint.folder)))
    return ServedModel(
        tokenizer=tokenizer,
        chat_template=load_chat_template(checkpoint.folder, tokenizer, override=config.model.chat_template),
        eos_token_ids=load_eos_token_ids(checkpoint.folder),
        vocabulary_size=checkpoint.description.vocab_size,
    )
