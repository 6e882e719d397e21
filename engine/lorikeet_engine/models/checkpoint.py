"""Tensors of a Hugging Face checkpoint, read from safetensors directly to their final memory.

4-bit linears are dequantised to their values on the way or, on request, stay packed; FP8 linears
stay FP8. On request, linears are rounded to another format, one after the other.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Self

import torch

from lorikeet_engine.adapter_format import Quantization, QuantizedLinears
from lorikeet_engine.device.memory import free_bytes, gib
from lorikeet_engine.errors import ModelError, SettingsError
from lorikeet_engine.kernels import fp8
from lorikeet_engine.kernels.fp8 import Fp8Rows, PartlyFp8, quantize_weight
from lorikeet_engine.kernels.lora.linear import FusedWeight, Weight
from lorikeet_engine.kernels.moe.mxfp4 import Mxfp4Experts
from lorikeet_engine.kernels.w4a16 import PackedWeight, StackedWeight
from lorikeet_engine.kernels.w4a16 import stack as stacked
from lorikeet_engine.models.cut import Cut, stack
from lorikeet_engine.models.load_progress import LoadProgress
from lorikeet_engine.models.staging import Span, Staging
from lorikeet_engine.models.stored_tensors import (
    DTYPES,
    PART_DTYPES,
    StoredTensor,
    find_tensors,
    has_head,
    instead_of,
)
from lorikeet_engine.models.weight_formats import weight_format
from lorikeet_engine.models.weight_formats.fp8 import UNUSED, Fp8, scales_of_part
from lorikeet_engine.models.weight_formats.mxfp4 import Mxfp4
from lorikeet_engine.models.weight_formats.nf4 import round_to_nf4
from lorikeet_engine.models.weight_formats.protocol import PackedFormat, not_divided
from lorikeet_engine.parallel.shard import WHOLE, Shard


class Checkpoint:
    """Tensors of a checkpoint folder by name, cast to one dtype on one device.

    Use it as a context manager: tensors are complete once it is left without an exception. Reading
    takes no host memory but the tensors' own and the buffers of Staging, which copies files to the
    device. On the meta device only the files' headers are read, which finds all errors except bad
    values.

    shard: part of the model that this process keeps. Callers of the methods that read say which
        part (Cut) of each tensor that is.
    rounding: format that read_linear rounds to; None: as stored.
    packs_linears: whether read_fused keeps linears of 4 bits packed.
    packs_experts: whether read_mxfp4 reads experts, which otherwise are floats.
    nbytes: bytes on the device of the tensors read so far.
    has_head: whether the files have lm_head, or embeddings that take its place.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype,
        quantized: QuantizedLinears | None = None,
        rounding: Quantization | None = None,
        shard: Shard = WHOLE,
        *,
        packed: bool = False,
    ) -> None:
        """Read the headers of a checkpoint's safetensors files.

        Raises ModelError, whose `field` is
        - weight_dtype, if `rounding` is NF4 and linears are quantised already, or if `packed` is
          set and linears are not in AWQ, GPTQ, W4A16, NF4 or MXFP4;
        - quantization_config.quant_method, if no linear is stored in the format that config.json
          names;
        - in other cases the file or the key of config.json at fault.

        quantized: format in which the files store linears; None: floats.
        rounding: format that read_linear rounds to, NF4 or FP8; None: as stored.
        shard: part of the model that this process keeps.
        packed: whether weights of 4 bits stay packed.
        """
        if packed and (quantized is None or not quantized.format.has_4_bits):
            raise ModelError(
                "weight_dtype=packed: the checkpoint's linears are "
                f"{quantized.format if quantized else 'floats'}, which cannot stay packed: want "
                "auto, or a checkpoint in AWQ, GPTQ, W4A16, NF4 or MXFP4",
                field="weight_dtype",
            )
        if quantized is not None and rounding is Quantization.NF4:
            raise ModelError(
                f"weight_dtype=nf4: the checkpoint is quantised already, as {quantized.format}: "
                "want auto, or a checkpoint of floats",
                field="weight_dtype",
            )
        self.folder = folder
        self.device = device
        self.dtype = dtype
        self.shard = shard
        self.nbytes = 0
        self.rounding = rounding
        self._stored = find_tensors(folder)
        self.has_head = has_head(self._stored)
        self._weight_format = weight_format(quantized, self._stored) if quantized else None
        self.packs_linears = packed and isinstance(self._weight_format, PackedFormat)
        self.packs_experts = packed and isinstance(self._weight_format, Mxfp4)
        self._unread = set(self._stored)
        self._renamed = dict[str, str]()  # prefixes of names, to those of the files
        logged_bytes = 0 if shard.index else self._stored_bytes() // shard.world
        self._progress = LoadProgress(logged_bytes)
        self._staging = None if device.type == "meta" else Staging(device, self._progress)
        self._to_raise: list[torch.Tensor] = []

    def __contains__(self, name: str) -> bool:
        """Return whether the checkpoint's files have a tensor of this name."""
        return name in self._stored

    def read(self, names: Sequence[str], rows: Sequence[int], *tail: int) -> torch.Tensor:
        """Read tensors, and stack their rows to one tensor [sum(rows), *tail].

        Raises ModelError, whose `field` is the tensor's name, if a tensor is missing or has another
        shape or an unsupported dtype.

        rows: number of rows of each tensor.
        tail: the other dimensions, which all tensors share.
        """
        return self.read_parts(names, [Cut.whole(count, *tail) for count in rows])

    def read_parts(self, names: Sequence[str], cuts: Sequence[Cut]) -> torch.Tensor:
        """Read the parts of tensors that this process keeps, and stack their rows.

        Raises ModelError if a tensor is missing, or has another shape or an unsupported dtype.

        cuts: the part of each tensor to keep.
        """
        out = self._read(names, cuts)
        self.nbytes += out.nbytes
        return out

    def read_plus_one(self, name: str, cut: Cut) -> torch.Tensor:
        """Read the part of a norm's weight that this process keeps, in float32, and add 1 to it.

        The 1 is added in place, once all tensors have been read. Raises ModelError if the tensor is
        missing, or has another shape or an unsupported dtype.

        cut: the part to keep.
        """
        out = self.read_float32(name, cut)
        self._to_raise.append(out)
        return out

    def read_float32(self, name: str, cut: Cut) -> torch.Tensor:
        """Read the part of a tensor that this process keeps, in float32.

        Raises ModelError if the tensor is missing, or has another shape or an unsupported dtype.

        cut: the part to keep.
        """
        out = torch.empty(cut.kept_shape, dtype=torch.float32, device=self.device)
        self._read_into(name, [(out, cut)])
        self.nbytes += out.nbytes
        return out

    def read_linear(self, names: Sequence[str], cuts: Sequence[Cut]) -> Weight:
        """Read the kept parts of fused linears' weights, and stack their rows.

        - Linears that are all stored as FP8 stay FP8. If blocks of the kept parts are too narrow
          for FP8 products, the parts are rounded again, with scales of rows.
        - Other quantised linears are dequantised to their exact values.
        - With `rounding`, floats, stored or dequantised, are rounded: for FP8 only the kept parts;
          for NF4 whole tensors, as NF4's scales depend on all values.

        FP8 weights are matrices, whatever dimensions the stored tensors have. Raises ModelError if
        a tensor is missing, or has another shape or an unsupported dtype.

        cuts: the part of each linear's weight that this process keeps.
        """
        stored = self._weight_format
        weight: Weight
        if isinstance(stored, Fp8) and all(map(self._is_quantized, names)):
            block = stored.block(cuts)
            is_narrow = block is not None and block[1] % fp8.BLOCK_WIDTHS
            weight = self._to_fp8(names, cuts) if is_narrow else self._read_fp8(names, cuts, stored)
        elif self.rounding is Quantization.FP8:
            weight = self._to_fp8(names, cuts)
        elif self.rounding is Quantization.NF4:
            weight = self._to_nf4(names, cuts)
        else:
            weight = self._read(names, cuts)
        if isinstance(weight, Fp8Rows):
            self._check_sides(names[0], *weight.rows.shape)
        self.nbytes += weight.nbytes
        return weight

    def read_arranged(
        self,
        name: str,
        cuts: Sequence[Cut],
        arrange: Callable[[torch.Tensor], torch.Tensor],
        *,
        rounds: bool = True,
    ) -> Weight:
        """Read parts of one tensor, stack them, and reorder the elements.

        Raises ModelError if the tensor is missing, or has another shape or an unsupported dtype.

        cuts: the parts that this process keeps.
        arrange: function that reorders the elements of the stacked parts. Its result is a weight
            [matrices, d_out, d_in], which is rounded to FP8 with `rounding`.
        rounds: False if the tensor is never rounded.
        """
        values = self._read([name] * len(cuts), cuts)
        self._finish_reading()
        arranged = arrange(values)
        weight: Weight = arranged
        if rounds and self.rounding is Quantization.FP8:
            fp8_weight = quantize_weight(arranged.flatten(0, -2))
            self._check_sides(name, *fp8_weight.rows.shape)
            count, scales = len(arranged), fp8_weight.scales
            rows = fp8_weight.rows.view(arranged.shape)
            weight = Fp8Rows(rows, scales.view(count, -1, *scales.shape[1:]), fp8_weight.block)
        self.nbytes += weight.nbytes
        return weight

    def read_mxfp4(
        self, name: str, shape: tuple[int, int, int], rows: Sequence[range], columns: range
    ) -> Mxfp4Experts:
        """Read a part of experts' weights in MXFP4, which stay packed.

        Raises ModelError if a tensor is missing or has another shape or dtype, or if the part or
        its scales cannot be packed.

        shape: (experts, d_in, d_out) of all weights.
        rows: outputs of each expert to keep, in order.
        columns: inputs to keep.
        """
        assert isinstance(self._weight_format, Mxfp4)
        weight = self._weight_format.pack_experts(name, shape, self, rows, columns)
        self.nbytes += weight.nbytes
        return weight

    def read_fused(self, names: Sequence[str], cuts: Sequence[Cut], floats: int) -> FusedWeight:
        """Read the kept parts of fused linears' weights, of which the last `floats` stay floats.

        With `packs_linears`, other linears of 4 bits stay packed; else they are read as by
        read_linear. Fused linears that cannot be one weight then become a StackedWeight: some are
        floats, or have other groups or another order of inputs. Raises ModelError if a tensor is
        missing, or has another shape or an unsupported dtype, or if a part of a linear cannot stay
        packed.

        names: names of the weights.
        cuts: the part of each weight that this process keeps.
        floats: number of linears, the last ones, that are never FP8 nor packed; if stored so, they
            are dequantised.
        """
        first = len(names) - floats
        if not first:
            return self.read_parts(names, cuts)
        if self.packs_linears:
            return self._read_packed(names, cuts, first)
        if floats and self._becomes_fp8(names[:first]):
            weight = self.read_linear(names[:first], cuts[:first])
            assert isinstance(weight, Fp8Rows)
            return PartlyFp8(weight, self.read_parts(names[first:], cuts[first:]))
        return self.read_linear(names, cuts)

    def leave(self, names: Sequence[str]) -> None:
        """Let check_all_read accept these tensors as unread, because only another process keeps
        them.
        """
        self._unread.difference_update(names)

    def _check_sides(self, name: str, d_out: int, d_in: int) -> None:
        """Raise ModelError unless CUDA can multiply by an FP8 weight [d_out, d_in]."""
        if self.device.type == "cuda" and (d_out % 16 or d_in % 16):
            others = "another number of GPUs, or " if self.shard.world > 1 else ""
            raise ModelError(
                f"{name} [{d_out}, {d_in}]: FP8 on a GPU wants both sides to be multiples of 16: "
                f"want {others}a checkpoint of floats, with weight_dtype=auto",
                field=name,
            )

    def part(self, name: str, dtype: str, *shape: int) -> torch.Tensor:
        """Read a tensor in its stored dtype to the device; to the meta device without values.

        Raises ModelError, whose `field` is the tensor's name, if it is missing or has another dtype
        or shape.

        dtype: dtype that the tensor must have, by safetensors' name.
        shape: shape that it must have.
        """
        stored = self._find(name, shape, (dtype,))
        if self._staging is None:
            return torch.empty(shape, dtype=PART_DTYPES[dtype], device=self.device)
        values = stored.values()
        self._progress.add(values.nbytes)
        return values.to(self.device)

    def scales(self, name: str, *shapes: tuple[int, ...]) -> torch.Tensor:
        """Read a tensor of floats, which must have one of these shapes.

        Raises ModelError if it is missing or has another shape or dtype.
        """
        stored = self._stored.get(name)
        found = stored is not None and stored.shape in shapes
        stored = self._find(name, stored.shape if stored and found else shapes[0], tuple(DTYPES))
        return self.part(name, stored.dtype, *stored.shape)

    def floats(self, name: str) -> torch.Tensor:
        """Read a small tensor of floats to the CPU, even if the checkpoint's device is meta.

        Raises ModelError, whose `field` is the tensor's name, if it is missing or holds no floats.
        """
        stored = self._stored.get(name)
        return self._find(name, stored.shape if stored else (), tuple(DTYPES)).values().float()

    def stored_bytes(self, name: str) -> bytes:
        """Read the bytes of a small tensor, even if the checkpoint's device is meta.

        Raises ModelError if the tensor is missing or its dtype is not U8.
        """
        stored = self._stored.get(name)
        stored = self._find(name, stored.shape if stored else (), ("U8",))
        return bytes(stored.values().numpy())

    def rename(self, prefix: str, to: str) -> None:
        """Replace `prefix` by `to` at the start of tensors' names.

        Error messages still give the names that the tensors have in the files.
        """
        self._renamed[to] = prefix
        for name in [name for name in self._stored if name.startswith(prefix)]:
            renamed = to + name.removeprefix(prefix)
            self._stored[renamed] = self._stored.pop(name)
            self._unread.discard(name)
            self._unread.add(renamed)

    def check_all_read(self, ignored: tuple[str, ...] = ()) -> None:
        """Raise ModelError if the files have tensors that the model has not read.

        rotary_emb.inv_freq, AutoGPTQ's zero biases, and the fixed scales of activations that come
        with FP8 weights may remain unread.

        ignored: prefixes of tensor names that may remain unused.
        """
        left = sorted(
            name
            for name in self._unread
            if not name.startswith(ignored)
            and not name.endswith("rotary_emb.inv_freq")
            and not self._is_zero_bias(name)
            and not (isinstance(self._weight_format, Fp8) and name.endswith(UNUSED))
        )
        if left:
            raise ModelError(
                f"{self.folder}: {left[0]} and {len(left) - 1} more tensors have no place in the "
                "model that config.json describes: the two do not belong together",
                field=left[0],
            )

    def _is_zero_bias(self, name: str) -> bool:
        """Return whether a tensor is a zero bias, which AutoGPTQ saves for linears without bias."""
        path = name.removesuffix(".bias")
        if path == name or f"{path}.qweight" not in self._stored:
            return False
        stored = self._stored[name]
        return stored.dtype in DTYPES and not bool(stored.values().any())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._staging is None:
            return
        try:
            if kind is None:
                self._staging.finish()
                for weight in self._to_raise:
                    weight += 1.0
        finally:
            self._staging.close()

    def _read(self, names: Sequence[str], cuts: Sequence[Cut]) -> torch.Tensor:
        out, parts = stack(cuts, self.device, self.dtype)
        for name, of_name in _by_tensor(names, parts, cuts):
            self._read_into(name, of_name)
        return out

    def _read_fp8(self, names: Sequence[str], cuts: Sequence[Cut], stored: Fp8) -> Fp8Rows:
        out, parts = stack(cuts, self.device, fp8.DTYPE)
        block, scales = stored.block(cuts), []
        for name, of_name in _by_tensor(names, parts, cuts):
            of_weight = stored.scales(name, of_name[0][1].shape, block, self)
            for part, cut in of_name:
                self._copy(name, part, ("F8_E4M3",), cut)
                scales.append(scales_of_part(of_weight, cut, block))
        return Fp8Rows(out, torch.cat(scales), block)

    def _to_fp8(self, names: Sequence[str], cuts: Sequence[Cut]) -> Fp8Rows:
        weight = self._read(names, cuts)
        self._finish_reading()
        return quantize_weight(weight.flatten(0, -2))

    def _to_nf4(self, names: Sequence[str], cuts: Sequence[Cut]) -> torch.Tensor:
        out, parts = stack(cuts, self.device, self.dtype)
        for name, of_name in _by_tensor(names, parts, cuts):
            whole = self._read([name], [Cut.whole(*of_name[0][1].shape)])
            self._finish_reading()
            rounded = round_to_nf4(whole)
            for part, cut in of_name:
                part.copy_(cut.of(rounded))
        return out

    def _read_packed(self, names: Sequence[str], cuts: Sequence[Cut], first: int) -> FusedWeight:
        assert isinstance(self._weight_format, PackedFormat)
        parts: list[list[torch.Tensor | PackedWeight]] = []
        for name, run in groupby(zip(names, cuts, range(len(names)), strict=True), itemgetter(0)):
            of_name = [(cut, i) for _, cut, i in run]
            if of_name[0][1] >= first or not self._is_quantized(name):
                kept = [cut for cut, _ in of_name]
                parts.append([self.read_parts([name] * len(kept), kept)])
                continue
            whole = self._weight_format.pack(name, of_name[0][0].shape, self)
            part = stacked([_packed_part(name, whole, cut) for cut, _ in of_name])
            last = parts[-1][-1] if parts else None
            if isinstance(last, PackedWeight) and last.goes_with(part):
                parts[-1].append(part)
            else:
                parts.append([part])
        weights = tuple(_joined(run) for run in parts)
        self.nbytes += sum(part.nbytes for part in weights if isinstance(part, PackedWeight))
        return weights[0] if len(weights) == 1 else StackedWeight(weights)

    def _finish_reading(self) -> None:
        """Wait for all reads so far, because the values are needed next."""
        if self._staging is not None:
            self._staging.finish()

    def _read_into(self, name: str, parts: Sequence[tuple[torch.Tensor, Cut]]) -> None:
        """Read parts of one tensor, which is dequantised once if it is quantised.

        parts: for each part, the memory to read into, and the Cut.
        """
        if self._weight_format is not None and self._is_quantized(name):
            whole = self._weight_format.dequantize(name, parts[0][1].shape, self)
            for out, cut in parts:
                out.copy_(cut.of(whole))
            return
        for out, cut in parts:
            self._copy(name, out, tuple(DTYPES), cut)

    def _copy(self, name: str, out: torch.Tensor, dtypes: Sequence[str], cut: Cut) -> None:
        stored = self._find(name, cut.shape, dtypes)
        if self._staging is not None:
            span = Span.of(stored.file, stored.begin, PART_DTYPES[stored.dtype], cut)
            self._staging.copy(span, out)

    def _stored_bytes(self) -> int:
        """Return the bytes of all tensors, except those of dtypes that are never read."""
        sizes = {dtype: read_as.itemsize for dtype, read_as in PART_DTYPES.items()}
        stored = self._stored.values()
        return sum(math.prod(each.shape) * sizes.get(each.dtype, 0) for each in stored)

    def _find(self, name: str, shape: Sequence[int], dtypes: Sequence[str]) -> StoredTensor:
        stored = self._stored.get(name)
        if stored is None:
            found = f"missing{instead_of(name, self._stored)}"
        elif stored.shape != tuple(shape) or stored.dtype not in dtypes:
            found = f"{stored.dtype} {list(stored.shape)}"
            if stored.dtype == "F8_E4M3" and self._weight_format is None:
                found += ", which config.json does not mention"
            elif stored.dtype == "F8_E4M3" and not self._is_quantized(name):
                found += ", without scales under a known name"
            found += f": want {list(shape)} in one of {', '.join(dtypes)}"
            if self._weight_format is not None or stored.dtype not in DTYPES:
                found += "; or take a copy that is not quantised"
        else:
            self._unread.discard(name)
            return stored
        for to, prefix in self._renamed.items():
            name = prefix + name.removeprefix(to) if name.startswith(to) else name
        raise ModelError(f"{self.folder}: tensor {name} is {found}", field=name)

    def _becomes_fp8(self, names: Sequence[str]) -> bool:
        """Return whether read_linear makes one FP8 weight of these linears."""
        is_stored = isinstance(self._weight_format, Fp8) and all(map(self._is_quantized, names))
        return is_stored or self.rounding is Quantization.FP8

    def _is_quantized(self, name: str) -> bool:
        """Return whether a linear's weight is stored in config.json's quantised format."""
        marks = self._weight_format.marks if self._weight_format is not None else ()
        return any(name.removesuffix(".weight") + mark in self._stored for mark in marks)


