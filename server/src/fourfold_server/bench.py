"""`fourfold bench`: the load of a server over HTTP, and throughput and latency of an engine in this process."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fourfold.config.click_options import ConfigCommand, config_options
from fourfold.config.engine_config import EngineConfig
from fourfold.config.options import OptionSet
from fourfold.plugins import load_plugins
from fourfold.sampling_params import SamplingParams

if TYPE_CHECKING:
    from fourfold.client.llm import LLM

_FIRST_TOKEN_ID = 1000
"""Vocabularies mostly begin with special tokens; small ones with fewer."""
_VOCABULARY_SIZE = 48000
"""Prompts draw from below this at most, so that they are the same for all models with larger vocabularies."""
F = TypeVar("F", bound=Callable[..., Any])


def build_command() -> click.Group:
    """The command and its three subcommands."""
    group = click.Group("bench", help="Measure throughput and latency with random prompts, greedy, to full length.")
    for command in (_serve_command(), _offline_command("throughput"), _offline_command("latency")):
        group.add_command(command)
    return group


def random_prompts(count: int, length: int, seed: int, *, vocabulary_size: int = _VOCABULARY_SIZE) -> list[list[int]]:
    """``count`` prompts of ``length`` token ids; another seed gives others, so that no prefix cache helps."""
    generator = random.Random(1234567 + seed)
    stop = min(_VOCABULARY_SIZE, vocabulary_size)
    start = min(_FIRST_TOKEN_ID, stop // 2)
    return [[generator.randrange(start, stop) for _ in range(length)] for _ in range(count)]


def _workload_options(*, num_prompts: int) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        positive = click.IntRange(min=1)
        for option in (
            click.option("--json", "as_json", is_flag=True, help="Print JSON."),
            click.option("--prompt-seed", type=int, default=0, show_default=True, help="Another seed, other prompts."),
            click.option("--output-len", type=positive, default=128, show_default=True, help="Tokens of each answer."),
            click.option("--input-len", type=positive, default=128, show_default=True, help="Tokens of each prompt."),
            click.option("--num-prompts", type=positive, default=num_prompts, show_default=True, help="Prompts."),
        ):
            function = option(function)
        return function

    return decorate


def _serve_command() -> click.Command:
    @click.command("serve", help="Load a running server with streaming completions.")
    @click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The server.")
    @click.option("--model", help="The model to ask for. [default: the first that is served]")
    @click.option("--api-key", envvar="FOURFOLD_API_KEY", help="The server's API key.")
    @click.option("--concurrency", type=click.IntRange(min=1), default=16, show_default=True, help="Requests at once.")
    @click.option(
        "--vocabulary-size",
        type=click.IntRange(min=1),
        default=_VOCABULARY_SIZE,
        show_default=True,
        help="Prompts draw token ids below this; lower it for a model that has fewer.",
    )
    @_workload_options(num_prompts=64)
    def command(url: str, api_key: str | None, as_json: bool, **workload: Any) -> None:
        from fourfold_server.load_client import Target
        from fourfold_server.server_url import read_url

        report = asyncio.run(_load(Target(url=read_url(url), api_key=api_key), **workload))
        if report.completed or as_json:
            _show(dataclasses.asdict(report), report.rows(), as_json=as_json)
        if report.first_error is not None:
            hint = "; give the model's --vocabulary-size" if "vocabulary" in report.first_error else ""
            total = report.completed + report.failed
            raise click.ClickException(
                f"{report.failed} of {total} requests failed; the first: {report.first_error}{hint}"
            )

    return command


async def _load(
    target: Any,
    *,
    model: str | None,
    concurrency: int,
    num_prompts: int,
    input_len: int,
    output_len: int,
    prompt_seed: int,
    vocabulary_size: int,
) -> Any:
    from fourfold_server.load_client import complete_all, first_model
    from fourfold_server.load_report import LoadReport

    common = {
        "model": model or await first_model(target),
        "max_tokens": output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    prompts = random_prompts(num_prompts, input_len, prompt_seed, vocabulary_size=vocabulary_size)
    bodies = [{**common, "prompt": prompt} for prompt in prompts]
    return LoadReport.of(await complete_all(target, bodies, concurrency))


def _offline_command(name: str) -> click.Command:
    measure, num_prompts, summary = {
        "throughput": (_throughput, 64, "Tokens per second of all prompts at once, in this process."),
        "latency": (_latency, 1, "Time to the first token and between tokens of one batch, in this process."),
    }[name]
    settings = load_plugins().settings()
    options = OptionSet((EngineConfig,), settings)

    @click.command(name, cls=ConfigCommand, help=summary)
    @click.argument("model", required=False)
    @click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True, help="Measurements.")
    @_workload_options(num_prompts=num_prompts)
    @config_options(options, skip={"model"})
    def command(model: str | None, config_file: str | None, **given: Any) -> None:
        from fourfold.client.llm import LLM

        repeat, as_json, output_len = given.pop("repeat"), given.pop("as_json"), given.pop("output_len")
        shape = (given.pop("num_prompts"), given.pop("input_len"))
        seed = given.pop("prompt_seed")
        read = options.read({"model": model, **given}, file=Path(config_file) if config_file else None)
        config = options.build(EngineConfig, read)
        with LLM(config) as llm:
            # The first round pays for what is set up on first use.
            rounds = [
                random_prompts(*shape, seed + index, vocabulary_size=llm.vocabulary_size) for index in range(repeat + 1)
            ]
            results = [measure(llm, prompts, output_len) for prompts in rounds][1:]
        values = {key: sorted(result[key] for result in results) for key in results[0]}
        rows = [(f"{key} (min median max)", _spread(numbers)) for key, numbers in values.items()]
        _show(values, rows, as_json=as_json)

    return command


def _throughput(llm: LLM, prompts: list[list[int]], output_len: int) -> dict[str, float]:
    seconds = _generate(llm, prompts, output_len)
    return {"seconds": seconds, "output tokens per second": len(prompts) * output_len / seconds}


def _latency(llm: LLM, prompts: list[list[int]], output_len: int) -> dict[str, float]:
    """Prefill by asking for one token; the rest is what a longer answer takes more. New prompts: no cache helps."""
    others = [[*reversed(prompt)] for prompt in prompts]
    first = _generate(llm, others, 1)
    whole = _generate(llm, prompts, output_len)
    decode = (whole - first) / max(1, output_len - 1)
    return {"time to first token, ms": first * 1000, "time per output token, ms": decode * 1000}


def _generate(llm: LLM, prompts: list[list[int]], output_len: int) -> float:
    sampling = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, sampling)
    return time.perf_counter() - start


def _spread(numbers: Sequence[float]) -> str:
    return f"{numbers[0]:.2f} {numbers[len(numbers) // 2]:.2f} {numbers[-1]:.2f}"


def _show(values: dict[str, Any], rows: list[tuple[str, str]], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(values, indent=2))
        return
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        click.echo(f"{name:<{width}}  {value}")
