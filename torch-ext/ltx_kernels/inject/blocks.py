"""Parts that the fused blocks of all families are made of."""

from collections.abc import Iterable
from typing import Any, Callable, Optional, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules import module as every_module

from .. import functional
from .._ops import add_op_namespace_prefix, ops
from .deferred import Deferred
from .norms import supported
from .patching import PART, is_plain
from .rewriting import is_of

#: (value, row of a learned table or None), added in the kernel: how a scale, shift or gate is given
Modulation = tuple[Tensor, Optional[Tensor]]


# In compiled code one of our ops takes the host some microseconds more than a kernel of Inductor, which fuses what is
# around it as well, and what our forwards look at is guarded on in each call. Where the tensors are small it is the
# host that counts: SDXL at 1024 x 1024, [2, 4096, 640], was slower compiled and injected than compiled alone.
COMPILED_ELEMENTS = 2**23


def left_to_inductor(x: Any) -> bool:
    """Whether a module of diffusers runs the class's own code for its input x: while compiled, for a small one."""
    return is_dynamo_compiling() and isinstance(x, Tensor) and x.numel() < COMPILED_ELEMENTS


def runs_stock(x: Tensor, *others: Tensor) -> bool:
    """Whether this call of a fused block belongs to the class's own code.

    So it is for what our ops do not take, under autocast (its dtypes are stock's business), and with grad enabled: the
    ops of the fused blocks have no backward, and what wants a gradient may be an input, a parameter or a tensor that a
    hook inside the block brings in. `others` are tensors that must have x's dtype and device, or the results of stock
    would have other dtypes than ours.
    """
    if torch.is_grad_enabled() or not supported(x) or torch.is_autocast_enabled(x.device.type):
        return True
    return any(t.dtype is not x.dtype or t.device != x.device for t in others)


def modulations(table: Tensor, temb: Tensor) -> list[Modulation]:
    """The n modulations of a block: a part of temb [B, 1 | S, n * D] and a row of the table [n, D] each; all views."""
    values = temb.unflatten(-1, (table.shape[0], -1)).unbind(2)
    return list(zip(values, table.unbind(0)))


def _norm_arguments(norm: nn.Module) -> dict:
    weight = getattr(norm, "weight", None)
    return {"weight": weight, "bias": getattr(norm, "bias", None), "eps": norm.eps}


class ResidualStream(Deferred):
    """The residual stream x [B, S, D] of a block, with the last branch not yet added.

    `add` takes a branch, and whatever comes next adds it: a `norm` in the same pass, else `value`. So a recipe reads as
    the block does, and the fusion is here, once. Made of the stream that the block before returns, it takes over the
    branch that is left there; whichever adds it first, both have the sum.
    """

    operands = ()  # it settles itself, see _settle

    def __init__(self, x: Union[Tensor, "ResidualStream"], statistic: str = "rms"):
        self._branch: Optional[Tensor] = None
        self._gate: Optional[Modulation] = None
        self._taken_over: Optional[ResidualStream] = None
        if isinstance(x, ResidualStream):
            self._taken_over = None if x._branch is None else x  # else it has nothing left to settle
            self._branch, self._gate, x = x._branch, x._gate, x._x
        self._x = x
        self._statistic = statistic
        self.shape, self.dtype = x.shape, x.dtype

    @property
    def residual(self) -> Tensor:
        """What the last branch is to be added to."""
        return self._x

    def add(self, branch: Tensor, gate: Optional[Modulation] = None) -> None:
        """x + gate * branch"""
        x = self.value()
        if isinstance(branch, Tensor) and branch.shape == self.shape and branch.dtype is self.dtype:
            self._branch, self._gate = branch, gate
            return
        # What a hook has put in its place, zeros of one element to skip it: as torch broadcasts and promotes.
        if gate is not None:
            branch = branch * (gate[0] if gate[1] is None else gate[0] + gate[1])
        self._x = x + branch
        self.shape, self.dtype = self._x.shape, self._x.dtype

    def value(self) -> Tensor:
        if self._branch is not None:
            gate, table = self._gate or (None, None)
            self._settle(functional.gated_residual(self._x, self._branch, gate, gate_table=table))
        return self._x

    def _settle(self, total: Tensor) -> None:
        before, branch = self._taken_over, self._branch
        self._x, self._branch, self._gate, self._taken_over = total, None, None, None
        if before is not None and before._branch is branch:  # it may have been added to since
            before._settle(total)

    def norm(self, norm: nn.Module, scale: Optional[Modulation] = None, shift: Optional[Modulation] = None) -> Tensor:
        """norm(x) * (1 + scale) + shift, with the norm's own weight, bias and epsilon."""
        scale, scale_table = scale or (None, None)
        shift, shift_table = shift or (None, None)
        arguments = {
            **_norm_arguments(norm),
            "norm": self._statistic,
            "scale_table": scale_table,
            "shift_table": shift_table,
        }
        if self._branch is None:
            return functional.ada_norm(self._x, scale, shift, **arguments)
        gate, gate_table = self._gate or (None, None)
        y, total = functional.residual_ada_norm(
            self._x, self._branch, gate, scale, shift, gate_table=gate_table, **arguments
        )
        self._settle(total)
        return y


