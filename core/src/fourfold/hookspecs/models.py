"""Offers that turn a model into text: arithmetic, architectures, checkpoints, tokenizers, parsers and routes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fourfold.markers import hookspec

if TYPE_CHECKING:
    from fourfold.entries import (
        AttentionBackendEntry,
        CheckpointFormatEntry,
        CheckpointSourceEntry,
        LinearMethodEntry,
        ModelEntry,
        OperatorsEntry,
        ReasoningParserEntry,
        RoutesEntry,
        TokenizerEntry,
        ToolParserEntry,
    )


@hookspec
def fourfold_linear_methods() -> list[LinearMethodEntry]:
    """Offer linear methods, each under a name for ``--linear-method``: the arithmetic of a linear layer's shard.

    Called once in every process, when plugins are loaded. ``build(ComputeContext)`` runs on every rank and returns a
    ``fourfold.contracts.linear_method.LinearMethod``.

    Returns a list of entries. Two plugins that offer one name are an error.

    Example::

        from fourfold import hookimpl
        from fourfold.entries import LinearMethodEntry


        def build(context):
            from my_plugin.linear import Int8Linear

            return Int8Linear(context.device, context.dtype)


        @hookimpl
        def fourfold_linear_methods():
            return [LinearMethodEntry(name="int8", build=build, summary="weights rounded to 8 bits")]
    """
    raise NotImplementedError


@hookspec
def fourfold_attention_backends() -> list[AttentionBackendEntry]:
    """Offer attention backends, each under a name for ``--attention``: a paged KV cache and attention over it.

    Called once in every process, when plugins are loaded. ``build(AttentionContext)`` runs once a layer on every rank
    and returns a ``fourfold.contracts.attention_backend.AttentionBackend``. One with the capability ``fp8_cache`` is
    also built for --kv-cache-dtype fp8, which others are refused for. One with ``latent_cache`` keeps the latents of
    latent attention once (``AttentionSpec.shared_values``), one with ``latent_heads`` the heads that are made of them;
    others are taken for such models by name alone, and keep heads.

    Returns a list of entries. Two plugins that offer one name are an error.

    Example::

        from fourfold import hookimpl
        from fourfold.entries import AttentionBackendEntry, Suitability


        def build(context):
            from my_plugin.attention import FlashAttention

            return FlashAttention(context.spec)


        def suits(config):
            if config.model.dtype == "float32":
                return Suitability(score=0, reason="computes in bfloat16 only; use --dtype bfloat16")
            return Suitability(score=20, reason="fused, for bfloat16")


        @hookimpl
        def fourfold_attention_backends():
            return [AttentionBackendEntry(name="flash", build=build, suits=suits)]
    """
    raise NotImplementedError


@hookspec
def fourfold_operators() -> list[OperatorsEntry]:
    """Offer operators, each under a name for ``--operators``: norms, activations and vocabulary-wide reductions.

    Called once in every process, when plugins are loaded. ``build(ComputeContext)`` runs on every rank and returns a
    ``fourfold.contracts.operators.Operators``.

    Returns a list of entries. Two plugins that offer one name are an error.

    Example::

        from fourfold import hookimpl
        from fourfold.entries import OperatorsEntry


        def build(context):
            from my_plugin.operators import FusedOperators

            return FusedOperators(context.device)


        @hookimpl
        def fourfold_operators():
            return [OperatorsEntry(name="fused", build=build, summary="norms fused with the residual")]
    """
    raise NotImplementedError


@hookspec
def fourfold_models() -> list[ModelEntry]:
    """Offer models: how a ``config.json`` of some architectures becomes a description that the decoder is built from.

    Called once in every process, when plugins are loaded. ``build(config_json)`` imports no torch and returns a
    ``fourfold.models.description.ModelDescription``.

    Returns a list of entries. Two plugins that offer one name are an error.

    Example::

        from fourfold import hookimpl
        from fourfold.entries import ModelEntry


        def describe(config_json):
            from my_plugin.olmo import describe_olmo

            return describe_olmo(config_json)


        @hookimpl
        def fourfold_models():
            return [ModelEntry(name="olmo", architectures=("OlmoForCausalLM",), build=describe)]
    """
    raise NotImplementedError


@hookspec
def fourfold_checkpoint_formats() -> list[CheckpointFormatEntry]:
    """Offer checkpoint formats, each under a name for ``--load-format``: how a model's tensors are read.

    Called once in every process, when plugins are loaded. ``build(CheckpointContext)`` returns a
    ``fourfold.contracts.checkpoint.CheckpointFormat``; with ``auto`` the one that recognizes the path is used.

    Returns a list of entries. Two plugins that offer one name are an error.

    Example::

        from fourfold import hookimpl
        from fourfold.entries import CheckpointFormatEntry


        def build(context):
            from my_plugin.npz import NpzFormat

            return NpzFormat(context.cache_folder)


        @hookimpl
        def fourfold_checkpoint_formats():
            return [CheckpointFormatEntry(name="npz", build=build, summary="config.json and one .npz file")]
    """
    raise NotImplementedError


@hookspec
def fourfold_checkpoint_sources() -> list[CheckpointSourceEntry]:
    """Offer checkpoint sources: how a model's name becomes a path on this host.

    Called once in every process, when plugins are loaded. ``build(CheckpointContext)`` imports no torch and returns a
    ``fourfold.contracts.checkpoint.CheckpointSource``. Sources are asked in order of ``order``, then name; the first
    that knows the name answers.

    Returns a list of entries. Two plugins that offer one name are an error.

    Example::

        from fourfold import hookimpl
        from fourfold.entries import CheckpointSourceEntry


        def build(context):
            from my_plugin.bucket import BucketSource

            return BucketSource(context.cache_folder)


        @hookimpl
        def fourfold_checkpoint_sources():
            return [CheckpointSourceEntry(name="bucket", order=40, build=build, summary="s3://bucket/model")]
    """
    raise NotImplementedError


@hookspec
def fourfold_tokenizers() -> list[TokenizerEntry]:
    """Offer tokenizers, each under a name for ``--tokenizer``: text to token ids and back.

    Called once in every process, when plugins are loaded. ``build(TokenizerContext)`` runs in every API server,
    imports no torch and returns a ``fourfold.contracts.tokenizer.Tokenizer``.

    Returns a list of entries. Two plugins that offer one name are an error.

    Example::

        from fourfold import hookimpl
        from fourfold.entries import TokenizerEntry


        def build(context):
            from my_plugin.tekken import TekkenTokenizer

            return TekkenTokenizer(context.folder)


        @hookimpl
        def fourfold_tokenizers():
            return [TokenizerEntry(name="tekken", build=build, summary="reads tekken.json")]
    """
    raise NotImplementedError


@hookspec
def fourfold_tool_parsers() -> list[ToolParserEntry]:
    """Offer tool parsers: how tool calls are found in generated text.

    Called once in every process, when plugins are loaded. ``build(None)`` is not called yet: the server refuses
    requests with tools.

    Returns a list of entries. Two plugins that offer one name are an error.

    Example::

        from fourfold import hookimpl
        from fourfold.entries import ToolParserEntry


        def build(context):
            from my_plugin.tools import HermesParser

            return HermesParser()


        @hookimpl
        def fourfold_tool_parsers():
            return [ToolParserEntry(name="hermes", build=build, summary="<tool_call> tags")]
    """
    raise NotImplementedError


@hookspec
def fourfold_reasoning_parsers() -> list[ReasoningParserEntry]:
    """Offer reasoning parsers: how reasoning is separated from the answer.

    Called once in every process, when plugins are loaded. ``build(None)`` is not called yet: reasoning stays in
    the answer.

    Returns a list of entries. Two plugins that offer one name are an error.

    Example::

        from fourfold import hookimpl
        from fourfold.entries import ReasoningParserEntry


        def build(context):
            from my_plugin.reasoning import ThinkTags

            return ThinkTags()


        @hookimpl
        def fourfold_reasoning_parsers():
            return [ReasoningParserEntry(name="think", build=build, summary="<think> tags")]
    """
    raise NotImplementedError


@hookspec
def fourfold_routes() -> list[RoutesEntry]:
    """Offer HTTP routes that the API server mounts beside its own.

    Called once in every process, when plugins are loaded; ``build(application state)`` runs in every API server,
    imports no torch and returns a ``fastapi.APIRouter``. The API key guards these routes too.

    Returns a list of entries. Two plugins that offer one name are an error.

    Example::

        from fourfold import hookimpl
        from fourfold.entries import RoutesEntry


        def build(state):
            from my_plugin.routes import router

            return router(state)


        @hookimpl
        def fourfold_routes():
            return [RoutesEntry(name="billing", build=build, summary="/billing")]
    """
    raise NotImplementedError
