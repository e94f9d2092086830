"""Thresholds in a device's memory: brought there once for a Spec, right on every stream and in every captured graph."""

from __future__ import annotations

import torch
from torch import Tensor

from ..specs.caches import cached_untraced

# What a captured graph reads is kept for good: nobody tells when the last graph that replays it is gone.
_CAPTURED: dict[int, Upload] = {}
# One stream a device that carries nothing else, so that waiting for a copy on it waits for no kernel.
_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


class Upload:
    """Numbers that have landed on a device."""

    def __init__(self, numbers: tuple[float, ...], device: torch.device) -> None:
        host = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        self._streams: set[int] = set()
        self._on_gpu = device.type == "cuda"
        self.numbers = _landed(host, device) if self._on_gpu else host.to(device)

    def read(self) -> Tensor:
        """Return the numbers for kernels that are launched on the current stream."""
        if self._on_gpu:
            stream = torch.cuda.current_stream(self.numbers.device)
            if stream.cuda_stream not in self._streams:
                # When these are given up, their memory is not used again before this stream has read them.
                self.numbers.record_stream(stream)
                self._streams.add(stream.cuda_stream)
            if torch.cuda.is_current_stream_capturing():
                _CAPTURED[id(self)] = self
        return self.numbers


@cached_untraced(maxsize=256)
def upload_of(numbers: tuple[float, ...], device: torch.device) -> Upload:
    """Bring numbers to a device once, whoever asks for them."""
    return Upload(numbers, device)


def _landed(host: Tensor, device: torch.device) -> Tensor:
    """Copy numbers to a GPU and wait until they are there: some microseconds, whatever is queued on other streams."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "rollout_corr: a CUDA graph is captured, and this Spec or loss was not yet run on this device; call it "
            "once with the same arguments before the capture, which also compiles its kernels"
        )
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)
    with torch.cuda.stream(_STREAMS[device]):
        numbers = host.pin_memory().to(device, non_blocking=True)
    _STREAMS[device].synchronize()
    return numbers
