"""The op inside models of Hugging Face transformers, whose modules are known by name: it is not imported here."""

import inspect
from collections.abc import Sequence

from torch import Tensor, nn

from msda_op.api import ms_deform_attn
from msda_op.backends import BACKENDS

_NAME = "MultiScaleDeformableAttention"


class MultiScaleDeformableAttention(nn.Module):
    """Stands in for the class of this name in transformers, which has no parameters.

    Args:
        backend: as in `msda_op.ms_deform_attn`.

    Raises:
        ValueError: if the backend's name is unknown.
    """

    def __init__(self, backend: str) -> None:
        super().__init__()
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}; choose one")
        self.backend = backend

    def forward(
        self,
        value: Tensor,
        value_spatial_shapes: Tensor,
        value_spatial_shapes_list: Sequence[tuple[int, int]],
        level_start_index: Tensor,
        sampling_locations: Tensor,
        attention_weights: Tensor,
        im2col_step: int,
    ) -> Tensor:
        """Calls `msda_op.ms_deform_attn`.

        Args:
            value: `[B, S, M, D]`.
            value_spatial_shapes: ignored; the next argument says the same on the host.
            value_spatial_shapes_list: L pairs (h, w).
            level_start_index: ignored; it follows from the shapes.
            sampling_locations: `[B, Q, M, L, K, 2]` (x, y); half precision, in which a model cast to it computes them,
                is cast up.
            attention_weights: `[B, Q, M, L, K]`.
            im2col_step: ignored; the kernels take any batch at once.

        Returns:
            `[B, Q, M*D]` in the dtype of `value`.

        Raises:
            ValueError: if an argument breaks a rule of `ms_deform_attn`.
            RuntimeError: if the backend cannot run here.

        Notes:
            Differentiable in value, locations and weights; never waits for the device.
        """
        shapes = tuple((int(height), int(width)) for height, width in value_spatial_shapes_list)
        locations = sampling_locations if sampling_locations.dtype.itemsize > 2 else sampling_locations.float()
        return ms_deform_attn(value, shapes, None, locations, attention_weights, backend=self.backend)


def swap_op(model: nn.Module, *, backend: str = "auto") -> int:
    """Lets a transformers model call our op instead of its own, in place; weights and state-dict keys stay.

    Any model whose layers hold transformers' `MultiScaleDeformableAttention` qualifies: Deformable-DETR, RT-DETR,
    Grounding DINO, OmDet-Turbo, LW-DETR, RF-DETR and others. Calling it again changes the backend.

    Args:
        model: for example a `transformers.DeformableDetrForObjectDetection`.
        backend: as in `msda_op.ms_deform_attn`.

    Returns:
        How many modules were replaced.

    Raises:
        ValueError: if the model has no such module, one of another signature, or the backend's name is unknown.
    """
    places = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child).__name__ == _NAME
    ]
    if not places:
        raise ValueError(
            f"model must hold modules {_NAME}, as transformers 5 has them, got {type(model).__name__} without any; "
            f"update transformers, or call msda_op.ms_deform_attn in its attention layers"
        )
    arguments = list(inspect.signature(MultiScaleDeformableAttention.forward).parameters)
    for parent, name in places:
        found = list(inspect.signature(type(getattr(parent, name)).forward).parameters)
        if found != arguments:
            raise ValueError(
                f"{_NAME}.forward must take {', '.join(arguments[1:])}, got {', '.join(found[1:])}; call "
                f"msda_op.ms_deform_attn in the model's attention layers"
            )
    for parent, name in places:
        replacement = MultiScaleDeformableAttention(backend)
        setattr(parent, name, replacement.train(getattr(parent, name).training))
    return len(places)
