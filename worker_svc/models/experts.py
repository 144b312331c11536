"""Mixture of experts: a router, and MLPs of which it chooses some for each token.

It owns the weights and their names in a checkpoint; which tokens a step has it does not know. Each
expert is two linear layers; the float numbers of all are two tensors, as the kernels of CUDA read
them.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference
from kernels.experts.weights import ExpertWeights, serves_float8
from kernels.quantized.grouped import GroupedWeight
from kernels.quantized.scaled import ScaledWeight
from worker_svc.models.layers import ACTS, Destinations, gate_up_names, parts
from worker_svc.models.linear import Linear, WeightRows
from worker_svc.models.mxfp4_experts import (
    BLOCKS,
    SCALES,
    CodeRows,
    Mxfp4Experts,
    Mxfp4Tensor,
)
from worker_svc.models.spec import MoeSpec, TensorNames, UnsupportedModel
from worker_svc.quantization.mxfp4 import BLOCK, separated

log = logging.getLogger(__name__)


Moved = TypeVar("Moved")


class ExpertMover(Protocol[Moved]):
    """Copies experts' weights to a layout of its own, and frees the plain ones as it does."""

    def of_linears(self, linears: Sequence[Linear]) -> list[Moved]:
        """One layer of each expert, of float numbers or fewer bits, which it drops."""

    def of_codes(self, codes: Tensor, exponents: Tensor, bias: Tensor | None) -> Moved:
        """A layer in MXFP4: codes [N, K], a byte each, and exponents [N, K / 32]."""


class ExpertForm(Enum):
    """The form in which weights of experts are held, and what fills them."""

    NUMBERS = "numbers"  # float numbers, of such
    EMPTY = "empty"  # those of a quantized model: no memory before they are filled
    WIDENED = "widened"  # float numbers, of codes in MXFP4
    CODES = "codes"  # codes in MXFP4, for kernels alone

    @property
    def is_mxfp4(self) -> bool:
        """True if the checkpoint has codes and scales in place of numbers."""
        return self in (ExpertForm.WIDENED, ExpertForm.CODES)


