"""Copies images from the host to the device."""

import torch


class Transfer:
    """On a CPU a copy is done when it returns; on a GPU it runs on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, image: torch.Tensor, block: torch.Tensor) -> torch.cuda.Event | None:
        """Copy the image into its block; the event, if any, is over when the copy is.

        The copy begins after what the computing stream was given so far: steps in flight may
        still read what lay in the block before.
        """
        if self._stream is None:
            block.copy_(image)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(block.device))
        with torch.cuda.stream(self._stream):
            block.copy_(image, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return event

    def settle(self) -> None:
        """Let the computing stream wait for all copies: blocks are about to move."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
