"""Parts of a decoder layer; each owns its weights, their names in a checkpoint, and a forward.

Plain callables instead of `nn.Module`: a decode step on CPU calls hundreds of them, and the model
is never trained.
"""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kernels import reference
from worker_svc.attention.torch_backend import AttentionStep
from worker_svc.models.interleaved import Interleaved
from worker_svc.models.linear import Linear
from worker_svc.models.spec import Activation, AttentionSpec, MlpSpec, TensorNames
from worker_svc.models.weights import Destination
from worker_svc.parallel.group import ALONE, Group

# (name in the checkpoint, what its tensor fills).
Destinations = Iterator[tuple[str, Destination]]

LLAMA = TensorNames()  # the names of most families

# act(gate) * up, of gate and up side by side; of one without a gate, act(up).
ACTS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: reference.silu_and_mul,
    Activation.GELU_TANH: reference.gelu_and_mul,
    Activation.RELU2: reference.relu2,
}


class RMSNorm:
    """RMS norm over the hidden dimension."""

    def __init__(
        self,
        size: int,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        offset: float = 0.0,
    ) -> None:
        """A checkpoint has the weight less `offset`; the sum of the two stays in float32."""
        weight_dtype = torch.float32 if offset else dtype
        self.weight = torch.empty(size, dtype=weight_dtype, device=device)
        self._offset = offset
        self.eps = eps

    def destinations(self, prefix: str) -> Destinations:
        yield f"{prefix}.weight", self.weight

    def add_offset(self) -> None:
        """Adds the offset, once, when the weight is filled and before anything reads it."""
        if self._offset:
            self.weight += self._offset

    def pack(self, dtype: torch.dtype) -> None:
        """Makes the weight of the type of what is normed, unless it has an offset."""
        if not self._offset:
            self.weight = self.weight.to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return reference.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        return reference.add_rms_norm(x, residual, self.weight, self.eps)