class Experts:
    """A router and experts; stands where a layer has an `MLP`."""

    def __init__(
        self,
        hidden: int,
        spec: MoeSpec,
        dtype: torch.dtype,
        device: torch.device,
        form: ExpertForm = ExpertForm.NUMBERS,
    ) -> None:
        """Raises UnsupportedModel if a block of MXFP4 would be cut."""
        if form.is_mxfp4 and spec.intermediate_size % BLOCK + hidden % BLOCK:
            raise UnsupportedModel(
                f"quantization: mxfp4 has blocks of {BLOCK} inputs, which do not divide the "
                f"{hidden} and {spec.intermediate_size} of a rank's experts"
            )
        self.spec, self._hidden, self._inner = spec, hidden, spec.intermediate_size
        self.dtype = dtype
        num_experts, shared = spec.router.num_experts, spec.shared
        self._gates_shared = shared is not None and shared.is_gated
        # Routing is computed in float32. A GPU reads the weight at each step, so there it has the
        # checkpoint's type. The gate of an expert of every token is one more row.
        router_dtype = torch.float32 if device.type == "cpu" else dtype
        num_rows = num_experts + self._gates_shared
        self.router = torch.empty((num_rows, hidden), dtype=router_dtype, device=device)
        self.bias: Tensor | None = None
        if spec.router.has_bias:
            self.bias = torch.empty(num_experts, dtype=torch.float32, device=device)
        self.logit_bias: Tensor | None = None
        if spec.router.has_logit_bias:
            self.logit_bias = torch.empty(num_experts, dtype=torch.float32, device=device)
        # An expert of every token is several others, which add up to it.
        count = num_experts + (0 if shared is None else shared.count)
        num_parts = 2 if spec.activation.has_gate else 1
        gate_up, down = (num_parts * self._inner, hidden), (hidden, self._inner)
        self._gate_up = _Stack(count, gate_up, dtype, device, form, has_bias=spec.bias)
        self._down = _Stack(count, down, dtype, device, form, has_bias=spec.bias)

    def destinations(self, prefix: str, names: TensorNames) -> Destinations:
        num_experts = self.spec.router.num_experts
        yield f"{prefix}.{names.router}.weight", self.router[:num_experts]
        if self.bias is not None:
            yield f"{prefix}.{names.router_bias}", self.bias
        if self.logit_bias is not None:
            yield f"{prefix}.{names.logit_bias}", self.logit_bias
        if names.stacks_outputs is not None:
            gate_up, down = names.stacks_outputs
            yield f"{prefix}.{gate_up}", self._gate_up.first(num_experts)
            yield f"{prefix}.{down}", self._down.first(num_experts)
        elif names.stacks_experts:
            experts_prefix = f"{prefix}.{names.experts}"
            for stack, name, num_parts in (
                (self._gate_up, names.expert_gate_up, 2),
                (self._down, names.expert_down, 1),
            ):
                yield from stack.destinations(f"{experts_prefix}.{name}", num_parts)
        else:
            yield from self._expert_destinations(prefix, names)
        shared = [stack.linears[num_experts:] for stack in (self._gate_up, self._down)]
        if shared[0]:
            yield from self._shared_destinations(prefix, names, *shared)

    def _expert_destinations(self, prefix: str, names: TensorNames) -> Destinations:
        """The destinations of experts with tensors of their own."""
        sizes = dict.fromkeys(self._gate_up_names(names), self._inner)
        for index in range(self.spec.router.num_experts):
            expert = f"{prefix}.{names.experts}.{index}"
            yield from self._gate_up.of_expert(index, expert, sizes)
            yield from self._down.of_expert(index, expert, {names.expert_down: self._hidden})

    def _shared_destinations(
        self, prefix: str, names: TensorNames, gate_ups: Sequence[Linear], downs: Sequence[Linear]
    ) -> Destinations:
        """The destinations of the expert of every token."""
        if self._gates_shared:
            yield f"{prefix}.{names.shared_gate}.weight", self.router[-1:]
        expert, inner = f"{prefix}.{names.shared_expert}", self._inner
        down_name = names.expert_down
        if names.shared_mlp is not None:
            expert, down_name = f"{prefix.rpartition('.')[0]}.{names.shared_mlp}", names.mlp_down
        by_part = [
            [linear.rows(place * inner, (place + 1) * inner) for linear in gate_ups]
            for place in range(2 if self.spec.activation.has_gate else 1)
        ]
        if names.mlp_gate_up is not None:
            is_one = len(gate_ups) == 1  # whose gate and up lie one after the other, too
            rows = [gate_ups[0].whole] if is_one else [*chain(*by_part)]
            yield f"{expert}.{names.mlp_gate_up}.weight", _joined(rows, 0)
        else:
            for name, rows in zip(self._gate_up_names(names), by_part, strict=True):
                yield f"{expert}.{name}.weight", _joined(rows, 0)
        yield f"{expert}.{down_name}.weight", _joined([linear.whole for linear in downs], 1)

    def _gate_up_names(self, names: TensorNames) -> tuple[str, ...]:
        return gate_up_names(self.spec.activation, names.expert_gate, names.expert_up)

    def drop_output_bias(self) -> None:
        """Drops the biases; called on all ranks but one, since the ranks' outputs are summed."""
        self._down.drop_bias()

    def pack(self) -> None:
        """Packs the weights, once, when all are filled."""
        self._gate_up.pack()
        self._down.pack()

    def stacked(self) -> tuple[ExpertWeights, ExpertWeights]:
        """Gives away the weights [E, 2I, hidden] and [E, hidden, I]."""
        return self._gate_up.stacked(), self._down.stacked()

    def moved(self, mover: "ExpertMover[Moved]") -> tuple[list[Moved], list[Moved]]:
        """Gives away the two products of each expert, gate and up first, to another layout."""
        return self._gate_up.moved(mover), self._down.moved(mover)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Hidden states [T, hidden] -> the weighted sum of the outputs of each one's experts."""
        return self.feed(hidden, *self.choose(F.linear(hidden.float(), self.router.float())))

    def feed(self, hidden: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The sum of the outputs of these experts [T, k] with these weights, [T, hidden]."""
        gate_ups, downs = self._gate_up.linears, self._down.linears
        return reference.feed_experts(hidden, weights, chosen, gate_ups, downs, self._act)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The product with the router [T, E] -> weights and indices of each row's experts."""
        rule, shared = self.spec.router, self.spec.shared
        of_choices = logits[:, : rule.num_experts]
        weights, chosen = reference.choose_experts(
            of_choices if self.logit_bias is None else of_choices + self.logit_bias,
            rule.top_k,
            rule.renormalizes,
            is_sigmoid=rule.is_sigmoid,
            bias=self.bias,
            scale=rule.scale,
            epsilon=rule.epsilon,
            groups=(rule.num_groups, rule.kept_groups),
        )
        if shared is not None:
            gate = logits[:, -1] if shared.is_gated else None
            weights, chosen = reference.with_shared_experts(
                weights, chosen, rule.num_experts, shared.count, gate
            )
        return weights, chosen

    def _act(self, inner: Tensor) -> Tensor:
        """The first product of an expert [R, 2I], or without a gate [R, I] -> [R, I]."""
        clamp = self.spec.clamp
        if clamp is not None:
            return reference.clamped_and_mul(inner, clamp)
        return ACTS[self.spec.activation](inner)


@dataclass(frozen=True, slots=True)
class Joined:
    """A destination: parts of one tensor, along a dimension, that are weights of their own."""

    parts: Sequence[WeightRows]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the checkpoint's tensor."""
        size = list(self.parts[0].shape)
        size[self.dim] *= len(self.parts)
        return tuple(size)

    def copy_(self, values: Tensor) -> None:
        """Fills the parts with float numbers of any type and device."""
        for part, value in zip(self.parts, values.chunk(len(self.parts), self.dim), strict=True):
            part.copy_(value)

    def put_narrow(self, values: GroupedWeight) -> None:
        """Fills the parts with integers, or with float numbers if they would cut groups."""
        size = self.parts[0].shape[self.dim]
        if self.dim == 1 and size % values.group:
            self.copy_(values.dequantized())
            return
        cut = values.columns if self.dim else values.rows
        for index, part in enumerate(self.parts):
            part.put_narrow(cut(index * size, (index + 1) * size))

    @property
    def is_wide(self) -> bool:
        """True if integers would become float numbers."""
        return any(part.linear.is_wide for part in self.parts)


def _joined(parts: Sequence[WeightRows], dim: int) -> WeightRows | Joined:
    """The destination of a tensor of these parts."""
    return parts[0] if len(parts) == 1 else Joined(parts, dim)


@dataclass(frozen=True, slots=True)
class Listed:
    """A destination: all experts' weights in one tensor, of linear layers of their own."""

    parts: Sequence[WeightRows]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K)."""
        return len(self.parts), *self.parts[0].shape

    def copy_(self, values: Tensor) -> None:
        """Fills them with float numbers of any type and device."""
        for part, given in zip(self.parts, values, strict=True):
            part.copy_(given)


@dataclass(frozen=True, slots=True)
class Stacked:
    """A destination: all experts' weights or biases in one tensor, outputs in the last dimension.

    There the outputs of `num_parts` matrices alternate, which here follow one after the other.
    """

    values: Tensor  # [E, N, K] or [E, N]
    num_parts: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the checkpoint's tensor."""
        num_experts, num_outputs, *inputs = self.values.shape
        return num_experts, *inputs, num_outputs

    def copy_(self, values: Tensor) -> None:
        """Fills them with float numbers of any type and device."""
        shape = self.num_parts, -1
        for to, given in zip(self.values, values, strict=True):
            outputs = given.to(to.device).movedim(-1, 0).unflatten(0, shape[::-1])
            to.unflatten(0, shape).copy_(outputs.transpose(0, 1))


