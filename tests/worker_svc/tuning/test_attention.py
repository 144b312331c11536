"""Choice of the attention backend: candidates, timings, refusals."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention_kind import AttentionKind
from tests.worker_svc.two_ranks import on_two_ranks
from worker_svc.attention.backend import AttentionChoice, AttentionTiming, Backend, LayerChoices
from worker_svc.attention.batch import MixedBatch
from worker_svc.attention.call import AttentionCall
from worker_svc.attention.flash_attn import InstalledVersions, Setup
from worker_svc.config import ATTENTION_BACKENDS, UnsupportedOption, WorkerConfig, parse
from worker_svc.parallel.group import ALONE, RankFailed
from worker_svc.protocol.step import Limits
from worker_svc.startup import startup
from worker_svc.tuning.attention import Candidates, Unfit, candidates, choose, quickest
from worker_svc.tuning.attention_timing import shapes

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LIMITS = Limits(
    num_blocks=1,
    block_size=16,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    max_model_len=8192,
    vocab_size=8,
)


class Named:
    """A backend with nothing but a name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def serves(self, kind: AttentionKind) -> bool:
        return kind.window is None or self is not TWO

    def decode(self, call: AttentionCall) -> Tensor:
        raise NotImplementedError

    prefill = decode

    def mixed(self, call: AttentionCall, mixed: MixedBatch) -> Tensor:
        raise NotImplementedError


FULL = AttentionKind(0.125)
TRITON, FOUR, TWO = Named("triton"), Named("flash-attn 4"), Named("flash-attn 2")


def setup() -> Setup:
    return Setup(head_dim=64, dtype=torch.bfloat16, block_size=16, capability=(9, 0))


def nothing_installed(setup: Setup) -> InstalledVersions:
    return InstalledVersions(
        (), ("flash-attn 4: not installed", "flash-attn 2: block_size 16 is odd")
    )


def both_installed(setup: Setup) -> InstalledVersions:
    return InstalledVersions((FOUR, TWO), ())  # type: ignore[arg-type]


def clock(times: dict[str, tuple[Sequence[float], Sequence[float]]]) -> Any:
    """Returns these times in us for (decode, prefill); raises for other backends."""

    def measure(backend: Backend) -> list[AttentionTiming]:
        if backend.name not in times:
            raise Unfit("decode of 1 x 1024 is 7.0e-01 away from ours")
        return [
            AttentionTiming(kind, f"shape {i}", backend.name, us)
            for kind, found in zip(("decode", "prefill"), times[backend.name], strict=True)
            for i, us in enumerate(found)
        ]

    return lambda: measure


def names(choice: AttentionChoice) -> tuple[str, str]:
    return choice.decode.name, choice.prefill.name


def test_each_kind_of_step_goes_to_who_is_quickest_at_it() -> None:
    times = {"triton": ([10, 100], [50]), "flash-attn 4": ([20, 150], [30]), TWO.name: ([9], [60])}
    offered = Candidates((FOUR, TWO))
    choice = choose(FULL, TRITON, offered, clock(times), ALONE)
    assert names(choice) == ("flash-attn 2", "flash-attn 4")
    assert choice.name == "decode: flash-attn 2, prefill: flash-attn 4"
    assert AttentionTiming("prefill", "shape 0", "flash-attn 4", 30) in choice.timings
    assert len(choice.timings) == 8


def test_layers_that_a_backend_does_not_serve_go_to_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    near = AttentionKind(0.125, window=8)
    times = {"triton": ([9], [9]), FOUR.name: ([7], [7]), TWO.name: ([5], [5])}
    offered = Candidates((FOUR, TWO))
    choices = LayerChoices(
        {kind: choose(kind, TRITON, offered, clock(times), ALONE) for kind in (FULL, near)}
    )
    assert choices.name == "full attention: flash-attn 2; window 8: flash-attn 4"
    assert len(choices.timings) == 3 * 2 + 2 * 2
    assert "layers with window 8: not by flash-attn 2" in caplog.text
    alone = choose(near, TRITON, Candidates((TWO,), has_triton=False), clock({}), ALONE)
    assert names(alone) == ("triton", "triton")


def test_every_shape_weighs_the_same() -> None:
    """Relative times count: 30 % of a short one outweigh 10 % of a long one."""
    a = [AttentionTiming("decode", "1 x 8", "a", 10), AttentionTiming("decode", "9 x 8", "a", 1000)]
    b = [AttentionTiming("decode", "1 x 8", "b", 13), AttentionTiming("decode", "9 x 8", "b", 900)]
    assert quickest(["b", "a"], a + b, "decode") == "a"


def test_who_is_hardly_quicker_changes_nothing() -> None:
    timings = [
        AttentionTiming("decode", "s", "triton", 100),
        AttentionTiming("decode", "s", "flash-attn 4", 98),
    ]
    assert quickest(["triton", "flash-attn 4"], timings, "decode") == "triton"
    timings[1] = AttentionTiming("decode", "s", "flash-attn 4", 96)
    assert quickest(["triton", "flash-attn 4"], timings, "decode") == "flash-attn 4"