class Attention:
    """QKV projection as one linear layer, rotary embedding, attention, output projection."""

    def __init__(
        self,
        hidden: int,
        spec: AttentionSpec,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        norm_offset: float = 0.0,
        group: Group = ALONE,
    ) -> None:
        """`eps` and `norm_offset` are those of the norms of queries and keys.

        `group` are the ranks that divide the heads.
        """
        q_size = spec.num_heads * spec.head_dim
        kv_size = spec.num_kv_heads * spec.head_dim
        # Gates follow the values, in a tensor with the queries, by head.
        self._num_gated = spec.num_heads if spec.is_gated else 0
        self._gate_size = q_size if spec.is_gated else 0
        self._spec = spec
        self._sizes = dict.fromkeys(_projections(spec), kv_size) | {"q_proj": q_size}
        self._eps = eps
        self._norm_offset = norm_offset
        self._qkv = Linear.empty(
            hidden,
            sum(self._sizes.values()) + self._gate_size,
            bias=spec.qkv_bias,
            dtype=dtype,
            device=device,
        )
        self._o = Linear.empty(q_size, hidden, bias=spec.o_bias, dtype=dtype, device=device)
        self.sinks: Tensor | None = None  # [H]
        if spec.has_sinks:
            self.sinks = torch.empty(spec.num_heads, dtype=dtype, device=device)
        self._norms: tuple[Tensor, ...] | None = None  # of queries, and of keys if it has any
        self._qk_norm: Tensor | None = None
        self.norms_all_heads, self._group = spec.norms_all_heads, group
        if spec.qk_norm:
            num_heads = spec.num_heads + (0 if spec.shares_kv else spec.num_kv_heads)
            norm_dtype = torch.float32 if norm_offset else dtype
            shape = num_heads, spec.head_dim
            self._qk_norm = torch.empty(shape, dtype=norm_dtype, device=device)
            q_norm, k_norm = self._qk_norm.tensor_split((spec.num_heads,))
            self._norms = (q_norm,) if spec.shares_kv else (q_norm, k_norm)
        self._v_norm: Tensor | None = None  # [D], ones: the norm of values has no weight
        if spec.v_norm:
            self._v_norm = torch.ones(spec.head_dim, dtype=dtype, device=device)

    def destinations(self, prefix: str, names: TensorNames = LLAMA) -> Destinations:
        if self._gate_size:
            yield from self._gated_destinations(prefix)
        else:
            yield from parts(prefix, self._sizes, self._qkv)
        yield from whole(f"{prefix}.{names.attention_output}", self._o)
        if self.sinks is not None:
            yield f"{prefix}.sinks", self.sinks
        if self._norms is not None and self.norms_all_heads:
            yield f"{prefix}.{names.q_norm}.weight", self._norms[0].view(-1)
            yield f"{prefix}.{names.k_norm}.weight", self._norms[1].view(-1)
        elif self._norms is not None:
            # The checkpoint has one row for all heads; pack() copies it to the others.
            for name, norm in zip((names.q_norm, names.k_norm), self._norms, strict=False):
                yield f"{prefix}.{name}.weight", norm[0]

    def _gated_destinations(self, prefix: str) -> Destinations:
        """Destinations of projections without biases: each head's query comes before its gate."""
        num_outputs = self._qkv.shape[0]
        q_size, k_size, _ = self._sizes.values()
        gates = self._qkv.rows(num_outputs - self._gate_size, num_outputs)
        queries = self._qkv.rows(0, q_size)
        yield f"{prefix}.q_proj.weight", Interleaved((queries, gates), self._num_gated)
        end = q_size + k_size
        yield f"{prefix}.k_proj.weight", self._qkv.rows(q_size, end)
        yield f"{prefix}.v_proj.weight", self._qkv.rows(end, num_outputs - self._gate_size)

    @property
    def linears(self) -> tuple[Linear, Linear]:
        """(QKV projection, output projection)."""
        return self._qkv, self._o

    @property
    def qk_norms(self) -> tuple[Tensor, Tensor] | None:
        """Weights of the q norm and the k norm; None for models without QK norm.

        They are [D] each for norms of each head, [H D] and [Hkv D] for norms of all heads.
        """
        if self._norms is None:
            return None
        q_norm, k_norm = self._norms
        if self.norms_all_heads:
            return q_norm.view(-1), k_norm.view(-1)
        return q_norm[0], k_norm[0]

    def drop_output_bias(self) -> None:
        """Drops the bias; called on all ranks but one, since the ranks' outputs are summed."""
        self._o.bias = None

    def add_norm_offset(self) -> None:
        """Adds the offset, once, when all weights are filled and before anything reads them."""
        if self._norms is not None and self._norm_offset:
            for norm in self._norms:
                norm[0] += self._norm_offset

    def pack(self, dtype: torch.dtype) -> None:
        """Once, when all weights are filled; for activations of this type."""
        self._qkv.pack()
        self._o.pack()
        if self._norms is not None and not self.norms_all_heads:
            for norm in self._norms:
                norm[1:] = norm[0]
        if self._qk_norm is not None and not self._norm_offset:
            self._qk_norm = self._qk_norm.to(dtype)
        if self._v_norm is not None:
            self._v_norm = self._v_norm.to(dtype)

    def __call__(self, hidden: Tensor, step: AttentionStep, layer: int) -> Tensor:
        qkv = self._qkv(hidden)  # [T, (H + 2 Hkv) D], or with gates [T, (2 H + 2 Hkv) D]
        if self.norms_all_heads:
            return self._o(step(self._normed(qkv), None, self._eps, layer, self.sinks))
        if self._spec.shares_kv:
            return self._o(step.read(qkv, self._qk_norm, self._eps, layer))
        if self._v_norm is not None:
            qkv = self._with_values(qkv, self._v_norm)
        if not self._gate_size:
            return self._o(step(qkv, self._qk_norm, self._eps, layer, self.sinks))
        qkv, gate = qkv.tensor_split((qkv.shape[-1] - self._gate_size,), dim=-1)
        attended = step(qkv, self._qk_norm, self._eps, layer, self.sinks)
        return self._o(step.gated(attended, gate))

    def _with_values(self, qkv: Tensor, norm: Tensor) -> Tensor:
        """The projections [T, (H + 2 Hkv) D] with normed values, which may be those of keys."""
        q_size, kv_size, *_ = self._sizes.values()
        values = qkv[:, -kv_size:].view(len(qkv), -1, self._spec.head_dim)
        normed = reference.rms_norm(values, norm, self._eps).flatten(1)
        return torch.cat((qkv[:, : q_size + kv_size], normed), dim=-1)

    def _normed(self, qkv: Tensor) -> Tensor:
        """The projections [T, (H + 2 Hkv) D] with the norm of all heads' queries, and all keys.

        Ranks have equally many dimensions, so the mean of their mean squares is that of all; heads
        of keys that several ranks have count as often.
        """
        assert self._qk_norm is not None
        *qk, v = torch.split(qkv, list(self._sizes.values()), dim=-1)
        squares = torch.stack([part.float().square().mean(-1) for part in qk])  # [2, T]
        squares = self._group.all_reduce(squares) / self._group.size
        scales = torch.rsqrt(squares + self._eps)[..., None]
        weights = torch.split(self._qk_norm.view(-1), list(self._sizes.values())[:2])
        normed = (
            (part.float() * scale).to(qkv.dtype) * weight
            for part, scale, weight in zip(qk, scales, weights, strict=True)
        )
        return torch.cat((*normed, v), dim=-1)


