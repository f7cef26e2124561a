"""Pictures of a training when it ends: its curves, and where one query of the last decoder layer looks."""

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

import msda_op
from models.callbacks import closes_log_window
from models.layers.ms_deform_attn import MSDeformAttn

LEVEL_COLOURS = ("#e6194b", "#f58231", "#ffe119", "#3cb44b", "#4363d8", "#911eb4", "#46f0f0", "#f032e6")
_DRAWN_WIDTH = 960
_FONT_SIZE = 16

logger = logging.getLogger(__name__)


class TrainingPlots(Callback):
    """Writes `plots/curves.png` (with matplotlib) and `plots/sampling.png` when training ends.

    The curves are what this process has seen: after a resumption they begin there, while the CSV log has everything.
    Sampling locations are drawn where one process trains.

    Args:
        run_dir: Folder of the run.
    """

    def __init__(self, run_dir: str) -> None:
        self.run_dir = Path(run_dir)
        self._curves: dict[str, list[tuple[int, float]]] = {}

    @rank_zero_only
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keeps a point of the loss where a log window closes."""
        if closes_log_window(trainer, batch_idx):
            self._keep(trainer, "train/loss")

    @rank_zero_only
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keeps a point of AP."""
        if not trainer.sanity_checking:
            for name in ("val/AP", "val/AP50"):
                self._keep(trainer, name)

    @rank_zero_only
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draws."""
        folder = self.run_dir / "plots"
        folder.mkdir(parents=True, exist_ok=True)
        if find_spec("matplotlib") is None:
            logger.info("no training curves without matplotlib: pip install -e '.[plots]'")
        elif self._curves:
            draw_curves(self._curves, folder / "curves.png")
        if trainer.world_size == 1 and trainer.val_dataloaders is not None:
            batch = pl_module.transfer_batch_to_device(next(iter(trainer.val_dataloaders)), pl_module.device, 0)
            draw_sampling(pl_module, batch).save(folder / "sampling.png")

    def _keep(self, trainer: Trainer, name: str) -> None:
        if name in trainer.callback_metrics:
            point = (trainer.global_step, float(trainer.callback_metrics[name]))
            self._curves.setdefault(name, []).append(point)


def draw_curves(curves: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """Writes a picture of values over steps, losses above and AP in percent below; needs matplotlib."""
    from matplotlib.figure import Figure  # optional, and slow to import

    figure = Figure(figsize=(7, 6), layout="constrained")
    loss_axes, ap_axes = figure.subplots(2, 1, sharex=True)
    for name, points in curves.items():
        steps, values = zip(*points, strict=True)
        if name.startswith("val/"):
            ap_axes.plot(steps, [100 * value for value in values], marker="o", label=name)
        else:
            loss_axes.plot(steps, values, label=name)
    loss_axes.set(ylabel="loss")
    ap_axes.set(ylabel="AP, percent", xlabel="step")
    for axes in (loss_axes, ap_axes):
        if axes.lines:
            axes.legend()
    figure.savefig(path, dpi=120)


@torch.no_grad()
def draw_sampling(detector: LightningModule, batch: dict[str, Any]) -> Image.Image:
    """Draws where the most confident query of a batch's first image samples in the last decoder layer.

    A dot a head and point, of the colour of its level; the larger, the more it weighs. The query's box is white.

    Args:
        detector: Maps a batch to logits and boxes of every layer.
        batch: As `models.detector.Detector` takes it, on the detector's device.

    Notes:
        Runs the network once in evaluation mode, and leaves its mode as it was.
    """
    attention = [module for module in detector.modules() if isinstance(module, MSDeformAttn)][-1]
    seen: list[tuple[Any, ...]] = []
    handle = attention.register_forward_pre_hook(lambda module, arguments: seen.append(arguments))
    was_training = detector.training
    detector.eval()
    try:
        output = detector(batch)
    finally:
        handle.remove()
        detector.train(was_training)
    query, reference_points, _, spatial_shapes, _ = seen[-1]
    place = int(output.logits[-1][0].amax(-1).argmax())
    locations, weights = sampling_of(attention, query, reference_points, spatial_shapes)
    pixels = Image.fromarray(batch["images"][0].permute(1, 2, 0).cpu().numpy())
    return draw_dots(pixels, locations[0, place].cpu(), weights[0, place].cpu(), _box_in_pixels(output, batch, place))


def sampling_of(
    attention: MSDeformAttn, query: Tensor, reference_points: Tensor, spatial_shapes: tuple[tuple[int, int], ...]
) -> tuple[Tensor, Tensor]:
    """Returns what the attention samples: locations [B, Q, M, L, K, 2] (x, y) and weights [B, Q, M, L, K], float32."""
    query = query.to(attention.sampling_offsets.weight.dtype)
    shape = (attention.num_heads, attention.num_levels, attention.num_points)
    offsets = attention.sampling_offsets(query).unflatten(-1, (*shape, 2)).float()
    weights = attention.attention_weights(query).unflatten(-1, (attention.num_heads, -1)).float().softmax(-1)
    locations = msda_op.sampling_locations_from_offsets(reference_points.float(), offsets, spatial_shapes)
    return locations, weights.unflatten(-1, shape[1:])


def draw_dots(
    image: Image.Image, locations: Tensor, weights: Tensor, box_xyxy: tuple[float, float, float, float]
) -> Image.Image:
    """Draws the samples of one query onto an enlarged copy of its image, with a line below that explains them.

    Args:
        image: The padded image that the levels span.
        locations: [M, L, K, 2] (x, y) in 0..1.
        weights: [M, L, K].
        box_xyxy: The query's box in pixels of the image.
    """
    scale = max(1.0, _DRAWN_WIDTH / image.width)
    panel = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(panel)
    low_x, low_y, high_x, high_y = (value * scale for value in box_xyxy)
    draw.rectangle((low_x, low_y, max(low_x, high_x), max(low_y, high_y)), outline="white", width=3)
    for level in range(locations.shape[1]):
        colour = LEVEL_COLOURS[level % len(LEVEL_COLOURS)]
        flat = zip(locations[:, level].reshape(-1, 2).tolist(), weights[:, level].flatten().tolist(), strict=True)
        for (x, y), weight in flat:
            center_x, center_y = x * panel.width, y * panel.height
            radius = 2 + 12 * weight**0.5
            draw.ellipse(
                (center_x - radius, center_y - radius, center_x + radius, center_y + radius),
                fill=colour,
                outline="black",
            )
    return _add_legend(panel, locations.shape[1])


def _add_legend(panel: Image.Image, levels: int) -> Image.Image:
    """Returns the picture above a line that says what colours and sizes mean."""
    height = _FONT_SIZE + 12
    picture = Image.new("RGB", (panel.width, panel.height + height), "white")
    picture.paste(panel)
    draw, font, left = ImageDraw.Draw(picture), ImageFont.load_default(_FONT_SIZE), 8.0
    words = [(f"level {level}", LEVEL_COLOURS[level % len(LEVEL_COLOURS)]) for level in range(levels)]
    for text, colour in (*words, ("size: attention weight; white: the query's box", "black")):
        draw.text((left, panel.height + 4), text, fill="black", font=font)
        end = left + draw.textlength(text, font=font)
        draw.line((left, picture.height - 3, end, picture.height - 3), fill=colour, width=4)
        left = end + 20
    return picture


def _box_in_pixels(output: Any, batch: dict[str, Any], place: int) -> tuple[float, float, float, float]:
    """The box of a query in pixels of the padded image: boxes span the image without its padding."""
    is_padding = batch["padding_mask"][0]
    height, width = int((~is_padding[:, 0]).sum()), int((~is_padding[0]).sum())
    center_x, center_y, box_width, box_height = output.boxes_cxcywh[-1][0, place].float().tolist()
    return (
        (center_x - box_width / 2) * width,
        (center_y - box_height / 2) * height,
        (center_x + box_width / 2) * width,
        (center_y + box_height / 2) * height,
    )
