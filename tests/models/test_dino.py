import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from models.criterion import Criterion
from models.denoising import ContrastiveDenoising
from models.dino import Dino
from models.structures import DetectorOutput, ImageBatch, Targets, take_apart

COUNTS = (1, 3)
# Of the norm: float32 sums in another order, through all layers and back.
MAX_RELATIVE_DIFFERENCE = 1e-4


def make_targets(*counts: int) -> Targets:
    generator = torch.Generator().manual_seed(2)
    total = sum(counts)
    boxes = torch.cat((torch.rand(total, 2, generator=generator) * 0.4 + 0.3, torch.full((total, 2), 0.3)), dim=1)
    return Targets(torch.randint(5, (total,), generator=generator), boxes, counts)


def train_once(model: Dino, batch: ImageBatch, targets: Targets, seed: int = 0) -> DetectorOutput:
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval()  # so that a second run has the same statistics
    return model(batch, targets, torch.Generator().manual_seed(seed))


def test_shapes_in_both_modes(dino: Dino, image_batch: ImageBatch) -> None:
    trained = dino(image_batch, make_targets(*COUNTS))
    assert trained.denoising is not None
    assert trained.denoising.logits.shape == (3, 2, 2 * 2 * 3, 5)  # two groups for three targets
    assert trained.denoising.boxes_cxcywh.shape == (3, 2, 12, 4)
    evaluated = dino.eval()(image_batch, make_targets(*COUNTS))
    assert evaluated.denoising is None
    for output in (trained, evaluated):
        assert output.logits.shape == (3, 2, 11, 5)
        assert output.boxes_cxcywh.shape == (3, 2, 11, 4)
        assert output.proposals is not None
        assert output.proposals.logits.shape == (2, 11, 5)
        assert output.proposals.boxes_cxcywh.shape == (2, 11, 4)
        assert not output.proposals.class_agnostic


def test_matching_queries_do_not_see_the_denoising_ones(dino: Dino, image_batch: ImageBatch) -> None:
    targets = make_targets(*COUNTS)
    with torch.no_grad():
        first, second = (train_once(dino, image_batch, targets, seed) for seed in (0, 1))
        alone = dino(image_batch)
    for output in (first, second):
        torch.testing.assert_close(output.logits, alone.logits, atol=1e-5, rtol=0)
        torch.testing.assert_close(output.boxes_cxcywh, alone.boxes_cxcywh, atol=1e-5, rtol=0)
    assert first.denoising is not None
    assert second.denoising is not None
    assert not torch.allclose(first.denoising.logits, second.denoising.logits)