class MLP:
    """Gate and up projections as one linear layer, the activation, down projection."""

    def __init__(
        self, hidden: int, spec: MlpSpec, dtype: torch.dtype, device: torch.device
    ) -> None:
        inner = spec.intermediate_size
        self.activation = spec.activation
        self._act = ACTS[spec.activation]
        self._inner = inner
        outer = 2 * inner if spec.activation.has_gate else inner
        self._gate_up = Linear.empty(hidden, outer, bias=spec.bias, dtype=dtype, device=device)
        self._down = Linear.empty(inner, hidden, bias=spec.bias, dtype=dtype, device=device)

    def destinations(self, prefix: str, names: TensorNames = LLAMA) -> Destinations:
        if names.mlp_gate_up is not None:
            yield from whole(f"{prefix}.{names.mlp_gate_up}", self._gate_up)
            yield from whole(f"{prefix}.{names.mlp_down}", self._down)
            return
        sizes = dict.fromkeys(
            gate_up_names(self.activation, names.mlp_gate, names.mlp_up), self._inner
        )
        yield from parts(prefix, sizes, self._gate_up)
        yield from whole(f"{prefix}.{names.mlp_down}", self._down)

    @property
    def linears(self) -> tuple[Linear, Linear]:
        """(gate and up projection, down projection)."""
        return self._gate_up, self._down

    def drop_output_bias(self) -> None:
        """Drops the bias; called on all ranks but one, since the ranks' outputs are summed."""
        self._down.bias = None

    def pack(self) -> None:
        self._gate_up.pack()
        self._down.pack()

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._down(self._act(self._gate_up(hidden)))


def _projections(spec: AttentionSpec) -> tuple[str, ...]:
    """The names of what the projection is made of, in this order."""
    if spec.shares_kv:
        return ("q_proj",)
    return ("q_proj", "k_proj") if spec.v_is_k else ("q_proj", "k_proj", "v_proj")


def gate_up_names(activation: Activation, gate: str, up: str) -> tuple[str, ...]:
    """The names of what an MLP's first product is made of, in this order."""
    return (gate, up) if activation.has_gate else (up,)


def whole(prefix: str, linear: Linear) -> Destinations:
    """The checkpoint's names of a linear layer."""
    yield f"{prefix}.weight", linear.whole
    if linear.bias is not None:
        yield f"{prefix}.bias", linear.bias


def parts(prefix: str, sizes: dict[str, int], linear: Linear) -> Destinations:
    """Checkpoint names with their views: consecutive rows of a fused linear layer."""
    ends = itertools.accumulate(sizes.values())
    for (name, size), end in zip(sizes.items(), ends, strict=True):
        yield f"{prefix}.{name}.weight", linear.rows(end - size, end)
    if linear.bias is not None:
        for name, bias in zip(sizes, torch.split(linear.bias, list(sizes.values())), strict=True):
            yield f"{prefix}.{name}.bias", bias
