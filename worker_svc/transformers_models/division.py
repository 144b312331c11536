"""Divides a model of transformers' classes among ranks, by the plan that its class brings.

A plan names modules and parameters, and says of each in a word how it is divided. A word that is
not known here, and a size that does not divide, are refused by name.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from worker_svc.models.spec import UnsupportedModel
from worker_svc.parallel.group import Group
from worker_svc.transformers_models.cuts import TensorCut
from worker_svc.transformers_models.divided_modules import (
    ADDED_UP,
    BY_INPUTS,
    BY_OUTPUTS,
    EMBEDDING,
    EXPERTS,
    gathering,
    install,
)

_GROUPS = "num_key_value_groups"  # an attribute of attention modules: query heads per KV head
# Words about gradients, or about tensors of a type that is not used here.
_WHOLE = {"replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params"}
_MODULES = BY_OUTPUTS | ADDED_UP | _WHOLE | {EMBEDDING}
# Of a parameter that a plan names itself, by word: the dimension from the end, and its blocks.
_PARAMETERS = {
    "colwise": (2, 1),
    "rowwise": (1, 1),
    "packed_colwise": (2, 2),
    "packed_rowwise": (1, 2),
}


class Division:
    """One rank's part of each parameter of a model, and what its modules ask of the others."""

    def __init__(self, model: PreTrainedModel, group: Group) -> None:
        """Reads the plan of a model, whose parameters are whole and need no memory.

        Raises UnsupportedModel.
        """
        self.group = group
        self.cuts: dict[str, TensorCut] = {}  # by parameter
        self.added_once: list[str] = []  # biases of what is added up: one rank adds them
        self.num_kv_groups: dict[str, int] = {}  # query heads per KV head, where that changes
        self._styles: dict[str, str] = {}  # by module
        self._model = model
        self._table: nn.Module = model.get_input_embeddings()
        self._head = _head_of(model)
        self._config: Any = model.config.get_text_config(decoder=True)
        self._read(dict(model.tp_plan or {}))

    @property
    def divides_head(self) -> bool:
        """True if each rank computes logits of its part of the vocabulary."""
        return any(module is self._head and name in self._styles for name, module in self._named())

    @contextmanager
    def whole_logits(self, model: PreTrainedModel) -> Iterator[None]:
        """Has the head of a divided model compute the logits of all ranks, as its plan says."""
        handle = _head_of(model).register_forward_hook(gathering(self.group))
        try:
            yield
        finally:
            handle.remove()

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a parameter."""
        cut = self.cuts.get(name)
        return whole if cut is None else cut.of(whole)

    def apply(self, model: PreTrainedModel) -> None:
        """Gives another model of the same configuration this rank's shapes, and collectives."""
        for name, module in model.named_modules():
            for leaf, parameter in list(module.named_parameters(recurse=False)):
                cut = self.cuts.get(f"{name}.{leaf}" if name else leaf)
                if cut is not None:
                    empty = parameter.new_empty(cut.shape(parameter.shape))
                    setattr(module, leaf, nn.Parameter(empty, requires_grad=False))
            if name in self.num_kv_groups:
                setattr(module, _GROUPS, self.num_kv_groups[name])
            if (style := self._styles.get(name)) is not None:
                install(module, style, self.group, module is _head_of(model))

    @torch.no_grad()
    def drop_added_once(self, model: nn.Module) -> None:
        """Leaves biases of what is added up to the first rank."""
        if self.group.rank > 0:
            for name in self.added_once:
                model.get_parameter(name).zero_()

    # --- reading the plan ------------------------------------------------------------------------

    def _read(self, plan: dict[str, str]) -> None:
        layers: nn.Module = self._model.get_decoder()  # type: ignore[no-untyped-call]
        ours = set(layers.modules()) - {self._table, self._head}
        for name, module in self._named():
            if module in ours:  # and no part that computes no text
                self._read_module(name, module, plan)
        if not self.cuts:
            raise self._refusal("brings no tp_plan for its layers")
        self._read_vocabulary(plan)

    def _read_vocabulary(self, plan: dict[str, str]) -> None:
        """The table and the head, which may be one tensor; both whole if they do not divide."""
        modules = {n: module for n, module in self._named() if module in (self._table, self._head)}
        named = {name for name in modules if _generic(name) in plan}
        if named and len({id(module.weight) for module in modules.values()}) == 1:
            named = set(modules)
        for name in sorted(named):
            module = modules[name]
            if len(module.weight) % self.group.size == 0:  # type: ignore[arg-type]
                style = EMBEDDING if isinstance(module, nn.Embedding) else "colwise"
                self._read_module(name, module, {_generic(name): style})

    def _read_module(self, name: str, module: nn.Module, plan: dict[str, str]) -> None:
        for leaf, parameter in module.named_parameters(recurse=False):
            path = f"{name}.{leaf}"
            if (style := plan.get(_generic(path))) is not None:
                self._cut_parameter(path, parameter, style)
        style = plan.get(_generic(name))
        if style is None or style in _WHOLE:
            return
        if style not in _MODULES:
            raise self._refusal(f"{name}: {style!r} of its tp_plan is not served")
        self._styles[name] = style
        if style == EXPERTS:
            self._require_all_divided(name, module)
        elif style == EMBEDDING:
            self._cut(f"{name}.weight", module.weight, 0)  # type: ignore[arg-type]
        elif style in BY_OUTPUTS | BY_INPUTS:
            self._cut_linear(name, module, style)

    def _cut_parameter(self, path: str, parameter: Tensor, style: str) -> None:
        if style in _WHOLE:
            return
        if style not in _PARAMETERS or parameter.ndim not in (1, 3):
            raise self._refusal(f"{path}: {style!r} of its tp_plan is not served")
        from_end, num_blocks = _PARAMETERS[style]
        self._cut(path, parameter, max(0, parameter.ndim - from_end), num_blocks)

    def _cut_linear(self, name: str, module: nn.Module, style: str) -> None:
        if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
            raise self._refusal(f"{name} is no plain linear layer")
        if style in BY_INPUTS:
            self._cut(f"{name}.weight", module.weight, 1)
            if module.bias is not None:
                self.added_once.append(f"{name}.bias")
            return
        count = self._num_parts(name, module) if style == "colwise" else self.group.size
        self._cut(f"{name}.weight", module.weight, 0, count=count)
        if module.bias is not None:
            self._cut(f"{name}.bias", module.bias, 0, count=count)

    def _num_parts(self, name: str, module: nn.Linear) -> int:
        """The number of different parts of a layer by outputs: of an attention whole heads."""
        path, _, leaf = name.rpartition(".")
        owner: Any = self._model.get_submodule(path)
        size = self.group.size
        if not isinstance(getattr(owner, "layer_idx", None), int):
            return size
        groups = getattr(owner, _GROUPS, None)
        num_heads, num_kv_heads = self._num_heads(owner, groups)
        if num_heads % size:
            raise UnsupportedModel(
                f"num_attention_heads: {num_heads} does not divide among tensor_parallel_size "
                f"{size}"
            )
        if leaf not in ("q_proj", "k_proj", "v_proj") or num_kv_heads % size == 0:
            return size
        if size % num_kv_heads:
            raise UnsupportedModel(
                f"num_key_value_heads: {num_kv_heads} and tensor_parallel_size {size}: neither "
                "divides the other"
            )
        self.num_kv_groups[path] = num_heads // size
        return size if leaf == "q_proj" else num_kv_heads

    def _num_heads(self, attention: Any, groups: int | None) -> tuple[int, int]:
        """Heads of queries, and of keys, of one layer; layers may differ."""
        num_heads = int(self._config.num_attention_heads)
        if groups is None:
            return num_heads, num_heads
        keys, head_dim = getattr(attention, "k_proj", None), getattr(attention, "head_dim", None)
        if isinstance(keys, nn.Linear) and head_dim:
            num_heads = keys.out_features // head_dim * groups
        return num_heads, num_heads // groups

    def _cut(
        self, name: str, whole: Tensor, dim: int, num_blocks: int = 1, count: int | None = None
    ) -> None:
        """Notes a cut; with fewer parts than ranks, ranks next to each other have the same."""
        count = count or self.group.size
        cut = TensorCut(dim, self.group.rank // (self.group.size // count), count, num_blocks)
        cut.require_equal(name, whole.shape)
        self.cuts[name] = cut

    def _require_all_divided(self, name: str, module: nn.Module) -> None:
        """Raises UnsupportedModel for a parameter that each rank would add once."""
        for leaf, _ in module.named_parameters():
            if f"{name}.{leaf}" not in self.cuts:
                raise self._refusal(f"{name}.{leaf} is not divided by its tp_plan")

    def _named(self) -> Iterator[tuple[str, nn.Module]]:
        return iter(self._model.named_modules())

    def _refusal(self, reason: str) -> UnsupportedModel:
        made = type(self._model).__name__
        return UnsupportedModel(f"tensor_parallel_size: {self.group.size}: {made}: {reason}")


def _head_of(model: Any) -> nn.Module:
    found: nn.Module = model.get_output_embeddings()
    return found


def _generic(name: str) -> str:
    """A name with * for each number of a layer, as plans have them."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
