"""State-dict layouts of other code, and how their names and tensors become ours and back.

Ours is the layout of the official Deformable-DETR and DINO code. Hugging Face transformers has two others, v4 and v5,
each with two ways to name the backbone. One table of pairs of names serves both directions.
"""

import re
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

HUGGING_FACE_LAYOUTS = ("hf_v4", "hf_v5")
BACKBONE_NAMES = ("timm", "transformers")
QUERY_KEY_VALUE = ("q_proj", "k_proj", "v_proj")

DETECTOR_NAMES = (
    ("transformer.level_embed", "model.level_embed"),
    ("transformer.reference_points.{rest}", "model.reference_points.{rest}"),
    ("transformer.enc_output.{rest}", "model.enc_output.{rest}"),
    ("transformer.enc_output_norm.{rest}", "model.enc_output_norm.{rest}"),
    ("transformer.pos_trans.{rest}", "model.pos_trans.{rest}"),
    ("transformer.pos_trans_norm.{rest}", "model.pos_trans_norm.{rest}"),
    ("query_embed.weight", "model.query_position_embeddings.weight"),
    ("input_proj.{rest}", "model.input_proj.{rest}"),
    ("class_embed.{rest}", "class_embed.{rest}"),
    ("bbox_embed.{rest}", "bbox_embed.{rest}"),
    ("transformer.decoder.class_embed.{rest}", "model.decoder.class_embed.{rest}"),
    ("transformer.decoder.bbox_embed.{rest}", "model.decoder.bbox_embed.{rest}"),
    ("transformer.encoder.layers.{i}.self_attn.{rest}", "model.encoder.layers.{i}.self_attn.{rest}"),
    ("transformer.encoder.layers.{i}.norm1.{rest}", "model.encoder.layers.{i}.self_attn_layer_norm.{rest}"),
    ("transformer.encoder.layers.{i}.norm2.{rest}", "model.encoder.layers.{i}.final_layer_norm.{rest}"),
    ("transformer.encoder.layers.{i}.linear1.{rest}", "model.encoder.layers.{i}.{mlp}fc1.{rest}"),
    ("transformer.encoder.layers.{i}.linear2.{rest}", "model.encoder.layers.{i}.{mlp}fc2.{rest}"),
    ("transformer.decoder.layers.{i}.cross_attn.{rest}", "model.decoder.layers.{i}.encoder_attn.{rest}"),
    ("transformer.decoder.layers.{i}.self_attn.out_proj.{rest}", "model.decoder.layers.{i}.self_attn.{out}.{rest}"),
    ("transformer.decoder.layers.{i}.self_attn.{qkv}.{rest}", "model.decoder.layers.{i}.self_attn.{qkv}.{rest}"),
    ("transformer.decoder.layers.{i}.norm1.{rest}", "model.decoder.layers.{i}.encoder_attn_layer_norm.{rest}"),
    ("transformer.decoder.layers.{i}.norm2.{rest}", "model.decoder.layers.{i}.self_attn_layer_norm.{rest}"),
    ("transformer.decoder.layers.{i}.norm3.{rest}", "model.decoder.layers.{i}.final_layer_norm.{rest}"),
    ("transformer.decoder.layers.{i}.linear1.{rest}", "model.decoder.layers.{i}.{mlp}fc1.{rest}"),
    ("transformer.decoder.layers.{i}.linear2.{rest}", "model.decoder.layers.{i}.{mlp}fc2.{rest}"),
)
"""Our names and Hugging Face's; {mlp} and {out} differ between its versions, {qkv} is one of `QUERY_KEY_VALUE`."""

VERSION_WORDS = {
    "hf_v4": {"mlp": "", "out": "out_proj", "body": "model.backbone.conv_encoder.model"},
    "hf_v5": {"mlp": "mlp.", "out": "o_proj", "body": "model.backbone.model"},
}
SECOND_NAME = "transformer.decoder."
HEAD = re.compile(r"(?:transformer\.decoder\.)?(class_embed|bbox_embed)\.(\d+)\.(.+)")
PLACEHOLDERS = {"i": r"\d+", "j": r"\d+", "rest": r".+", "qkv": "|".join(QUERY_KEY_VALUE)}


