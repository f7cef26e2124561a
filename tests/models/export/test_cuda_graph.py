"""Graphs: which call gets one, what they may cost, and what is refused. Capturing itself needs a GPU."""

import copy
import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

from models.export.buckets import pad_images
from models.export.certificate import Tolerance, compare_detections, contrasting_inputs
from models.export.cuda_graph import CudaGraph, GraphedDetector
from models.export.inference import keep_half_weights
from models.export.recipe import Precision, build_module
from models.layers.frozen_norm import FoldedBatchNorm2d
from models.layers.level_tables import keeping_level_tables

BUCKETS = ((64, 64), (64, 128), (128, 64))


class Recording:
    """What a CUDA graph is, without a GPU: fixed buffers, and the weights at the addresses of the capture."""

    memory_mib = 10.0

    def __init__(self, module, inputs):
        self._inputs = tuple(tensor.clone() for tensor in inputs)
        self._module = copy.deepcopy(module)  # a weight that is replaced later does not reach a graph
        self._outputs = module(*self._inputs)

    def __call__(self, *inputs):
        for static, given in zip(self._inputs, inputs, strict=True):
            assert static.shape == given.shape
            static.copy_(given)
        for static, new in zip(self._outputs, self._module(*self._inputs), strict=True):
            static.copy_(new)
        return self._outputs


class StuckRecording(Recording):
    """A graph that missed its input."""

    def __call__(self, *inputs):
        return self._outputs


def build(source, device="cpu", backend="reference", traced=False):
    fp32 = Precision(torch.float32, False)
    return build_module(source, precision=fp32, backend=backend, fused=True, device=torch.device(device), traced=traced)


@pytest.fixture
def module(source):
    return build(source)


def graphed(module, capture=Recording, cap=1000.0, batch_size=1):
    return GraphedDetector(module, buckets=BUCKETS, batch_size=batch_size, memory_cap_mib=cap, capture=capture)


def inputs_of(height, width, batch_size=1):
    return contrasting_inputs((height, width), batch_size)[1]


def test_each_bucket_is_captured_once_and_answers_as_eager(module):
    detector = graphed(module)
    for _ in range(2):
        for bucket in BUCKETS:
            for inputs in contrasting_inputs(bucket, 1):
                answers = detector(*inputs)
                assert all(torch.equal(one, other) for one, other in zip(answers, module(*inputs), strict=True))
    assert detector.captures == len(BUCKETS)
    assert detector.eager_calls == 0


def test_answers_outlive_the_next_call(module):
    detector = graphed(module)
    first, second = contrasting_inputs((64, 64), 1)
    kept = detector(*first)
    detector(*second)
    assert all(torch.equal(one, other) for one, other in zip(kept, module(*first), strict=True))


def test_what_has_no_graph_is_eager_counted_and_logged_once(module, caplog):
    detector = graphed(module)
    with caplog.at_level(logging.WARNING):
        for inputs in (inputs_of(128, 128), inputs_of(64, 64, batch_size=2), inputs_of(192, 64)):
            answers = detector(*inputs)
            assert all(torch.equal(one, other) for one, other in zip(answers, module(*inputs), strict=True))
    assert detector.eager_calls == 3
    assert detector.captures == 0
    assert [record.message for record in caplog.records if "computed eagerly" in record.message] == [
        "Inputs (1, 3, 128, 128) have no graph (buckets [(64, 64), (64, 128), (128, 64)], 1 images, cap 1000 MiB): "
        "computed eagerly, and counted"
    ]


def test_the_least_recently_used_graph_leaves(module):
    detector = graphed(module, cap=25.0)
    for bucket in (BUCKETS[0], BUCKETS[1], BUCKETS[0], BUCKETS[2]):
        detector(*inputs_of(*bucket))
        assert detector.memory_mib <= 25
    assert detector.captured == (BUCKETS[0], BUCKETS[2])
    detector(*inputs_of(*BUCKETS[1]))
    assert detector.captures == 4
    assert detector.eager_calls == 0


def test_a_graph_over_the_cap_stays_eager(module, caplog):
    detector = graphed(module, cap=5.0)
    for _ in range(2):
        detector(*inputs_of(*BUCKETS[0]))
    assert (detector.captures, detector.captured, detector.eager_calls) == (1, (), 2)
    assert "over the cap" in caplog.text


def test_capturing_beforehand(module):
    detector = graphed(module)
    detector.capture_all()
    detector(*inputs_of(*BUCKETS[1]))
    assert detector.captures == len(BUCKETS)


def test_a_graph_that_does_not_answer_as_eager_is_refused(module):
    with pytest.raises(RuntimeError, match="must equal the eager detector bit for bit and depend on its input"):
        graphed(module, capture=StuckRecording)(*inputs_of(64, 64))


@torch.no_grad()
def write_in_place(layer):
    layer.weight.mul_(1.5)


def replace_data(layer):
    layer.weight.data = layer.weight.data * 1.5


def replace_parameter(layer):
    layer.weight = nn.Parameter(layer.weight.detach() * 1.5, requires_grad=False)