# ---- linear layers

#: what these classes compute, unless somebody has given them another forward
_FORWARDS = {cls: cls.forward if is_of(cls.forward, cls.__module__) else None for cls in (nn.Linear, nn.Dropout)}


def is_plain_linear(module: nn.Module) -> bool:
    """A Linear that is nothing else: no adapter, no hook, no quantised, sharded or offloaded weight."""
    if not is_plain(module, nn.Linear) or nn.Linear.forward is not _FORWARDS[nn.Linear]:
        return False
    parameters = module._parameters
    return type(parameters.get("weight")) is nn.Parameter and "bias" in parameters


_CALL = nn.Module.__call__


def calls_forward(module: nn.Module) -> bool:
    """Whether calling a module runs its own hooks and its forward: it is not compiled, no hook is on all modules."""
    if every_module._global_forward_hooks or every_module._global_forward_pre_hooks:
        return False
    return type(module).__call__ is _CALL and module._compiled_call_impl is None


def call_forward(module: Any, *args: Any, **options: Any) -> Any:
    """module(*args, **options), past nn.Module.__call__ where that would only call the forward.

    It takes the host half as long as a GEMM. While grad is enabled it may do more: backward hooks are its business.
    A part of a block (`install`) runs its own forward.
    """
    if type(module).__call__ is not _CALL or torch.is_grad_enabled():
        return module(*args, **options)
    own = None if "forward" in module.__dict__ else module.__dict__.get(PART)
    if is_dynamo_compiling() and own is None:
        return module(*args, **options)
    if every_module._global_forward_hooks or every_module._global_forward_pre_hooks:
        return module(*args, **options)
    if module._forward_hooks or module._forward_pre_hooks or module._compiled_call_impl is not None:
        return module(*args, **options)
    # Not `own or`: torch 2.11's dynamo cannot tell whether a method is true.
    return (module.forward if own is None else own)(*args, **options)


def call_plain(module: Any, x: Any) -> Any:
    """module(x), past the forward too where that is a plain Linear's or Dropout's."""
    cls = type(module)
    if cls not in _FORWARDS:
        return call_forward(module, x)
    if cls.__call__ is not _CALL or is_dynamo_compiling() or torch.is_grad_enabled():
        return module(x)
    if every_module._global_forward_hooks or every_module._global_forward_pre_hooks:
        return module(x)
    if cls is nn.Linear and is_plain_linear(module):
        weight, bias = module._parameters["weight"], module._parameters["bias"]
        if bias is None or type(x) is not Tensor or x.is_contiguous():
            return F.linear(x, weight, bias)
        # A slice of the tokens: torch copies it as well, but adds the bias after the GEMM, in a pass of its own.
        return F.linear(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], weight.shape[0])
    if cls is nn.Dropout and not module.training and is_plain(module, cls) and cls.forward is _FORWARDS[cls]:
        return x
    return module(x)


