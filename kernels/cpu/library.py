"""Python interface of layer.c and attention.c: typed calls with tensors.

Each operation is defined by the function of the same name in `kernels/reference.py`; names that end
in an underscore overwrite an input. Weights of norms are float32 for every dtype. The structs
repeat those of the C sources field by field.
"""

import ctypes
import logging
import os
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_float, c_int, c_long, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernels import fp8
from kernels.cpu import build, isa
from kernels.cpu.isa import ISA
from kernels.expert_clamp import Clamp
from kernels.quantized.grouped import GroupedWeight

SOURCE = Path(__file__).with_name("layer.c")
ATTENTION = Path(__file__).with_name("attention.c")  # the only one that knows the cache's type
GROUPS = (16, 32, 64, 128)  # inputs that can share a scale
MAX_HEAD_DIM = 256
MAX_HEADS_PER_KV_HEAD = 96
STORED = {
    torch.float32: "-DFLOAT32",
    torch.bfloat16: "-DBFLOAT16",
    torch.float16: "-DFLOAT16",
}
MXFP4_BIAS = 127  # of a scale, which is an exponent
_CHOICES = torch.float32, torch.int64  # the types of a row's weights, and of its experts
# Types of the KV cache other than the library's, for ATTENTION alone.
CACHED = {torch.float8_e4m3fn: "-DKV_E4M3", torch.float8_e5m2: "-DKV_E5M2"}

log = logging.getLogger(__name__)


class GemmArguments(ctypes.Structure):
    """C struct `gemm`: a packed weight, its bias, K and N, and the format of its integers."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_long),
        ("outputs", c_long),
        ("group", c_long),
        ("bits", c_int),
        ("has_half_scales", c_int),
        ("rounds_inputs", c_int),
        ("is_mxfp4", c_int),
    )


class AttentionArguments(ctypes.Structure):
    """C struct `attention`: arguments shared by all layers of a step."""

    _fields_ = (
        ("num_heads", c_long),
        ("num_kv_heads", c_long),
        ("head_dim", c_long),
        ("block_size", c_long),
        ("block_rows", c_long),
        ("table_width", c_long),
        ("window", c_long),
        ("scale", c_float),
        ("eps", c_float),
        ("softcap", c_float),
        ("cos_sin", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("tables", c_void_p),
        ("context_lens", c_void_p),
        ("starts", c_void_p),
        ("rows", c_long),
        ("sequences", c_long),
    )


class BlockArguments(ctypes.Structure):
    """C struct `block`: the weights between one layer's attention and the next layer's."""

    _fields_ = (
        ("o", GemmArguments),
        ("gate_up", GemmArguments),
        ("down", GemmArguments),
        ("next_qkv", GemmArguments),
        ("post_norm", c_void_p),
        ("next_norm", c_void_p),
        ("attention_output_norm", c_void_p),
        ("mlp_output_norm", c_void_p),
        ("hidden", c_long),
        ("inner", c_long),
        ("eps", c_float),
        ("gelu", c_int),
    )


class StreamArguments(ctypes.Structure):
    """C struct `stream`: the activations of a step."""

    _fields_ = (
        ("attended", c_void_p),
        ("residual", c_void_p),
        ("hidden", c_void_p),
        ("added", c_void_p),
        ("gate_up", c_void_p),
        ("inner", c_void_p),
        ("qkv", c_void_p),
        ("copy", c_void_p),
        ("totals", c_void_p),
        ("rows", c_long),
    )


class ExpertsArguments(ctypes.Structure):
    """C struct `experts`: all experts of a layer, the choices of a step's rows, and space."""

    _fields_ = (
        ("gate_up", POINTER(GemmArguments)),
        ("down", POINTER(GemmArguments)),
        ("num_experts", c_long),
        ("top_k", c_long),
        ("chosen", c_void_p),
        ("weights", c_void_p),
        ("limit", c_float),
        ("alpha", c_float),
        ("starts", c_void_p),
        ("places", c_void_p),
        ("gathered", c_void_p),
        ("gate_ups", c_void_p),
        ("inner", c_void_p),
        ("outputs", c_void_p),
        ("copy", c_void_p),
        ("totals", c_void_p),
    )


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight [N, K] in the library's layout, with its bias [N]."""

    weight: Tensor  # of the library's dtype, or bytes of integers
    bias: Tensor | None
    arguments: GemmArguments

    @property
    def num_inputs(self) -> int:
        return int(self.arguments.inputs)

    @property
    def num_outputs(self) -> int:
        return int(self.arguments.outputs)

    @property
    def num_totals(self) -> int:
        """Numbers that a GEMM needs of a row's groups of inputs; 0 for float numbers."""
        group = int(self.arguments.group)
        each = 2 if self.arguments.rounds_inputs else 1
        return each * self.num_inputs // group if group else 0

    @property
    def form(self) -> tuple[int, ...]:
        """The numbers that decide how a GEMM's inputs are prepared for it."""
        one = self.arguments
        return self.num_inputs, self.num_outputs, one.group, one.bits, one.rounds_inputs