@pytest.mark.parametrize("change", [write_in_place, replace_data, replace_parameter])
def test_a_changed_weight_is_refused_until_recaptured(module, change):
    detector = graphed(module)
    inputs = inputs_of(64, 64)
    before = detector(*inputs)
    change(module.model.transformer.encoder.layers[0].linear1)
    with pytest.raises(ValueError, match=r"got 1 changed since \(model.transformer.encoder.layers.0.linear1.weight\)"):
        detector(*inputs)
    detector.recapture()
    after = detector(*inputs)
    assert all(torch.equal(one, other) for one, other in zip(after, module(*inputs), strict=True))
    assert not torch.equal(before[0], after[0])


def test_loading_weights_is_noticed(module, source):
    detector = graphed(module)
    detector(*inputs_of(64, 64))
    state = module.model.state_dict()
    module.model.load_state_dict(state)
    with pytest.raises(ValueError, match="weights must be those that were captured"):
        detector(*inputs_of(64, 64))


def test_level_tables_of_all_attention_calls_are_kept(module):
    with keeping_level_tables(module) as tables:
        module(*inputs_of(64, 128))
    assert len(tables) == 2 * 2
    assert tables[0].tolist() == [[8, 16], [4, 8], [2, 4]]
    assert tables[1].tolist() == [0, 128, 160]


PRECISIONS = {
    "bf16": Precision(torch.bfloat16, True),
    "fp16": Precision(torch.float16, True),
    "tf32": Precision(torch.float32, True),
    "fp32": Precision(torch.float32, False),
}


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_graph_equals_eager_bit_for_bit(any_model, as_module, precision, monkeypatch):
    for switch in (torch.backends.cuda.matmul, torch.backends.cudnn):
        monkeypatch.setattr(switch, "allow_tf32", PRECISIONS[precision].allow_tf32)
    module = as_module(any_model, PRECISIONS[precision].dtype).cuda()
    for layer in module.modules():
        if hasattr(layer, "backend"):
            layer.backend = "triton"
    first, second = (tuple(tensor.cuda() for tensor in each) for each in contrasting_inputs((128, 192), 2))
    keep_half_weights(module, *first)
    detector = GraphedDetector(module, buckets=((128, 192),), batch_size=2, memory_cap_mib=4096)
    for inputs in (first, second, first):
        answers = detector(*inputs)
        for one, other in zip(answers, module(*inputs), strict=True):
            assert torch.equal(one, other)
    assert not torch.equal(detector(*first)[0], detector(*second)[0])
    assert (detector.captures, detector.eager_calls) == (1, 0)
    assert 0 < detector.memory_mib < 4096


@pytest.mark.gpu
@pytest.mark.parametrize("change", [write_in_place, replace_data, replace_parameter])
def test_a_weight_changed_after_capture_is_noticed(source, change):
    module = build(source, "cuda", "triton")
    detector = graphed(module, capture=CudaGraph, cap=4096.0)
    inputs = inputs_of(64, 64)
    before = detector(*inputs)
    change(module.model.transformer.encoder.layers[0].linear1)
    with pytest.raises(ValueError, match="weights must be those that were captured"):
        detector(*inputs)
    detector.recapture()
    assert not torch.equal(before[0], detector(*inputs)[0])


@pytest.mark.gpu
def test_norms_that_kernels_take_along_answer_as_folded_ones_do(source, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    backbone = {**source.recipe.model["backbone"], "channels_last": True}
    source = replace(source, recipe=replace(source.recipe, model={**source.recipe.model, "backbone": backbone}))
    fused, folded = (build(source, "cuda", "triton", traced=traced) for traced in (False, True))
    assert any(isinstance(layer, FoldedBatchNorm2d) and layer.fused for layer in fused.modules())
    assert not any(isinstance(layer, FoldedBatchNorm2d) for layer in folded.modules())
    for inputs in contrasting_inputs((64, 128), 2):
        inputs = tuple(tensor.cuda() for tensor in inputs)
        with torch.no_grad():
            found = compare_detections(folded(*inputs), fused(*inputs))
        assert found.within(Tolerance(score=1e-3, box_px=0.1, min_score=0.0)), found


@pytest.mark.gpu
def test_graphs_answer_from_host_memory_and_survive_each_other(source):
    module = build(source, "cuda", "triton")
    detector = graphed(module, capture=CudaGraph, cap=4096.0)
    detector.capture_all()
    image = torch.randint(256, (3, 50, 60), dtype=torch.uint8)
    answers = {}
    for bucket in (*BUCKETS, *BUCKETS):
        images, sizes_hw = pad_images([image], bucket, 1)
        answer = detector(images, sizes_hw, sizes_hw)
        torch.testing.assert_close(answer[0], answers.setdefault(bucket, answer)[0], rtol=0, atol=0)
        torch.testing.assert_close(answer[0], answers[BUCKETS[0]][0], rtol=0, atol=1e-3)
    assert detector.eager_calls == 0