def test_without_the_mask_they_would(dino: Dino, image_batch: ImageBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    open_mask = "models.denoising.DenoisingQueries.attention_mask"
    monkeypatch.setattr(open_mask, lambda self, count: torch.zeros(2 * (len(self.group) + count,)).bool())
    with torch.no_grad():
        seen = train_once(dino, image_batch, make_targets(*COUNTS))
        alone = dino(image_batch)
    assert (seen.logits - alone.logits).abs().max() > 1e-3


@pytest.mark.parametrize("counts", [(4, 1), (7, 0), (0, 0)])
def test_padding_at_the_end_changes_nothing(
    counts: tuple[int, int],
    dino: Dino,
    criterion: Criterion,
    image_batch: ImageBatch,
    gradients_of: Callable[[torch.nn.Module], dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    targets, computed = make_targets(*counts), []
    for padded in (True, False):
        if not padded:
            monkeypatch.setattr(ContrastiveDenoising, "_pad", lambda self, needed: needed)
        dino.zero_grad()
        output = train_once(dino, image_batch, targets)
        losses = criterion(output, targets, lambda count: count)
        losses.total.backward()
        outputs = {f"output {index}": tensor for index, tensor in enumerate(take_apart(output)[0])}
        gradients = [gradients_of(part) for part in (dino.transformer, dino.label_enc)]
        computed.append(outputs | losses.terms | gradients[0] | gradients[1])
    with_padding, without = computed
    assert with_padding.keys() == without.keys()
    for name, expected in without.items():
        difference = (with_padding[name] - expected).float().norm()
        assert difference <= MAX_RELATIVE_DIFFERENCE * expected.float().norm(), name


def test_seen_padding_would_change_the_others(
    dino: Dino, image_batch: ImageBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets, make_queries = make_targets(7, 1), dino.denoising.make_queries
    with torch.no_grad():
        hidden = train_once(dino, image_batch, targets).denoising

        def show(*args: Any) -> Any:
            made = make_queries(*args)
            assert len(made.queries.group) > made.num_queries
            return replace(made, queries=replace(made.queries, group=torch.zeros_like(made.queries.group)))

        monkeypatch.setattr(dino.denoising, "make_queries", show)
        seen = train_once(dino, image_batch, targets).denoising
    assert hidden is not None
    assert seen is not None
    assert (seen.logits - hidden.logits).abs().max() > 1e-3


def test_groups_do_not_see_each_other(dino: Dino, image_batch: ImageBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    make_queries, targets = dino.denoising.make_queries, make_targets(*COUNTS)
    with torch.no_grad():
        expected = train_once(dino, image_batch, targets).denoising

        def change_first_group(*args: Any) -> Any:
            made = make_queries(*args)
            labels = made.queries.labels
            changed = torch.cat(((labels[:, :6] + 1) % 5, labels[:, 6:]), dim=1)
            return replace(made, queries=replace(made.queries, labels=changed))

        monkeypatch.setattr(dino.denoising, "make_queries", change_first_group)
        actual = train_once(dino, image_batch, targets).denoising
    assert expected is not None
    assert actual is not None
    torch.testing.assert_close(actual.logits[:, :, 6:], expected.logits[:, :, 6:], atol=1e-5, rtol=0)
    assert (actual.logits[:, :, :6] - expected.logits[:, :, :6]).abs().max() > 1e-3


def test_queries_are_learned_contents_at_the_best_proposals(dino: Dino, image_batch: ImageBatch) -> None:
    seen: list[Any] = []
    dino.transformer.decoder.register_forward_hook(lambda module, inputs, output: seen.append(inputs))
    scores: list[torch.Tensor] = []
    dino.transformer.enc_out_class_embed.register_forward_hook(lambda module, inputs, output: scores.append(output))
    output = dino.eval()(image_batch)
    query, query_pos, reference_points, *_, attention_mask = seen[0]
    assert query_pos is None
    assert attention_mask is None
    assert torch.equal(query, dino.transformer.tgt_embed.weight.expand(2, -1, -1))
    assert torch.equal(reference_points, output.proposals.boxes_cxcywh)
    assert not reference_points.requires_grad
    every, chosen = scores
    assert not every.requires_grad
    best = every.amax(-1).topk(11, dim=1).values
    torch.testing.assert_close(chosen.amax(-1), best)
    assert not torch.equal(every.argmax(-1), torch.zeros_like(every.argmax(-1))), "the first class alone decides"


def test_more_queries_than_proposals_are_refused(make_dino: Callable[..., Dino]) -> None:
    batch = ImageBatch(torch.zeros(1, 3, 32, 32), torch.zeros(1, 32, 32, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"num_queries must be at most the number of proposals, 22 .*got 23"):
        make_dino(d_model=64, num_queries=23).eval()(batch)


@pytest.mark.parametrize("counts", [(0, 0), (0, 3), (30, 1)])
def test_every_parameter_gets_a_finite_gradient(
    counts: tuple[int, int], dino: Dino, criterion: Criterion, image_batch: ImageBatch
) -> None:
    targets = make_targets(*counts)
    losses = criterion(dino(image_batch, targets), targets, lambda count: count)
    assert {"loss_ce_dn", "loss_giou_dn_1", "loss_bbox_enc"} <= set(losses.terms)
    assert (losses.terms["loss_ce_dn"] > 0) == (sum(counts) > 0)
    losses.total.backward()
    assert [name for name, parameter in dino.named_parameters() if parameter.grad is None] == []
    assert all(parameter.grad.isfinite().all() for parameter in dino.parameters())


def test_denoising_reconstructs_its_own_targets(dino: Dino, criterion: Criterion, image_batch: ImageBatch) -> None:
    dino.denoising.box_noise_scale = 0.0
    targets = make_targets(*COUNTS)
    for parameter in dino.bbox_embed.parameters():
        torch.nn.init.zeros_(parameter)
    losses = criterion(dino(image_batch, targets), targets, lambda count: count)
    for suffix in ("_dn_0", "_dn_1", "_dn"):
        assert losses.terms[f"loss_bbox{suffix}"] < 1e-5
        assert losses.terms[f"loss_giou{suffix}"] < 1e-5
    assert losses.terms["loss_bbox"] > 1e-2


def test_forward_reads_no_tensor_on_the_host(
    dino: Dino, image_batch: ImageBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, lambda *args: pytest.fail("the forward pass reads a tensor"))
    dino(image_batch, make_targets(30, 2))


@pytest.mark.gpu
def test_only_the_matcher_waits_for_the_gpu(
    dino: Dino, criterion: Criterion, image_batch: ImageBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    dino.cuda()
    batch = ImageBatch(image_batch.images.cuda(), image_batch.padding_mask.cuda())
    targets = make_targets(30, 2)
    targets = Targets(targets.labels.cuda(), targets.boxes_cxcywh.cuda(), targets.counts)
    matches = criterion.matcher(dino(batch, targets), targets)
    monkeypatch.setattr(criterion.matcher, "forward", lambda output, targets: matches)
    generator = torch.Generator("cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        criterion(dino(batch, targets, generator), targets, lambda count: count).total.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(parameter.grad is not None for parameter in dino.parameters())


@pytest.mark.gpu
def test_an_image_of_500_boxes_needs_at_most_half_as_much_memory_again(
    make_dino: Callable[..., Dino], criterion: Criterion
) -> None:
    published = {"d_model": 256, "num_heads": 8, "num_encoder_layers": 6, "num_decoder_layers": 6}
    points = {"num_encoder_points": 4, "num_decoder_points": 4}
    model = make_dino(**published, **points, num_queries=900, dim_feedforward=2048, backend="triton").cuda()
    model.denoising = ContrastiveDenoising(num_queries=100, max_queries=400, label_noise_ratio=0.5, box_noise_scale=1.0)
    padding_mask = torch.zeros(2, 512, 640, dtype=torch.bool, device="cuda")
    batch = ImageBatch(torch.randn(2, 3, 512, 640, device="cuda"), padding_mask)

    def peak_mib(*counts: int) -> float:
        targets = make_targets(*counts)
        targets = Targets(targets.labels.cuda(), targets.boxes_cxcywh.cuda(), targets.counts)
        model.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            losses = criterion(model(batch, targets), targets, lambda count: count)
        losses.total.backward()
        return torch.cuda.max_memory_allocated() / 2**20

    peak_mib(7, 7)  # the first step also holds what libraries allocate once
    normal, dense = peak_mib(7, 7), peak_mib(7, 500)
    assert dense <= 1.5 * normal, f"{dense:.0f} MiB after {normal:.0f}"


def test_checkpointing_gives_the_same_gradients(make_dino: Callable[..., Dino], image_batch: ImageBatch) -> None:
    gradients = []
    for gradient_checkpointing in (False, True):
        model = make_dino(dropout=0.1, gradient_checkpointing=gradient_checkpointing)
        torch.manual_seed(1)
        output = model(image_batch, make_targets(*COUNTS), torch.Generator().manual_seed(0))
        (output.logits.sum() + output.boxes_cxcywh.sum() + output.denoising.logits.sum()).backward()
        gradients.append([p.grad for p in model.transformer.encoder.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_bf16_autocast_keeps_logits_and_boxes_in_float32(dino: Dino, image_batch: ImageBatch) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = dino(image_batch, make_targets(*COUNTS))
    for part in (output, output.proposals, output.denoising):
        assert part.logits.dtype == part.boxes_cxcywh.dtype == torch.float32
        assert part.logits.isfinite().all()


def test_an_image_gives_the_same_boxes_alone_and_in_a_batch(dino: Dino) -> None:
    dino.eval()
    images, mask = torch.randn(2, 3, 64, 96), torch.zeros(2, 64, 96, dtype=torch.bool)
    both, alone = dino(ImageBatch(images, mask)), dino(ImageBatch(images[:1], mask[:1]))
    torch.testing.assert_close(alone.boxes_cxcywh[:, 0], both.boxes_cxcywh[:, 0], atol=1e-5, rtol=0)
    torch.testing.assert_close(alone.logits[:, 0], both.logits[:, 0], atol=1e-5, rtol=0)


def test_one_pair_of_heads_for_the_layers_and_one_for_the_proposals(make_dino: Callable[..., Dino]) -> None:
    model = make_dino()
    assert len(set(model.class_embed)) == len(set(model.bbox_embed)) == 1
    transformer = model.transformer
    assert transformer.enc_out_class_embed is not model.class_embed[0]
    for ours, proposals in (
        (model.class_embed[0], transformer.enc_out_class_embed),
        (model.bbox_embed[0], transformer.enc_out_bbox_embed),
    ):
        pairs = zip(ours.parameters(), proposals.parameters(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs), "both pairs start from the same weights"


def test_initialisation(make_dino: Callable[..., Dino]) -> None:
    model = make_dino(d_model=128)
    torch.testing.assert_close(model.class_embed[0].bias.sigmoid(), torch.full((5,), 0.01))
    assert model.bbox_embed[0].layers[-1].weight.abs().max() == model.bbox_embed[0].layers[-1].bias.abs().max() == 0
    for matrix in (model.transformer.tgt_embed.weight, model.transformer.decoder.ref_point_head.layers[0].weight):
        bound = (6 / sum(matrix.shape)) ** 0.5
        assert 0.9 * bound < matrix.abs().max() <= bound
    assert model.label_enc.weight.shape == (6, 128)
    assert model.label_enc.weight.std().item() == pytest.approx(1, abs=0.1)
    assert model.transformer.level_embed.std().item() == pytest.approx(1, abs=0.1)


def test_state_dict_keys_are_the_published_ones(dino: Dino) -> None:
    affine = r"\.(weight|bias)"
    heads = (r"class_embed\.[0-2]" + affine, r"bbox_embed\.[0-2]\.layers\.[0-2]" + affine)
    attention = r"(sampling_offsets|attention_weights|value_proj|output_proj)" + affine
    patterns = [
        r"backbone\.0\.body\.(conv1|bn1|layer[1-4])\..*",
        r"input_proj\.[0-3]\.[01]" + affine,
        r"label_enc\.weight",
        *heads,
        *(r"transformer\.decoder\." + head for head in heads),
        r"transformer\.(level_embed|tgt_embed\.weight)",
        r"transformer\.(enc_output|enc_output_norm|enc_out_class_embed|enc_out_bbox_embed\.layers\.[0-2])" + affine,
        r"transformer\.decoder\.(norm|ref_point_head\.layers\.[01])" + affine,
        r"transformer\.encoder\.layers\.[01]\.(self_attn\." + attention + r"|(norm[12]|linear[12])" + affine + ")",
        r"transformer\.decoder\.layers\.[0-2]\.(cross_attn\." + attention + r"|(norm[123]|linear[12])" + affine + ")",
        r"transformer\.decoder\.layers\.[0-2]\.self_attn\.(in_proj_(weight|bias)|out_proj" + affine + ")",
    ]
    keys = set(dino.state_dict())
    assert [key for key in keys if not any(re.fullmatch(pattern, key) for pattern in patterns)] == []
    assert [pattern for pattern in patterns if not any(re.fullmatch(pattern, key) for key in keys)] == []


def test_the_loss_falls(make_dino: Callable[..., Dino], criterion: Criterion, image_batch: ImageBatch) -> None:
    model, targets, totals = make_dino(), make_targets(*COUNTS), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(12):
        output = model(image_batch, targets, torch.Generator().manual_seed(step))
        losses = criterion(output, targets, lambda count: count)
        optimizer.zero_grad()
        losses.total.backward()
        optimizer.step()
        totals.append(losses.total.item())
    assert totals[-1] < 0.75 * totals[0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_classes": 0}, "num_classes must be at least 1, got 0"),
        ({"d_model": 48}, "d_model must be a multiple of 32, got 48"),
    ],
)
def test_wrong_settings_are_refused(overrides: dict[str, Any], message: str, make_dino: Callable[..., Dino]) -> None:
    with pytest.raises(ValueError, match=message):
        make_dino(**overrides)
