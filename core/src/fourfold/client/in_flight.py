"""A request that has not ended: where it is, what it has brought, and how it goes on elsewhere. Knows no socket."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from fourfold.client.engine_link import EngineLink
from fourfold.contracts.load_balancer import BalancedRequest
from fourfold.engine.prefix_cache import prompt_marks
from fourfold.messages import AddRequest, FinishReason, RequestOutput

logger = logging.getLogger(__name__)

Receiver = Callable[[RequestOutput], None]
MAX_DEATHS = 2
"""Engines that may die with a request before it is taken for the cause."""


class InFlight:
    """Keeps what another engine needs to go on from where this one stopped: the prompt and all tokens so far."""

    __slots__ = ("deaths", "link", "moves", "num_tokens", "num_uncomputed", "output_token_ids", "receiver", "request")

    def __init__(self, request: AddRequest, receiver: Receiver) -> None:
        self.request = request
        self.receiver = receiver
        self.link: EngineLink | None = None
        """The engine that has it; None while it waits for one."""
        self.output_token_ids: list[int] = []
        self.moves = 0
        """Engines that it had to leave."""
        self.deaths: list[int] = []
        """Of these, the engines that died with it, and may have because of it."""
        self.num_uncomputed = 0
        """Known tokens that its engine has yet to compute before the next one."""
        self.num_tokens = 0
        """These, and output tokens still to come, at most."""

    def place(self, link: EngineLink) -> None:
        """Send it to an engine, which does all of it or the rest. Raises RequestError if that takes no messages."""
        request = self.request
        if self.moves:
            request = msgspec.structs.replace(request, output_token_ids=self.output_token_ids, attempt=self.moves)
        link.send(request)
        self.link = link
        self.num_uncomputed = len(request.prompt_token_ids) + len(self.output_token_ids)
        self.num_tokens = len(request.prompt_token_ids) + (request.sampling.max_tokens or 0)
        link.begin(self.num_tokens)

    def balanced(self, block_size: int) -> BalancedRequest:
        """What a balancer needs to know of it; ``block_size`` is that of the cache."""
        request = self.request
        tokens, salt, adapter = request.prompt_token_ids, request.cache_salt, request.adapter
        return BalancedRequest(
            num_prompt_tokens=len(tokens),
            max_tokens=request.sampling.max_tokens or 0,
            read_marks=lambda: prompt_marks(tokens, block_size, salt, adapter),
        )

    def take(self, token_ids: list[int]) -> None:
        """Note what an output brought."""
        if self.link is None or not token_ids:
            return
        self.output_token_ids += token_ids
        done = min(self.num_tokens, self.num_uncomputed + len(token_ids))
        self.num_uncomputed = 0
        self.num_tokens -= done
        self.link.progress(done)

    def deliver(self, output: RequestOutput) -> bool:
        """Whether the receiver took it: one that fails must not hurt the other requests of the message."""
        try:
            self.receiver(output)
        except Exception:
            logger.exception("the receiver of request %s failed", output.request_id)
            return False
        return True

    def fail(self, reason: str) -> None:
        """Tell the receiver that nothing more comes."""
        error = RequestOutput(
            request_id=self.request.request_id, finish_reason=FinishReason.ERROR, error=reason, error_status=503
        )
        self.deliver(error)

    def leave(self) -> None:
        """Its engine has it no more; twice is harmless."""
        if self.link is not None:
            self.link.end(self.num_tokens)
            self.link = None

    def bury(self, engine: int, *, blameless: bool) -> bool:
        """Leave an engine that is no more; returns whether it may go on on another one."""
        self.leave()
        self.moves += 1
        if not blameless:
            self.deaths.append(engine)
        return len(self.deaths) < MAX_DEATHS