def _joined(parts: list[Tensor]) -> Optional[Tensor]:
    """The tensor whose consecutive rows `parts` are, if they lie so in one storage."""
    first = parts[0]
    end, dtype, row, rows = first.data_ptr(), first.dtype, first.shape[1:], 0
    for part in parts:
        if part.data_ptr() != end or part.dtype is not dtype or part.shape[1:] != row or not part.is_contiguous():
            return None
        end += part.nbytes
        rows += part.shape[0]
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes():  # neighbours that an allocator has put there
        return None
    return first.detach().as_strided((rows, *row), first.stride())


_PACKED = "_ltx_kernels_packed"


def is_packed(linear: nn.Linear) -> bool:
    """Whether `pack` has had this one: a hint, for its weight may have been moved since."""
    return _PACKED in linear.__dict__


def pack(linears: list[nn.Linear]) -> bool:
    """Move the weights and biases of Linears of one input into one storage, so that `project` is one GEMM.

    Costs no memory: the parameters become views of the new storage and the old ones are freed. `.to()`, offload and
    deepcopy part them. False where they are not plain or do not fit together.
    """
    if not all(map(is_plain_linear, linears)) or len({(w.dtype, w.device, w.shape[1]) for w in _weights(linears)}) > 1:
        return False
    if len(_biases(linears)) not in (0, len(linears)):
        return False
    with torch.inference_mode(False), torch.no_grad():
        for tensors in (_weights(linears), _biases(linears)):
            if tensors and _joined(tensors) is None:
                for tensor, part in zip(tensors, torch.cat(tensors).split([t.shape[0] for t in tensors])):
                    tensor.data = part
    for linear in linears:
        linear.__dict__[_PACKED] = True
    return True


def unpack(linears: list[nn.Module]) -> None:
    """Undo `pack`: each parameter has a storage of its own again."""
    for linear in linears:
        linear.__dict__.pop(_PACKED, None)
    if not all(type(linear) is nn.Linear and {"weight", "bias"} <= linear._parameters.keys() for linear in linears):
        return
    with torch.inference_mode(False), torch.no_grad():
        for tensors in (_weights(linears), _biases(linears)):
            if len(tensors) > 1 and _joined(tensors) is not None:
                for tensor in tensors:
                    tensor.data = tensor.detach().clone()


Projections = Callable[[nn.Module], Iterable[list[nn.Module]]]


def packing(projections: Projections, min_width: int = 0) -> tuple[Callable, Callable]:
    """What a recipe does with the Linears of one input, `projections` of a module: `pack` on a GPU, and `unpack`.

    Those of an input narrower than `min_width` are left: finding them side by side costs the host more than it saves.
    """

    def installed(module: nn.Module) -> None:
        for linears in projections(module):
            weights = [linear.weight for linear in linears if type(linear) is nn.Linear]
            if all(weight.is_cuda and weight.shape[1] >= min_width for weight in weights):
                pack(linears)

    def removed(module: nn.Module) -> None:
        for linears in projections(module):
            unpack([linear for linear in linears if type(linear) is nn.Linear])

    return installed, removed


def _weights(linears: list[nn.Linear]) -> list[Tensor]:
    return [linear._parameters["weight"] for linear in linears]  # linear.weight takes nn.Module half a microsecond


def _biases(linears: list[nn.Linear]) -> list[Tensor]:
    biases = [linear._parameters["bias"] for linear in linears]
    return [bias for bias in biases if bias is not None]


