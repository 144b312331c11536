"""Reads a PEFT folder: adapter_config.json and adapter_model.safetensors.

Every tensor must meet a module of the model, with the shape that the module and the configuration
ask for; all of this is checked before any tensor is read. With tensor parallelism a rank keeps the
rows of B, or the columns of A, that belong to its part of the module.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from wire.adapters import AdapterSource, adapter_id
from worker_svc.adapters import peft_config
from worker_svc.adapters.errors import BadAdapter
from worker_svc.adapters.packing import PackedLayout
from worker_svc.adapters.peft_config import PeftConfig
from worker_svc.adapters.sites import AdapterTarget, AdapterTargets, Site, kinds_of
from worker_svc.adapters.weights import (
    Expansion,
    LoadedAdapter,
    PlainProduct,
    Product,
    SiteWeights,
)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_ENDS = (".lora_A.weight", ".lora_B.weight")
_CHUNK_BYTES = 1 << 20
_MOST_CONFIG_BYTES = 1 << 20
# Kinds of tensors that are refused for what they are, before their module is looked for.
_REFUSED = {
    "lora_embedding_": "adapters of embeddings are not supported",
    "lora_magnitude_vector": "DoRA is not supported",
    ".lora_bias": "biases of adapters are not supported",
    "lora_B.bias": "biases of adapters are not supported",
    "modules_to_save": "whole modules are not supported",
    ".experts.": "adapters of experts are not supported",
    "lm_head.": "adapters of the head are not supported",
}


@dataclass(frozen=True, slots=True)
class _Pair:
    """The two matrices of one module, as they lie in the file."""

    module: str
    target: AdapterTarget
    rank: int
    scale: float
    names: tuple[str, str]


@dataclass(frozen=True, slots=True)
class AdapterReader:
    """Reads adapters of one model, as a rank of it computes them."""

    targets: AdapterTargets
    max_rank: int
    dtype: torch.dtype  # of activations
    pack: Callable[[Tensor], Product] = PlainProduct  # a weight [N, K] as what multiplies by it
    layout: PackedLayout | None = None  # of a device that computes them; None: the host does

    def read(self, name: str, folder: Path, wanted_id: str = "") -> LoadedAdapter:
        """The adapter in a folder, to be called so. Raises BadAdapter.

        With `wanted_id` it must be the one that had this id when it was read before.
        """
        config_bytes = _config_bytes(folder)
        config = peft_config.parse(config_bytes)
        if config.rank > self.max_rank:
            raise BadAdapter(f"r: {config.rank} is above max_lora_rank {self.max_rank}")
        path = folder / WEIGHTS
        try:
            before = _state(path)
            digest = _digest(config_bytes, path)
            with safe_open(path, framework="pt") as file:
                pairs = self._pairs(config, file)
                sites = self._sites(pairs, file)
            if _state(path) != before:
                raise BadAdapter(f"{WEIGHTS}: changed while it was read")
        except FileNotFoundError:
            raise BadAdapter(_missing(folder)) from None
        except (OSError, SafetensorError) as error:
            raise BadAdapter(f"{WEIGHTS}: cannot be read: {error}") from None
        source = AdapterSource(name, str(folder), adapter_id(name, digest))
        if wanted_id and source.adapter_id != wanted_id:
            raise BadAdapter(f"{folder} holds another adapter than when {name!r} was loaded")
        rank = max(pair.rank for pair in pairs)
        if self.layout is None:
            return LoadedAdapter(source, rank, sites)
        return LoadedAdapter(source, rank, {}, self.layout.packed(sites))

    def _pairs(self, config: PeftConfig, file: Any) -> list[_Pair]:
        """The modules of a file, all checked. Raises BadAdapter, naming the tensor."""
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        found: dict[str, list[str]] = {}
        for name in sorted(shapes):
            found.setdefault(self._module_of(name), []).append(name)
        if not found:
            raise BadAdapter(f"{WEIGHTS}: has no tensors")
        pairs = [self._pair(config, module, names, shapes) for module, names in found.items()]
        kinds = kinds_of(found)
        unmet = [name for name in config.modules if name.rpartition(".")[2] not in kinds]
        if unmet:
            raise BadAdapter(f"target_modules: {unmet[0]!r} has no tensors in {WEIGHTS}")
        return pairs

    def _module_of(self, name: str) -> str:
        """The module of the model that a tensor belongs to."""
        for sign, why in _REFUSED.items():
            if sign in name:
                raise BadAdapter(f"{name}: {why}")
        end = next((end for end in _ENDS if name.endswith(end)), None)
        if end is None or not name.startswith(_PREFIX):
            raise BadAdapter(f"{name}: is no matrix of LoRA ({_PREFIX}MODULE{_ENDS[0]} or B)")
        module = name.removeprefix(_PREFIX).removesuffix(end)
        if module not in self.targets:
            kinds = ", ".join(kinds_of(self.targets))
            raise BadAdapter(f"{name}: meets no module that takes adapters here: {kinds}")
        return module

    def _pair(
        self,
        config: PeftConfig,
        module: str,
        names: list[str],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> _Pair:
        if len(names) != 2:
            raise BadAdapter(f"{names[0]}: its other matrix is missing")
        target, rank = self.targets[module], config.rank_of(module)
        if rank > self.max_rank:
            problem = f"rank {rank} is above max_lora_rank {self.max_rank}"
            raise BadAdapter(f"{module}: {problem}")
        num_outputs, num_inputs = target.whole_shape
        for name, wanted in zip(names, ((rank, num_inputs), (num_outputs, rank)), strict=True):
            if shapes[name] != wanted:
                raise BadAdapter(f"{name}: has shape {shapes[name]}, expected {wanted}")
        return _Pair(module, target, rank, config.scale_of(module), (names[0], names[1]))

    def _sites(self, pairs: list[_Pair], file: Any) -> dict[Site, SiteWeights]:
        """The weights of each linear layer, for this rank."""
        by_site: dict[Site, list[_Pair]] = {}
        for pair in pairs:
            by_site.setdefault(pair.target.site, []).append(pair)
        return {site: self._weights(its, file) for site, its in by_site.items()}

    def _weights(self, pairs: list[_Pair], file: Any) -> SiteWeights:
        shrinking, expansions, first = [], [], 0
        for pair in pairs:
            a, b = (self._tensor(name, file) for name in pair.names)
            target, last = pair.target, first + pair.rank
            if (division := target.division) is not None and division.dim:
                a = division.cut(a, target.num_inputs)
            elif division is not None:
                b = division.cut(b, target.end - target.begin)
            scaled = self.pack((b * pair.scale).to(self.dtype).contiguous())
            expansions.append(Expansion(target.begin, target.end, first, last, scaled))
            shrinking.append(a.to(self.dtype))
            first = last
        return SiteWeights(self.pack(torch.cat(shrinking).contiguous()), tuple(expansions))

    def _tensor(self, name: str, file: Any) -> Tensor:
        tensor: Tensor = file.get_tensor(name).float()
        if not torch.isfinite(tensor).all():
            raise BadAdapter(f"{name}: has values that are not finite")
        return tensor


def _config_bytes(folder: Path) -> bytes:
    try:
        with (folder / CONFIG).open("rb") as file:
            content = file.read(_MOST_CONFIG_BYTES + 1)
    except FileNotFoundError:
        raise BadAdapter(_missing(folder)) from None
    except OSError as error:
        raise BadAdapter(f"{CONFIG}: cannot be read: {error}") from None
    if len(content) > _MOST_CONFIG_BYTES:
        raise BadAdapter(f"{CONFIG}: is larger than {_MOST_CONFIG_BYTES} bytes")
    return content


def _missing(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is no folder"
    lacking = CONFIG if not (folder / CONFIG).exists() else WEIGHTS
    return f"{folder} has no {lacking}"


def _state(path: Path) -> tuple[int, int, int]:
    """A file's identity, size and time of change."""
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


def _digest(config_bytes: bytes, path: Path) -> str:
    """A digest of an adapter's content."""
    hashed = blake2b(len(config_bytes).to_bytes(8, "little") + config_bytes, digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            hashed.update(chunk)
    return hashed.hexdigest()