def detect_layout(keys: list[str]) -> str | None:
    """Recognises the layout of a detector's state dict by its names.

    Returns:
        "ours" (also the official one), "hf_v4", "hf_v5", or None for anything else.
    """
    if any(key.startswith("transformer.") for key in keys):
        return "ours"
    for layout in HUGGING_FACE_LAYOUTS:
        if any(key.startswith(VERSION_WORDS[layout]["body"]) for key in keys):
            return layout
    return None


def from_hugging_face(weights: Mapping[str, Tensor], layout: str) -> dict[str, Tensor]:
    """Renames the weights of a `DeformableDetrForObjectDetection` and joins its query, key and value projections.

    Args:
        weights: State dict; names of tied heads may be missing, as in safetensors files.
        layout: One of `HUGGING_FACE_LAYOUTS`.

    Returns:
        The weights under our names. A name that no rule knows is kept, for the strict check to report.
    """
    backbone = "transformers" if any(".embedder.embedder." in key for key in weights) else "timm"
    renamed = {}
    for key, tensor in weights.items():
        ours = _translate(key, _reverse_rules(layout, backbone))
        renamed[ours or key] = tensor
    return complete_shared_heads(_join_query_key_value(renamed))


def to_hugging_face(weights: Mapping[str, Tensor], layout: str, backbone: str) -> dict[str, Tensor]:
    """Renames our weights to those of a `DeformableDetrForObjectDetection` and splits query, key and value.

    Args:
        weights: Our state dict of a Deformable-DETR.
        layout: One of `HUGGING_FACE_LAYOUTS`.
        backbone: "timm" for a timm ResNet inside, "transformers" for transformers' own.

    Raises:
        ValueError: If layout or backbone is unknown, or a name has no counterpart, as those of DINO.
    """
    if layout not in HUGGING_FACE_LAYOUTS or backbone not in BACKBONE_NAMES:
        raise ValueError(
            f"layout and backbone must be of {', '.join(HUGGING_FACE_LAYOUTS)} and {', '.join(BACKBONE_NAMES)}, "
            f"got {layout} and {backbone}; choose one of each"
        )
    renamed, unknown = {}, []
    for key, tensor in _split_query_key_value(weights).items():
        theirs = _translate(key, _rules(layout, backbone))
        if theirs is not None:
            renamed[theirs] = tensor
        elif not key.endswith("num_batches_tracked"):
            unknown.append(key)
    if unknown:
        raise ValueError(
            f"weights must be of a Deformable-DETR for the layout {layout}, got {unknown[0]} and "
            f"{len(unknown) - 1} more names without a counterpart; export to the official layout"
        )
    return renamed