def _one_gemm(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Optional[Tensor]:
    """Linears of one input in one GEMM, [*, sum of N]; None where their weights do not lie side by side."""
    weight = _joined(weights)
    bias = _joined(biases) if biases and weight is not None else None
    if weight is None or weight.dtype is not x.dtype or (biases and bias is None):
        return None
    return F.linear(x, weight, bias)


def _linear_joined(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    """Linears of one input, [*, K] to [*, sum of N]: one GEMM where it can be, else one each into the same output."""
    y = _one_gemm(x, weights, biases)
    if y is not None:
        return y
    sizes = [weight.shape[0] for weight in weights]
    y, rows = x.new_empty((*x.shape[:-1], sum(sizes))), x.reshape(-1, x.shape[-1])
    for i, part in enumerate(y.view(-1, sum(sizes)).split(sizes, dim=1)):
        if biases:
            torch.addmm(biases[i], rows, weights[i].t(), out=part)
        else:
            torch.mm(rows, weights[i].t(), out=part)
    return y


def _linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """gelu(x @ weight.T + bias) with the tanh formula: x [*, K], weight [N, K], bias [N] to [*, N]."""
    y = torch._addmm_activation(bias, x.reshape(-1, x.shape[-1]), weight.t(), use_gelu=True)
    return y.view(*x.shape[:-1], weight.shape[0])


_library = torch.library.Library(add_op_namespace_prefix("").rstrip(":"), "FRAGMENT")


def _op(function: Callable, arguments: str, width: Callable[..., int]) -> Callable:
    """An op of its own to torch.compile; `width` tells the last size of what it returns.

    torch.compile cannot look at where weights lie, and would take a GEMM and its epilogue apart. There is no gradient:
    it is called without grad alone. By torch.library.custom_op a call takes the host 10 us more than the function does,
    so it takes 3 (benchmarks/results/h200/tuning/kernels_of_a_step.txt, on a CPU).
    """

    def fake(x: Tensor, *weights_and_biases: Any) -> Tensor:
        return x.new_empty((*x.shape[:-1], width(*weights_and_biases)))

    name = function.__name__[1:]
    _library.define(f"{name}({arguments}) -> Tensor")
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(add_op_namespace_prefix(name), fake, lib=_library)
    return getattr(ops, name).default


_linear_joined_op = _op(
    _linear_joined,
    "Tensor x, Tensor[] weights, Tensor[] biases",
    lambda weights, biases: sum(weight.shape[0] for weight in weights),
)
_linear_gelu_op = _op(_linear_gelu, "Tensor x, Tensor weight, Tensor bias", lambda weight, bias: weight.shape[0])


def project(x: Tensor, linears: list[nn.Module]) -> list[Tensor]:
    """Each of `linears` of x [*, K]: one GEMM where they are plain and their weights side by side, else one each."""
    if not all(map(is_plain_linear, linears)):
        return [linear(x) for linear in linears]
    weights, biases = _weights(linears), _biases(linears)
    y = None
    if len(biases) in (0, len(weights)):
        if not torch.compiler.is_compiling():
            y = _one_gemm(x, weights, biases)
        elif x.is_cuda and not torch.is_grad_enabled() and all(weight.dtype is x.dtype for weight in weights):
            y = _linear_joined_op(x, weights, biases)
    if y is None:
        return [linear(x) for linear in linears]
    return list(y.split_with_sizes([weight.shape[0] for weight in weights], dim=-1))


HAS_GELU_EPILOGUE = hasattr(torch, "_addmm_activation")


def linear_gelu_tanh(x: Tensor, linear: nn.Module) -> Optional[Tensor]:
    """gelu(linear(x)) [*, N] with the tanh formula in the GEMM's epilogue; None where that cannot be had."""
    if not (x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)) or torch.is_grad_enabled():
        return None
    if not HAS_GELU_EPILOGUE or torch.is_autocast_enabled("cuda"):
        return None
    if not is_plain_linear(linear) or linear.bias is None or linear.weight.dtype is not x.dtype:
        return None
    compute = _linear_gelu_op if torch.compiler.is_compiling() else _linear_gelu
    return compute(x, linear.weight, linear.bias)
