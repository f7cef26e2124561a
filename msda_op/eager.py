"""The op in eager code: an autograd function, which does what the registered op does with less work for the host.

A call of a registered op costs the host more than the kernels of a decoder. So `attend` takes an autograd function
wherever nothing but autograd looks on, and the registered op elsewhere: when PyTorch traces, maps or transforms the
call. Either way `launch` does the work. The autograd function knows beforehand whether the gradient of value will be
wanted, and where it will be reduced from records, the forward kernel counts them; the registered op leaves that to the
backward pass. Passes of one launch are repeated from memory.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd import forward_ad

from msda_op import registration
from msda_op.call_memory import is_watched, remember
from msda_op.options import Options
from msda_op.triton import launch
from msda_op.triton.arguments import Inputs, Needs
from msda_op.triton.hopper.call import align, are_joint
from msda_op.triton.launch_memory import Recipe, write_recipe


def attend(inputs: Inputs, conventions: tuple[Any, ...], call: Hashable | None, own_tables: bool) -> Tensor:
    """Returns what `registration.forward` returns of validated arguments, by the shortest way.

    Args:
        inputs: tensors of the call.
        conventions: the further arguments of the registered op.
        call: the description of the call, under which the way is remembered; None for one not to be remembered.
        own_tables: whether the level table was made for such calls, and does not come with each of them.
    """
    if is_watched(*inputs):
        return registration.forward(*inputs, *conventions)
    attention = Attention(inputs, conventions, own_tables)
    if call is not None and not triton.knobs.runtime.interpret:  # which has nothing to repeat
        remember(call, attention)
    value, *tables, points, scores, reference_points = inputs
    return attention(value, tables, points, scores, reference_points)


class Attention:
    """Runs calls like the one it is made for, and remembers their launches."""

    def __init__(self, inputs: Inputs, conventions: tuple[Any, ...], own_tables: bool) -> None:
        """Looks at a call once; arguments as in `attend`."""
        self.conventions = conventions
        self.thin_levels, *options, self.fp32_grad_accum, self.deterministic = conventions
        self.options = Options(*options)
        self.tables = (inputs.spatial_shapes, inputs.level_start_index) if own_tables else None
        self.output_shape = launch.output_shape(inputs, self.options)
        self.plan = launch.plan_of(inputs, self.options, self.deterministic, self.fp32_grad_accum)
        self.counts = launch.counts_samples(inputs, self.plan)
        self.copies = not all(tensor is None or tensor.is_contiguous() for tensor in inputs)
        # Its kernels read the parts of a product where they stand, and write their gradients as such parts.
        in_rows = inputs.reference_points is not None and self.plan.forward == self.plan.backward == "hopper"
        self.kept = ("points", "scores") if in_rows else ()
        self.joint = in_rows and are_joint(inputs.points, inputs.scores)
        self.forward_recipe: Recipe | None = None
        self.backward_recipes: dict[Needs, Recipe | None] = {}

    def __call__(
        self,
        value: Tensor,
        tables: Sequence[Any],
        points: Tensor,
        scores: Tensor,
        reference_points: Tensor | None = None,
    ) -> Tensor:
        """Returns `[B, Q, M*D]`; `tables` are those of the call."""
        if self.copies:  # once, for both passes
            inputs = Inputs._make((value, *(self.tables or tables), points, scores, reference_points))
            value, *tables, points, scores, reference_points = launch.make_contiguous(inputs, self.kept)
        if not torch.is_grad_enabled() and forward_ad._current_level < 0:  # which the function would refuse
            tensors = (value, *(self.tables or tables), points, scores, reference_points)
            return self.forward(tensors, needs_value=False)[0]
        given = () if self.tables else tables
        return _apply(self, value, points, scores, reference_points, *given)

    def forward(self, tensors: tuple[Any, ...], needs_value: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns the output of inputs in the order of `Inputs`, and what the backward pass then need not count."""
        if needs_value and self.counts:
            return launch.forward_of_records(Inputs._make(tensors), self.options, self.thin_levels)
        output = tensors[0].new_empty(self.output_shape)
        if self.forward_recipe is not None and _is_on_current_device(output):
            self.forward_recipe.run((*tensors, output))
        elif output.numel() > 0:
            inputs = Inputs._make(tensors)
            started = launch.start_forward(inputs, output, self.options, self.thin_levels, self.plan)
            self.forward_recipe = write_recipe(*started, (*tensors, output))
        return output, ()

    def backward(
        self, grad_output: Tensor, inputs: Inputs, needs: Needs, counted: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, ...]:
        """Returns the gradients in the order of `Needs`, None where not asked for."""
        if not launch.takes_one_launch(self.plan, needs) or grad_output.numel() == 0:
            ways = (self.plan, self.options, self.thin_levels, self.fp32_grad_accum, self.deterministic)
            return launch.differentiate(grad_output, inputs, *ways, needs, counted, self.joint)
        value = inputs.value
        grad_output = align(grad_output.to(value.dtype))
        targets = launch.allocate_targets(inputs, needs, self.joint)
        tensors = (*inputs, grad_output, *targets)
        recipe = self.backward_recipes.get(needs)
        if recipe is not None and _is_on_current_device(value):
            recipe.run(tensors)
        else:
            started = launch.start_backward(grad_output, inputs, targets, self.options, self.thin_levels)
            self.backward_recipes[needs] = write_recipe(*started, tensors)
        grad_value, *others = targets
        return None if grad_value is None else grad_value.to(value.dtype), *others


def _is_on_current_device(tensor: Tensor) -> bool:
    return not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device()


class _Attend(torch.autograd.Function):
    """Takes, behind the attention that runs the call, value, points, scores, reference points, and tables if given."""

    @staticmethod
    def forward(ctx: Any, attention: Attention, *tensors: Tensor | None) -> Tensor:
        value, points, scores, reference_points, *tables = tensors
        inputs = (value, *(attention.tables or tables), points, scores, reference_points)
        output, counted = attention.forward(inputs, ctx.needs_input_grad[1])
        ctx.attention = attention
        ctx.save_for_backward(*tensors, *counted)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        attention, given = ctx.attention, len(ctx.needs_input_grad) - 5
        # Asked for once: checkpointing hands them out once.
        value, points, scores, reference_points, *others = ctx.saved_tensors
        inputs = Inputs._make((value, *(attention.tables or others[:given]), points, scores, reference_points))
        needs = Needs(*ctx.needs_input_grad[1:5])
        if torch.is_grad_enabled():  # the registered op knows what to say to those who want a second derivative
            returned = iter(registration.backward(grad_output, *inputs, *attention.conventions, *needs))
            gradients = tuple(next(returned) if needed else None for needed in needs)
        else:
            gradients = attention.backward(grad_output, inputs, needs, tuple(others[given:]))
        return None, *gradients, *([None] * given)


_Attend.__name__ = "msda_op::attend"  # under which profilers list it, beside the registered ops
# That of the class looks first for what is left of transforms that have ended, which takes as long as all of it.
# A tensor of them has no memory, and `describe_call` fails where such are asked for.
_apply = super(torch.autograd.Function, _Attend).apply
