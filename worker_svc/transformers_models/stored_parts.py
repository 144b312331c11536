"""One rank's parts of a checkpoint, as transformers' loader takes tensors.

The loader gives tensors the names of its class, and joins those of experts. A part is cut before
that, so that a rank reads nothing else; a conversion for which that would be wrong is refused.
"""

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from worker_svc.models.spec import UnsupportedModel
from worker_svc.models.stored.checkpoint import Checkpoint
from worker_svc.transformers_models.cuts import LazyPart, TensorCut
from worker_svc.transformers_models.division import Division


def parts_of(
    checkpoint: Checkpoint, outline: PreTrainedModel, division: Division
) -> dict[str, LazyPart]:
    """All tensors by the checkpoint's names, to be read while it is open.

    `outline` is the whole model without memory. Raises UnsupportedModel.
    """
    names = _Names(outline)
    return {
        name: LazyPart(
            checkpoint.stored(name),
            names.cut(name, len(checkpoint.stored(name).get_shape()), division),
        )
        for name in checkpoint.names
    }


class _Names:
    """The names in a model that a checkpoint's tensors get."""

    def __init__(self, outline: PreTrainedModel) -> None:
        known = get_model_conversion_mapping(outline)
        self._renamings = [each for each in known if isinstance(each, WeightRenaming)]
        self._converters = [each for each in known if isinstance(each, WeightConverter)]
        self._prefix = outline.base_model_prefix
        self._parameters = outline.state_dict()

    def cut(self, name: str, num_dims: int, division: Division) -> TensorCut | None:
        """This rank's part of a tensor of the checkpoint. Raises UnsupportedModel."""
        target, pattern = self._target(name, self._renamings, self._converters)
        if target not in self._parameters and name in self._parameters:
            target, pattern = self._target(name, [], [])
        if pattern is None:
            return division.cuts.get(target)
        converter = next(each for each in self._converters if pattern in each.source_patterns)
        targets = {
            target.replace(converter.target_patterns[0], each) for each in converter.target_patterns
        }
        cuts = [division.cuts[each] for each in targets if each in division.cuts]
        if not cuts:
            return None
        found = _before(converter, cuts[0], num_dims) if len(targets) == 1 else None
        if found is None:
            raise UnsupportedModel(
                f"{name}: tensor_parallel_size {division.group.size}: a part of {target} cannot "
                f"be read apart, which transformers makes by {converter.operations}"
            )
        return found

    def _target(
        self, name: str, renamings: list[WeightRenaming], converters: list[WeightConverter]
    ) -> tuple[str, str | None]:
        """The name in the model, and the pattern of the converter that leads there."""
        found: tuple[str, str | None] = rename_source_key(
            name, renamings, converters, self._prefix, self._parameters
        )
        return found


def _before(converter: WeightConverter, cut: TensorCut, num_dims: int) -> TensorCut | None:
    """The cut of one expert's matrix that makes that of all experts; None: there is none."""
    merged, *joined = converter.operations
    is_known = isinstance(merged, MergeModulelist) and merged.dim == 0 and num_dims == 2
    if not is_known or cut.dim == 0:
        return None
    if not joined:
        return TensorCut(cut.dim - 1, cut.index, cut.count, cut.num_blocks)
    (last, *others) = joined
    if others or not isinstance(last, Concatenate):
        return None
    num_joined = len(converter.source_patterns) if last.dim == cut.dim else 1
    if num_joined != cut.num_blocks:
        return None
    return TensorCut(cut.dim - 1, cut.index, cut.count)
