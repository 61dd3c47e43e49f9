"""One stage of a pipeline at work: takes activations and sampled ids, runs its layers, hands on what comes out.

Every rank of an engine gets every step; what the stages exchange is not known to the engine. Sampled ids go from the
last stage straight to the first, which needs them as input; the stages between need none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from fourfold.models.stage_partition import Stage

if TYPE_CHECKING:
    import torch

    from fourfold.contracts.attention_backend import AttentionMetadata
    from fourfold.distributed.stage_transport import StageTransport
    from fourfold.messages import StepMessage
    from fourfold.worker.device import Device
    from fourfold.worker.request_state import Int64, RequestState
    from fourfold.worker.step_inputs import StepInputs, StepPlan


class StageModel(Protocol):
    """What a stage needs of a decoder; T tokens, H hidden size."""

    @property
    def stage(self) -> Stage:
        """The layers it has."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, H]; on the first stage."""

    def run_layers(
        self,
        hidden: torch.Tensor | None,
        residual: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        metadata: Sequence[AttentionMetadata],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden, residual) [T, H] before this stage's layers -> the same after them."""

    def finish(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """(hidden, residual) -> normed hidden states [T, H]; on the last stage."""


class _Sampled(NamedTuple):
    """Ids that the last stage will send."""

    step: int
    slots: Int64


class PipelineStage:
    """Bound to one rank's layers and its ends of the transport."""

    def __init__(
        self, model: StageModel, transport: StageTransport, state: RequestState, device: Device, *, depth: int
    ) -> None:
        """``depth`` is how many steps are in the air at most."""
        self.is_last = model.stage.is_last
        self._is_first = model.stage.is_first
        self._model = model
        self._transport = transport
        self._state = state
        self._device = device
        self._depth = depth
        self._awaited: deque[_Sampled] = deque()
        self._sampled_in: dict[int, int] = {}
        """slot -> the last step that sampled for the request in it; on the first stage."""

    @property
    def waited_seconds(self) -> float:
        """Spent on other stages so far."""
        return self._transport.waited_seconds

    def take_ids(self, message: StepMessage) -> None:
        """Have the ids that ``message`` builds on, before anything of it is applied; on the first stage."""
        if not self._is_first:
            return
        # Of a slot that is free again they must not come later: they would count as the next request's.
        slots = [*message.ended, *(entry.slot for entry in message.scheduled)]
        needed = max((self._sampled_in.get(slot, -1) for slot in slots), default=-1)
        # Nor may they pile up when nothing needs them: those of steps that have returned are there.
        self._take_through(max(needed, message.step - self._depth))
        for slot in message.ended:
            self._sampled_in.pop(slot, None)

    def receive(self, step: int, plan: StepPlan) -> None:
        """Have the activations of a step, where ``run`` looks for them; beyond the first stage."""
        if not self._is_first:
            self._transport.receive_activations(step, plan.num_tokens)

    def run(
        self, inputs: StepInputs, kv_caches: Sequence[torch.Tensor], metadata: Sequence[AttentionMetadata]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden, residual) [T, H] after this stage's layers; reads stable addresses, so that it may be recorded."""
        if self._is_first:
            return self._model.run_layers(
                None, self._model.embed(inputs.token_ids), inputs.positions, kv_caches, metadata
            )
        hidden, residual = self._transport.activations(len(inputs.positions))
        return self._model.run_layers(hidden, residual, inputs.positions, kv_caches, metadata)

    def finish(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """What ``run`` returned -> normed hidden states [T, H]; on the last stage."""
        return self._model.finish(hidden, residual)

    def send(self, step: int, plan: StepPlan, hidden: torch.Tensor, residual: torch.Tensor) -> None:
        """Hand on what ``run`` returned, without the rows of padding; before the last stage."""
        self._transport.send_activations(step, hidden[: plan.num_tokens], residual[: plan.num_tokens])
        slots = plan.slots[plan.sampling]
        if self._is_first and len(slots):
            self._awaited.append(_Sampled(step, slots))
            self._sampled_in.update(dict.fromkeys(slots.tolist(), step))

    def send_ids(self, step: int, token_ids: torch.Tensor) -> None:
        """Hand the sampled ids, int64 [R], to the first stage; on the last one."""
        if len(token_ids):
            self._transport.send_ids(step, token_ids)

    def close(self) -> None:
        """Let go of the other stages; idempotent."""
        self._transport.close()

    def _take_through(self, step: int) -> None:
        while self._awaited and self._awaited[0].step <= step:
            sampled = self._awaited.popleft()
            ids = self._transport.receive_ids(sampled.step, len(sampled.slots))
            self._state.append(sampled.slots, ids.cpu().numpy())
