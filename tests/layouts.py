"""Tensors laid out as no kernel likes them, for the tests of several ops."""

from __future__ import annotations

import pytest
import torch

#: Rows of 48 for the most part: what `r(*sizes)` gives, seen in another way.
VIEWS = {
    "rank 1": lambda r: r(48),
    "rank 2, every second row": lambda r: r(10, 48)[::2],
    "rank 3, transposed batch": lambda r: r(4, 3, 48).transpose(0, 1),
    "rank 4, heads of a QKV": lambda r: r(2, 5, 3, 4, 48)[:, :, 1],
    "rank 4, heads transposed": lambda r: r(2, 5, 4, 48).transpose(1, 2),
    "rank 5, does not fold": lambda r: r(3, 4, 2, 5, 48).permute(2, 0, 3, 1, 4),
    "rank 6, does not fold": lambda r: r(3, 2, 4, 3, 2, 48).permute(4, 2, 0, 3, 1, 5)[:, 1:],
    "rank 6, sliced all over": lambda r: r(4, 4, 4, 4, 4, 96)[::2, 1:, :3, ::3, 1:3, 24:72],
    "expanded rows": lambda r: r(1, 48).expand(6, 48),
    "expanded in the middle": lambda r: r(3, 1, 48).expand(3, 4, 48),
    "expanded last dim": lambda r: r(6, 1).expand(6, 48),
    "transposed": lambda r: r(48, 6).t(),
    "channels last": lambda r: r(2, 48, 3, 4).to(memory_format=torch.channels_last),
    "channels last, rows of two strides": lambda r: r(2, 3, 4, 48).permute(0, 3, 1, 2).transpose(1, 3),
    "sizes of one": lambda r: r(1, 2, 1, 3, 1, 48)[:, :, :, ::2],
    "last dim through a stride": lambda r: r(6, 96)[:, ::2],
}


class RandomLayouts:
    """Choices and layouts that a number stands for."""

    def __init__(self, number: int, device: str):
        self.generator, self.device = torch.Generator().manual_seed(number), device

    def pick(self, *choices):
        return choices[torch.randint(len(choices), (), generator=self.generator).item()]

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Of this shape, behind a random permutation and slice of something larger."""
        order = torch.randperm(len(shape) - 1, generator=self.generator).tolist()
        sizes = [shape[i] for i in order] + [shape[-1]]
        step, start = self.pick(1, 1, 2), self.pick(0, 0, 1)
        big = [size * step + start for size in sizes[:-1]] + [sizes[-1] + self.pick(0, 0, 8, 3)]
        tensor = torch.randn(big, generator=self.generator).to(device=self.device, dtype=dtype)
        tensor = tensor[tuple(slice(start, start + size * step, step) for size in sizes[:-1])]
        tensor = tensor[..., tensor.shape[-1] - shape[-1] :]
        return tensor.permute(*(order.index(i) for i in range(len(order))), len(order))


#: Elements from one row to the next: more than an int32 counts.
FAR = 2**31 + 64


def room_for_far(elements: int, device: str) -> torch.Tensor:
    """FAR + elements of bf16, reserved; what is never touched takes no memory on a CPU."""
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("needs 6 GB of free GPU memory")
    try:
        return torch.empty(FAR + elements, dtype=torch.bfloat16, device=device)
    except RuntimeError:
        pytest.skip("no 4 GB to reserve")


def assert_nothing_copied(function) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    names = {event.name for event in profile.events()}
    assert any("ltx_kernels" in name for name in names), names
    assert not names & {"aten::copy_", "aten::clone", "aten::contiguous", "aten::to"}, names
