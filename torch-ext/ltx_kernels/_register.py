"""Fakes and autograd formulas of the ops, registered at import.

An op compiled before its register_autograd gives no gradient later.
"""

import torch

from ._ops import add_op_namespace_prefix, ops


def _fake(name):
    """`torch.library.register_fake` for the op `name`, with a check that its tensors share a device.

    A fake serves the meta device too, and a call with one meta tensor among real ones comes here: without the check it
    would return memory that nobody wrote.
    """
    names = [argument.name for argument in getattr(ops, name).default._schema.arguments]

    def register(fake):
        def checked(*args):
            tensors = {name: value for name, value in zip(names, args) if isinstance(value, torch.Tensor)}
            first = "x" if "x" in tensors else next(iter(tensors))
            device = tensors[first].device
            for name, tensor in tensors.items():
                if tensor.device != device:
                    raise RuntimeError(
                        f"ltx_kernels: {name} is on {tensor.device}; the device of {first} is needed: {device}"
                    )
            return fake(*args)

        return torch.library.register_fake(add_op_namespace_prefix(name), checked)

    return register


@_fake("rms_norm")
def _(x, weight, eps, weight_offset, cast_before_weight):
    return x.new_empty(x.shape)


@_fake("rms_norm_with_rstd")
def _(x, weight, eps, weight_offset, cast_before_weight):
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


@_fake("rms_norm_backward")
def _(grad_y, x, weight, rstd, weight_offset, cast_before_weight, wants_grad_weight):
    grad_weight = torch.empty_like(weight) if wants_grad_weight and weight is not None else x.new_empty(0)
    return x.new_empty(x.shape), grad_weight


def _rms_norm_setup_context(ctx, inputs, output):
    x, weight, _, ctx.weight_offset, ctx.cast_before_weight = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.set_materialize_grads(False)


def _rms_norm_backward(ctx, grad_y, _grad_rstd):
    if grad_y is None:
        return None, None, None, None, None
    x, weight, rstd = ctx.saved_tensors
    wants_grad_weight = weight is not None and ctx.needs_input_grad[1]
    grad_x, grad_weight = ops.rms_norm_backward(
        grad_y, x, weight, rstd, ctx.weight_offset, ctx.cast_before_weight, wants_grad_weight
    )
    return grad_x, grad_weight if wants_grad_weight else None, None, None, None


torch.library.register_autograd(
    add_op_namespace_prefix("rms_norm_with_rstd"), _rms_norm_backward, setup_context=_rms_norm_setup_context
)


def _no_second_backward(ctx, *grads):
    raise RuntimeError(
        "ltx_kernels: rms_norm has no second derivative; use torch.nn.functional.rms_norm where one is needed"
    )


torch.library.register_autograd(add_op_namespace_prefix("rms_norm_backward"), _no_second_backward)


@_fake("layer_norm")
def _(x, weight, bias, eps):
    return x.new_empty(x.shape)


@_fake("ada_norm")
def _(x, scale, shift, weight, bias, eps, layer, scale_table, shift_table):
    return x.new_empty(x.shape)


@_fake("gated_residual")
def _(residual, x, gate, gate_table):
    return residual.new_empty(residual.shape)


@_fake("residual_ada_norm")
def _(residual, x, *args):
    return x.new_empty(x.shape), residual.new_empty(residual.shape)


@_fake("pixel_norm_silu")
def _(x, scale, shift, eps):
    if x.stride(1) == 1 and not x.is_contiguous():  # channels last
        return x.new_empty([x.shape[0], *x.shape[2:], x.shape[1]]).movedim(-1, 1)
    return x.new_empty(x.shape)


@_fake("glu")
def _(x, activation, gate_first):
    return x.new_empty([*x.shape[:-1], x.shape[-1] // 2])


@_fake("activate")
def _(x, up, activation):
    return x.new_empty(x.shape)


@_fake("rope")
def _(x, *args):
    return x.new_empty(x.shape)


@_fake("q_norm_rope")
def _(q, *args):
    return q.new_empty(q.shape)


@_fake("qk_norm_rope")
def _(q, k, *args):
    return q.new_empty(q.shape), k.new_empty(k.shape)


@_fake("rope_3d")
def _(q, k, *args):
    return q.new_empty(q.shape), k.new_empty(k.shape)
