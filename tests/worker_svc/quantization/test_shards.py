"""A rank's part of a quantized checkpoint is a part of the whole."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.worker_svc.models.test_models import MAX_MODEL_LEN
from tests.worker_svc.quantized_checkpoints import FORMATS, float8_blocks, packed, save_quantized
from worker_svc.models import Decoder
from worker_svc.models import config as model_config
from worker_svc.models.linear import WeightRows
from worker_svc.models.stored.quantized import load_quantized
from worker_svc.models.weights import WrongShape
from worker_svc.parallel.group import Group

CPU = torch.device("cpu")


def weights(folder: Path, rank: int, size: int) -> tuple[Decoder, dict[str, torch.Tensor]]:
    """The model of a rank, and the weights of its linear layers by name."""
    config = model_config.load(folder)
    assert config.quantization is not None
    model = Decoder(config, torch.float32, CPU, MAX_MODEL_LEN, Group(rank, size))
    destinations, share = dict(model.destinations()), model.sharding.share
    load_quantized(folder, config.quantization, destinations, frozenset(), share, CPU)
    rows = {name: to for name, to in destinations.items() if isinstance(to, WeightRows)}
    return model, {name: to.values for name, to in rows.items()}


# Each kind of tensor and axis once.
SHARDED = ("packed-asymmetric", "packed-channel", "packed-order", "gptq-asymmetric", "gptq-order",
           "awq", "int8", "int8-tensor", "fp8-channel", "fp8-block", "fp8-static")  # fmt: skip


@pytest.mark.parametrize("name", SHARDED)
def test_parts_are_those_of_the_whole_weight(
    name: str, plain: Mapping[str, Path], tmp_path: Path
) -> None:
    save_quantized(plain["qwen3"], tmp_path / "q", tmp_path / "twin", FORMATS[name])
    _, whole = weights(tmp_path / "q", 0, 1)
    for rank, size in ((0, 2), (1, 2), (0, 4), (2, 4), (3, 4)):
        model, parts = weights(tmp_path / "q", rank, size)
        for layer, part in parts.items():
            share = model.sharding.share(layer)
            assert share is not None
            assert torch.equal(part, share.cut(whole[layer], part.shape[share.dim])), layer


@pytest.mark.parametrize(
    ("form", "named"),
    [
        (packed(group=32), r"o_proj\.weight_scale: the part 0 to 16 of a rank cuts a group of 32"),
        (float8_blocks((48, 64)), r"o_proj\.weight_scale_inv: the part 0 to 16 of a rank cuts"),
    ],
)
def test_a_cut_through_a_group_is_refused_by_name(
    form: "object", named: str, plain: Mapping[str, Path], tmp_path: Path
) -> None:
    save_quantized(plain["llama"], tmp_path / "q", tmp_path / "twin", form)  # type: ignore[arg-type]
    with pytest.raises(WrongShape, match=named):
        weights(tmp_path / "q", 0, 4)
