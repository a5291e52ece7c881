"""Fakes and autograd formulas of the ops, registered at import: an op compiled before its register_autograd gives no gradient later."""

import torch

from ._ops import add_op_namespace_prefix, ops


@torch.library.register_fake(add_op_namespace_prefix("rms_norm"))
def _(x, weight, eps, weight_offset, cast_before_weight):
    return x.new_empty(x.shape)


@torch.library.register_fake(add_op_namespace_prefix("rms_norm_with_rstd"))
def _(x, weight, eps, weight_offset, cast_before_weight):
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.register_fake(add_op_namespace_prefix("rms_norm_backward"))
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
    raise RuntimeError("ltx_kernels: rms_norm has no second derivative; use torch.nn.functional.rms_norm where one is needed")


torch.library.register_autograd(add_op_namespace_prefix("rms_norm_backward"), _no_second_backward)


@torch.library.register_fake(add_op_namespace_prefix("layer_norm"))
def _(x, weight, bias, eps):
    return x.new_empty(x.shape)


@torch.library.register_fake(add_op_namespace_prefix("ada_norm"))
def _(x, scale, shift, weight, bias, eps, layer, scale_table, shift_table):
    return x.new_empty(x.shape)


@torch.library.register_fake(add_op_namespace_prefix("gated_residual"))
def _(residual, x, gate, gate_table):
    return residual.new_empty(residual.shape)


@torch.library.register_fake(add_op_namespace_prefix("residual_ada_norm"))
def _(residual, x, *args):
    return x.new_empty(x.shape), residual.new_empty(residual.shape)
