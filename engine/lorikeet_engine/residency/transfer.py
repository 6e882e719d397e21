"""Copies images from the host to the device."""

from collections.abc import Sequence

import torch


class Transfer:
    """On a CPU a copy is done when it returns; on a GPU it runs on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, image: torch.Tensor, blocks: Sequence[torch.Tensor]) -> torch.cuda.Event | None:
        """Copy the image into its blocks in turn; the event, if any, is over when that is done.

        The copy begins after what the computing stream was given so far: steps in flight may
        still read what lay in the blocks before.
        """
        sizes = [block.numel() for block in blocks]
        parts = image.split(sizes)  # type: ignore[no-untyped-call]
        if self._stream is None:
            for block, part in zip(blocks, parts, strict=True):
                block.copy_(part)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for block, part in zip(blocks, parts, strict=True):
                block.copy_(part, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return event

    def settle(self) -> None:
        """Let the computing stream wait for all copies: blocks are about to move."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
