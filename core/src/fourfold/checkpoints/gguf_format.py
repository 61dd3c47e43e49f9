"""The format ``gguf``: one file, converted once into a folder of config.json, tokenizer.json and fp32 safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold.checkpoints.conversion_cache import converted_folder, make_once
from fourfold.checkpoints.gguf_config import hugging_face_config
from fourfold.checkpoints.gguf_file import GgufFile, GgufTensor
from fourfold.checkpoints.gguf_tensors import IGNORED, TensorRule, tensor_rule
from fourfold.checkpoints.safetensors_file import SafetensorsWriter
from fourfold.checkpoints.safetensors_format import SafetensorsFormat
from fourfold.errors import CheckpointError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from fourfold.checkpoints.progress import Progress
    from fourfold.contracts.checkpoint import TensorReader
    from fourfold.entries import CheckpointContext

_VERSION = 2
"""Raised when a conversion comes out differently, so that older ones are not used."""
_CHUNK_ELEMENTS = 1 << 19
"""fp32 elements dequantised at a time: 2 MB, which stays in a core's cache."""
_THREADS = 8


class GgufFormat:
    """See the contract for each method."""

    def __init__(self, context: CheckpointContext) -> None:
        self._cache = Path(context.cache_folder)
        self._converted = SafetensorsFormat(context)

    def recognizes(self, path: Path) -> bool:
        """A .gguf file, or a folder with exactly one."""
        return path.suffix == ".gguf" or (path.is_dir() and len(list(path.glob("*.gguf"))) == 1)

    def read_config(self, path: Path) -> Mapping[str, Any]:
        """From the header, in milliseconds."""
        with _opened(_file_of(path)) as file:
            return hugging_face_config(file)

    def prepare(self, path: Path, *, progress: Progress) -> Path:
        """The folder of the conversion."""
        source = _file_of(path)
        try:
            folder = converted_folder(self._cache, source, _VERSION)
        except OSError as error:
            raise CheckpointError(f"{source} cannot be read: {error}") from error
        return make_once(folder, lambda empty: convert(source, empty, progress))

    def open(self, folder: Path) -> AbstractContextManager[TensorReader]:
        """The converted tensors."""
        return self._converted.open(folder)


def convert(source: Path, folder: Path, progress: Progress) -> None:
    """Write the whole model of ``source`` into an empty ``folder``."""
    from fourfold.checkpoints.gguf_tokenizer import build_tokenizer, generation_config, tokenizer_config

    with _opened(source) as file, ThreadPoolExecutor(_num_threads(), "convert") as pool:
        config = hugging_face_config(file)
        tokenizer = pool.submit(build_tokenizer, file)
        _convert_tensors(file, config, folder / "model.safetensors", pool, progress)
        tokenizer.result().save(str(folder / "tokenizer.json"), pretty=False)
        _write_json(folder / "config.json", config)
        _write_json(folder / "tokenizer_config.json", tokenizer_config(file))
        _write_json(folder / "generation_config.json", generation_config(file))


def _convert_tensors(
    file: GgufFile, config: Mapping[str, Any], target: Path, pool: ThreadPoolExecutor, progress: Progress
) -> None:
    from fourfold.checkpoints.gguf_dequantize import check_places

    check_places(file)
    rules = _rules(file, config)
    shapes = {rule.name: tensor.shape for tensor, rule in rules}
    progress.task(f"converting {file.path.name}", len(rules))
    writer = SafetensorsWriter(target, shapes)
    pending: set[Future[None]] = set()
    try:
        for tensor, rule in rules:
            pending.add(pool.submit(_convert_tensor, file, tensor, rule, writer))
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()
                progress.advance(1)
    finally:
        for future in pending:
            future.cancel()
        wait(pending)
        writer.close()


def _rules(file: GgufFile, config: Mapping[str, Any]) -> list[tuple[GgufTensor, TensorRule]]:
    architecture = str(file.get("general.architecture"))
    rules = []
    for tensor in file.tensors.values():
        if tensor.name in IGNORED:
            continue
        rule = tensor_rule(tensor.name, architecture, config)
        if rule is None:
            raise CheckpointError(f"{file.path} has tensor {tensor.name}, which {architecture} models do not use")
        rules.append((tensor, rule))
    return rules


def _convert_tensor(file: GgufFile, tensor: GgufTensor, rule: TensorRule, writer: SafetensorsWriter) -> None:
    import numpy as np

    from fourfold.checkpoints.gguf_dequantize import dequantize_rows

    num_rows = tensor.shape[0]
    if len(tensor.shape) == 1:
        step = num_rows
    else:
        step = max(1, _CHUNK_ELEMENTS * num_rows // tensor.size // rule.rows) * rule.rows
    written = 0
    for first in range(0, num_rows, step):
        values = dequantize_rows(file, tensor, range(first, min(first + step, num_rows)))
        if rule.restore is not None:
            values = rule.restore(values)
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        writer.write(rule.name, data, first_byte=written)
        written += len(data)


def _file_of(path: Path) -> Path:
    if path.is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if not files:
        raise CheckpointError(f"{path} has no .gguf file; name one, or leave out --load-format gguf")
    if len(files) > 1:
        raise CheckpointError(f"{path} holds {len(files)} .gguf files; name one of them")
    return files[0]


@contextmanager
def _opened(path: Path) -> Iterator[GgufFile]:
    file = GgufFile(path)
    try:
        yield file
    finally:
        file.close()


def _num_threads() -> int:
    return min(_THREADS, len(os.sched_getaffinity(0)))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")
