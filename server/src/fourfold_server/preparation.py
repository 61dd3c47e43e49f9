"""From read fields to engine requests: prompts become token ids, lengths are checked, choices get ids and seeds."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from fourfold.errors import RequestError
from fourfold.messages import AddRequest
from fourfold.sampling_params import MAX_N, SamplingParams
from fourfold.text.seeds import choice_seed, random_seed
from fourfold.text.served_model import ServedModel
from fourfold_server.context_length import refuse_oversized, room_for_output
from fourfold_server.sampling_fields import build_sampling
from fourfold_server.state import ServerState

MAX_CHOICES = 1024
"""Prompts times n of one request."""


class Prompt(NamedTuple):
    """One prompt as the engine gets it."""

    token_ids: list[int]
    text: str | None = None
    """As the client sent it; None when it sent token ids, or messages."""


def encode_prompts(
    model: ServedModel, prompts: Sequence[str | list[int]], *, limit: int, add_special_tokens: bool
) -> list[Prompt]:
    """Tokenize text, check token ids. Runs in the text pool. Raises RequestError that names the prompt's index."""
    encoded = []
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            refuse_oversized(model.tokenizer, prompt, limit, parameter="prompt")
            token_ids = model.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            encoded.append(Prompt(token_ids, prompt))
        else:
            check_token_ids(prompt, model.vocabulary_size, place=f"prompt {index}", parameter="prompt")
            encoded.append(Prompt(prompt))
        if not prompt or not encoded[-1].token_ids:
            raise RequestError(f"prompt {index} is empty; it needs at least one token", parameter="prompt")
    return encoded


def encode_chat(model: ServedModel, messages: list[dict[str, Any]], values: Mapping[str, Any], *, limit: int) -> Prompt:
    """Render and tokenize. Runs in the text pool. Raises RequestError."""
    template = model.chat_template
    if template is None:
        raise RequestError("the model has no chat template; serve it with --chat-template", parameter="messages")
    go_on = values["continue_final_message"]
    if go_on and values["add_generation_prompt"]:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other", parameter="continue_final_message"
        )
    if go_on and messages[-1]["role"] != "assistant":
        raise RequestError(
            "continue_final_message needs a final message of role assistant", parameter="continue_final_message"
        )
    for message in messages:
        refuse_oversized(model.tokenizer, message["content"], limit, parameter="messages")
    if "developer" not in template.source:
        # A template that knows no developer would treat it as a stranger; OpenAI's is the newer name of system.
        messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
    token_ids = template.encode(
        messages,
        add_generation_prompt=values["add_generation_prompt"] is not False,
        continue_final_message=go_on,
        variables=values["chat_template_kwargs"],
    )
    if not token_ids:
        raise RequestError("messages render to an empty prompt; it needs at least one token", parameter="messages")
    return Prompt(token_ids)


def check_token_ids(token_ids: Sequence[int], vocabulary_size: int, *, place: str, parameter: str) -> None:
    """Raise RequestError for ids outside the vocabulary."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocabulary_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocabulary_size)
        raise RequestError(
            f"{place} has token id {wrong}; the vocabulary is 0 to {vocabulary_size - 1}", parameter=parameter
        )


def check_choices(n: int, num_prompts: int) -> None:
    """Raise RequestError for more choices than one request may have. Comes before any prompt is tokenized."""
    if not 1 <= n <= MAX_N:
        raise RequestError(f"n is {n}; from 1 to {MAX_N}", parameter="n")
    if n * num_prompts > MAX_CHOICES:
        parameter = "prompt" if num_prompts > MAX_CHOICES else "n"
        raise RequestError(
            f"{num_prompts} prompts with n {n} are {n * num_prompts} choices; {MAX_CHOICES} at most",
            parameter=parameter,
        )


def build_requests(
    state: ServerState,
    model: ServedModel,
    prompts: Sequence[Prompt],
    values: Mapping[str, Any],
    *,
    request_id: str,
    limit: int,
    max_tokens: int | None,
    **sampling_fields: Any,
) -> list[AddRequest]:
    """One a choice, the choices of a prompt together; ``limit`` is the context. Raises RequestError."""
    # Checked as the client sent them, before max_tokens is cut to the context.
    asked = build_sampling(values, max_tokens=max_tokens, **sampling_fields)
    asked.check_vocabulary(model.vocabulary_size)
    adapter = state.find_adapter(values["model"])
    parameter = "messages" if "messages" in values else "prompt"
    requests: list[AddRequest] = []
    for prompt in prompts:
        room = room_for_output(
            len(prompt.token_ids), max_tokens, limit, strict=state.config.strict_max_tokens, parameter=parameter
        )
        seed = random_seed() if asked.seed is None else asked.seed
        for choice in range(values["n"]):
            requests.append(
                AddRequest(
                    request_id=f"{request_id}-{len(requests)}",
                    client=state.client.api_index,
                    prompt_token_ids=prompt.token_ids,
                    sampling=_at_choice(asked, room, seed, choice),
                    eos_token_ids=model.eos_token_ids,
                    priority=values["priority"],
                    arrival_time=time.time(),
                    cache_salt=values["cache_salt"],
                    adapter="" if adapter is None else adapter.unique,
                    adapter_folder="" if adapter is None else adapter.folder,
                )
            )
    return requests


def new_id(prefix: str) -> str:
    """An id that no other request has, whatever clients send."""
    return f"{prefix}-{secrets.token_hex(16)}"


def _at_choice(asked: SamplingParams, max_tokens: int, seed: int, choice: int) -> SamplingParams:
    # What the context cuts off max_tokens, it cuts off min_tokens too.
    min_tokens = min(asked.min_tokens, max_tokens)
    return msgspec.structs.replace(
        asked, n=1, max_tokens=max_tokens, min_tokens=min_tokens, seed=choice_seed(seed, choice)
    )