def test_who_is_wrong_or_fails_is_left_out() -> None:
    times = {"triton": ([100], [100]), TWO.name: ([50], [150])}
    choice = choose(FULL, TRITON, Candidates((FOUR, TWO)), clock(times), ALONE)
    assert names(choice) == ("flash-attn 2", "triton")
    with pytest.raises(
        Unfit, match=r"none works: flash-attn 4: decode of 1 x 1024 is 7.0e-01 away"
    ):
        choose(FULL, TRITON, Candidates((FOUR,), has_triton=False), clock({}), ALONE)


def test_triton_alone_is_not_measured() -> None:
    def measure() -> Any:
        raise AssertionError

    choice = choose(FULL, TRITON, Candidates(), measure, ALONE)
    assert choice == AttentionChoice(TRITON, TRITON, TRITON)
    assert choice.name == "triton"


def test_one_that_is_asked_for_is_tried_before_it_serves() -> None:
    choice = choose(
        FULL, TRITON, Candidates((FOUR,), False), clock({FOUR.name: ([900], [900])}), ALONE
    )
    assert names(choice) == ("flash-attn 4", "flash-attn 4")


def choices_of_ranks(clocks: Sequence[Any]) -> list[Any]:
    """Result or exception of `choose` on each of two ranks with these clocks."""
    return on_two_ranks(
        lambda group: choose(FULL, TRITON, Candidates((FOUR, TWO)), clocks[group.rank], group)
    )


def test_all_ranks_choose_what_rank_0_does() -> None:
    fast_four = {"triton": ([9], [9]), FOUR.name: ([5], [5]), TWO.name: ([9], [9])}
    fast_two = {"triton": ([9], [9]), FOUR.name: ([9], [9]), TWO.name: ([5], [5])}
    first, second = choices_of_ranks([clock(fast_four), clock(fast_two)])
    assert names(first) == names(second) == ("flash-attn 4", "flash-attn 4")


def test_a_rank_that_cannot_do_as_rank_0_says_so_on_all() -> None:
    first, second = choices_of_ranks(
        [clock({"triton": ([9], [9]), FOUR.name: ([5], [5])}), clock({"triton": ([9], [9])})]
    )
    assert isinstance(first, RankFailed)
    assert isinstance(second, Unfit)
    assert "rank 1: Unfit: attention_backend: flash-attn 4 works on rank 0 and not here" in str(
        first
    )


def test_auto_offers_what_is_installed_beside_triton() -> None:
    assert candidates("auto", CUDA, 64, setup, both_installed) == Candidates((FOUR, TWO))
    assert candidates("auto", CUDA, 64, setup, nothing_installed) == Candidates()
    asked = candidates("flash-attn", CUDA, 64, setup, both_installed)
    assert asked == Candidates((FOUR, TWO), has_triton=False)


@pytest.mark.parametrize(("option", "device"), [("triton", CUDA), ("auto", CPU)])
def test_nothing_is_looked_for_where_nothing_could_use_it(
    option: str, device: torch.device
) -> None:
    def find(setup: Setup) -> InstalledVersions:
        raise AssertionError

    assert candidates(option, device, 64, setup, find) == Candidates()
    assert candidates("auto", CUDA, 96, setup, find) == Candidates()


def test_what_is_named_and_cannot_be_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"4: not installed; flash-attn 2: block_size 16 is odd"):
        candidates("flash-attn", CUDA, 64, setup, nothing_installed)
    for option in ("triton", "flash-attn"):
        with pytest.raises(ValueError, match=f"{option} needs device cuda, this is cpu"):
            candidates(option, CPU, 64, setup, both_installed)
        with pytest.raises(ValueError, match=f"{option} needs a head_dim .*, not 96"):
            candidates(option, CUDA, 96, setup, both_installed)


def test_the_option_is_one_of_three(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse([]).attention_backend == "auto"
    for name in ATTENTION_BACKENDS:
        assert parse(["--attention-backend", name]).attention_backend == name
    with pytest.raises(ValueError, match="attention_backend: fa3 must be one of auto, triton"):
        WorkerConfig(attention_backend="fa3")


def test_a_worker_on_cpu_refuses_before_it_reads_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(CONFIG_JSON)
    config = WorkerConfig(attention_backend="flash-attn")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedOption, match="attention_backend: flash-attn needs device cuda"):
        startup.load(config, tmp_path, "float32", "")


CONFIG_JSON = """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32,
"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
"num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
"hidden_act": "silu", "torch_dtype": "float32"}"""


def test_shapes_stay_within_the_limits() -> None:
    assert [str(shape) for shape in shapes(LIMITS)] == [
        *("1 x 1024", "32 x 1024", "256 x 1024"),
        *("8 x 1024 of 1024", "1 x 2048 of 4096"),
    ]
    small = Limits(1, 16, 2, 20, 64, 8)
    for shape in shapes(small):
        assert shape.num_seqs <= 2
        assert shape.num_seqs * shape.num_queries <= 20
        assert shape.num_queries <= shape.context <= 64
