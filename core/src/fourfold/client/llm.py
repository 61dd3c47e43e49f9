"""``LLM``: an engine in this process, for batches of prompts. Imports torch only through the engine that it builds."""

from __future__ import annotations

import itertools
import logging
import os
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec

from fourfold.client.choice_batch import Choice, ChoiceBatch, EngineCores
from fourfold.client.frozen_heap import frozen_heap
from fourfold.client.replicas import Replicas
from fourfold.client.request_result import CompletionOutput, RequestResult
from fourfold.config.engine_config import EngineConfig
from fourfold.config.node_plan import check_offline_nodes
from fourfold.config.options import build_engine_config
from fourfold.config.resolution import resolve
from fourfold.engine.build import build_engine
from fourfold.engine.executor_client import ExecutorClient
from fourfold.engine.operations import Call, sleep_calls, update_calls, wake_calls
from fourfold.engine.sleep import check_level, check_tags
from fourfold.errors import ConfigError, EngineError, ExecutorClosed, RequestError, Unsupported
from fourfold.messages import AddRequest, FinishReason
from fourfold.plugins import load_plugins
from fourfold.sampling_params import MAX_SEED, SamplingParams
from fourfold.text.output_processor import Delta, OutputProcessor
from fourfold.text.seeds import choice_seed
from fourfold.text.served_model import load_served_model

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with ``prompt`` or ``prompt_token_ids``."""
Message = Mapping[str, Any]


class LLM:
    """``LLM("smollm2").generate("The capital of France is", SamplingParams(max_tokens=4))``.

    Use as a context manager, or call ``close``. One thread at a time.
    """

    def __init__(self, model: str | EngineConfig = "smollm2", **options: object) -> None:
        """``options`` are those of ``fourfold serve`` for engines, with underscores, or ``model`` is a whole config.

        With ``data_parallel_size`` above 1 the engines are processes of their own.

        Raises ConfigError, PluginError, and EngineError for a rank that failed.
        """
        registry = load_plugins()
        if not isinstance(model, EngineConfig):
            model = build_engine_config(registry.settings(), model=model, **options)
        elif options:
            raise ConfigError(f"options beside a whole config: {', '.join(options)}; put them into the config")
        check_offline_nodes(model.nodes)
        resolved = resolve(model, registry)
        logger.info("%s", "; ".join(resolved.reasons))
        self.config = resolved.config
        self._text = load_served_model(self.config, registry)
        self.tokenizer = self._text.tokenizer
        self._events = registry.events
        self.vocabulary_size = self._text.vocabulary_size
        """Token ids are 0 to this, exclusive."""
        self._core: EngineCores | None
        self._client: ExecutorClient | None
        several = self.config.parallel.data_parallel_size > 1
        # Replicas that somebody else launched are each a process like this one.
        if several and not registry.executors()[self.config.backends.executor].offline_only:
            replicas = Replicas(self.config, registry)
            self._core, self._client, self._ready = replicas, None, replicas.ready
        else:
            built = build_engine(self.config, registry)
            self._core, self._client, self._ready = built.core, built.client, built.ready
        self._seeds = random.Random(self.config.model.effective_seed)
        self._serial = itertools.count()
        self._adapters: dict[str, str] = {}
        """Name -> the name by which engines have it."""
        self._pid = os.getpid()
        if self._client is not None:  # processes of their own tell their plugins themselves
            self._events.engine_started(self._ready)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the engine and its ranks. Twice is harmless."""
        core, self._core = self._core, None
        if core is not None and os.getpid() == self._pid:  # a fork's copy is not the fork's to end
            try:
                core.shutdown()
            finally:
                if self._client is not None:
                    self._events.engine_stopped(self._ready)

    def save_sharded_state(self, folder: str | os.PathLike[str]) -> None:
        """Save what every rank holds of the weights into a new folder; ``LLM(folder)`` loads it, at any cut.

        Each rank then reads its own part alone, wherever the cut is the same. Raises WorkerError for a folder in use.
        """
        self._open_client().save_sharded_state(folder)

    def sleep(self, level: int = 1) -> None:
        """Give memory back until ``wake_up``; nothing can be generated meanwhile.

        The KV cache is let go of; at level 1 weights go from the device to the host's memory, at level 2 they are let
        go of too and read again. Raises RequestError for another level.
        """
        check_level(level)
        self._operate(sleep_calls(level))

    def wake_up(self, tags: Sequence[str] = ()) -> None:
        """Take the memory again: all of it, or that of ``weights`` or ``kv_cache`` alone. Raises RequestError."""
        check_tags(tags)
        self._operate(wake_calls(tags))

    def update_weights(self, model: str | os.PathLike[str]) -> None:
        """Go on with the weights of another checkpoint of the same model: a folder, or any name that a model may have.

        Names and shapes are checked on every rank before anything changes: raises ConfigError, or RequestError from
        several replicas. Cached prefixes are forgotten.
        """
        name = os.fspath(model)
        self._operate([("check_weights", {"model": name})])
        self._operate(update_calls(name))

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self._operate([("reset_prefix_cache", {})])

    def load_adapter(self, name: str, folder: str | os.PathLike[str]) -> None:
        """Load a LoRA adapter in PEFT's format, which ``generate`` and ``chat`` then take by its name.

        Needs ``enable_lora=True``. Raises RequestError for a name that is taken, ConfigError (RequestError from several
        replicas) for an adapter that does not fit the model.
        """
        if name in self._adapters:
            raise RequestError(f"a LoRA adapter {name!r} is loaded already; unload it first")
        # A name of its own for each load, so that nothing cached outlives an adapter.
        unique = f"{name}#{next(self._serial)}"
        self._operate([("load_adapter", {"name": unique, "folder": str(Path(folder).absolute())})])
        self._adapters[name] = unique

    def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter. Raises RequestError for one that is not loaded."""
        self._operate([("unload_adapter", {"name": self._find_adapter(name)})])
        del self._adapters[name]

    def start_profile(self, folder: str | os.PathLike[str]) -> None:
        """Trace every rank until ``stop_profile``; raises WorkerError where a profile is running."""
        self._open_client().start_profile(folder)

    def stop_profile(self) -> list[Path]:
        """Write one trace a rank into the folder and return the paths; raises WorkerError where none is running."""
        return self._open_client().stop_profile()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | None = None,
    ) -> list[RequestResult]:
        """Go on from every prompt; results are in the order of ``prompts``.

        ``params`` are one for all prompts or one each, ``adapter`` is the name of a loaded LoRA adapter. Raises
        RequestError, before anything runs, for a prompt or parameter that cannot work, and EngineError when the engine
        fails.
        """
        several = _as_list(prompts)
        return self._run([self._encode(prompt, place) for place, prompt in enumerate(several)], params, adapter)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str | None = None,
    ) -> list[RequestResult]:
        """Answer one conversation, or each of several; raises like ``generate``.

        Special tokens in messages are plain text.
        """
        template = self._text.chat_template
        if template is None:
            raise RequestError("the model has no chat template; pass chat_template=FILE", parameter="messages")
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise RequestError("messages must be a list of messages, or of conversations", parameter="messages")
        conversations: list[Any] = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        encoded = [
            template.encode(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self._run([_Encoded(None, token_ids) for token_ids in encoded], params, adapter)

    def _operate(self, calls: Sequence[Call]) -> None:
        if self._core is None:
            raise ExecutorClosed("this LLM is closed; build another one")
        self._core.operate(calls, timeout=self.config.timeouts.startup_timeout)

    def _find_adapter(self, name: str) -> str:
        if name not in self._adapters:
            raise RequestError(f"no LoRA adapter {name!r} is loaded; load_adapter does it", parameter="adapter")
        return self._adapters[name]

    def _open_client(self) -> ExecutorClient:
        if self._core is None:
            raise ExecutorClosed("this LLM is closed; build another one")
        if self._client is None:
            raise Unsupported("an LLM of several replicas cannot do this; build one with data_parallel_size=1")
        return self._client

    def _encode(self, prompt: Prompt, place: int) -> _Encoded:
        text: Any = prompt
        if isinstance(prompt, Mapping):
            known = [key for key in ("prompt", "prompt_token_ids") if key in prompt]
            if len(known) != 1:
                raise RequestError(f"prompt {place} needs one of prompt and prompt_token_ids", parameter="prompt")
            text = prompt[known[0]]
        if isinstance(text, str):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise RequestError(f"prompt {place} is no Unicode text: {error}", parameter="prompt") from error
            return _Encoded(text, self.tokenizer.encode(text))
        if not isinstance(text, Sequence) or isinstance(text, bytes | bytearray | memoryview):
            raise RequestError(
                f"prompt {place} is of type {type(text).__name__}; text, token ids, or a mapping with one of them",
                parameter="prompt",
            )
        token_ids = list(text)
        if not all(type(token_id) is int for token_id in token_ids):
            raise RequestError(f"prompt {place} has an item that is no token id", parameter="prompt")
        return _Encoded(None, token_ids)

    def _run(
        self,
        prompts: Sequence[_Encoded],
        params: SamplingParams | Sequence[SamplingParams] | None,
        adapter: str | None,
    ) -> list[RequestResult]:
        if self._core is None:
            raise ExecutorClosed("this LLM is closed; build another one")
        if os.getpid() != self._pid:
            # Threads and locks of torch do not live on in a fork: the first step would wait for ever.
            raise EngineError(f"this LLM belongs to process {self._pid}, and this is a fork of it; build one here")
        several = _params_of(params, len(prompts))
        unique = "" if adapter is None else self._find_adapter(adapter)
        choices = [
            choice
            for place, (prompt, sampling) in enumerate(zip(prompts, several))
            for choice in self._choices(prompt, sampling, place, unique)
        ]
        # The engine refuses more than it lets wait; the rest is added as requests end.
        with frozen_heap():
            ChoiceBatch(self._core, choices, limit=self.config.scheduler.max_num_waiting).run()
        following = iter(choices)
        return [_result(prompt, list(itertools.islice(following, one.n))) for prompt, one in zip(prompts, several)]

    def _choices(self, prompt: _Encoded, sampling: SamplingParams, place: int, adapter: str) -> Iterator[Choice]:
        limit, size = self._ready.max_model_len, self._text.vocabulary_size
        num_prompt = len(prompt.token_ids)
        if not 0 < num_prompt < limit:
            raise RequestError(
                f"prompt {place} has {num_prompt} tokens; 1 to {limit - 1} leave room for output",
                parameter="prompt",
                code="context_length_exceeded" if num_prompt else None,
            )
        if min(prompt.token_ids) < 0 or max(prompt.token_ids) >= size:
            raise RequestError(
                f"prompt {place} has a token id outside the vocabulary, 0 to {size - 1}", parameter="prompt"
            )
        sampling.check_vocabulary(size)
        seed = self._seeds.randint(0, MAX_SEED) if sampling.seed is None else sampling.seed
        max_tokens = min(sampling.max_tokens or limit, limit - num_prompt)
        for index in range(sampling.n):
            request = AddRequest(
                request_id=f"llm-{next(self._serial)}",
                client=0,
                prompt_token_ids=prompt.token_ids,
                sampling=msgspec.structs.replace(sampling, n=1, max_tokens=max_tokens, seed=choice_seed(seed, index)),
                eos_token_ids=self._text.eos_token_ids,
                arrival_time=time.time(),
                adapter=adapter,
            )
            yield Choice(request, OutputProcessor(self.tokenizer, request.sampling, prompt.token_ids), Delta(), [])


class _Encoded(NamedTuple):
    """A prompt as the engine gets it."""

    text: str | None
    token_ids: list[int]


def _result(prompt: _Encoded, choices: Sequence[Choice]) -> RequestResult:
    outputs = []
    for index, choice in enumerate(choices):
        total, wanted = choice.total, choice.request.sampling.logprobs is not None
        outputs.append(
            CompletionOutput(
                index=index,
                text=total.text,
                token_ids=total.token_ids,
                logprobs=[placed.logprobs for placed in total.logprobs] if wanted else None,
                finish_reason=total.finish_reason or FinishReason.ABORT,
                stop_reason=total.stop_reason,
            )
        )
    first = choices[0].total
    return RequestResult(
        prompt=prompt.text,
        prompt_token_ids=prompt.token_ids,
        prompt_logprobs=first.prompt_logprobs,
        num_cached_tokens=first.num_cached_tokens,
        outputs=outputs,
    )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt is a list of one; a list of integers is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes):
        raise RequestError(f"prompts are of type {type(prompts).__name__}; a prompt or a list", parameter="prompt")
    several: list[Any] = list(prompts)
    return [several] if several and isinstance(several[0], int) else several


def _params_of(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise RequestError("params must be SamplingParams, or a list of them", parameter="params")
    if len(params) != num_prompts:
        raise RequestError(f"there are {num_prompts} prompts and {len(params)} params; pass one, or one each")
    return params
