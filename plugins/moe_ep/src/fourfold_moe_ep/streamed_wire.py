"""An all-to-all whose sending has a stream of its own, for microbatches on a device that orders work itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from fourfold.contracts.mixture import AllToAll, DispatchedTokens


class StreamedWire:
    """See ``fourfold.contracts.mixture.AllToAll``: what one batch sends is on its way while another one computes.

    A phase of sending starts when what the current stream has so far is done, and the phase of receiving lets the
    current stream go on when it has ended; the host waits for nothing, and a device graph records both streams.
    """

    def __init__(self, wire: AllToAll, device: torch.device) -> None:
        """``wire`` sends on the current stream all that its phases of sending have to do."""
        self._wire = wire
        self.graph_safe = wire.graph_safe
        # Before what else there is to do: whoever waits for the rows would wait for that too.
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._sent: dict[int, tuple[Any, tuple[torch.Tensor, ...]]] = {}
        """By channel: the event, and tensors whose memory must not be given away before."""

    def dispatch_send(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, sizes: Sequence[int], channel: int = 0
    ) -> None:
        """See AllToAll."""
        with self._sending(channel, x, ids, weights):
            self._wire.dispatch_send(x, ids, weights, sizes=sizes, channel=channel)

    def dispatch_receive(self, *, channel: int = 0) -> DispatchedTokens:
        """See AllToAll."""
        self._wait(channel)
        return self._wire.dispatch_receive(channel=channel)

    def combine_send(self, partial: torch.Tensor, *, channel: int = 0) -> None:
        """See AllToAll."""
        with self._sending(channel, partial):
            self._wire.combine_send(partial, channel=channel)

    def combine_receive(self, *, channel: int = 0) -> torch.Tensor:
        """See AllToAll."""
        self._wait(channel)
        return self._wire.combine_receive(channel=channel)

    def close(self) -> None:
        """See AllToAll."""
        self._sent.clear()
        self._wire.close()

    @contextmanager
    def _sending(self, channel: int, *tensors: torch.Tensor) -> Iterator[None]:
        # Noted now, not when the other batch has queued its own work behind it.
        computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        computed.record()
        self._stream.wait_event(computed)
        with torch.cuda.stream(self._stream):
            yield
            sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
            sent.record()
        self._sent[channel] = sent, tensors

    def _wait(self, channel: int) -> None:
        sent, _ = self._sent.pop(channel)
        torch.cuda.current_stream().wait_event(sent)
