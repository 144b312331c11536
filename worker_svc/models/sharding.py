"""Tensor parallelism: the sizes of each rank, and its shard of each tensor.

Attention and recurrent layers are sharded by heads, an MLP and each expert by its inner dimension,
embedding and LM head by vocabulary; a router is whole on every rank.
With more ranks than KV heads several ranks hold the same KV head, each with different query heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from worker_svc.models.spec import (
    AttentionSpec,
    DeltaNetSpec,
    Feed,
    Mamba2Spec,
    MlpAndExpertsSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    RecurrentSpec,
    ShortConvSpec,
    UnsupportedModel,
    experts_of,
)
from worker_svc.models.weights import Share


@dataclass(frozen=True, slots=True)
class Sharding:
    """One rank's shard. Raises UnsupportedModel, naming the size that does not divide."""

    whole: ModelSpec
    rank: int
    size: int
    spec: ModelSpec = field(init=False)  # the model with the sizes of one rank
    # Of tensors of which each section is divided, by the ends of their names.
    _sections: Mapping[str, tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "spec", _part(self.whole, self.size))
        object.__setattr__(self, "_sections", _sections(self.whole))

    @property
    def first_token(self) -> int:
        """The first token id in this rank's part of the vocabulary."""
        return self.rank * self.spec.vocab_size

    @property
    def kv_heads(self) -> slice:
        """This rank's KV heads, among those of the whole model."""
        count = self.spec.attention.num_kv_heads
        first = self.rank * self.whole.attention.num_kv_heads // self.size
        return slice(first, first + count)

    def share(self, name: str) -> Share | None:
        """The shard of a checkpoint's tensor that this rank reads; None: the whole tensor."""
        divided = self.whole.names.divided
        parts = name.split(".")
        ends = [end for end in (".".join(parts[-3:]), ".".join(parts[-2:])) if end in divided]
        if self.size == 1 or not ends:
            return None
        end, count = ends[0], self.size
        if end.startswith(("k_proj", "v_proj", "k_norm")):
            count = min(count, self._num_kv_heads(name))
        sections = self._sections.get(end, ())
        return Share(divided[end], self.rank // (self.size // count), count, sections)

    def _num_kv_heads(self, name: str) -> int:
        """The KV heads, on all ranks together, of the layer that has a tensor."""
        index = name.removeprefix(f"{self.whole.names.layers}.").partition(".")[0]
        return self.whole.layers[int(index)].attention.num_kv_heads


def _sections(whole: ModelSpec) -> Mapping[str, tuple[int, ...]]:
    """The sections of tensors of which each is divided, by the ends of their names."""
    mixers = (layer.mixer for layer in whole.layers)
    found = (mixer.divided_sections for mixer in mixers if isinstance(mixer, RecurrentSpec))
    of_mixers = next(found, {})
    stacked = whole.names.stacks_outputs
    if stacked is None:
        return of_mixers
    feeds = (experts_of(layer.feed) for layer in whole.layers)
    inner = next(feed.intermediate_size for feed in feeds if feed is not None)
    return {**of_mixers, stacked[0]: (inner, inner)}  # gate and up


def _part(whole: ModelSpec, size: int) -> ModelSpec:
    """The model with the sizes of one of `size` ranks."""
    if size == 1:
        return whole
    if whole.names.mlp_gate_up is not None:
        raise UnsupportedModel(
            f"tensor_parallel_size: {size} ranks are not supported for {whole.architecture}, whose "
            "files have one tensor of gate and up"
        )
    layers = tuple(
        replace(layer, mixer=_mixer(layer.mixer, size), feed=_feed(layer.feed, size))
        for layer in whole.layers
    )
    inputs = whole.layer_inputs
    if inputs is not None:
        rows = _quotient("vocab_size_per_layer_input", inputs.vocab_size, size)
        inputs = replace(inputs, vocab_size=rows)
    vocab_size = _quotient("vocab_size", whole.vocab_size, size)
    return replace(whole, layers=layers, vocab_size=vocab_size, layer_inputs=inputs)


def _mixer(
    whole: AttentionSpec | RecurrentSpec | None, size: int
) -> AttentionSpec | RecurrentSpec | None:
    match whole:
        case AttentionSpec():
            return _attention(whole, size)
        case DeltaNetSpec():
            return replace(
                whole,
                num_key_heads=_quotient("linear_num_key_heads", whole.num_key_heads, size),
                num_value_heads=_quotient("linear_num_value_heads", whole.num_value_heads, size),
            )
        case ShortConvSpec():
            channels = _quotient("channels of a convolution", whole.channels, size)
            return replace(whole, channels=channels)
        case Mamba2Spec():
            # A group's norm is over all of its heads, so that no rank may have a part of one.
            return replace(
                whole,
                num_heads=_quotient("heads of Mamba-2", whole.num_heads, size),
                num_groups=_quotient("groups of Mamba-2", whole.num_groups, size),
            )
    return None


def _attention(whole: AttentionSpec, size: int) -> AttentionSpec:
    num_heads = _quotient("num_attention_heads", whole.num_heads, size)
    if size < whole.num_kv_heads:
        num_kv_heads = _quotient("num_key_value_heads", whole.num_kv_heads, size)
    elif size % whole.num_kv_heads:
        raise UnsupportedModel(
            f"tensor_parallel_size: {size} ranks are no multiple of "
            f"{whole.num_kv_heads} num_key_value_heads"
        )
    else:
        num_kv_heads = 1
    return replace(whole, num_heads=num_heads, num_kv_heads=num_kv_heads)


def _feed(whole: Feed | None, size: int) -> Feed | None:
    match whole:
        case MlpSpec(inner):
            return replace(whole, intermediate_size=_quotient("intermediate_size", inner, size))
        case MoeSpec():
            return _experts(whole, size)
        case MlpAndExpertsSpec(MlpSpec(inner) as mlp, experts):
            mlp = replace(mlp, intermediate_size=_quotient("intermediate_size", inner, size))
            return MlpAndExpertsSpec(mlp, _experts(experts, size))
    return None


def _experts(whole: MoeSpec, size: int) -> MoeSpec:
    inner = _quotient("intermediate_size of an expert", whole.intermediate_size, size)
    return replace(whole, intermediate_size=inner)


def _quotient(name: str, value: int, size: int) -> int:
    if value % size:
        raise UnsupportedModel(f"{name}: {value} does not divide among tensor_parallel_size {size}")
    return value // size
