"""Modules of which a rank has a part: what they ask of the other ranks.

The words for that are those of the plans that classes of transformers bring. Which module has which
word is not known here.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from worker_svc.parallel.group import Group

# Words of plans, by what is done to a module's parameters, input and output.
BY_OUTPUTS = {"colwise", "colwise_gather_output", "colwise_rep"}
BY_INPUTS = {"rowwise", "rowwise_split_input", "rowwise_rep"}
_GATHERED = {"colwise_gather_output", "colwise_rep"}
_CUT_FIRST = {"rowwise_split_input", "rowwise_rep"}
ADDED_UP = {*BY_INPUTS, "moe_tp_experts", "all_reduce"}
EMBEDDING = "embedding_rowwise"
EXPERTS = "moe_tp_experts"


def install(module: nn.Module, style: str, group: Group, is_head: bool) -> None:
    """Has a module work with its part of the parameters; a head gives its part of the logits."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    if style in _CUT_FIRST:
        module.register_forward_pre_hook(_cutting_inputs(group))
    if style in ADDED_UP:
        module.register_forward_hook(_adding_up(group))
    if style in _GATHERED and not is_head:
        module.register_forward_hook(gathering(group))
    if style == EMBEDDING:
        assert isinstance(module, nn.Embedding)
        module.num_embeddings, module.padding_idx = len(module.weight), None
        lookup = _PartialLookup(len(module.weight), group)
        module.register_forward_pre_hook(lookup.before)
        module.register_forward_hook(lookup.after)


def _cutting_inputs(group: Group) -> Callable[[nn.Module, Any], Any]:
    def before(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Inputs [..., K] -> this rank's [..., K / size]."""
        x = inputs[0]
        return (x.tensor_split(group.size, dim=-1)[group.rank], *inputs[1:])

    return before


def _adding_up(group: Group) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    def after(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return group.all_reduce(output.contiguous())

    return after


def gathering(group: Group) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    """The hook that gathers a module's outputs."""

    def after(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """Outputs [..., N / size] of each rank -> [..., N]."""
        return group.gather(output).movedim(0, -2).flatten(-2)

    return after


class _PartialLookup:
    """Looks token ids up in one rank's part of a table: zeros for those of other ranks."""

    def __init__(self, num_tokens: int, group: Group) -> None:
        self._num_tokens, self._group = num_tokens, group
        self._elsewhere: Tensor | None = None  # of the call between `before` and `after`

    def before(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Token ids -> places in the part."""
        places = inputs[0] - self._group.rank * self._num_tokens
        self._elsewhere = (places < 0) | (places >= self._num_tokens)
        return (places.masked_fill(self._elsewhere, 0), *inputs[1:])

    def after(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """Rows of the part -> rows of the whole table."""
        elsewhere, self._elsewhere = self._elsewhere, None
        assert elsewhere is not None  # set before
        return self._group.all_reduce(output.masked_fill(elsewhere.unsqueeze(-1), 0))