def _by_tensor(
    names: Sequence[str], parts: Sequence[torch.Tensor], cuts: Sequence[Cut]
) -> Iterator[tuple[str, list[tuple[torch.Tensor, Cut]]]]:
    """Yield each tensor's name once, with the memory and the Cut of each of its parts.

    names, parts, cuts: tensor, memory and Cut of each part; a tensor's parts are neighbours.
    """
    for name, members in groupby(zip(names, parts, cuts, strict=True), key=itemgetter(0)):
        yield name, [(part, cut) for _, part, cut in members]


def _packed_part(name: str, whole: PackedWeight, cut: Cut) -> PackedWeight:
    try:
        return whole.part(cut.rows, cut.columns or range(cut.shape[-1]))
    except ValueError as error:
        raise not_divided(name, error) from error


def _joined(run: Sequence[torch.Tensor | PackedWeight]) -> torch.Tensor | PackedWeight:
    """Return a run's only weight, or its packed weights stacked to one.

    run: one tensor, or packed weights that can be stacked.
    """
    packed = [each for each in run if isinstance(each, PackedWeight)]
    return stacked(packed) if packed else run[0]


def check_room(folder: Path, needed: int, device: torch.device, smaller: str = "") -> None:
    """Raise SettingsError if a model's weights do not fit in the device's free memory.

    folder: the checkpoint.
    needed: bytes of the weights on the device.
    smaller: weight_dtype to suggest, with which the weights would take less; empty: none.
    """
    free = free_bytes(device)
    if needed > free:
        raise SettingsError(
            f"{folder}: its weights take {gib(needed)} as they are served, and {gib(free)} are "
            f"free on {device}: want a smaller model, "
            f"{smaller and f'weight_dtype={smaller}, '}or a larger device"
        )
