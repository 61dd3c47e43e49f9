"""Fills a decoder from a checkpoint: every parameter once, nothing left over, one tensor in hand at a time."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fourfold.checkpoints.progress import NoProgress
from fourfold.distributed.model_parallel import GroupLinks, ModelParallel, initialize_model_parallel
from fourfold.errors import CheckpointError, ConfigError
from fourfold.layout import ParallelLayout
from fourfold.models.building import BuiltDecoder, DecoderBuilder
from fourfold.models.mixture_tensors import MixtureReader
from fourfold.models.stage_partition import Stage
from fourfold.models.tensor_table import EMBEDDING, HARMLESS, HEAD, checkpoint_tensors, layer_prefix

if TYPE_CHECKING:
    import torch

    from fourfold.checkpoints.progress import Progress
    from fourfold.checkpoints.resolve import Checkpoint
    from fourfold.contracts.checkpoint import TensorReader
    from fourfold.entries import WorkerContext
    from fourfold.models.decoder import Decoder
    from fourfold.models.description import ModelDescription
    from fourfold.plugins import PluginRegistry

_NAMED_AT_MOST = 5
_COMPARED_ROWS = 4096


def load_model(
    context: WorkerContext,
    registry: PluginRegistry,
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    parallel: ModelParallel | None = None,
    stage: Stage | None = None,
) -> Decoder:
    """This rank's decoder with its weights; raises as ``build_model`` and ``fill_model`` do."""
    built = build_model(
        context, registry, checkpoint.description, device=device, dtype=dtype, parallel=parallel, stage=stage
    )
    fill_model(built, checkpoint, progress)
    return built.decoder


def build_model(
    context: WorkerContext,
    registry: PluginRegistry,
    description: ModelDescription,
    *,
    device: torch.device,
    dtype: torch.dtype,
    parallel: ModelParallel | None = None,
    stage: Stage | None = None,
) -> BuiltDecoder:
    """This rank's decoder without weights. ``parallel`` may be left out where every group is one rank, ``stage`` where
    it holds all layers. Raises ConfigError for a backend or a cut that cannot do this model.
    """
    if parallel is None:
        # Copies of the engine are independent: a rank's groups are those within its own.
        layout = ParallelLayout(pp=context.layout.pp, tp=context.layout.tp)
        parallel = initialize_model_parallel(layout, context.rank, _refuse_to_connect)
    stage = stage or Stage(layers=range(description.num_layers))
    return DecoderBuilder(
        description,
        context.config,
        registry,
        parallel.tp,
        expert_group=parallel.ep,
        stage=stage,
        device=device,
        dtype=dtype,
        rank=context.rank,
    ).build()


def fill_model(built: BuiltDecoder, checkpoint: Checkpoint, progress: Progress) -> None:
    """Load all weights, in place of those that are there if there are any; raises as ``check_model`` does."""
    _read(built, checkpoint, progress, load=True)


def check_model(built: BuiltDecoder, checkpoint: Checkpoint) -> None:
    """Look whether ``fill_model`` can, and change nothing.

    Raises CheckpointError for tensors that are missing, left over, truncated or of the wrong shape.
    """
    _read(built, checkpoint, NoProgress(), load=False)


def _read(built: BuiltDecoder, checkpoint: Checkpoint, progress: Progress, *, load: bool) -> None:
    description = built.decoder.description
    with checkpoint.format.open(checkpoint.folder) as reader:
        known = reader if description.mixture is None else MixtureReader(reader)
        names = set(known.names())
        shapes = checkpoint_tensors(description)
        _check_names(names, built.parameters, shapes, description)
        progress.task("loading weights", len(built.parameters))
        for name, take in built.parameters.items():
            tensor = known.tensor(name)
            if tuple(tensor.shape) != shapes[name]:
                raise CheckpointError(
                    f"tensor {name} has shape {list(tensor.shape)}, but config.json makes it {list(shapes[name])}"
                )
            if load:
                take(tensor)
            progress.advance(1)
        if description.tied_embeddings and HEAD in names:
            _check_tied(known)


def _check_names(names: set[str], needed: Iterable[str], known: Iterable[str], description: ModelDescription) -> None:
    """``needed`` by this rank, ``known`` to the whole model."""
    missing = [name for name in needed if name not in names]
    left_over = sorted(name for name in names.difference(known) if not HARMLESS.search(name))
    if description.tied_embeddings:
        left_over = [name for name in left_over if name != HEAD]
    unused = tuple(layer_prefix(description.num_layers + number) for number in range(description.unused_layers))
    left_over = [name for name in left_over if not name.startswith(unused)]
    if missing:
        close = difflib.get_close_matches(missing[0], left_over, n=1)
        hint = f"; it holds {close[0]}, which nothing takes" if close else ""
        raise CheckpointError(f"the checkpoint lacks {_listed(missing)}{hint}")
    if left_over:
        raise CheckpointError(
            f"the checkpoint holds {_listed(left_over)}, which {description.architecture} with this config.json does "
            "not use; the config.json belongs to another model"
        )


def _check_tied(reader: TensorReader) -> None:
    """A tied head that is stored as well must equal the embedding, or one of the two would be lost."""
    head, embedding = reader.tensor(HEAD), reader.tensor(EMBEDDING)
    if tuple(head.shape) == tuple(embedding.shape):
        chunks = range(0, head.shape[0], _COMPARED_ROWS)
        if all(bool((head[i : i + _COMPARED_ROWS] == embedding[i : i + _COMPARED_ROWS]).all()) for i in chunks):
            return
    raise CheckpointError(
        f"{HEAD} differs from {EMBEDDING}, but config.json has tie_word_embeddings: true; set it to false"
    )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMED_AT_MOST])
    more = len(names) - _NAMED_AT_MOST
    return f"{shown} and {more} more" if more > 0 else shown


def _refuse_to_connect(group: str, ranks: tuple[int, ...], rank: int) -> GroupLinks:
    raise ConfigError(f"the {group} group has {len(ranks)} ranks; this worker connects none, use an executor that does")
