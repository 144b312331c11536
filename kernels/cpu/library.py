"""kernels.c as Python sees it: typed calls with tensors, pointers inside.

The meaning of every operation is the function of the same name in `kernels/reference.py`, except
that inputs are overwritten where a name says so. The structs here are those of kernels.c, field by
field.
"""

import ctypes
import logging
import os
from collections.abc import Mapping
from ctypes import POINTER, c_float, c_int, c_long, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernels.cpu import build

SOURCE = Path(__file__).with_name("kernels.c")
LANES = 16  # every size of a tensor but the rows is a multiple of this
PANEL = 2 * LANES  # outputs whose weights lie together
MAX_HEAD_DIM = 256

log = logging.getLogger(__name__)


class Product(ctypes.Structure):
    """`product` in C: a packed weight, its bias, K and N."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_long),
        ("outputs", c_long),
    )


class AttentionArguments(ctypes.Structure):
    """`attention` in C: what all layers of a decode step have in common."""

    _fields_ = (
        ("num_heads", c_long),
        ("num_kv_heads", c_long),
        ("head_dim", c_long),
        ("block_size", c_long),
        ("table_width", c_long),
        ("scale", c_float),
        ("eps", c_float),
        ("cos_sin", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("tables", c_void_p),
        ("context_lens", c_void_p),
        ("rows", c_long),
    )


class BlockArguments(ctypes.Structure):
    """`block` in C: the weights between one attention and the next."""

    _fields_ = (
        ("o", Product),
        ("gate_up", Product),
        ("down", Product),
        ("next_qkv", Product),
        ("post_norm", c_void_p),
        ("next_norm", c_void_p),
        ("hidden", c_long),
        ("inner", c_long),
        ("eps", c_float),
    )


class StreamArguments(ctypes.Structure):
    """`stream` in C: the activations of a step."""

    _fields_ = (
        ("attended", c_void_p),
        ("residual", c_void_p),
        ("hidden", c_void_p),
        ("added", c_void_p),
        ("gate_up", c_void_p),
        ("inner", c_void_p),
        ("qkv", c_void_p),
        ("rows", c_long),
    )


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight [N, K] in the layout that kernels.c reads, with its bias [N]."""

    weight: Tensor
    bias: Tensor | None
    arguments: Product

    @property
    def num_outputs(self) -> int:
        return int(self.arguments.outputs)


class Library:
    """The compiled operations for activations of one type. Tensors must be contiguous."""

    def __init__(self, path: Path, dtype: torch.dtype, threads: int) -> None:
        self.dtype = dtype
        self._threads = threads
        library = ctypes.CDLL(str(path))
        pointer = c_void_p
        self._pack = _declare(library.pack, pointer, pointer, c_long, c_long)
        self._linear = _declare(
            library.linear, POINTER(Product), pointer, pointer, pointer, c_long, c_int
        )
        self._add_rms_norm = _declare(
            library.add_rms_norm, *[pointer] * 4, c_long, c_long, c_float, c_int
        )
        self._silu_and_mul = _declare(library.silu_and_mul, pointer, pointer, c_long, c_long, c_int)
        self._decode_attention = _declare(
            library.decode_attention, POINTER(AttentionArguments), *[pointer] * 4, c_int
        )
        self._decoder_block = _declare(
            library.decoder_block, POINTER(BlockArguments), POINTER(StreamArguments), c_int
        )

    def pack(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """Copies a weight [N, K] into the layout of the products."""
        self._check(weight)
        num_outputs, num_inputs = weight.shape
        for size in (num_outputs, num_inputs):
            if size % LANES:
                raise ValueError(f"a weight {list(weight.shape)}: {size} is no multiple of {LANES}")
        num_panels = -(-num_outputs // PANEL)
        packed = torch.empty(num_panels * PANEL * num_inputs, dtype=self.dtype)
        self._pack(weight.data_ptr(), packed.data_ptr(), num_outputs, num_inputs)
        bias_at = None if bias is None else bias.data_ptr()
        arguments = Product(packed.data_ptr(), bias_at, num_inputs, num_outputs)
        return PackedLinear(packed, bias, arguments)

    def linear(self, x: Tensor, packed: PackedLinear, out: Tensor) -> Tensor:
        """x [T, K] -> out [T, N], which is of the library's type or float32."""
        self._check(x)
        is_plain = out.dtype == self.dtype
        at = out.data_ptr() if is_plain else None
        at_float32 = None if is_plain else out.data_ptr()
        self._linear(packed.arguments, x.data_ptr(), at, at_float32, len(x), self._threads)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The norm of x [T, hidden]."""
        return self._norm(None, x, weight, eps)

    def add_rms_norm_(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Adds x to the residual [T, hidden], returns the norm of the sum."""
        self._check(x)
        return self._norm(x.data_ptr(), residual, weight, eps)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """x [T, 2 I] -> [T, I]."""
        self._check(x)
        out = x.new_empty((len(x), x.shape[1] // 2))
        self._silu_and_mul(x.data_ptr(), out.data_ptr(), *out.shape, self._threads)
        return out

    def decode_attention(
        self,
        arguments: AttentionArguments,
        qkv: Tensor,
        qk_norm: Tensor | None,
        kv_rows: Tensor,
        out: Tensor,
    ) -> None:
        """Norms, rotates and stores one token a sequence, then attends: out [B, H D].

        qkv is [B, (H + 2 Hkv) D]; qk_norm [H + Hkv, D]; kv_rows [num_slots, 2, Hkv, D].
        """
        norm_at = None if qk_norm is None else qk_norm.data_ptr()
        self._decode_attention(
            arguments, qkv.data_ptr(), norm_at, kv_rows.data_ptr(), out.data_ptr(), self._threads
        )

    def decoder_block(self, block: BlockArguments, stream: StreamArguments) -> None:
        """From one layer's attended values to the next layer's q, k and v."""
        self._decoder_block(block, stream, self._threads)

    def _norm(self, added_at: int | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        self._check(residual)
        out = torch.empty_like(residual)
        self._add_rms_norm(
            added_at, residual.data_ptr(), weight.data_ptr(), out.data_ptr(),
            *residual.shape, eps, self._threads,
        )  # fmt: skip
        return out

    def _check(self, x: Tensor) -> None:
        if x.dtype != self.dtype or x.device.type != "cpu" or not x.is_contiguous():
            raise ValueError(f"{x.dtype} on {x.device}, strides {x.stride()}: not for {self.dtype}")


def load(dtype: torch.dtype, environment: Mapping[str, str] | None = None) -> Library | None:
    """The operations for a type, compiled if need be; None, with a line in the log, without."""
    environment = os.environ if environment is None else environment
    if environment.get("PAGEWIRE_CPU_KERNELS") == "0":
        log.info("CPU kernels are switched off: torch computes everything")
        return None
    if dtype not in (torch.bfloat16, torch.float32):
        log.info("there are no CPU kernels for %s: torch computes everything", dtype)
        return None
    defines = [f"-DBF16={int(dtype == torch.bfloat16)}"]
    try:
        path = build.library(SOURCE, defines, build.Toolchain.find(environment))
        return Library(path, dtype, torch.get_num_threads())
    except (build.BuildFailed, OSError) as error:
        log.warning("no CPU kernels, torch computes everything: %s", error)
        return None


def _declare(function: "ctypes._NamedFuncPointer", *arguments: type) -> "ctypes._NamedFuncPointer":
    function.argtypes = arguments
    function.restype = None
    return function