class PackedExperts:
    """The two products of each expert of a layer, and the activation between them."""

    def __init__(
        self,
        gate_ups: Sequence[PackedLinear],
        downs: Sequence[PackedLinear],
        clamp: Clamp | None = None,
    ) -> None:
        """Takes one of each for an expert. Raises ValueError if they are not all of one form."""
        for linears in (gate_ups, downs):
            if len({one.form for one in linears}) > 1:
                raise ValueError("experts: their weights are not all of one form")
        self.gate_ups, self.downs, self.clamp = list(gate_ups), list(downs), clamp
        self.gate_up_arguments = _array(self.gate_ups)
        self.down_arguments = _array(self.downs)


def _array(linears: Sequence[PackedLinear]) -> "ctypes.Array[GemmArguments]":
    return (GemmArguments * len(linears))(*(one.arguments for one in linears))


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory for what GEMMs read in addition to their inputs; None: nothing."""

    copy: Tensor | None
    totals: Tensor | None  # float32

    @property
    def addresses(self) -> tuple[int | None, int | None]:
        return _at(self.copy), _at(self.totals)


class Library:
    """The compiled operations for one dtype. Tensors must be contiguous and of that dtype."""

    def __init__(
        self,
        layer: Path,
        attention: Path,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        isa: ISA,
        threads: int,
    ) -> None:
        self.dtype = dtype
        self.kv_dtype = kv_dtype
        self.isa = isa.name
        self._threads = threads
        library = ctypes.CDLL(str(layer))
        pointer = c_void_p
        self._packed_size = _declare(library.packed_size, c_long, c_long, returns=c_long)
        self._pack = _declare(library.pack, pointer, pointer, c_long, c_long, c_int)
        gemm = POINTER(GemmArguments)
        self._copy_size = _declare(library.copy_size, gemm, returns=c_long)
        self._packed_groups_size = _declare(library.packed_groups_size, gemm, returns=c_long)
        self._pack_groups = _declare(library.pack_groups, gemm, *[pointer] * 4, c_int)
        self._linear = _declare(library.linear, gemm, *[pointer] * 5, c_long, c_int)
        self._add_rms_norm = _declare(
            library.add_rms_norm, *[pointer] * 4, c_long, c_long, c_float, c_int
        )
        self._silu_and_mul = _declare(library.silu_and_mul, pointer, pointer, c_long, c_long, c_int)
        self._gelu_and_mul = _declare(library.gelu_and_mul, pointer, pointer, c_long, c_long, c_int)
        self._attend = _declare(
            ctypes.CDLL(str(attention)).attend, POINTER(AttentionArguments), *[pointer] * 7, c_int
        )
        of_block = POINTER(BlockArguments), POINTER(StreamArguments), c_int
        self._decoder_block = _declare(library.decoder_block, *of_block)
        self._begin_block = _declare(library.begin_block, *of_block)
        self._finish_block = _declare(library.finish_block, *of_block)
        self._route = _declare(library.route, *[pointer] * 3, *[c_long] * 3, c_int)
        self._feed_experts = _declare(
            library.feed_experts, POINTER(ExpertsArguments), pointer, pointer, c_long, c_int
        )

    def pack(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """Copies a weight [N, K] into the layout of the library's GEMM."""
        self._check(weight)
        num_outputs, num_inputs = weight.shape
        if bias is not None:
            self._check(bias, (num_outputs,))
        packed = torch.empty(self._packed_size(num_outputs, num_inputs), dtype=self.dtype)
        self._pack(weight.data_ptr(), packed.data_ptr(), num_outputs, num_inputs, self._threads)
        bias_at = None if bias is None else bias.data_ptr()
        arguments = GemmArguments(packed.data_ptr(), bias_at, num_inputs, num_outputs)
        return PackedLinear(packed, bias, arguments)

    def pack_groups(self, weight: GroupedWeight, bias: Tensor | None) -> PackedLinear:
        """Copies integers [N, K] into the layout of the library's GEMM.

        Their products are those of the numbers that they stand for, not rounded to the dtype. Rows
        are rounded to 8 bits, group by group, if the weight is made for it and has zero points.
        `supports_groups` says which weights can be packed. Raises ValueError for others.
        """
        if not supports_groups(weight):
            raise ValueError(f"groups of {weight.group} inputs: no multiple of {GROUPS[0]}")
        num_outputs, num_inputs = weight.shape
        if bias is not None:
            self._check(bias, (num_outputs,))
        group = largest_group(weight.group)
        weight = weight.regrouped(weight.bits, group)
        zeros = weight.zeros() if weight.rounds_rows else None
        return self._packed_groups(
            weight.integers, weight.scales, weight.offsets if zeros is None else zeros, bias,
            GemmArguments(
                None, _at(bias), num_inputs, num_outputs, group, weight.bits, 0, zeros is not None
            ),
        )  # fmt: skip

    def pack_mxfp4(self, codes: Tensor, exponents: Tensor, bias: Tensor | None) -> PackedLinear:
        """Copies codes [N, K] of MXFP4, a byte each, into the layout of the library's GEMM.

        They stay in 4 bits; `exponents` [N, K / 32] are those of the checkpoint, uint8.
        """
        num_outputs, num_inputs = codes.shape
        if bias is not None:
            self._check(bias, (num_outputs,))
        ones = torch.ones_like(exponents, dtype=torch.float32)
        scales = torch.ldexp(ones, exponents.int() - MXFP4_BIAS)
        group = num_inputs // scales.shape[1]
        return self._packed_groups(
            codes, scales, torch.zeros_like(scales), bias,
            GemmArguments(None, _at(bias), num_inputs, num_outputs, group, 4, 0, 0, is_mxfp4=1),
        )  # fmt: skip

    def _packed_groups(
        self,
        integers: Tensor,
        scales: Tensor,
        offsets: Tensor,
        bias: Tensor | None,
        arguments: GemmArguments,
    ) -> PackedLinear:
        """Packs integers of the format that the arguments name; `offsets` may be zero points."""
        integers = integers.contiguous()
        of_type = (scales,) if arguments.rounds_inputs else (scales, offsets)
        is_half = all(torch.equal(x.half().float(), x) for x in of_type)
        if is_half:
            scales = scales.half()
            offsets = offsets if arguments.rounds_inputs else offsets.half()
        arguments.has_half_scales = is_half
        packed = torch.empty(self._packed_groups_size(arguments), dtype=torch.uint8)
        scales, offsets = scales.contiguous(), offsets.contiguous()
        self._pack_groups(
            arguments, integers.data_ptr(), scales.data_ptr(), offsets.data_ptr(),
            packed.data_ptr(), self._threads,
        )  # fmt: skip
        arguments.weight = packed.data_ptr()
        return PackedLinear(packed, bias, arguments)

    def scratch(self, rows: int, *packed: PackedLinear) -> Scratch:
        """Memory for one of these GEMMs at a time, with this number of rows."""
        size = max(self._copy_size(one.arguments) for one in packed)
        num_totals = max(one.num_totals for one in packed)
        copy = torch.empty(rows * size, dtype=torch.uint8) if size else None
        return Scratch(copy, torch.empty(rows * num_totals) if num_totals else None)

    def linear(self, x: Tensor, packed: PackedLinear, out: Tensor) -> Tensor:
        """x [T, K] @ W.T + b -> out [T, N], of the library's dtype or float32."""
        self._check(x, (len(x), packed.num_inputs))
        is_plain = out.dtype == self.dtype
        if out.shape != (len(x), packed.num_outputs) or not out.is_contiguous():
            raise ValueError(f"out {list(out.shape)}: not [{len(x)}, {packed.num_outputs}]")
        scratch = self.scratch(len(x), packed)
        self._linear(
            packed.arguments,
            x.data_ptr(),
            *scratch.addresses,
            out.data_ptr() if is_plain else None,
            None if is_plain else out.data_ptr(),
            len(x),
            self._threads,
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm of x [T, hidden]."""
        return self._norm(None, x, weight, eps)

    def add_rms_norm_(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Adds x to residual [T, hidden] in place and returns the norm of the sum."""
        self._check(x, residual.shape)
        return self._norm(x.data_ptr(), residual, weight, eps)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """silu(x[:, :I]) * x[:, I:]: [T, 2 I] -> [T, I]."""
        self._check(x)
        out = x.new_empty((len(x), x.shape[1] // 2))
        self._silu_and_mul(x.data_ptr(), out.data_ptr(), *out.shape, self._threads)
        return out

    def gelu_and_mul(self, x: Tensor) -> Tensor:
        """gelu(x[:, :I]) * x[:, I:], approximated by tanh: [T, 2 I] -> [T, I]."""
        self._check(x)
        out = x.new_empty((len(x), x.shape[1] // 2))
        self._gelu_and_mul(x.data_ptr(), out.data_ptr(), *out.shape, self._threads)
        return out

    def attend(
        self,
        arguments: AttentionArguments,
        qkv: Tensor,
        qk_norm: Tensor | None,
        kv_rows: Tensor,
        kv_scales: Tensor | None,
        out: Tensor,
        key_offsets: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Applies QK norm and rotary embedding, writes the KV cache, attends: out [T, H D].

        qkv is [T, (H + 2 Hkv) D]; qk_norm [H + Hkv, D] and sinks [H] float32; kv_rows
        [num_rows, 2, Hkv, D]; kv_scales [4, Hkv] and key_offsets [Hkv, D] for a cache in FP8
        (`kernels.fp8`). Raises TypeError for a cache, norms or sinks of another type.
        """
        if kv_rows.dtype != self.kv_dtype:
            raise TypeError(f"a cache of {kv_rows.dtype}, the library is for {self.kv_dtype}")
        num_kv_heads, head_dim = int(arguments.num_kv_heads), int(arguments.head_dim)
        for name, given in (("qk_norm", qk_norm), ("sinks", sinks)):
            if given is not None and (given.dtype != torch.float32 or not given.is_contiguous()):
                raise TypeError(f"{name} must be contiguous float32, not {given.dtype}")
        fp8.check_scales(kv_scales, self.kv_dtype, num_kv_heads)
        fp8.check_offsets(key_offsets, self.kv_dtype, num_kv_heads, head_dim)
        self._attend(
            arguments,
            qkv.data_ptr(),
            _at(qk_norm),
            _at(sinks),
            kv_rows.data_ptr(),
            _at(kv_scales),
            _at(key_offsets),
            out.data_ptr(),
            self._threads,
        )

    def decoder_block(self, block: BlockArguments, stream: StreamArguments) -> None:
        """Runs from one layer's attention output to the next layer's q, k and v."""
        self._decoder_block(block, stream, self._threads)

    def begin_block(self, block: BlockArguments, stream: StreamArguments) -> None:
        """Runs from a layer's attention output to the input of its experts, `stream.hidden`."""
        self._begin_block(block, stream, self._threads)

    def finish_block(self, block: BlockArguments, stream: StreamArguments) -> None:
        """Runs from the output of a layer's experts, `stream.added`, to the next q, k and v."""
        self._finish_block(block, stream, self._threads)

    def route(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, hidden] @ weight [E, hidden] of float32, transposed -> [T, E] in float32."""
        self._check(x, (len(x), weight.shape[1]))
        if weight.dtype != torch.float32 or not weight.is_contiguous():
            raise TypeError(f"a router's weight must be contiguous float32, not {weight.dtype}")
        out = torch.empty((len(x), len(weight)), dtype=torch.float32)
        self._route(
            x.data_ptr(), weight.data_ptr(), out.data_ptr(), *x.shape, len(weight), self._threads
        )
        return out

    def feed_experts(
        self, x: Tensor, weights: Tensor, chosen: Tensor, experts: PackedExperts, out: Tensor
    ) -> Tensor:
        """x [T, hidden], and weights and indices of each row's experts [T, k] -> out [T, hidden].

        The weights are float32, the indices int64. Raises ValueError or IndexError for other sizes,
        types or indices.
        """
        gate_up, down = experts.gate_ups[0], experts.downs[0]
        num_experts = len(experts.gate_ups)
        self._check(x, (len(x), gate_up.num_inputs))
        self._check(out, (len(x), down.num_outputs))
        if weights.shape != chosen.shape or (weights.dtype, chosen.dtype) != _CHOICES:
            raise ValueError(f"choices: {weights.dtype} and {chosen.dtype} are not {_CHOICES}")
        if chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < num_experts:
            raise IndexError(f"choices: not all are among {num_experts} experts")
        weights, chosen = weights.contiguous(), chosen.contiguous()
        rows = chosen.numel()
        indices = torch.empty(num_experts + 1 + rows, dtype=torch.int64)
        gathered, gate_ups = (x.new_empty(rows, n) for n in gate_up.form[:2])
        inner = x.new_empty(rows, down.num_inputs)
        outputs = torch.empty((rows, down.num_outputs), dtype=torch.float32)
        scratch = self.scratch(rows, gate_up, down)
        clamp = experts.clamp
        arguments = ExpertsArguments(
            experts.gate_up_arguments, experts.down_arguments, num_experts, chosen.shape[1],
            chosen.data_ptr(), weights.data_ptr(),
            0 if clamp is None else clamp.limit, 0 if clamp is None else clamp.alpha,
            indices.data_ptr(), indices[num_experts + 1 :].data_ptr(), gathered.data_ptr(),
            gate_ups.data_ptr(), inner.data_ptr(), outputs.data_ptr(), *scratch.addresses,
        )  # fmt: skip
        self._feed_experts(arguments, x.data_ptr(), out.data_ptr(), len(x), self._threads)
        return out

    def _norm(self, added_at: int | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        self._check(residual)
        weight = weight.float()
        if weight.shape != residual.shape[-1:] or not weight.is_contiguous():
            raise ValueError(f"a norm's weight {list(weight.shape)}: not [{residual.shape[-1]}]")
        out = torch.empty_like(residual)
        self._add_rms_norm(
            added_at, residual.data_ptr(), weight.data_ptr(), out.data_ptr(),
            *residual.shape, eps, self._threads,
        )  # fmt: skip
        return out

    def _check(self, x: Tensor, shape: Sequence[int] | None = None) -> None:
        if x.dtype != self.dtype or x.device.type != "cpu" or not x.is_contiguous():
            raise ValueError(f"{x.dtype} on {x.device}, strides {x.stride()}: not for {self.dtype}")
        if shape is not None and x.shape != torch.Size(shape):
            raise ValueError(f"a tensor {list(x.shape)}: not {list(shape)}")


def supports_groups(weight: GroupedWeight) -> bool:
    """True if the kernels multiply by these integers; in halved groups, if these are too large."""
    return weight.group % GROUPS[0] == 0


def largest_group(group: int) -> int:
    """The largest group of the kernels that divides a group which they support."""
    return max(size for size in GROUPS if group % size == 0)


def load(
    dtype: torch.dtype,
    environment: Mapping[str, str] | None = None,
    kv_dtype: torch.dtype | None = None,
) -> Library | None:
    """Loads the operations for a dtype, compiling them if needed; None, logged, on failure.

    `kv_dtype` is the type of the KV cache: FP8, or None for the same dtype.

    Uses the fastest instruction set of this machine that the compiler supports, or the one that
    PAGEWIRE_CPU_ISA names. Raises isa.UnknownISA if the machine does not have that one.
    """
    environment = os.environ if environment is None else environment
    candidates = isa.candidates(environment)
    kv_dtype = kv_dtype or dtype
    if environment.get("PAGEWIRE_CPU_KERNELS") == "0":
        log.info("CPU kernels are switched off: torch computes everything")
        return None
    if dtype not in STORED or kv_dtype not in (dtype, *CACHED):
        log.info("no CPU kernels for %s over %s: torch computes everything", dtype, kv_dtype)
        return None
    problem: Exception | None = None
    try:
        toolchain = build.Toolchain.find(environment)
    except build.BuildFailed as error:
        candidates, problem = (), error
    for one in candidates:
        try:
            flags = [*one.flags, STORED[dtype]]
            layer = build.library(SOURCE, flags, toolchain)
            flags += [] if kv_dtype == dtype else [CACHED[kv_dtype]]
            attention = build.library(ATTENTION, flags, toolchain)
            return Library(layer, attention, dtype, kv_dtype, one, torch.get_num_threads())
        except (build.BuildFailed, OSError) as error:
            problem = problem or error
    log.warning(
        "no CPU kernels, torch computes everything, slower (a C compiler makes them: "
        "apt-get install gcc libc6-dev): %s",
        problem,
    )
    return None


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _declare(
    function: "ctypes._NamedFuncPointer", *arguments: type, returns: type | None = None
) -> "ctypes._NamedFuncPointer":
    function.argtypes = arguments
    function.restype = returns
    return function