def complete_shared_heads(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gives heads every name that the official layout has for them, where a file stores a shared tensor once.

    Heads of all layers are one unless boxes are refined; box heads that refine, and class heads of a two-stage model,
    are stored a second time inside the decoder.

    Args:
        weights: State dict of a Deformable-DETR under our names.
    """
    completed = dict(weights)
    heads = {match.groups(): tensor for key, tensor in weights.items() if (match := HEAD.fullmatch(key))}
    two_stage = "transformer.enc_output.weight" in weights
    layers = {match[1] for key in weights if (match := re.match(r"transformer\.decoder\.layers\.(\d+)\.", key))}
    refined = two_stage or any(
        not torch.equal(tensor, heads[head, "0", rest])
        for (head, _, rest), tensor in heads.items()
        if head == "bbox_embed" and (head, "0", rest) in heads
    )
    refined = refined or any(key.startswith(f"{SECOND_NAME}bbox_embed.") for key in weights)
    for head, rest in {(head, rest) for head, _, rest in heads}:
        for index in map(str, range(len(layers) + int(two_stage))):
            tensor = heads.get((head, index, rest), heads.get((head, "0", rest)))
            if tensor is None:
                continue
            completed.setdefault(f"{head}.{index}.{rest}", tensor)
            if two_stage or (refined and head == "bbox_embed"):
                completed.setdefault(f"{SECOND_NAME}{head}.{index}.{rest}", tensor)
    return completed


def _translate(key: str, rules: tuple[tuple[re.Pattern[str], str], ...]) -> str | None:
    for pattern, template in rules:
        if match := pattern.fullmatch(key):
            return template.format(**match.groupdict())
    return None


@cache
def _rules(layout: str, backbone: str) -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((_compile(ours), theirs) for ours, theirs in _name_pairs(layout, backbone))


@cache
def _reverse_rules(layout: str, backbone: str) -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((_compile(theirs), ours) for ours, theirs in _name_pairs(layout, backbone))


def _name_pairs(layout: str, backbone: str) -> list[tuple[str, str]]:
    """Spells the table out for one layout; what stays in braces is taken from the name that is translated."""
    words = VERSION_WORDS[layout]
    kept = {name: f"{{{name}}}" for name in PLACEHOLDERS}
    pairs = [(ours, theirs.format(**words, **kept)) for ours, theirs in DETECTOR_NAMES]
    if backbone == "timm":
        return [*pairs, ("backbone.0.body.{rest}", f"{words['body']}.{{rest}}")]
    return [*pairs, *((f"backbone.0.body.{ours}", f"{words['body']}.{theirs}") for ours, theirs in _resnet_names())]


def _resnet_names() -> list[tuple[str, str]]:
    """Names inside torchvision's ResNet and transformers' `ResNetBackbone`."""
    pairs = [
        ("conv1.{rest}", "embedder.embedder.convolution.{rest}"),
        ("bn1.{rest}", "embedder.embedder.normalization.{rest}"),
    ]
    for stage in range(4):
        ours, theirs = f"layer{stage + 1}.{{i}}", f"encoder.stages.{stage}.layers.{{i}}"
        pairs += [
            (f"{ours}.downsample.0.{{rest}}", f"{theirs}.shortcut.convolution.{{rest}}"),
            (f"{ours}.downsample.1.{{rest}}", f"{theirs}.shortcut.normalization.{{rest}}"),
        ]
        for index in range(3):
            pairs += [
                (f"{ours}.conv{index + 1}.{{rest}}", f"{theirs}.layer.{index}.convolution.{{rest}}"),
                (f"{ours}.bn{index + 1}.{{rest}}", f"{theirs}.layer.{index}.normalization.{{rest}}"),
            ]
    return pairs


def _compile(template: str) -> re.Pattern[str]:
    pattern = re.escape(template)
    for name, expression in PLACEHOLDERS.items():
        pattern = pattern.replace(re.escape(f"{{{name}}}"), f"(?P<{name}>{expression})")
    return re.compile(pattern)


def _split_query_key_value(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    split: dict[str, Tensor] = {}
    for key, tensor in weights.items():
        prefix, found, kind = key.partition(".in_proj_")
        if not found:
            split[key] = tensor
            continue
        for name, part in zip(QUERY_KEY_VALUE, tensor.chunk(3), strict=True):
            split[f"{prefix}.{name}.{kind}"] = part.clone()
    return split


def _join_query_key_value(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    joined: dict[str, Tensor] = {}
    for key, tensor in weights.items():
        if ".self_attn.q_proj." in key:
            parts = [key.replace("q_proj", name) for name in QUERY_KEY_VALUE]
            if all(part in weights for part in parts):
                joined[key.replace("q_proj.", "in_proj_")] = torch.cat([weights[part] for part in parts])
        elif not re.search(r"\.self_attn\.[kv]_proj\.", key):
            joined[key] = tensor
    return joined
