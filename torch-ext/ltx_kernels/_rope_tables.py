"""The tables of rope_3d: cosines and sines of each axis of a grid, built once a grid, theta and device."""

import torch
from torch import Tensor

# Nothing is ever evicted: a captured CUDA graph may hold the address of a table. A table is small (some 50 KB a grid);
# what comes after the last place is built on each call.
_MAX_TABLES = 256
_tables: dict[tuple, tuple[Tensor, ...]] = {}


def _axis_table(size: int, dim: int, theta: float, device: torch.device) -> Tensor:
    """``[size, dim / 2, 2]`` float32: cos and sin of ``p * theta ** (-2i / dim)``, computed in fp64."""
    frequencies = theta ** (torch.arange(0, dim, 2, dtype=torch.float64, device=device) / -max(dim, 1))
    angles = torch.arange(size, dtype=torch.float64, device=device)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), dim=-1).float()


def _axis_tables(grid, axes_dim, theta: float, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(_axis_table(size, dim, theta, device) for size, dim in zip(grid, axes_dim))


def axis_tables(grid, axes_dim, theta: float, device: torch.device) -> tuple[Tensor, ...]:
    """One table an axis of the grid."""
    # A compiled graph computes its own; under a dispatch mode (FakeTensorMode is one) a tensor may not be a real one.
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return _axis_tables(grid, axes_dim, theta, device)
    key = (*grid, *axes_dim, theta, device)
    tables = _tables.get(key)
    if tables is not None:
        return tables
    # A capture allows no copy from the host, and fills what it allocates only when it is replayed.
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _axis_tables(grid, axes_dim, theta, device)
    # Built outside inference mode, whose tensors are of no use elsewhere. The copy from pageable memory is done when it
    # returns, so that a later call on another stream finds the tables filled.
    with torch.inference_mode(False), torch.no_grad():
        tables = tuple(table.to(device) for table in _axis_tables(grid, axes_dim, theta, torch.device("cpu")))
    if len(_tables) < _MAX_TABLES:
        _tables[key] = tables
    return tables