class _Stack:
    """A linear layer of each expert."""

    def __init__(
        self,
        num_experts: int,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        form: ExpertForm,
        *,
        has_bias: bool,
    ) -> None:
        outputs, inputs = shape
        self._bias: Tensor | None = None  # [E, N]
        if has_bias:
            self._bias = torch.empty((num_experts, outputs), dtype=dtype, device=device)
        self._is_mxfp4 = form.is_mxfp4
        self._scales: Tensor | None = None  # of codes
        self._values: Tensor | None = None  # [E, N, K]; None: each layer has its own weight
        if form is ExpertForm.CODES:
            codes = num_experts, outputs, inputs // 2
            self._values = torch.empty(codes, dtype=torch.uint8, device=device)
            scales = num_experts, outputs, inputs // BLOCK
            self._scales = torch.empty(scales, dtype=torch.uint8, device=device)
            self.linears: list[Linear] = []
            return
        if form is ExpertForm.EMPTY:
            self.linears = [
                Linear.empty(inputs, outputs, bias=False, dtype=dtype, device=device)
                for _ in range(num_experts)
            ]
            self._share_bias()
            return
        self._values = torch.empty((num_experts, outputs, inputs), dtype=dtype, device=device)
        self.linears = [Linear(weight) for weight in self._values]
        self._share_bias()

    def _share_bias(self) -> None:
        for index, linear in enumerate(self.linears):
            linear.bias = None if self._bias is None else self._bias[index]

    def destinations(self, name: str, num_parts: int) -> Destinations:
        """The destinations of one tensor for all experts, in which outputs of parts alternate."""
        if self._values is None:
            raise ValueError(f"{name}: is read as float numbers alone")
        if self._is_mxfp4:
            experts = Mxfp4Experts(name, self._values, self._scales, num_parts)
            for ending in (BLOCKS, SCALES):
                yield f"{name}_{ending}", Mxfp4Tensor(experts, ending)
        else:
            yield name, Stacked(self._values, num_parts)
        if self._bias is not None:
            yield f"{name}_bias", Stacked(self._bias, num_parts)

    def of_expert(self, index: int, prefix: str, sizes: dict[str, int]) -> Destinations:
        """The destinations of one expert's tensors: consecutive outputs by name."""
        if self.linears:
            yield from parts(prefix, sizes, self.linears[index])
            return
        assert self._values is not None and self._scales is not None  # codes
        end = 0
        for name, size in sizes.items():
            rows = slice(end, end + size)
            end += size
            codes = CodeRows(self._values[index, rows], self._scales[index, rows])
            yield f"{prefix}.{name}.weight", codes
            if self._bias is not None:
                yield f"{prefix}.{name}.bias", self._bias[index, rows]

    def first(self, count: int) -> Tensor | Listed:
        """The destination of the weights [count, N, K] of so many layers."""
        if self._values is None:
            return Listed([linear.whole for linear in self.linears[:count]])
        return self._values[:count]

    def drop_bias(self) -> None:
        """Drops the biases."""
        self._bias = None
        self._share_bias()

    def pack(self) -> None:
        """Moves the weights to the device's layout."""
        for linear in self.linears:
            linear.pack()
        if any(linear.is_packed for linear in self.linears):
            self._values = None

    def stacked(self) -> ExpertWeights:
        """Gives away the weights; in 8 bits, if all are so and the device can widen them."""
        return replace(self._stacked(), bias=self._bias)

    def moved(self, mover: "ExpertMover[Moved]") -> list[Moved]:
        """Gives away the linear layers of all experts."""
        values, scales = self._values, self._scales
        self._values = self._scales = None
        if values is None or scales is None:
            del values
            return mover.of_linears(self.linears)
        biases = [None] * len(values) if self._bias is None else list(self._bias)
        by_expert = zip(values, scales, biases, strict=True)
        return [mover.of_codes(separated(codes), *each) for codes, *each in by_expert]

    def _stacked(self) -> ExpertWeights:
        if self._values is not None and self._scales is not None:
            return ExpertWeights.of_codes(self._values, self._scales)
        if self._values is not None:
            return ExpertWeights(self._values)
        stored = [linear.take_narrow() for linear in self.linears]
        narrow = [weight for weight in stored if isinstance(weight, ScaledWeight)]
        if len(narrow) == len(stored) and serves_float8(narrow[0].values.device):
            found = ExpertWeights.stacked(narrow)
            if found is not None:
                return found
        dtype = self.linears[0].dtype
        wide = torch.stack(
            [
                linear.weight if weight is None else weight.dequantized(dtype)
                for linear, weight in zip(self.linears, stored, strict=True)
            ]
        )
        log.warning(
            "quantization: experts %s are kept as float numbers, %.3f GiB: no kernel widens them",
            list(wide.shape),
            wide.nbytes / 2**30,
        )
        return ExpertWeights(wide)
