"""Layers by torch between kernels, interpreted, against torch layers; and what they wait for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.worker_svc.models.test_delta_net import assert_near
from tests.worker_svc.models.test_models import Steps, make_prompts
from tests.worker_svc.runner.interpreted import needs_interpreter, to_have_kernels
from tests.worker_svc.transformers_models.families import write
from worker_svc.attention.batch import AttentionBatch
from worker_svc.models import Decoder, load_model
from worker_svc.models.stored.narrow_gemms import NarrowLinear

pytestmark = needs_interpreter

CPU, LENGTH = torch.device("cpu"), 96
SIZES: dict[str, Any] = {"head_dim": 16, "hidden_size": 64}
NAMES = ["granite", "granite_hybrid", "lfm2_moe", "minimax_m2", "nemotron_h", "qwen3_next"]
NAMES += ["deepseek_v3", "glm4_moe_lite"]
# Of each mixer and feed once; rounded at load.
IN_8_BITS = ["qwen3_next:fp8", "nemotron_h:fp8", "lfm2_moe:fp8"]
NAMES += IN_8_BITS
Pair = tuple[Decoder, Decoder]
# What a device has to answer before the host goes on.
WAITING = {
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "masked_select",
    "nonzero",
    "nonzero_numpy",
    "repeat_interleave.Tensor",  # numbers of which the device has
    "unique_dim",
}
OF_MASKS = ("index", "index_put", "index_put_", "where")
OF_TENSORS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
# Copies of what the host has: no graph can record them.
FROM_THE_HOST = ("tensor", "as_tensor", "from_numpy")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """A function from a family's name to its model by torch alone, and with kernels."""

    @cache
    def get(name: str) -> Pair:
        name, _, quantization = name.partition(":")
        quantization = quantization or "auto"
        folder = write(name, tmp_path_factory.mktemp("models") / name, SIZES)
        by_torch = load_model(folder, torch.float32, CPU, LENGTH, quantization=quantization)
        return by_torch, composed(folder, quantization)

    return get


def composed(folder: Path, quantization: str = "auto") -> Decoder:
    with pytest.MonkeyPatch.context() as patched:
        model = to_have_kernels(folder, patched, quantization)
        model.composed = model._compose()
    return model


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_torch_layers(name: str, pair: Callable[[str], Pair]) -> None:
    by_torch, with_kernels = pair(name)
    prompts = make_prompts(24, 9, 5)
    steps, wanted = Steps(with_kernels, prompts), Steps(by_torch, prompts)
    # Chunks that end inside the convolution, one token, several tokens, and both together.
    for scheduled in ({0: 2, 2: 1}, {0: 1, 1: 8}, {0: 18, 1: 1, 2: 2}, {0: 1, 2: 1}, {0: 1, 2: 1}):
        for found, expected in zip(steps.run(scheduled), wanted.run(scheduled), strict=True):
            assert expected.abs().max() > 0.5  # logits near 0 would prove nothing
            assert_near(found, expected)


@pytest.mark.parametrize("name", IN_8_BITS)
def test_weights_stay_in_8_bits(name: str, pair: Callable[[str], Pair]) -> None:
    _, model = pair(name)
    assert model.composed is not None
    for layer in model.composed._loop.layers:
        linears = [] if layer.mixer is None else list(layer.mixer.linears)
        products = {type(linear._packed) for linear in linears}
        assert products <= {NarrowLinear, NoneType}
        assert (NarrowLinear in products) is bool(linears)
        experts = getattr(layer.feed, "experts", None)
        assert experts is None or (experts.gate_up.is_fp8 and experts.down.is_fp8)
    for device, is_composed in (("cuda", True), ("cpu", False)):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(model, "device", torch.device(device))
            assert model._is_composed is is_composed


class Waited(AssertionError):
    """The host waited for a device, or a device for the host."""


def is_mask(index: object) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype is torch.bool


class NoWaits(TorchDispatchMode):
    """Raises Waited for operations whose results the host needs."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        given = args if len(args) == 1 else args[1] if len(args) > 1 else ()
        masks = name in OF_MASKS and isinstance(given, list | tuple) and any(map(is_mask, given))
        if masks or not WAITING.isdisjoint((name, f"{name}.{func._overloadname}")):
            raise Waited(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Raises Waited where a step on CUDA would wait, but inside of interpreted kernels."""
    from triton.runtime import interpreter  # noqa: PLC0415 - not everywhere

    launch = interpreter.GridExecutor.__call__

    def refuse(name: str) -> Callable[..., None]:
        def refused(*args: Any, **kwargs: Any) -> None:
            raise Waited(name)

        return refused

    patched = pytest.MonkeyPatch()

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.undo()
        with _disable_current_modes():
            result = launch(self, *args, **kwargs)
        patch()
        return result

    def patch() -> None:
        for name in (*OF_TENSORS, "new_tensor"):
            patched.setattr(torch.Tensor, name, refuse(name))
        for name in FROM_THE_HOST:
            patched.setattr(torch, name, refuse(name))
        patched.setattr(interpreter.GridExecutor, "__call__", launched)

    patch()
    try:
        with NoWaits():
            yield
    finally:
        patched.undo()


def decodes(slots: list[int]) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch]:
    """A step of one token in each slot, of padding below 0, as a decode graph has it."""
    who = torch.tensor(slots)
    is_row = who >= 0
    positions = torch.where(is_row, 3, 0)
    batch = AttentionBatch.of_decodes(
        torch.where(is_row, 16 * (1 + who) + positions, -1),
        torch.where(is_row, 1 + who, 0).int()[:, None],
        torch.where(is_row, 4, 0).int(),
        LENGTH,
        who.int(),
    )
    return torch.arange(len(slots)), positions, batch


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_single_tokens_waits_for_nothing(name: str, pair: Callable[[str], Pair]) -> None:
    _, model = pair(name)
    model.make_states(2, 0)
    inputs, cache = decodes([1, 0, -1, -1]), model.new_cache(4, 16)
    with torch.inference_mode(), nothing_waits():
        token_ids, positions, batch = inputs
        model.vocab_part(model.forward(token_ids, positions, cache, batch))


@pytest.mark.parametrize(
    "wait",
    [
        lambda x, mask: x[mask],
        lambda x, mask: x.nonzero(),
        lambda x, mask: x.index_put((mask,), x[:1]),
        lambda x, mask: torch.where(mask),
        lambda x, mask: bool(mask.all()),
        lambda x, mask: x[0].tolist(),
        lambda x, mask: x.new_tensor([1]),
        lambda x, mask: torch.repeat_interleave(mask.long()),
    ],
)
def test_what_waits_is_found(wait: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    x, mask = torch.ones(2), torch.tensor([True, False])
    with torch.inference_mode(), nothing_waits(), pytest.raises(Waited):
        wait(x, mask)


def test_torch_layers_wait_and_states_of_several_tokens_do_not(
    pair: Callable[[str], Pair],
) -> None:
    by_torch, model = pair("lfm2_moe")
    for each in (by_torch, model):
        each.make_states(2, 0)
    token_ids, positions, batch = decodes([1, 0])
    cache = model.new_cache(4, 16)
    with torch.inference_mode(), nothing_waits(), pytest.raises(Waited):
        by_torch.forward(token_ids, positions, cache, batch)
    several = replace(batch, max_seqlen_q=2, cu_seqlens_q=torch.tensor([0, 1, 2]).int())
    with torch.inference_mode(), nothing_waits():
        model.forward(token_ids, positions, cache, several)
